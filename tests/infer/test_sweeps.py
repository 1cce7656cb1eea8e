"""A summary's rows by task and its sweeps, from made-up records."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.infer.measure.record import SUITE, Asked, AskedCell, AskedPoint, Record, line_of, read_as, read_records
from aerie.infer.measure.statistics import main_groups, sweep_rows
from aerie.infer.report.page import write_report
from aerie.model.storage import write_json
from tests.infer.made_up import drafted, milliseconds, record, write_run
from tests.infer.test_report import facts

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
WARM: dict[str, Any] = {**GREEDY, "temperature": 0.5}
MAIN = (AskedCell(0, **GREEDY), AskedCell(1, **GREEDY))


def point(row: int, value: object, prompts: tuple[tuple[str, str], ...], sampling: dict[str, Any]) -> AskedPoint:
    return AskedPoint(row, **sampling, sweep="s", key="tree.levels", value=value, prompts=prompts)


def records() -> list[Record]:
    """Two prompts: vanilla takes 40 ms, row 1 takes 20 on the first and 10 on the second, row 2 takes 5; row 3 warm."""
    times = {(1, "a"): 20.0, (1, "b"): 10.0, (2, "a"): 5.0}
    out = [record(prompt_id=name) for name in "ab"]
    out += [
        drafted((3, 1), row=row, prompt_id=name, ms=milliseconds(10.0, 10.0 + ms)) for (row, name), ms in times.items()
    ]
    warm = {"temperature": 0.5, "prompt_id": "a", "identical": None}
    return [*out, record(**warm), drafted((3, 1), row=3, ms=milliseconds(10.0, 30.0), **warm)]


def test_rows_are_those_of_the_bench_and_points_those_of_their_prompts() -> None:
    points = (point(1, 6, (("sums", "a"),), GREEDY), point(2, 8, (("sums", "a"),), GREEDY),
              point(3, 9, (("sums", "a"),), WARM), point(7, 9, (("sums", "a"),), GREEDY))  # fmt: skip
    asked = Asked(MAIN, points)
    assert [members.first.row for members in main_groups(records(), asked)] == [0, 1]
    rows, details = sweep_rows(records(), asked)
    assert [(r.value, r.prompts, r.speedup, r.temperature) for r in rows] == [
        (6, 1, pytest.approx(2.0), 0.0),
        (8, 1, pytest.approx(8.0), 0.0),
        (9, 1, pytest.approx(2.0), 0.5),
    ]
    assert {r.sweep for r in rows} == {"s"} and len(details) == 3
    assert main_groups(records(), None)[2].first.row == 2 and sweep_rows(records(), None) == ([], [])


def test_a_point_that_failed_is_an_error_without_a_time() -> None:
    broken = drafted((3, 1), row=2, prompt_id="a", status="error", message="no memory", ms=None)
    rows, _ = sweep_rows([record(prompt_id="a"), broken], Asked(MAIN, (point(2, 8, (("sums", "a"),), GREEDY),)))
    assert rows[0].status == "error" and rows[0].sweep == "s" and "speedup" not in rows[0].as_dict()


def test_the_suite_survives_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    asked = Asked(MAIN, (point(2, [1, "x"], (("sums", "a"),), WARM),), True, (128,), 512)
    write_json(tmp_path / SUITE, as_dict(asked))
    assert read_as(tmp_path / SUITE, Asked) == asked
    write_json(tmp_path / SUITE, {"main": [{"row": 1}]})
    with pytest.raises(UserError, match=r"suite\.json: main\.0\.temperature: .*measure again"):
        read_as(tmp_path / SUITE, Asked)


def test_a_summary_by_task_has_a_row_for_each_and_its_page_has_them_pooled(tmp_path: Path) -> None:
    bench, calibration = write_run(tmp_path)
    pooled = write_report(bench, calibration, tmp_path / "report", facts())
    found = read_records(bench / "records.jsonl")
    cells = tuple(AskedCell(row, **GREEDY) for row in dict.fromkeys(each.row for each in found))
    write_json(bench / SUITE, as_dict(Asked(cells[:-1], (), by_task=True)))
    summary = write_report(bench, calibration, tmp_path / "report", facts())
    tasks = list(dict.fromkeys(each.task for each in found))
    assert [(row["method"], row["task"]) for row in summary["rows"]] == [
        (row["method"], task) for row in pooled["rows"][:-1] for task in tasks
    ]
    details = json.loads((tmp_path / "report" / "details.json").read_text())
    assert [row["tau"] for row in details["pooled"]] == [row["tau"] for row in pooled["rows"][:-1]]
    assert len(details["rows"]) == len(summary["rows"])
    new = sum(row["new_tokens"] for row in summary["rows"] if row["method"] == "vanilla")
    assert new == pooled["rows"][0]["new_tokens"]
    lines = (tmp_path / "report" / "table.csv").read_text().splitlines()
    assert len(lines) == 1 + len(summary["rows"])


def test_records_without_a_suite_are_all_rows(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("".join(map(line_of, records())))
    summary = write_report(tmp_path, tmp_path, tmp_path / "report", facts())
    assert len(summary["rows"]) == 5 and summary["sweeps"] == []
