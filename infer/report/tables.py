"""Rows of the summary in words and as text tables; sweeps and papers as grids."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from huggingface_hub import get_local_safetensors_metadata, try_to_load_from_cache
from huggingface_hub.errors import NotASafetensorsRepoError

from aerie.configs.errors import UserError
from aerie.configs.read import read_text, read_yaml
from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure import statistics
from aerie.infer.measure.record import Asked, Record, SummaryRow, TreeShape
from aerie.infer.measure.statistics import ALL_TASKS, VANILLA, Group, group, grouped, identity, told_apart
from aerie.model.hub import is_on_hub
from aerie.model.storage import CONFIG, digest, read_json

Rows = Sequence[SummaryRow]
NOTHING = "–"
LEVELS = "tree.levels"  # the key of a sweep over depths or lengths
# at most this share of the fixed tree's wasted forwards, at least these of its best tau and the vote's own best speed
LIMITS = {"waste": 0.5, "tau": 0.97, "modelled": 0.97}
COLUMNS: dict[str, list[str]] = read_yaml(Path(__file__).with_name("columns.yaml"))[0]
PUBLISHED = read_yaml(Path(__file__).with_name("published.yaml"))[0]
TASKS: dict[str, str] = PUBLISHED["tasks"]
SHARED = ("embed_tokens.weight", "d2t", "t2d")  # of a head's file: its target's embedding, and tables
CURVES = re.compile(r"(held_out_)?(loss|greedy_agreement|accuracy_at_\d+|predicted_tau|tau)")


def stopped(trainings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """'stopped by the time budget at step 483 of 1,050' of each training whose budget ended it."""
    words = "stopped by the time budget at step {steps:,} of {total_steps:,}"
    return {name: words.format_map(one) for name, one in trainings.items() if one["ended"] == "budget"}


def parameters(directory: Path) -> int | None:
    """Numbers in the safetensors of a directory or cached repository, without what a head has of its target."""
    cached = try_to_load_from_cache(str(directory), CONFIG) if is_on_hub(directory) else None
    with suppress(OSError, NotASafetensorsRepoError):
        found = get_local_safetensors_metadata(Path(cached).parent if isinstance(cached, str) else directory)
        own = [(name, table) for file in found.files_metadata.values() for name, table in file.tensors.items()]
        return sum(table.parameter_count for name, table in own if name not in SHARED)
    return None


def training_curves(metrics: Path) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """metrics.jsonl by kind of training: figure -> its steps and values."""
    curves: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.is_file() else ():
        with suppress(ValueError, TypeError, KeyError):  # a kill has cut it off
            record = json.loads(line)
            for name in filter(CURVES.fullmatch, record):
                curve = curves.setdefault(record["kind"], {}).setdefault(name, {"steps": [], "values": []})
                curve["steps"].append(record["step"])
                curve["values"].append(record[name])
    return curves


def tree_text(row: SummaryRow) -> str:
    """'6 levels, k 8, 16 nodes', '5 levels, chain, stop entropy', '4 levels, static, 64 nodes', with 'NOT lossless'."""
    tree = row.tree
    if tree is None:
        return NOTHING
    words = {"chain": "chain", "static": f"static, {tree.nodes} nodes", "auto": f"auto, {tree.nodes} nodes at most"}
    sizes = f"{tree.levels} levels, {words.get(tree.shape, f'k {tree.k}, {tree.nodes} nodes')}"
    return ", ".join(filter(None, (tree.text or sizes, tree.variant, "NOT lossless" if is_lossy(row) else "")))


def is_lossy(row: SummaryRow) -> bool:
    """Whether typical acceptance does not keep the target's law, even where the row failed."""
    typical = row.tree is not None and "typical" in row.tree.settings and row.temperature > 0
    return typical or "not lossless" in row.verify


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


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:.{digits}f}{unit}"


def interval(row: SummaryRow) -> str:
    bounds = row.speedup_ci95
    return NOTHING if bounds is None or row.method == VANILLA else f"{bounds[0]:.2f}–{bounds[1]:.2f}"


def ms_per_cycle(row: SummaryRow) -> dict[str, float]:
    """Decode milliseconds per cycle by part; empty where the row has none."""
    if row.ms is None or not row.target_forwards:
        return {}
    return {part: getattr(row.ms, part) / row.target_forwards for part in ("draft", "verify", "commit", "other")}


def names(records: Sequence[Record], rows: Sequence[int]) -> str:
    """'row 2 (eagle2, 6 levels, k 10, 60 nodes)' of each row."""
    groups = group(records)
    every = told_apart([identity(members) for members in groups])
    labels = {members.first.row: label(row, every) for members, row in zip(groups, every, strict=True)}
    return " and ".join(f"row {row} ({labels[row]})" for row in dict.fromkeys(rows))


