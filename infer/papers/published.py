"""Reads the speedups and tau that the papers published for their models and machines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from aerie.infer.measure.statistics import ALL_TASKS, grouped
from aerie.infer.report.grids import LEVELS
from aerie.infer.report.tables import SummaryRows, tree_text

TASK_NAMES = {
    "mean": "mean",
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "cnn_dm": "CNN/DM",
    "natural_questions": "NQ",
    "math500": "MATH-500",
    "aime25": "AIME25",
    "mbpp": "MBPP",
    "livecodebench": "LCB",
}


def read_published() -> pd.DataFrame:
    """A line for each published cell: source, model, method, temperature, task, speedup, tau.

    `key` and `value` are the setting that a paper's table varies, and empty in other tables.
    """
    table = pd.read_csv(Path(__file__).with_name("published.csv"), dtype=str, keep_default_na=False)
    about = [name for name in table if name not in TASK_NAMES]
    cells = table.melt(about, var_name="task", value_name="cell")
    cells = cells[cells.cell != ""]
    # a cell is speedup/tau, speedup/ or /tau
    cells[["speedup", "tau"]] = cells.cell.str.split("/", expand=True).apply(pd.to_numeric)
    return cells.astype({"temperature": float})


PUBLISHED = read_published()


def published_range(figures: Mapping[str, Any], temperature: float, is_ratio: bool) -> str:
    """The range of the differences or ratios of two methods' figures, in words.

    figures: `published` of a claim.
    """
    table = PUBLISHED[PUBLISHED.source.str.startswith(figures["source"])]
    table = table[table.temperature == temperature]
    if "value" in figures:
        table = table[table["value"] == str(figures["value"])]
    about = ["model", "key", "value", "task"]
    sides = table.pivot_table(figures["figure"], about, "method", "last")
    mine, theirs = sides.reindex(columns=[figures["of"], figures["against"]]).dropna().to_numpy().T
    if len(mine) == 0:
        return ""
    values = mine / theirs if is_ratio else mine - theirs
    form = "{:.2f}" if is_ratio else "{:+.2f}"
    return f"{form.format(min(values))} to {form.format(max(values))} ({len(values)} figures)"


class Comparison(NamedTuple):
    """A line of the table of measured and published figures."""

    method: str
    temperature: float
    of: str  # the measured tree, or the paper's model
    paper: str  # "": measured here
    points: Mapping[str, Any]  # task -> a row of the bench, or a line of PUBLISHED


def beside_published(rows: SummaryRows, by_task: Mapping[int, SummaryRows]) -> list[Comparison]:
    """The measured lines of each method that has published ones, followed by these.

    by_task: position in rows -> the row's figures on each task.
    """
    depths = {str(row.tree.levels) for row in rows if row.tree}
    # Of the depths that a paper varies, only those measured here are shown.
    at_depths = (PUBLISHED.key == LEVELS) & PUBLISHED["value"].isin(depths)
    published = PUBLISHED[at_depths | (PUBLISHED.key == "")].replace(np.nan, None)
    comparisons = []
    measured = [position for position, row in enumerate(rows) if row.status == "ok"]
    methods = grouped(measured, lambda number: (rows[number].method, rows[number].temperature))
    for (method, temperature), positions in methods.items():
        theirs = published[published.method == method]
        theirs = theirs[theirs.temperature == temperature]
        if theirs.empty:
            continue
        for position in positions:
            row = rows[position]
            points = {part.task: part for part in by_task.get(position, ()) if part.status == "ok"}
            points["mean" if row.task == ALL_TASKS else row.task] = row
            comparisons.append(Comparison(method, temperature, tree_text(row), "", points))
        for (source, model, depth), cells in theirs.groupby(
            ["source", "model", "value"], sort=False
        ):
            name = f"{model}, {depth} levels" if depth else model
            points = {cell.task: cell for cell in cells.itertuples()}
            comparisons.append(Comparison(method, temperature, name, source, points))
    return comparisons
