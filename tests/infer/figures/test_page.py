"""Sweeps, claim and published numbers on the page and in its files, from a made-up bench with a tuning."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.read import as_dict
from aerie.infer.measure.record import SUITE, AskedCell, line_of
from aerie.infer.report.page import write_report
from aerie.model.storage import write_json
from tests.infer.figures import test_lengths as chains
from tests.infer.figures.test_claim import COSTS, GREEDY, bench
from tests.infer.test_report import BROWSER, facts, laid_out, read_page

TREE = {"shape": "dynamic", "levels": 6, "k": 10, "nodes": 60, "stop": {"rule": "constant"}}
PREDICTED = {"tree": TREE, "tau": 3.0, "ms_per_token": 2.0, "speedup": 1.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose rows are vanilla and a tree of 2 levels, and whose sweep is over fixed and voting depths."""
    records, asked = bench()
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "records.jsonl").write_text("".join(map(line_of, records)))
    main = (*asked.main, *(AskedCell(row, **GREEDY) for row in (1, 2)))
    write_json(tmp_path / "bench" / SUITE, as_dict(replace(asked, main=main)))
    head = {"kind": "eagle1", "head": "heads/eagle1", "costs_ms": COSTS, "trees": [], "rules": []}
    choice = {"method": "eagle2", **PREDICTED}
    tuning = {"chosen": "eagle1", "heads": [{**head, "choice": choice, "published": PREDICTED}]}
    write_json(tmp_path / "tune" / "tune.json", tuning)
    return tmp_path


def report(run: Path) -> dict[str, Any]:
    return write_report(run / "bench", run / "calibration", run / "report", facts())


def test_the_page_has_every_section_that_was_measured(run: Path) -> None:
    summary = report(run)
    assert [(p["sweep"], p["value"]) for p in summary["sweeps"]] == [("d", 2), ("d", 2), ("d", 4), ("d", 4)]
    details = json.loads((run / "report" / "details.json").read_text())
    assert details["deagle"][0]["waste"] == 0.5
    words = " ".join(read_page(run / "report").words)
    for text in ("In words", "DEAGLE’s claim", "does NOT hold here", "How deep may a tree grow?", "What ends a draft",
                 "As published, on their models", "measured here", "Llama3-8B on MT-bench"):  # fmt: skip
        assert text in words, text
    assert "ablation" not in words and "By context length" not in words  # were not measured
    assert (run / "report" / "sweep-depths.svg").is_file()


def test_draft_lengths_stand_beside_constants_of_the_same_mean_and_by_task(tmp_path: Path) -> None:
    records, asked = chains.bench()
    records = [replace(one, task="units") if one.prompt_id == "b" else one for one in records]
    points = tuple(replace(point, prompts=(("sums", "a"), ("units", "b"))) for point in asked.points)
    main = (*asked.main, AskedCell(4, **GREEDY))
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "records.jsonl").write_text("".join(map(line_of, records)))
    write_json(tmp_path / "bench" / SUITE, as_dict(replace(asked, main=main, points=points, by_task=True)))
    report(tmp_path)
    words = " ".join(" ".join(read_page(tmp_path / "report").words).split())
    for text in ("Does a length that follows the draft pay? draft_lm head, T 0, 2 prompts", "costs were not measured",
                 "SVIP (entropy) drafts 3.00 tokens in a cycle", "constant of the same mean, interpolated",
                 "Against a constant length of the same mean: a larger tau (+0.75", "run tune", "20.0 %",
                 "By task: draft_lm, chains, T 0", "tokens of an answer"):  # fmt: skip
        assert text in words, text


def test_sweeps_are_in_the_text_files_apart_from_the_rows(run: Path) -> None:
    summary = report(run)
    with (run / "report" / "sweeps.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    assert [(p["sweep"], p["key"], p["value"], p["method"]) for p in points[:2]] == [
        ("d", "tree.levels", "2", "eagle2"), ("d", "tree.levels", "2", "deagle"),
    ]  # fmt: skip
    assert [float(p["tau"]) for p in points] == [2.0, 2.0, 4.0, 2.0]
    assert len((run / "report" / "table.csv").read_text().splitlines()) == 1 + len(summary["rows"])
    main, sweep = (run / "report" / "table.md").read_text().split("\nSweep d:\n\n")
    assert len(main.splitlines()) == 2 + len(summary["rows"])
    header, _, first, *_ = sweep.splitlines()
    assert header.startswith("| tree.levels | method |") and first.startswith(
        "| 2 | eagle2 | 2 levels, k 10, 60 nodes |"
    )
    assert header.count("|") == first.count("|")


def test_without_sweeps_their_files_of_an_earlier_report_go(run: Path) -> None:
    report(run)
    (run / "bench" / SUITE).unlink()
    report(run)
    assert not [*(run / "report").glob("sweep*")]
    assert "sweeps.csv" not in (run / "report" / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium-headless-shell")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_sections_without_overflow(run: Path, tmp_path: Path, width: int) -> None:
    report(run)
    scroll_width, wide, _, drawn = laid_out(run / "report", tmp_path, width)
    assert scroll_width <= width and wide == [] and all(drawn)