def cells_of(row: SummaryRow) -> dict[str, str]:
    cells = {"method": row.method, "tree": tree_text(row), "task": row.task, "T": sampling_text(row)}
    cells["prompts"] = str(row.prompts)
    if row.status != "ok":
        return {**cells, "error": f"error: {row.message}"}
    return cells | {
        "tau": number(row.tau),
        "tau (macro)": number(row.tau_macro),
        "speedup": number(row.speedup, unit="x"),
        "95 % interval": interval(row),
        "tokens/s": number(row.tokens_per_s, 1),
        "identical": NOTHING if row.identical is None else f"{row.identical}/{row.identical + (row.mismatch or 0)}",
        "accept rate": number(row.accept_rate, 3),
    }


def console_table(rows: Rows) -> str:
    lines = [{name: name for name in COLUMNS["console"]}, *map(cells_of, rows)]
    widths = {name: max(len(line.get(name, "")) for line in lines) for name in lines[0]}
    text, right = [], ("tau", "speedup", "identical")
    for line in lines:
        padded = [f"{line.get(name, ''):{'>' if name in right else '<'}{width}}" for name, width in widths.items()]
        text.append("  ".join(padded).rstrip() + (f"  {line['error']}" if "error" in line else ""))
    text.insert(1, "  ".join("─" * width for width in widths.values()))
    return "\n".join(text)


def markdown_table(rows: Rows) -> str:
    columns = COLUMNS["markdown"]
    text = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for line in map(cells_of, rows):
        cells = {"tau": line.get("error", NOTHING), **line}
        texts = (cells.get(name, NOTHING).replace("|", "\\|").replace("\n", " ") for name in columns)
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
        stops = "".join(f"- {name}: {words}.\n" for name, words in details["training"]["stopped"].items())
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{report}: is not what was written; run: aerie report --run {run}") from error
    table = read_text(report / "table.md")
    return name, f"\n## {name}\n\nTarget `{target}`; {machine}; commit `{commit}`.\n\n{stops}{table}"


def csv_table(rows: Rows, sweeps: bool = False) -> str:
    """One line per row, unrounded; points of sweeps begin with sweep, key, value and span."""
    lines = []
    for row in rows:
        values = row.as_dict()
        times = {f"ms_{part}": value for part, value in (values.get("ms") or {}).items()}
        low, high = row.speedup_ci95 or (None, None)
        tree = {"tree": None} if row.tree is None else {**row.tree.as_dict(), "tree": tree_text(row)}
        lines.append({**values, **tree, **times, "speedup_low": low, "speedup_high": high})
    columns = [*(("sweep", "key", "value", "span") if sweeps else ()), *COLUMNS["csv"]]
    return pd.DataFrame(lines, columns=columns, dtype=object).to_csv(index=False, lineterminator="\n")


@dataclass(frozen=True)
class Published:
    value: Any
    speedup: float | None
    tau: float | None
    status: str = "published"


@dataclass(frozen=True)
class Line:
    """One line of a grid; `value` of each point is its place along the line."""

    label: str
    points: tuple[Any, ...]  # SummaryRow or Published
    note: str = ""

    def at(self, value: Any) -> Any:
        return next((point for point in self.points if point.value == value), None)


@dataclass(frozen=True)
class Grid:
    title: str
    lines: tuple[Line, ...]
    values: tuple[Any, ...]
    key: str = ""  # what varies in a sweep
    picture: str | None = None  # its name


def published(name: str) -> Grid:
    table = PUBLISHED[name]
    lines = (Line(text, _published(table["values"], cells)) for text, cells in table["lines"].items())
    return Grid(name, tuple(lines), tuple(table["values"]))


def _published(values: Sequence[Any], cells: Sequence[Any]) -> tuple[Published, ...]:
    """Points of the cells: '2.81/3.92' (speedup and tau), '2.81/', 2.81 or empty."""
    points = []
    for value, cell in zip(values, cells, strict=True):
        speedup, length = (float(text) if text else None for text in f"{cell}/".split("/")[:2])
        if speedup or length:
            points.append(Published(value, speedup, length))
    return tuple(points)


