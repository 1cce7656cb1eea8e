"""Rows of the summary in words and as text tables; sweeps and papers as grids."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from huggingface_hub import get_local_safetensors_metadata, try_to_load_from_cache
from huggingface_hub.errors import NotASafetensorsRepoError

from aerie.configs.errors import UserError
from aerie.configs.read import read_text, read_yaml
from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.record import Record, SummaryRow, TreeShape
from aerie.infer.measure.statistics import ALL_TASKS, VANILLA, group, grouped, identity, told_apart
from aerie.model.hub import is_on_hub
from aerie.model.storage import CONFIG, read_json

Rows = Sequence[SummaryRow]
NOTHING = "–"
LEVELS = "tree.levels"  # the key of a sweep over depths or lengths
COLUMNS: dict[str, list[str]] = read_yaml(Path(__file__).with_name("columns.yaml"))[0]
# the papers' own numbers: speedup, or speedup/tau; `key` and `value` where one setting varies
PAPERS = [
    *csv.DictReader(
        Path(__file__).with_name("published.csv").read_text(encoding="utf-8").splitlines()
    )
]
TASKS = {
    "mean": "mean",
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
}
TASKS |= {"cnn_dm": "CNN/DM", "natural_questions": "NQ"}
SHARED = (
    "embed_tokens.weight",
    "d2t",
    "t2d",
)  # of a head's file: its target's embedding, and tables
CURVES = re.compile(r"(held_out_)?(loss|greedy_agreement|accuracy_at_\d+|predicted_tau|tau)")


def stopped(trainings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """'stopped by the time budget at step 483 of 1,050', by name of each training that its budget ended."""
    words = "stopped by the time budget at step {steps:,} of {total_steps:,}"
    return {
        name: words.format_map(one) for name, one in trainings.items() if one["ended"] == "budget"
    }


def parameters(directory: Path) -> int | None:
    """Parameters in the safetensors of a directory or cached repository, without a head's copies from its target."""
    cached = try_to_load_from_cache(str(directory), CONFIG) if is_on_hub(directory) else None
    with suppress(OSError, NotASafetensorsRepoError):
        found = get_local_safetensors_metadata(
            Path(cached).parent if isinstance(cached, str) else directory
        )
        own = [
            (name, table)
            for file in found.files_metadata.values()
            for name, table in file.tensors.items()
        ]
        return sum(table.parameter_count for name, table in own if name not in SHARED)
    return None


def training_curves(metrics: Path) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """metrics.jsonl by kind of training: figure -> its steps and values."""
    curves: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for line in (
        metrics.read_text(encoding="utf-8", errors="replace").splitlines()
        if metrics.is_file()
        else ()
    ):
        with suppress(ValueError, TypeError, KeyError):  # a kill has cut it off
            record = json.loads(line)
            for name in filter(CURVES.fullmatch, record):
                curve = curves.setdefault(record["kind"], {}).setdefault(
                    name, {"steps": [], "values": []}
                )
                curve["steps"].append(record["step"])
                curve["values"].append(record[name])
    return curves


def tree_text(row: SummaryRow) -> str:
    """The words of its tree, with 'NOT lossless'."""
    return (
        NOTHING
        if row.tree is None
        else row.tree.words + (", NOT lossless" if is_lossy(row) else "")
    )


def is_lossy(row: SummaryRow) -> bool:
    """Whether typical acceptance does not keep the target's law, even where the row failed."""
    typical = row.tree is not None and "typical" in row.tree.settings and row.temperature > 0
    return typical or "not lossless" in row.verify


