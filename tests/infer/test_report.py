"""Laws of the report: the contract of summary.json, an honest and self-contained page, tables, pictures."""

import csv
import html.parser
import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.infer.measure.record import SUITE, Asked, AskedCell, Record, line_of, read_records
from aerie.infer.measure.statistics import group, summary_row
from aerie.infer.report import tables
from aerie.infer.report.page import Facts, lossless, write_report
from aerie.model.storage import write_json
from tests.infer import test_papers as papers
from tests.infer.calibration.made_up import analysis
from tests.infer.made_up import drafted, record, write_run

ROW_KEYS = {
    "method", "head", "head_path", "task", "temperature", "top_k", "top_p", "prompts", "verify", "tree", "new_tokens",
    "tau", "tau_macro", "accepted_histogram", "tokens_per_s", "speedup", "speedup_ci95", "speedup_mean_per_prompt",
    "speedup_with_prefill", "target_forwards", "draft_forwards", "draft_forwards_wasted", "draft_nodes", "accept_rate",
    "identical", "mismatch", "peak_memory_gib", "ms", "status",
}  # fmt: skip
TREE = {"shape": "dynamic", "levels": 6, "k": 10, "nodes": 60, "stop": {"rule": "constant"}}
PREDICTED = {"tree": TREE, "tau": 3.0, "ms_per_token": 2.0, "speedup": 1.5}


def report(run: Path, output: str = "report") -> dict[str, Any]:
    """Writes the report of a run; the content of its summary.json."""
    facts = Facts(
        run="runs/made-up",
        commit="0123abcd4567",
        target={"name": "tiny <target>", "blocks": 12},
        head={"kind": "eagle1"},
        hardware={"device": "cpu", "threads": 1, "dtype": "float32"},
        commands=("python infer/main.py bench --config a.yaml && true",),
    )
    rows = write_report(run / "bench", run / "calibration", run / output, facts)
    summary: dict[str, Any] = json.loads((run / output / "summary.json").read_text(encoding="utf-8"))
    assert len(rows) <= len(summary["rows"])
    return summary


def write_bench(run: Path, records: Sequence[Record], asked: Asked, head: str) -> None:
    """A bench of these records, with a tuning of this kind of head."""
    (run / "bench").mkdir()
    (run / "bench" / "records.jsonl").write_text("".join(map(line_of, records)))
    write_json(run / "bench" / SUITE, as_dict(asked))
    costs = next(one for one in papers.TUNING["heads"] if one["kind"] == head)
    choice = {"method": "eagle2", **PREDICTED}
    heads = [{**costs, "head": head, "trees": [PREDICTED], "rules": [], "choice": choice, "published": PREDICTED}]
    write_json(run / "tune" / "tune.json", {"chosen": head, "heads": heads})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a report with two samplings, a failing row and an analysis of the calibration."""
    run = tmp_path_factory.mktemp("run")
    write_run(run, temperatures=(0.0, 1.0), failing=True)
    write_json(run / "calibration" / "analysis.json", analysis())
    report(run)
    return run


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a report whose sweep is over fixed and voting depths, with a tuning."""
    run = tmp_path_factory.mktemp("swept")
    records, asked = papers.voting()
    main = (*asked.main, *(AskedCell(row, **papers.GREEDY) for row in (1, 2)))
    write_bench(run, records, replace(asked, main=main), "eagle1")
    report(run)
    return run


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the words alone: drawing takes most of a report's time."""
    monkeypatch.setattr("aerie.infer.report.page.pictures", lambda *_: {})


