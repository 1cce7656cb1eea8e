"""What the papers measured with these methods, on their models and machines, beside this run's rows; never among them.

published.csv has one line for each method, model and temperature of a paper's table: speedup/tau for each task.
Papers: EAGLE-2 (arXiv 2406.16858), EAGLE-3 (2503.01840), DEAGLE, DFlash (2602.06036).
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from infer.aggregate import ALL_TASKS
from infer.table import number, tree_text

TASKS = {
    "mean": "mean",
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "cnn_dm": "CNN/DM",
    "natural_questions": "NQ",
}


@dataclass(frozen=True)
class Figures:
    """A method's speedup and tau; null: not published, or not measured."""

    speedup: float | None
    tau: float | None

    def text(self) -> str:
        """'4.26× / 4.83'."""
        speedup = "" if self.speedup is None else f"{self.speedup:.2f}×"
        return f"{speedup} / {number(self.tau)}" if self.tau is not None else speedup


@dataclass(frozen=True)
class Published:
    """One line of a paper's table; cells by task, `mean` among them."""

    method: str
    model: str
    temperature: float
    source: str
    cells: dict[str, Figures]


@dataclass(frozen=True)
class Beside:
    """A line of the page's table; the cell `mean` of a row measured here is over all its tasks."""

    method: str
    model: str  # of a row measured here: its tree
    temperature: float
    source: str | None  # null: measured here
    cells: tuple[str, ...]  # in the order of TASKS


@cache
def published() -> tuple[Published, ...]:
    """Every line of published.csv."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Published(
                line["method"], line["model"], float(line["temperature"]), line["source"],
                {task: _figures(line[task]) for task in TASKS if line[task]},
            )
            for line in csv.DictReader(file)
        )  # fmt: skip


def beside(rows: Sequence[dict[str, Any]], by_task: Sequence[dict[str, Any]]) -> list[Beside]:
    """What was measured of each method and temperature, and below it what was published of the same.

    rows are pooled over tasks; by_task has their parts, with `row` the position among rows. A method of which nothing
    was published at its temperature is left out.
    """
    found: dict[tuple[str, float], list[Beside]] = {}
    for position, row in enumerate(rows):
        if row["status"] == "ok" and _known(row["method"], row["temperature"]):
            parts = {part["task"]: part for part in by_task if part["row"] == position and part["status"] == "ok"}
            cells = {task: Figures(part["speedup"], part["tau"]) for task, part in parts.items()}
            cells["mean" if row["task"] == ALL_TASKS else row["task"]] = Figures(row["speedup"], row["tau"])
            place = found.setdefault((row["method"], row["temperature"]), [])
            place.append(Beside(row["method"], tree_text(row), row["temperature"], None, _texts(cells)))
    return [
        line
        for (method, temperature), ours in found.items()
        for line in [
            *ours,
            *(
                Beside(method, each.model, temperature, each.source, _texts(each.cells))
                for each in _known(method, temperature)
            ),
        ]
    ]


def _known(method: str, temperature: float) -> list[Published]:
    return [each for each in published() if (each.method, each.temperature) == (method, temperature)]


def _texts(cells: dict[str, Figures]) -> tuple[str, ...]:
    return tuple(cells[task].text() if task in cells else "" for task in TASKS)


def _figures(cell: str) -> Figures:
    speedup, tau = (float(part) if part else None for part in cell.split("/"))
    return Figures(speedup, tau)