def lossless(rows: Rows, extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of compared greedy outputs of drafting rows; state: good, partial, rounding, bad or unknown.

    rounding: every difference is a near-tie of a 16-bit dtype.
    """
    names = (
        "identical",
        "compared",
        "identical_to_generate",
        "compared_to_generate",
        "differing",
        "rounding",
    )
    counts = dict.fromkeys(names, 0)
    for row, extra in zip(rows, extras, strict=True):
        if (
            row.status == "ok"
            and row.tree is not None
            and row.temperature == 0
            and row.identical is not None
        ):
            seen = {
                **extra,
                "identical": row.identical,
                "compared": row.identical + (row.mismatch or 0),
            }
            counts = {name: count + (seen[name] or 0) for name, count in counts.items()}
    failed, lossy = sum(row.status != "ok" for row in rows), sum(map(is_lossy, rows))
    state = "partial" if failed or lossy else "good"
    if counts["differing"]:
        state = "bad" if counts["differing"] > counts["rounding"] else "rounding"
    state = state if counts["compared"] else "unknown"
    margin = max((extra["margin"] for extra in extras if extra["margin"] is not None), default=None)
    return {"margin": margin, "state": state, **counts, "failed": failed, "lossy": lossy}


def sampling_text(row: SummaryRow) -> str:
    """'0', '1', or '0.6, top-p 0.8'."""
    if row.temperature == 0:
        return "0"
    top_k = f", top-k {row.top_k}" if row.top_k else ""
    return f"{row.temperature:g}{top_k}" + (f", top-p {row.top_p:g}" if row.top_p < 1 else "")


def label(row: SummaryRow, rows: Rows) -> str:
    """Method, tree, and the sampling where the rows have several."""
    words = [row.method] if row.tree is None else [row.method, tree_text(row)]
    if len({sampling_text(other) for other in rows}) > 1:
        words.append(f"T {sampling_text(row)}")
    return ", ".join(words)


def names_of(rows: Rows) -> str:
    """'eagle and eagle2 (children sampled) are', 'sps is': methods, with what sets them apart from published ones."""
    names = [
        row.method + (f" ({row.tree.variant})" if row.tree and row.tree.variant else "")
        for row in rows
    ]
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:.{digits}f}{unit}"


def interval(row: SummaryRow) -> str:
    bounds = row.speedup_ci95
    return (
        NOTHING if bounds is None or row.method == VANILLA else f"{bounds[0]:.2f}–{bounds[1]:.2f}"
    )


def ms_per_cycle(row: SummaryRow) -> dict[str, float]:
    """Decode milliseconds per cycle by part; empty where the row has none."""
    if row.ms is None or not row.target_forwards:
        return {}
    return {
        part: getattr(row.ms, part) / row.target_forwards
        for part in ("draft", "verify", "commit", "other")
    }


def names(records: Sequence[Record], rows: Sequence[int]) -> str:
    """'row 2 (eagle2, 6 levels, k 10, 60 nodes)' of each row."""
    groups = group(records)
    every = told_apart([identity(members) for members in groups])
    labels = {
        members.first.row: label(row, every) for members, row in zip(groups, every, strict=True)
    }
    return " and ".join(f"row {row} ({labels[row]})" for row in dict.fromkeys(rows))


def cells_of(row: SummaryRow) -> dict[str, str]:
    cells = {
        "method": row.method,
        "tree": tree_text(row),
        "task": row.task,
        "T": sampling_text(row),
    }
    cells["prompts"] = str(row.prompts)
    if row.status != "ok":
        return {**cells, "error": f"error: {row.message}"}
    return cells | {
        "tau": number(row.tau),
        "tau (macro)": number(row.tau_macro),
        "speedup": number(row.speedup, unit="x"),
        "95 % interval": interval(row),
        "tokens/s": number(row.tokens_per_s, 1),
        "identical": NOTHING
        if row.identical is None
        else f"{row.identical}/{row.identical + (row.mismatch or 0)}",
        "accept rate": number(row.accept_rate, 3),
    }


def console_table(rows: Rows) -> str:
    lines = [{name: name for name in COLUMNS["console"]}, *map(cells_of, rows)]
    widths = {name: max(len(line.get(name, "")) for line in lines) for name in lines[0]}
    text, right = [], ("tau", "speedup", "identical")
    for line in lines:
        padded = [
            f"{line.get(name, ''):{'>' if name in right else '<'}{width}}"
            for name, width in widths.items()
        ]
        text.append("  ".join(padded).rstrip() + (f"  {line['error']}" if "error" in line else ""))
    text.insert(1, "  ".join("─" * width for width in widths.values()))
    return "\n".join(text)


def markdown_table(rows: Rows) -> str:
    columns = COLUMNS["markdown"]
    text = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for line in map(cells_of, rows):
        cells = {"tau": line.get("error", NOTHING), **line}
        texts = (
            cells.get(name, NOTHING).replace("|", "\\|").replace("\n", " ") for name in columns
        )
        text += f"| {' | '.join(texts)} |\n"
    return text


def result_of(run: Path, report: Path) -> tuple[str, str]:
    """A run's name, and its part of docs/results.md."""
    if not (report / "summary.json").is_file():
        raise UserError(f"{run}: has no report; run aerie report --config RECIPE --run {run}")
    facts, details = (read_json(report / f"{name}.json") for name in ("summary", "details"))
    try:
        machine = ", ".join(f"{key} {value}" for key, value in facts["hardware"].items() if value)
        name, target, commit = facts["run"], facts["target"]["name"], facts["commit"]
        stops = "".join(
            f"- {name}: {words}.\n" for name, words in details["training"]["stopped"].items()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{report}: is damaged; run: aerie report --run {run}") from error
    table, judged = (read_text(report / f"{name}.md") for name in ("table", "claims"))
    left_out = [line for line in judged.splitlines(keepends=True) if "Not measured: " in line]
    lines = [line for line in judged.splitlines(keepends=True) if line not in left_out]
    table += f"\n### What the papers claim\n\n{''.join(lines)}"
    if numbers := [*dict.fromkeys(line.split(".")[0].strip("| ") for line in left_out)]:
        table += f"\nNot measured, in part or at all: {', '.join(numbers)} (`aerie claims {name}` says what would).\n"
    return (
        name,
        f"\n## {name}\n\nTarget `{target}`; {machine}; commit `{commit}`.\n\n{stops}{table}",
    )


def csv_table(rows: Rows, sweeps: bool = False) -> str:
    """One line per row, unrounded; points of sweeps begin with sweep, key, value and span."""
    lines = []
    for row in rows:
        values = row.as_dict()
        times = {f"ms_{part}": value for part, value in (values.get("ms") or {}).items()}
        low, high = row.speedup_ci95 or (None, None)
        tree = (
            {"tree": None} if row.tree is None else {**row.tree.as_dict(), "tree": tree_text(row)}
        )
        lines.append({**values, **tree, **times, "speedup_low": low, "speedup_high": high})
    columns = [*(("sweep", "key", "value", "span") if sweeps else ()), *COLUMNS["csv"]]
    return pd.DataFrame(lines, columns=columns, dtype=object).to_csv(
        index=False, lineterminator="\n"
    )


class Published(NamedTuple):
    value: Any
    speedup: float
    tau: float | None
    status: str = "published"


class Line(NamedTuple):
    """One line of a grid; `value` of each point is its place along the line."""

    label: str
    points: tuple[Any, ...]  # SummaryRow or Published
    note: str = ""

    def at(self, value: Any) -> Any:
        return next((point for point in self.points if point.value == value), None)


class Grid(NamedTuple):
    title: str
    lines: tuple[Line, ...]
    values: tuple[Any, ...]
    key: str = ""  # what varies in a sweep
    picture: str = ""  # its name, if there is one


def published(key: str) -> Grid:
    """The papers' figures as one setting varies: a line for each model, method, temperature and task."""
    lines: dict[str, dict[Any, str]] = {}
    for row, task in product((row for row in PAPERS if row["key"] == key), ("mt_bench", "gsm8k")):
        if row[task]:
            name = f"{row['model']}, {row['method']}, T {row['temperature']}, {TASKS[task]}"
            lines.setdefault(name, {})[row["value"]] = row[task]
    values = tuple(dict.fromkeys(value for cells in lines.values() for value in cells))
    return Grid(key, tuple(Line(name, _published(cells)) for name, cells in lines.items()), values)


def _published(cells: Mapping[Any, str]) -> tuple[Published, ...]:
    """Points of the cells by value: '2.81/3.92' (speedup and tau) or '2.81/'; an empty cell has none."""
    pairs = [(value, cell.split("/")) for value, cell in cells.items() if cell]
    return tuple(
        Published(value, float(speedup), float(tau) if tau else None)
        for value, (speedup, tau) in pairs
    )


def sweep_lines(points: Rows) -> tuple[Line, ...]:
    """A line per row of a sweep: its first at every value, its second, and so on."""

    def words_of(point: SummaryRow) -> list[str]:
        tree, about = (
            point.tree,
            [f"{point.head_path or point.head} head", f"T {sampling_text(point)}"],
        )
        sizes = (
            []
            if tree is None
            else tree_text(replace(point, tree=replace(tree, variant=""))).split(", ")
        )
        variant = tree.variant.split(", ") if tree and tree.variant else []
        return [point.method, *variant, *about, *sizes]

    at_value = grouped(points, lambda point: repr(point.value)).values()
    lines = [[point for point in places if point] for places in zip_longest(*at_value)]
    # a line's label: the words that all its points share, its method first, without those that all lines share
    words = [
        [word for word in words_of(each[0]) if all(word in words_of(p) for p in each)]
        for each in lines
    ]
    shared = set(words[0][1:]).intersection(*words[1:])
    labels = [
        ", ".join(word for word in each if word not in shared or word == each[0]) for each in words
    ]
    return tuple(Line(text, tuple(members)) for text, members in zip(labels, lines, strict=True))


def values_of(points: Rows) -> tuple[Any, ...]:
    values = [alike[0].value for alike in grouped(points, lambda point: repr(point.value)).values()]
    return tuple(sorted(values) if numeric(values) else values)


def numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def sweep_grids(sweeps: Rows) -> list[Grid]:
    """A grid per sweep; those over numbers have a picture."""
    grids = []
    points_of = grouped(
        (point for point in sweeps if point.sweep != CONTEXT), lambda point: str(point.sweep)
    )
    for place, (name, points) in enumerate(points_of.items()):
        values = values_of(points)
        picture = f"sweep-{place}" if numeric(values) and len(values) > 1 else ""
        grids.append(Grid(name, sweep_lines(points), values, str(points[0].key), picture))
    return grids


def context_grids(sweeps: Rows) -> dict[str, Grid]:
    """Grids 'cumulative' (up to a length) and 'bucket' (from one length to the next).

    Rows whose answers reach more lengths stand first, then the faster ones.
    """
    points = told_apart(
        [point for point in sweeps if point.sweep == CONTEXT and point.tree is not None]
    )
    rows = list(grouped(points, lambda point: label(point, points)).items())
    rows.sort(key=lambda row: (len(row[1]), row[1][-1].speedup or 0.0), reverse=True)
    grids = {}
    for span in ("cumulative", "bucket") if points else ():
        lines = [
            Line(name, tuple(one for one in members if one.span == span)) for name, members in rows
        ]
        grids[span] = Grid(span, tuple(lines), values_of(points))
    return grids


def task_grid(rows: Rows, parts: Mapping[int, Rows]) -> Grid | None:
    """Drafting rows by task; parts: for a position in rows, that row on each task (its `value`)."""
    tasks, lines = (
        tuple(dict.fromkeys(part.task for of_row in parts.values() for part in of_row)),
        [],
    )
    for position, row in enumerate(rows):
        if row.tree is not None and row.status == "ok":
            sampling = "" if sampling_text(row) == "0" else f", T {sampling_text(row)}"
            lines.append(
                Line(row.method, tuple(parts.get(position, ())), tree_text(row) + sampling)
            )
    return Grid("By task", tuple(lines), tasks) if tasks and lines else None


def beside(rows: Rows, parts: Mapping[int, Rows]) -> list[tuple[str, float, Line]]:
    """(method, temperature, line): each method's measured lines, then the published ones."""
    # a published line's label is the model, its note the paper; of published depths, only those measured here
    known: dict[tuple[str, float], list[Line]] = {}
    depths = {str(row.tree.levels) for row in rows if row.tree}
    for cells in PAPERS:
        if not cells["key"] or (cells["key"] == LEVELS and cells["value"] in depths):
            name = cells["model"] + (f", {cells['value']} levels" if cells["key"] else "")
            line = Line(name, _published({task: cells[task] for task in TASKS}), cells["source"])
            known.setdefault((cells["method"], float(cells["temperature"])), []).append(line)
    shown: dict[tuple[str, float], list[Line]] = {}
    for position, row in enumerate(rows):
        key = row.method, row.temperature
        if row.status == "ok" and key in known:
            whole = replace(row, value="mean" if row.task == ALL_TASKS else row.task)
            by_task = [part for part in parts.get(position, ()) if part.status == "ok"]
            shown.setdefault(key, []).append(Line(tree_text(row), (whole, *by_task)))
    return [(*key, line) for key, lines in shown.items() for line in (*lines, *known[key])]


def rule_of(tree: TreeShape) -> str:
    """'fixed', 'vote' (of all three signals), fewer signals by name, or another rule."""
    stop = tree.settings.get("stop", {"rule": "constant"})
    if stop["rule"] == "vote":
        return "vote" if len(stop["signals"]) == 3 else " and ".join(stop["signals"])
    return "fixed" if stop["rule"] == "constant" else str(stop["rule"])