class Page(html.parser.HTMLParser):
    """Tags with attributes, and all text, of a report's page."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed((run / "report" / "index.html").read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_summary_follows_the_contract_to_the_key(whole: Path) -> None:
    summary = json.loads((whole / "report" / "summary.json").read_text(encoding="utf-8"))
    assert set(summary) == {
        "schema", "run", "commit", "target", "head", "hardware", "rows", "sweeps", "calibration",
    }  # fmt: skip
    assert (summary["schema"], summary["sweeps"]) == (1, [])
    assert set(summary["calibration"]) == {"temperature", "ece", "brier", "bins"}
    assert set(summary["calibration"]["bins"][0]) == {"low", "high", "count", "confidence", "acceptance"}
    for row in summary["rows"]:
        if row["status"] == "ok":
            assert set(row) == ROW_KEYS and len(row["speedup_ci95"]) == 2
            assert set(row["ms"]) == {"prefill", "draft", "verify", "commit", "other", "wall"}
            assert row["tree"] is None or set(row["tree"]) >= {"shape", "levels", "k", "nodes"}
        else:
            assert not set(row) & {"ms", "tokens_per_s", "speedup", "tau"} and "530 positions" in row["message"]
    assert [row["status"] for row in summary["rows"]].count("error") == 2


def test_the_page_asks_for_nothing_outside_itself_and_escapes_what_others_wrote(whole: Path, swept: Path) -> None:
    for run in (whole, swept):
        page, source = Page(run), (run / "report" / "index.html").read_text(encoding="utf-8")
        assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "img"}
        for tag, attributes in page.tags:
            assert not any(name.startswith("on") for name in attributes), tag
            for name in ("src", "href", "xlink:href"):
                target = attributes.get(name)
                assert target is None or target.startswith(("#", "data:,")) or (run / "report" / target).is_file()
        assert "@import" not in source and not re.search(r"url\((?!#)", source)
        ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
        used = {str(a["xlink:href"])[1:] for _, a in page.tags if a.get("xlink:href")}
        assert len(ids) == len(set(ids)) and used and used <= set(ids)
    source = (whole / "report" / "index.html").read_text(encoding="utf-8")
    for text in ("<b>Bold</b>", "<script>alert(1)</script>", "<max_position_embeddings>", "tiny <target>"):
        assert text.replace("<", "&lt;").replace(">", "&gt;") in source and text not in source


def test_every_picture_is_a_file_and_those_of_earlier_input_go(tmp_path: Path, whole: Path) -> None:
    drawn = {path.stem for path in (whole / "report").glob("*.svg")}
    assert drawn >= {"tau", "speedup", "milliseconds", "depth", "reliability"}
    assert len([name for name in drawn if name.startswith("calibration-")]) == 5
    for path in (whole / "report").glob("*.svg"):
        assert ET.fromstring(path.read_text(encoding="utf-8")).tag.endswith("svg")  # noqa: S314 (our own file)
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "calibration")
    (tmp_path / "run" / "bench" / "reference.json").unlink()
    assert report(tmp_path / "run")["calibration"] is None
    assert {path.stem for path in (tmp_path / "run" / "report").glob("*.svg")} == drawn - {"reliability"} - {
        name for name in drawn if name.startswith("calibration-")
    }
    text = Page(tmp_path / "run").text
    assert "honest baseline" in Page(whole).text and "honest baseline" not in text
    assert "Does a calibrator help?" in Page(whole).text and "Does a calibrator help?" not in text


def test_the_same_input_gives_the_same_bytes(swept: Path) -> None:
    report(swept, "again")
    files = sorted(path.name for path in (swept / "report").iterdir())
    assert files == sorted(path.name for path in (swept / "again").iterdir())
    for name in files:
        assert (swept / "report" / name).read_bytes() == (swept / "again" / name).read_bytes(), name


def test_damaged_or_missing_input_is_an_error_with_the_command(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_json(tmp_path / "calibration" / "analysis.json", {"schema": 99})
    with pytest.raises(UserError, match=r"analysis\.json: .*calibrate --overwrite"):
        report(tmp_path)
    (tmp_path / "bench" / "records.jsonl").write_text("")
    with pytest.raises(UserError, match=r"records\.jsonl: holds no whole record.*infer/main\.py bench"):
        report(tmp_path)


@pytest.mark.usefixtures("without_pictures")
def test_rows_by_task_are_pooled_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path)
    cells = tuple(AskedCell(row, **papers.GREEDY) for row in (0, 1))
    write_json(tmp_path / "bench" / SUITE, as_dict(Asked(cells, by_task=True)))
    rows = [(row["method"], row["task"]) for row in report(tmp_path)["rows"]]
    assert rows == [(method, task) for method in ("vanilla", "eagle2") for task in ("sums", "units", "letters")]
    details = json.loads((tmp_path / "report" / "details.json").read_text())
    assert [row["task"] for row in details["pooled"]] == ["all"] * 2 and len(details["by_task"]) == 6


@pytest.mark.usefixtures("without_pictures")
def test_the_page_says_lossless_only_when_every_greedy_output_is_identical(tmp_path: Path) -> None:
    write_run(tmp_path)
    report(tmp_path)
    text = Page(tmp_path).text
    assert "36 of 36 greedy outputs are token-identical to the vanilla row and to transformers’ generate." in text
    assert "Not lossless" not in text
    path = tmp_path / "bench" / "records.jsonl"
    records = read_records(path)
    records[1] = replace(records[1], identical=False)
    path.write_text("".join(map(line_of, records)))
    report(tmp_path)
    text = Page(tmp_path).text
    assert "Not lossless" in text and "11/12" in text
    assert "35 of 36 greedy outputs are token-identical to the vanilla row, 36 of 36 to" in text
    failed = [replace(one, status="error", message="x", ms=None) for one in records if one.row == 1]
    path.write_text("".join(map(line_of, failed)))
    assert [row["status"] for row in report(tmp_path)["rows"]] == ["error"]
    assert "Failed, so no figure" in Page(tmp_path).text and "Not checked" in Page(tmp_path).text
    (row,) = [summary_row(one) for one in group([record(), drafted((3, 1))]) if one.first.method == "eagle2"]
    compared = {"identical_to_generate": 1, "compared_to_generate": 1}
    states = [
        lossless([row], [compared]), lossless([row], [{**compared, "identical_to_generate": 0}]),
        lossless([row, replace(row, status="error")], [compared, compared]),
        lossless([row, replace(row, temperature=1.0, verify="typical (not lossless)")], [compared, compared]),
    ]  # fmt: skip
    assert [found["state"] for found in states] == ["good", "bad", "partial", "partial"]


def test_the_page_has_every_section_that_was_measured_and_words_that_fit_its_figures(swept: Path) -> None:
    text = Page(swept).text
    for words in (
        "In words", "As published, on their models", "measured here", "Llama3-8B on MT-bench",
        "With room for 4 levels the vote wastes 4 draft forwards, the fixed tree 8: 0.50 times as many. The claim, at "
        "most 0.5 times as many, holds here.", "50.0 % of the fixed tree’s best", "at least 97 %, does NOT hold here",
        "Tuned to this machine: eagle2 on the eagle1 head with at most 6 levels, k 10 and 60 nodes, predicted to be "
        "1.50 times as fast",
    ):  # fmt: skip
        assert words in text, words
    summary = re.search(r"DEAGLE’s claim, on the eagle1 head: with room.*?prompts\)", text)
    assert summary and "it holds for wasted forwards and modelled speed; it does not hold for tau" in summary.group()
    assert "ablation" not in text and "By context length" not in text  # were not measured


def test_rows_and_sweeps_are_text_tables_and_a_sweep_that_is_gone_takes_its_file(swept: Path, tmp_path: Path) -> None:
    with (swept / "report" / "sweeps.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    assert [(p["value"], p["method"], float(p["tau"])) for p in points] == [
        ("2", "eagle2", 2.0), ("2", "deagle", 2.0), ("4", "eagle2", 4.0), ("4", "deagle", 2.0),
    ]  # fmt: skip
    main, sweep = (swept / "report" / "table.md").read_text().split("\nSweep d:\n\n")
    header, _, first, *_ = sweep.splitlines()
    assert header.startswith("| tree.levels | head | method |") and header.count("|") == first.count("|")
    assert first.startswith("| 2 | eagle1 | eagle2 | 2 levels, k 10, 60 nodes |") and len(main.splitlines()) == 2 + 3
    shutil.copytree(swept, tmp_path / "run")
    (tmp_path / "run" / "bench" / SUITE).unlink()
    report(tmp_path / "run")
    assert not [*(tmp_path / "run" / "report").glob("sweep*")] and "sweeps.csv" not in Page(tmp_path / "run").text


def test_tables_show_each_row_with_its_figures_and_a_failure_with_its_message() -> None:
    records = [record(prompt_id=str(n)) for n in range(3)] + [drafted((3, 1), prompt_id=str(n)) for n in range(3)]
    records += [
        drafted((2, 2), row=2, prompt_id="0"),
        drafted((), row=2, prompt_id="1", status="error", message="a | b"),
    ]
    rows = [summary_row(members) for members in group(records)]
    header, _, vanilla, eagle, failed = tables.console_table(rows).splitlines()
    assert header.split() == ["method", "tree", "T", "tau", "speedup", "95", "%", "interval", "identical"]
    assert vanilla.split() == ["vanilla", "–", "0", "1.00", "1.00x", "–", "–"]
    assert eagle.split() == [*"eagle2 6 levels, k 8, 16 nodes 0 2.00 1.00x 1.00–1.00 3/3".split()]
    assert header.index("tau") + len("tau") == vanilla.index("1.00") + len("1.00")
    assert failed.endswith("error: 1 of 2 prompts failed; first '1': a | b")
    assert len({line.replace("\\|", "").count("|") for line in tables.markdown_table(rows).splitlines()}) == 1
    lines = list(csv.DictReader(tables.csv_table(rows).splitlines()))
    assert (lines[0]["nodes"], lines[1]["nodes"], float(lines[1]["ms_wall"])) == ("", "16", 150.0)
    assert (lines[2]["tau"], lines[2]["ms_wall"], lines[2]["speedup_low"]) == ("", "", "")
    warm = replace(rows[1], temperature=0.6, top_p=0.8, verify="typical (not lossless)")
    assert tables.sampling_text(warm) == "0.6, top-p 0.8" and "NOT lossless" in tables.tree_text(warm)