def sweep_lines(points: Rows) -> tuple[Line, ...]:
    """A sweep's first row at every value, its second, and so on."""

    def words_of(point: SummaryRow) -> list[str]:
        tree, about = point.tree, [f"{point.head_path or point.head} head", f"T {sampling_text(point)}"]
        sizes = [] if tree is None else tree_text(replace(point, tree=replace(tree, variant=""))).split(", ")
        variant = tree.variant.split(", ") if tree and tree.variant else []
        return [point.method, *variant, *about, *sizes]

    at_value = grouped(points, lambda point: repr(point.value)).values()
    lines = [[point for point in places if point] for places in zip_longest(*at_value)]
    # a line is called by the words that all of its points have, its method first, without what all lines have
    words = [[word for word in words_of(each[0]) if all(word in words_of(p) for p in each)] for each in lines]
    shared = set(words[0][1:]).intersection(*words[1:])
    labels = [", ".join(word for word in each if word not in shared or word == each[0]) for each in words]
    return tuple(Line(text, tuple(members)) for text, members in zip(labels, lines, strict=True))


def values_of(points: Rows) -> tuple[Any, ...]:
    values = [alike[0].value for alike in grouped(points, lambda point: repr(point.value)).values()]
    return tuple(sorted(values) if numeric(values) else values)


def numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def sweep_grids(sweeps: Rows) -> list[Grid]:
    """A grid per sweep; those over numbers have a picture."""
    grids = []
    points_of = grouped((point for point in sweeps if point.sweep != CONTEXT), lambda point: str(point.sweep))
    for place, (name, points) in enumerate(points_of.items()):
        values = values_of(points)
        picture = f"sweep-{place}" if numeric(values) and len(values) > 1 else None
        grids.append(Grid(name, sweep_lines(points), values, str(points[0].key), picture))
    return grids


def context_grids(sweeps: Rows) -> dict[str, Grid]:
    """'cumulative' (to a length) and 'bucket' (between two); rows that get furthest the fastest stand first."""
    points = told_apart([point for point in sweeps if point.sweep == CONTEXT and point.tree is not None])
    rows = list(grouped(points, lambda point: label(point, points)).items())
    rows.sort(key=lambda row: (len(row[1]), row[1][-1].speedup or 0.0), reverse=True)
    grids = {}
    for span in ("cumulative", "bucket") if points else ():
        lines = [Line(name, tuple(one for one in members if one.span == span)) for name, members in rows]
        grids[span] = Grid(span, tuple(lines), values_of(points))
    return grids


def task_grid(rows: Rows, parts: Mapping[int, Rows]) -> Grid | None:
    """Drafting rows by task; parts: by position in rows the row on each task, which is its value."""
    tasks, lines = tuple(dict.fromkeys(part.task for of_row in parts.values() for part in of_row)), []
    for position, row in enumerate(rows):
        if row.tree is not None and row.status == "ok":
            sampling = "" if sampling_text(row) == "0" else f", T {sampling_text(row)}"
            lines.append(Line(row.method, tuple(parts.get(position, ())), tree_text(row) + sampling))
    return Grid("By task", tuple(lines), tasks) if tasks and lines else None


def beside(rows: Rows, parts: Mapping[int, Rows]) -> list[tuple[str, float, Line]]:
    """(method, temperature, line): each method's measured lines, then the published ones."""
    # a published line's label is the model, its note the paper
    known: dict[tuple[str, float], list[Line]] = {}
    for cells in csv.DictReader(Path(__file__).with_name("published.csv").read_text(encoding="utf-8").splitlines()):
        line = Line(cells["model"], _published([*TASKS], [cells[task] for task in TASKS]), cells["source"])
        known.setdefault((cells["method"], float(cells["temperature"])), []).append(line)
    shown: dict[tuple[str, float], list[Line]] = {}
    for position, row in enumerate(rows):
        key = row.method, row.temperature
        if row.status == "ok" and key in known:
            whole = replace(row, value="mean" if row.task == ALL_TASKS else row.task)
            by_task = [part for part in parts.get(position, ()) if part.status == "ok"]
            shown.setdefault(key, []).append(Line(tree_text(row), (whole, *by_task)))
    return [(*key, line) for key, lines in shown.items() for line in (*lines, *known[key])]


def lengths(
    rows: Rows, prompts: Mapping[str | None, frozenset[tuple[str, str]]]
) -> list[tuple[str, list[tuple[SummaryRow, float, float | None]]]]:
    """(row, tokens drafted a cycle, tau of a constant length of that mean) of chains on the same prompts (SVIP).

    prompts: of each sweep, and under None of the bench. The constant's tau is null beyond the measured lengths.
    """
    chains = [row for row in rows if row.status == "ok" and row.span is None and row.tree and row.tree.shape == "chain"]
    alike = grouped(chains, lambda row: (row.head_path or row.head, sampling_text(row), prompts[row.sweep]))
    families = []
    for (head, sampling, asked), members in alike.items():
        drafted = [(row.draft_nodes or 0.0) / (row.target_forwards or 1) for row in members]
        pairs = zip(drafted, members, strict=True)
        fixed = sorted((mean, row.tau or 0.0) for mean, row in pairs if row.tree and rule_of(row.tree) == "fixed")
        if 1 < len(fixed) < len(members):
            means, tau_of = np.array(fixed).T
            constant = np.interp(drafted, means, tau_of, left=np.nan, right=np.nan)
            taus = [None if np.isnan(tau) else float(tau) for tau in constant]
            measured = sorted(zip(members, drafted, taus, strict=True), key=lambda one: one[1])
            families.append((f"{head} head, T {sampling}, {len(asked)} prompts", measured))
    return families


