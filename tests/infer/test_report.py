"""Laws of the report: summary.json's contract, and a page that is complete and stands alone."""

import html
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from aerie.configs.read import as_dict
from aerie.infer.measure.bench_files import SUITE, Cell, Record, SuiteFile, line_of
from aerie.infer.papers.appendix import papers_appendix
from aerie.infer.papers.claims import all_claims
from aerie.infer.report.page import write_report
from aerie.infer.report.tables import tuned_cells
from aerie.model.storage import Manifest, read_json, write_json, write_text
from tests import tiny
from tests.infer.made_up import (
    FAILED,
    GREEDY,
    TREE_NAME,
    TUNING,
    drafted,
    record,
    voting_answers,
    voting_suite,
    write_run,
)
from tests.infer.test_calibrate import write_calibration

ROW_KEYS = set(
    "method head head_path task temperature top_k top_p prompts verify tree new_tokens tau "
    "tau_macro accepted_histogram tokens_per_s speedup speedup_ci95 speedup_mean_per_prompt "
    "speedup_with_prefill target_forwards draft_forwards draft_forwards_wasted draft_nodes "
    "accept_rate identical mismatch peak_memory_gib ms status".split()
)
FACTS: dict[str, Any] = {
    "run": "runs/made-up",
    "commit": "0123abcd4567",
    "target": {"name": "tiny <target>", "blocks": 12},
    "head": {"kind": "eagle1"},
    "hardware": {"device": "cpu", "threads": 1, "dtype": "float32"},
    "commands": ["a && b"],
}


def write_records(run: Path, *records: Record) -> None:
    write_text(run / "bench" / "records.jsonl", "".join(map(line_of, records)))


def make_report(run: Path, output: str = "report", *, has_papers: bool = True) -> dict[str, Any]:
    """Writes the report of a run; returns the content of its summary.json."""
    papers = partial(papers_appendix, run) if has_papers else None
    write_report(run / "bench", run / "calibration", run / output, FACTS, 0, papers)
    return read_json(run / output / "summary.json")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a report with two samplings, a failing row and an analysis of the calibration."""
    run = tmp_path_factory.mktemp("run")
    write_run(run)
    write_calibration(run / "calibration")
    make_report(run)
    return run


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a report whose sweep is over fixed and voting depths, with a tuning."""
    run = tmp_path_factory.mktemp("swept")
    write_records(run, *voting_answers())
    write_json(run / "bench" / SUITE, as_dict(voting_suite()))
    write_json(run / "tune" / "tune.json", TUNING)
    make_report(run)
    return run


def page(run: Path) -> str:
    return (run / "report" / "index.html").read_text(encoding="utf-8")


def words_of(run: Path) -> str:
    return " ".join(html.unescape(re.sub(r"(?s)<style.*?</style>|<[^>]+>", " ", page(run))).split())


def test_summary_contract(measured: Path) -> None:
    """summary.json has the keys of its contract; a failed row has a message and no figure."""
    summary = read_json(measured / "report" / "summary.json")
    keys = "schema run commit target head hardware rows sweeps calibration"
    assert set(summary) == set(keys.split()) and summary["schema"] == 1
    bins = summary["calibration"].pop("bins")
    assert set(summary["calibration"]) == {"temperature", "ece", "brier"}
    assert set(bins[0]) == {"low", "high", "count", "confidence", "acceptance"}
    assert sum(row["status"] == "error" for row in summary["rows"]) == 2
    for row in summary["rows"]:
        if row["status"] == "error":
            assert not set(row) & {"ms", "tokens_per_s", "speedup", "tau"}
            assert "530 positions" in row["message"]
        else:
            assert set(row) == ROW_KEYS and len(row["speedup_ci95"]) == 2
            assert set(row["ms"]) == {"prefill", "draft", "verify", "commit", "other", "wall"}
            assert row["tree"] is None or set(row["tree"]) >= {"shape", "levels", "k", "nodes"}


def test_page_stands_alone(measured: Path, swept: Path) -> None:
    """The page asks for nothing outside itself; its links lead to its parts, each once."""
    for run in (measured, swept):
        source = page(run)
        assert not re.search(r"<(script |iframe|object|embed|img)|<[^>]*\son\w+=", source)
        assert not re.search(r"@import|url\((?!#)", source) and source.count("<script>") == 1
        assert not re.search(r"fetch|https?:", source.split("<script>")[1])
        for link in re.findall(r'(?:src|href)="([^"]*)"', source):
            assert link.startswith(("#", "data:,")) or (run / "report" / link).is_file(), link
        ids = re.findall(r'\bid="([^"]+)"', source)
        assert len(ids) == len(set(ids))
        assert set() < set(re.findall(r'href="#([^"]+)"', source)) <= set(ids)
        contents = re.findall(r'href="#([^"]+)"', re.findall(r"(?s)<nav>(.*?)</nav>", source)[0])
        assert contents == re.findall(r'<(?:h2|details) id="([^"]+)"', source)
        assert source.count("<h2") + source.count("<details") == len(contents)
        assert "<details open" not in source


