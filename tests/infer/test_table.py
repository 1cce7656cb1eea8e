"""Laws of the tables."""

import csv
import io
from dataclasses import asdict, replace
from typing import Any

import pytest

from aerie.configs.schema.decode import METHODS, MethodConfig
from aerie.infer.measure.record import tree_shape
from aerie.infer.measure.statistics import group, row
from aerie.infer.report.tables import console_table, csv_table, markdown_table, sampling_text, tree_text
from tests.infer.made_up import drafted, milliseconds, record


@pytest.fixture
def summary() -> dict[str, Any]:
    quick = milliseconds(prefill=10.0, wall=26.0)
    records = [record(prompt_id=str(n)) for n in range(3)]
    records += [drafted((3, 1), prompt_id=str(n), ms=quick) for n in range(3)]
    records += [drafted((2, 2), row=2, prompt_id="0", ms=quick)]
    records += [record(row=2, method="eagle2", prompt_id="1", status="error", message="too | long", ms=None)]
    return {"rows": [row(members) for members in group(records)]}


def test_the_console_table_shows_each_row_aligned_with_its_figures(summary: dict[str, Any]) -> None:
    header, _, vanilla, eagle, failed = console_table(summary).splitlines()
    assert header.split() == ["method", "tree", "T", "tau", "speedup", "95", "%", "interval", "identical"]
    assert vanilla.split() == ["vanilla", "–", "0", "1.00", "1.00x", "–", "–"]
    assert eagle.split() == [*"eagle2 6 levels, k 8, 16 nodes 0 2.00 2.50x 2.50–2.50 3/3".split()]
    assert header.index("tau") + len("tau") == vanilla.index("1.00") + len("1.00")
    assert failed.endswith("error: 1 of 2 prompts failed; first '1': too | long")


def test_markdown_keeps_its_columns_whatever_a_message_holds(summary: dict[str, Any]) -> None:
    lines = markdown_table(summary).splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "2.50x [2.50–2.50]" in lines[3]


def test_csv_holds_every_row_unrounded_and_nothing_where_there_is_nothing(summary: dict[str, Any]) -> None:
    vanilla, eagle, failed = csv.DictReader(io.StringIO(csv_table(summary)))
    assert float(eagle["speedup"]) == summary["rows"][1]["speedup"]
    assert eagle["nodes"] == "16"
    assert float(eagle["ms_wall"]) == 78.0
    assert vanilla["nodes"] == ""
    assert (failed["tau"], failed["ms_wall"], failed["speedup_low"]) == ("", "", "")
    assert failed["message"].endswith("too | long")


def test_trees_and_samplings_read_as_words() -> None:
    assert tree_text({"tree": {"shape": "chain", "levels": 5, "k": 1, "nodes": 6}}) == "5 levels, chain"
    assert sampling_text({"temperature": 0.6, "top_k": 0, "top_p": 0.8}) == "0.6, top-p 0.8"
    assert sampling_text({"temperature": 0.0, "top_k": 50, "top_p": 0.9}) == "0"


def test_every_methods_tree_reads_as_words() -> None:
    texts = {}
    for method in METHODS:
        shape = tree_shape(MethodConfig(method))
        row = {"tree": None if shape is None else {**shape.settings, **asdict(replace(shape, settings={}))}}
        texts[method] = tree_text(row)
    assert texts["vanilla"] == "–" and texts["eagle3"] == "8 levels, k 10, 60 nodes"
    assert texts["pld"] == "n-grams up to 2, 10 tokens" and texts["lookahead"] == "N 5, W 7, G 7"
    assert texts["medusa"] == "4 levels, static, 64 nodes" and texts["sps-svip"] == "40 levels, chain"