def rule_of(tree: TreeShape) -> str:
    """'fixed', 'vote' (of all three signals), fewer signals by name, or another rule."""
    stop = tree.settings.get("stop", {"rule": "constant"})
    if stop["rule"] == "vote":
        return "vote" if len(stop["signals"]) == 3 else " and ".join(stop["signals"])
    return "fixed" if stop["rule"] == "constant" else str(stop["rule"])


def claims(records: Sequence[Record], asked: Asked, tuning: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """DEAGLE's claim, wherever fixed and voting trees were measured at the same depths on the same prompts.

    At the largest depth: the vote's `waste` against the fixed tree's, its `tau` against the fixed tree's best over the
    depths, its `modelled` speedup against its own best (null without costs in tune.json).
    """
    trees: dict[tuple[Any, ...], dict[tuple[str, int], tuple[Record, ...]]] = {}
    for point in asked.points:
        answers = statistics.members_of(records, point) if point.key == LEVELS else ()
        tree = answers[0].tree if answers else None
        if tree is None or tree.shape != "dynamic" or any(record.status != "ok" for record in answers):
            continue
        if rule_of(tree) in ("fixed", "vote"):
            first, alike = answers[0], digest([tree.k, tree.nodes, {**tree.settings, "stop": None}])
            confidence, prompts = tree.settings.get("calibrated"), tuple(sorted(point.prompts))
            key = (first.head, first.head_path, confidence, first.sampling, prompts, alike)
            trees.setdefault(key, {}).setdefault((rule_of(tree), tree.levels), answers)
    baselines, measured = statistics.baselines_of(records), []
    for (kind, path, confidence, sampling, prompts, _), by_rule in trees.items():
        depths = sorted(depth for rule, depth in by_rule if rule == "fixed" and ("vote", depth) in by_rule)
        if len(depths) < 2:
            continue
        spent: dict[str, list[dict[str, Any]]] = {"fixed": [], "vote": []}
        for depth, rule in product(depths, spent):
            answers = by_rule[rule, depth]
            row = statistics.summary_row(Group(answers, baselines.get(sampling, {})))
            figures = {name: getattr(row, name) for name in ("draft_forwards", "draft_forwards_wasted", "speedup")}
            spent[rule].append({"depth": depth, "tau": row.tau, "modelled": modelled(answers, tuning), **figures})
        fixed, vote = spent["fixed"], spent["vote"]
        best_tau = max(fixed, key=lambda one: one["tau"] or 0.0)
        best_speed = max(vote, key=lambda one: one["modelled"] or 0.0)
        claim = {"head": kind, "head_path": path, "calibrated": confidence, "prompts": len(prompts), **spent}
        claim |= dict(zip(("temperature", "top_k", "top_p"), sampling, strict=True))
        claim |= {"largest": depths[-1], "tau_best_depth": best_tau["depth"]}
        claim["modelled_best_depth"] = best_speed["depth"] if vote[-1]["modelled"] else None
        bases = {"waste": ("draft_forwards_wasted", fixed[-1]), "tau": ("tau", best_tau)}
        for name, (column, base) in {**bases, "modelled": ("modelled", best_speed)}.items():
            ratio = vote[-1][column] / base[column] if base[column] and vote[-1][column] is not None else None
            holds = None if ratio is None else ratio <= LIMITS[name] if name == "waste" else ratio >= LIMITS[name]
            claim |= {name: ratio, f"{name}_holds": holds}
        measured.append(claim)
    return measured


def modelled(answers: Sequence[Record], tuning: Mapping[str, Any] | None) -> float | None:
    """The speedup of these answers by the costs that `tune` measured."""
    heads = tuning["heads"] if tuning else ()
    costs = next((head["costs_ms"] for head in heads if head["kind"] == answers[0].head), None)
    tree = answers[0].tree
    if costs is None or tree is None:
        return None
    from aerie.infer.measure.tune import Costs, counted

    total, nodes = counted(answers)
    draft, verify = ({int(key): value for key, value in costs[part].items()} for part in ("draft", "verify"))
    ms = Costs(draft, verify, costs["rest"], costs["plain"]).price(total, tree.k, nodes)
    return costs["plain"] * total.tokens / ms if total.draft_trees else None