@pytest.mark.parametrize(
    "text",
    ["<b>Bold</b>", "<script>alert(1)</script>", "<max_position_embeddings>", "tiny <target>"],
)
def test_page_escapes(text: str, measured: Path) -> None:
    """What others wrote is text in the page, not markup."""
    assert html.escape(text, quote=False) in page(measured) and text not in page(measured)


def test_pictures(tmp_path: Path, measured: Path) -> None:
    """Each picture is a file too; those of earlier input go, also the papers' with the papers."""
    usual = {"tau", "speedup", "depth"}
    of_calibration = {"reliability", "calibration-calibrator", "calibration-by-depth"}
    of_papers = {
        "claims-figure-6",
        "claims-drift",
        "claims-kl",
        "claims-survival",
        "claims-bounds",
        "claims-oracle",
    }
    drawn = {path.stem: path for path in (measured / "report").glob("*.svg")}
    assert set(drawn) == usual | of_calibration | of_papers
    for path in drawn.values():
        assert ET.fromstring(path.read_text(encoding="utf-8")).tag.endswith("svg")  # noqa: S314 (our own file)
    run = shutil.copytree(measured, tmp_path / "run")
    make_report(run, has_papers=False)
    assert {path.stem for path in (run / "report").glob("*.svg")} == usual | of_calibration
    assert "What the papers claim" in page(measured) and "papers claim" not in page(run)
    shutil.rmtree(run / "calibration")
    (run / "bench" / "reference.json").unlink()
    assert make_report(run)["calibration"] is None
    assert {path.stem for path in (run / "report").glob("*.svg")} == usual
    for words in ("fair baseline", "Does a calibrator help?"):
        assert words in words_of(measured) and words not in words_of(run)


def test_rows_by_task(tmp_path: Path, measured: Path) -> None:
    """Where the suite asks for it, summary.json has a row for each task."""
    run = shutil.copytree(measured, tmp_path / "run")
    suite = SuiteFile(tuple(Cell(row, **GREEDY) for row in (0, 1)), by_task=True)
    write_json(run / "bench" / SUITE, as_dict(suite))
    rows = [(row["method"], row["task"]) for row in make_report(run)["rows"]]
    assert rows == [*product(("vanilla", "eagle2"), ("sums", "units", "letters"))]


def test_tuned_headline(swept: Path, tmp_path: Path) -> None:
    """The page begins with the tuned tree, measured where it was."""
    headline = f"Tuned to this machine 1.50 × predicted, not measured {TREE_NAME} to use it:"
    chat = f"aerie chat --run runs/made-up --row {swept / 'tune' / 'tuned.yaml'}"
    assert f"{headline} {chat}" in words_of(swept)
    run = shutil.copytree(swept, tmp_path / "run")
    row = {
        "tau": 2.0,
        "speedup": 1.4,
        "speedup_ci95": [1.2, 1.6],
        "chosen_against_it": 1.0,
        "chosen_against_it_ci95": [1.0, 1.0],
    }
    figures = {
        "predicted_over_measured": 1.07,
        "predicted_tau_over_measured": 1.5,
        "names": ["vanilla", "a tree"],
        "rows": [row | {"speedup": 1.0}, row],
    }
    write_json(run / "tune" / "measured.json", figures)
    make_report(run)
    assert "Tuned to this machine 1.40 × 95 % interval 1.20–1.60 eagle2, 6 levels" in words_of(run)
    assert read_json(run / "report" / "details.json")["tuning"]["measured"]["rows"][1] == row


