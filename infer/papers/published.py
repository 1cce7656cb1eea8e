"""What the papers published: speedup and tau of their models on their machines."""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from aerie.infer.measure.statistics import ALL_TASKS
from aerie.infer.report.grids import LEVELS, Grid, Line
from aerie.infer.report.tables import SummaryRows, tree_text

CSV_FILE = Path(__file__).with_name("published.csv")
# A cell is speedup/tau, or speedup/ alone. `key` and `value` say which setting a table varies.
PUBLISHED_ROWS = list(csv.DictReader(CSV_FILE.read_text(encoding="utf-8").splitlines()))
TASK_NAMES = {
    "mean": "mean",
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "cnn_dm": "CNN/DM",
    "natural_questions": "NQ",
}


class PublishedPoint(NamedTuple):
    value: Any  # its place along a line: a task, or the value of what varies
    speedup: float
    tau: float | None
    status: str = "published"


def published_points(cells: Mapping[Any, str]) -> tuple[PublishedPoint, ...]:
    """The points of cells by value; an empty cell has none."""
    points = []
    for value, cell in cells.items():
        if cell:
            speedup, tau = cell.split("/")
            points.append(PublishedPoint(value, float(speedup), float(tau) if tau else None))
    return tuple(points)


def published_grid(key: str) -> Grid:
    """The papers' figures as one setting varies, by model, method, temperature and task."""
    lines: dict[str, dict[Any, str]] = {}
    for row in PUBLISHED_ROWS:
        for task in ("mt_bench", "gsm8k"):
            if row["key"] == key and row[task]:
                name = (
                    f"{row['model']}, {row['method']}, T {row['temperature']}, {TASK_NAMES[task]}"
                )
                lines.setdefault(name, {})[row["value"]] = row[task]
    values = dict.fromkeys(value for cells in lines.values() for value in cells)
    points = [Line(name, published_points(cells)) for name, cells in lines.items()]
    return Grid(key, tuple(points), tuple(values))


def published_range(figures: Mapping[str, Any], temperature: float, is_ratio: bool) -> str:
    """The range of figures of method `of` against those of `against`, as differences or ratios."""
    about = [name for name in PUBLISHED_ROWS[0] if name not in TASK_NAMES]
    table = pd.DataFrame(PUBLISHED_ROWS).melt(about, var_name="task", value_name="cell")
    part = int(figures["figure"] == "tau")  # of a cell, speedup/tau
    table["cell"] = pd.to_numeric(table.cell.str.split("/").str[part])
    table = table[table.source.str.startswith(figures["source"])]
    table = table[table.temperature.astype(float) == temperature]
    if "value" in figures:
        table = table[table["value"] == str(figures["value"])]
    sides = table.pivot_table("cell", ["model", "key", "value", "task"], "method", "last")
    mine, theirs = sides.reindex(columns=[figures["of"], figures["against"]]).dropna().to_numpy().T
    if len(mine) == 0:
        return ""
    values = mine / theirs if is_ratio else mine - theirs
    form = "{:.2f}" if is_ratio else "{:+.2f}"
    return f"{form.format(min(values))} to {form.format(max(values))} ({len(values)} figures)"


def beside_published(
    rows: SummaryRows, by_task: Mapping[int, SummaryRows]
) -> list[tuple[str, float, Line]]:
    """(method, temperature, line): each method's measured lines, then the published ones.

    A published line's note is its paper.
    """
    measured: dict[tuple[str, float], list[Line]] = {}
    for position, row in enumerate(rows):
        if row.status == "ok":
            mean = replace(row, value="mean" if row.task == ALL_TASKS else row.task)
            tasks = [part for part in by_task.get(position, ()) if part.status == "ok"]
            line = Line(tree_text(row), (mean, *tasks))
            measured.setdefault((row.method, row.temperature), []).append(line)
    depths = {str(row.tree.levels) for row in rows if row.tree}
    published: dict[tuple[str, float], list[Line]] = {}
    for cells in PUBLISHED_ROWS:
        # of depths that a paper varies, only those that are measured here
        if not cells["key"] or (cells["key"] == LEVELS and cells["value"] in depths):
            name = cells["model"] + (f", {cells['value']} levels" if cells["key"] else "")
            points = published_points({task: cells[task] for task in TASK_NAMES})
            key = cells["method"], float(cells["temperature"])
            published.setdefault(key, []).append(Line(name, points, cells["source"]))
    shown = []
    for key, lines in measured.items():
        if key in published:
            shown += [(*key, line) for line in lines + published[key]]
    return shown