def test_trainings(tmp_path: Path, capsys: Any) -> None:
    """Trainings are in the report, and one that its budget ended is told under the table."""
    run = tmp_path / "run"
    write_records(run, record(), drafted((3, 1)))
    Manifest(facts={"stage": "bench"}).write(run / "bench")
    facts = {
        "stage": "train",
        "steps": 483,
        "total_steps": 1050,
        "tokens": 9000,
        "train_seconds": 90.0,
    }
    Manifest(facts={**facts, "ended": "budget"}).write(run / "heads" / "eagle1")
    Manifest(facts={**facts, "ended": "finished"}).write(run / "target")
    save_file(
        {"fc.weight": np.zeros((4, 8)), "embed_tokens.weight": np.zeros((50, 4))},
        run / "heads" / "eagle1" / "model.safetensors",
    )
    metrics = [
        {"step": 100, "loss": 0.01},
        {"step": 200, "loss": 0.005},
        {"step": 200, "held_out_tau": 2.5},
    ]
    lines = [json.dumps({"kind": "eagle1", **line}) for line in metrics]
    write_text(run / "metrics.jsonl", "\n".join([*lines, "5", '{"loss": 1}', '{"ki']))
    values = {
        "run": str(run),
        "target": {"path": str(run / "target")},
        "data": {"conversations": ["x.jsonl"]},
    }
    config = tiny.recipe(tmp_path / "recipe.yaml", values)
    stopped = "stopped by the time budget at step 483 of 1,050"
    told = f"aerie report --config {config}\n eagle1 head: training {stopped}"
    assert "target: training" not in tiny.session(told, capsys)
    # 32 parameters: the embedding is the target's
    assert f"eagle1 head {stopped} 32 483 9,000 90 s" in words_of(run)
    curves = read_json(run / "report" / "details.json")["training"]["curves"]["eagle1"]
    assert curves["loss"] == {"steps": [100, 200], "values": [0.01, 0.005]} and len(curves) == 2
    assert "tau by decoding" in (run / "report" / "training-eagle1.svg").read_text()


def test_same_bytes(swept: Path) -> None:
    """The same input gives the same files."""
    make_report(swept, "again")
    for path in (swept / "again").iterdir():
        assert path.read_bytes() == (swept / "report" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bench/suite.json", "{", "aerie bench --overwrite"),
        ("bench/records.jsonl", "", r"records\.jsonl: holds no whole record.*aerie bench"),
    ],
)
def test_damaged_input(name: str, text: str, message: str, tmp_path: Path) -> None:
    """Input that is damaged or missing is an error with the command that mends it."""
    write_records(tmp_path, record())
    write_text(tmp_path / name, text)
    tiny.refused(message, make_report, tmp_path)


DRAFTED = drafted((3, 1))


@pytest.mark.parametrize(
    ("answers", "state", "words"),
    [
        (
            [DRAFTED],
            "good",
            "1 of 1 greedy outputs are token-identical to the vanilla row, 1 of 1 to",
        ),
        ([replace(DRAFTED, identical=False)], "bad", "0 of 1 greedy outputs"),
        ([replace(DRAFTED, identical_to_generate=False)], "bad", "Not lossless"),
        (
            [replace(DRAFTED, identical=False, margin=0.5)],
            "rounding",
            "that differ (margin up to 0.50",
        ),
        ([replace(DRAFTED, identical=False, margin=1.5)], "bad", "Not lossless"),
        ([DRAFTED, replace(DRAFTED, row=2, **FAILED)], "partial", "Failed, so no figure"),
        ([replace(DRAFTED, **FAILED)], "unknown", "Not checked"),
    ],
)
def test_verdict(answers: list[Record], state: str, words: str, tmp_path: Path) -> None:
    """The page says lossless only where every greedy output is identical."""
    write_records(tmp_path, record(), *answers)
    make_report(tmp_path, has_papers=False)
    assert f"verdict box {state}" in page(tmp_path) and words in words_of(tmp_path)


def test_claims_and_points(swept: Path) -> None:
    """The page has a line for every claim, and sweeps.csv the points of sweeps."""
    lines = read_json(swept / "report" / "details.json")["claims"]["lines"]
    assert {line["number"] for line in lines} == set(range(1, len(all_claims()) + 1))
    # too few prompts to refute any
    assert {line["verdict"] for line in lines} == {"holds", "open", "out of reach"}
    for line in lines:
        assert line["claim"] in words_of(swept) and line["why"] in words_of(swept)
    assert "wastes at most half" in (swept / "report" / "claims.md").read_text()
    points = pd.read_csv(swept / "report" / "sweeps.csv")[["value", "method", "tau"]]
    assert points.to_numpy().tolist() == [
        [2, "eagle2", 2.0],
        [2, "deagle", 2.0],
        [4, "eagle2", 4.0],
        [4, "deagle", 2.0],
    ]


def test_the_tuned_row_of_a_results_page_is_the_chosen_one() -> None:
    rows = [
        {"tau": tau, "speedup": tau / 2, "speedup_ci95": [1.0, 2.0], "chosen_against_it": speed}
        for tau, speed in ((1.0, 1.5), (4.0, 1.0), (5.0, 1.25))
    ]
    names = ["vanilla", "eagle2, 6 levels, k 2, 12 nodes", "eagle2, published"]
    cells = tuned_cells({"names": names, "rows": rows})
    assert cells["method"] == "eagle2 (tuned)" and cells["tree"] == "6 levels, k 2, 12 nodes"
    assert (cells["tau"], cells["speedup"]) == ("4.00", "2.00x")
