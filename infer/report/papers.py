"""The papers' tables: sweeps as grids, DEAGLE's claim, and the published figures beside."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.record import Asked, Record, SummaryRow, TreeShape
from aerie.infer.measure.statistics import ALL_TASKS, Group, baselines_of, members_of, speedups, tau, told_apart
from aerie.infer.report.tables import grouped, label, sampling_text, tree_text
from aerie.model.storage import digest

LEVELS = "tree.levels"  # the key of a sweep over depths or lengths
# at most this share of the fixed tree's wasted forwards, at least these of its best tau and the vote's own best speed
LIMITS = {"waste": 0.5, "tau": 0.97, "speed": 0.97}
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
class Published:
    """A paper's figures; null: it does not say."""

    value: Any
    speedup: float | None
    tau: float | None
    status: str = "published"


@dataclass(frozen=True)
class Line:
    """One line of a grid, measured or published; `value` of each point is its place along the line."""

    label: str
    points: tuple[SummaryRow | Published, ...]
    note: str = ""

    def at(self, value: Any) -> SummaryRow | Published | None:
        """The first point with this value."""
        return next((point for point in self.points if point.value == value), None)

    @property
    def published(self) -> bool:
        """Whether it stands in a paper."""
        return isinstance(self.points[0], Published)


@dataclass(frozen=True)
class Grid:
    """Figures by line and value: what a sweep, a paper's table or a picture shows."""

    title: str
    lines: tuple[Line, ...]
    values: tuple[Any, ...]
    picture: str | None = None  # its name

    @property
    def key(self) -> str:
        """What varies in a sweep."""
        return str(getattr(self.lines[0].points[0], "key", ""))


@cache
def published(name: str) -> Grid:
    """A paper's table out of published.yaml."""
    table = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))[name]
    lines = (Line(text, _published(table["values"], cells)) for text, cells in table["lines"].items())
    return Grid(name, tuple(lines), tuple(table["values"]))


@cache
def published_methods() -> dict[tuple[str, float], list[Line]]:
    """The lines of published.csv by method and temperature; a line's label is its model, its note the paper."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = grouped(rows, lambda row: (row["method"], float(row["temperature"])))
    return {
        key: [Line(row["model"], _published([*TASKS], [row[task] for task in TASKS]), row["source"]) for row in members]
        for key, members in lines.items()
    }


def _published(values: Sequence[Any], cells: Sequence[Any]) -> tuple[Published, ...]:
    """One point per cell that is not empty: '2.81/3.92', '2.81/' or 2.81."""
    points = []
    for value, cell in zip(values, cells, strict=True):
        speedup, _, length = str(cell).partition("/")
        if speedup or length:
            points.append(Published(value, float(speedup) if speedup else None, float(length) if length else None))
    return tuple(points)


# Sweeps


def sweep_lines(points: Sequence[SummaryRow]) -> tuple[Line, ...]:
    """The lines of a sweep: its first row at every value, its second, and so on."""
    seen: Counter[str] = Counter()
    lines: dict[int, list[SummaryRow]] = {}
    for point in points:
        lines.setdefault(seen[repr(point.value)], []).append(point)
        seen[repr(point.value)] += 1
    # a line is called by the words that all of its points have, its method first, without what all lines have
    words = [[word for word in _words(each[0]) if all(word in _words(one) for one in each)] for each in lines.values()]
    shared = set(words[0]).intersection(*words[1:])
    return tuple(
        Line(", ".join([*each[:1], *(word for word in each[1:] if word not in shared)]), tuple(members))
        for each, members in zip(words, lines.values(), strict=True)
    )


def _words(point: SummaryRow) -> list[str]:
    """What may name the line of a point: its method, variant, head, sampling and sizes."""
    tree = point.tree
    sizes = [] if tree is None else tree_text(replace(point, tree=replace(tree, variant=""))).split(", ")
    variant = tree.variant.split(", ") if tree and tree.variant else []
    return [point.method, *variant, f"{point.head_path or point.head} head", f"T {sampling_text(point)}", *sizes]


def values_of(points: Sequence[SummaryRow | Published]) -> tuple[Any, ...]:
    """Every value, numbers by size, others in order of appearance."""
    values: list[Any] = []
    for point in points:
        values += [] if point.value in values else [point.value]
    return tuple(sorted(values) if numeric(values) else values)


def numeric(values: Sequence[Any]) -> bool:
    """Whether an axis can have these values."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def varied_grids(sweeps: Sequence[SummaryRow]) -> list[Grid]:
    """The sweeps that are in no paper's table."""
    others = [point for point in sweeps if point.sweep != CONTEXT and not _is_ablation(point) and not _is_depth(point)]
    grids = []
    for number, (name, points) in enumerate(grouped(others, lambda point: str(point.sweep)).items()):
        values = values_of(points)
        picture = f"sweep-{number}" if numeric(values) and len(values) > 1 else None
        grids.append(Grid(name, sweep_lines(points), values, picture))
    return grids


def _is_ablation(point: SummaryRow) -> bool:
    return point.key in ("tree.rank", "tree.rerank") and point.tree is not None and "rerank" in point.tree.settings


def ablation(sweeps: Sequence[SummaryRow]) -> Grid | None:
    """EAGLE-2's ablation with the published figures beside; null without a sweep over tree.rank or tree.rerank."""
    paper = published("ablation")
    points = [
        replace(point, value=paper.values[2 * (settings["rank"] == "survival") + settings["rerank"]])
        for point in sweeps
        if _is_ablation(point) and point.tree and (settings := point.tree.settings)
    ]
    if not points:
        return None
    families = grouped(points, lambda one: f"{one.method}, {one.head_path or one.head}, T {sampling_text(one)}")
    lines = [Line(name, tuple(reversed(members))) for name, members in families.items()]
    values = tuple(value for value in paper.values if value in {point.value for point in points})
    return Grid("EAGLE-2’s ablation", (*lines, *(replace(one, note="published") for one in paper.lines)), values)


def _is_depth(point: SummaryRow) -> bool:
    """Whether a point is of a sweep over how deep a dynamic tree may be."""
    return point.key == LEVELS and point.tree is not None and point.tree.shape == "dynamic"


def depth_grids(sweeps: Sequence[SummaryRow]) -> list[Grid]:
    """The points of every sweep over the depth of dynamic trees, by head, confidence, sampling and prompts."""

    def title(point: SummaryRow) -> str:
        confidence = point.tree.settings.get("calibrated") if point.tree else None
        head = f"{point.head_path or point.head} head" + (f", {confidence} confidence" if confidence else "")
        prompts = f"{point.prompts} prompt{'s' * (point.prompts != 1)}"
        tasks = "all tasks" if point.task == ALL_TASKS else point.task
        return f"{head}, T {sampling_text(point)}, {prompts} of {tasks}"

    def name_and_width(point: SummaryRow) -> tuple[str, int]:
        """The line: the rule, what else its row has otherwise, and k."""
        assert point.tree is not None
        rule, variant = rule_of(point.tree), point.tree.variant.split(", ")
        alone = " alone" if len(point.tree.settings.get("stop", {}).get("signals", ())) == 1 else ""
        words = {"fixed": f"fixed ({point.method})", "vote": "vote (DEAGLE)"}.get(rule, rule + alone)
        return ", ".join([words, *(p for p in variant if p and not p.startswith("signals "))]), point.tree.k

    grids = []
    for number, (name, points) in enumerate(grouped(filter(_is_depth, sweeps), title).items()):
        lines = []
        for (words, _), members in grouped(points, name_and_width).items():
            by_depth = {point.value: point for point in reversed(members)}  # of two at one depth the first stays
            lines.append(Line(words, tuple(by_depth[depth] for depth in sorted(by_depth))))
        picture = f"sweep-depths-{number}" if number else "sweep-depths"
        grids.append(Grid(name, tuple(lines), values_of(points), picture))
    return grids


def context_grids(sweeps: Sequence[SummaryRow]) -> dict[str, Grid]:
    """'cumulative' (from the start to a length) and 'bucket' (between two lengths), the same lines in both."""
    points = told_apart([point for point in sweeps if point.sweep == CONTEXT and point.tree is not None])
    by_label = grouped(points, lambda point: label(point, points))
    grids = {}
    for span in ("cumulative", "bucket") if points else ():
        lines = [Line(name, tuple(one for one in members if one.span == span)) for name, members in by_label.items()]
        grids[span] = Grid(span, tuple(lines), values_of(points))
    return grids


# Rows of the bench side by side


def task_grid(rows: Sequence[SummaryRow], parts: Sequence[tuple[int, SummaryRow]]) -> Grid | None:
    """Every drafting row by task; parts: (position in rows, the row on one task)."""
    tasks = tuple(dict.fromkeys(part.task for _, part in parts))
    lines = []
    for position, row in enumerate(rows):
        if row.tree is not None and row.status == "ok":
            sampling = "" if sampling_text(row) == "0" else f", T {sampling_text(row)}"
            points = tuple(replace(part, value=part.task) for at, part in parts if at == position)
            lines.append(Line(row.method, points, tree_text(row) + sampling))
    return Grid("By task", tuple(lines), tasks) if tasks and lines else None


def beside(rows: Sequence[SummaryRow], parts: Sequence[tuple[int, SummaryRow]]) -> list[tuple[str, float, Line]]:
    """(method, temperature, line): what was measured of a method and below it what was published of the same.

    The point `mean` of a measured line is over all its tasks. Methods of which nothing was published are left out.
    """
    known = published_methods()
    shown: dict[tuple[str, float], list[Line]] = {}
    for position, row in enumerate(rows):
        key = row.method, row.temperature
        if row.status == "ok" and key in known:
            whole = replace(row, value="mean" if row.task == ALL_TASKS else row.task)
            by_task = [replace(part, value=part.task) for at, part in parts if at == position and part.status == "ok"]
            shown.setdefault(key, []).append(Line(tree_text(row), (whole, *by_task)))
    return [(*key, line) for key, lines in shown.items() for line in (*lines, *known[key])]


# DEAGLE: a vote wastes less than half of a fixed tree's forwards and keeps tau and speed, however deep trees may grow


def rule_of(tree: TreeShape) -> str:
    """'fixed', 'vote' (all three signals), its signals where it has fewer, or the name of another rule."""
    stop = tree.settings.get("stop", {"rule": "constant"})
    if stop["rule"] == "vote":
        return "vote" if len(stop["signals"]) == 3 else " and ".join(stop["signals"])
    return "fixed" if stop["rule"] == "constant" else str(stop["rule"])


def claims(records: Sequence[Record], asked: Asked | None, tuning: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The claim for each head, confidence and sampling with fixed and voting trees of the same depths and prompts.

    Ratios are of the vote: `waste` against the fixed tree's at the largest depth, `tau` against the fixed tree's best
    over the depths, `modelled` against the vote's own best, null where tune.json has no costs for this kind of head.
    """
    trees: dict[tuple[Any, ...], dict[tuple[str, int], tuple[Record, ...]]] = {}
    for point in asked.points if asked else ():
        answers = members_of(records, point) if point.key == LEVELS else ()
        tree = answers[0].tree if answers else None
        if tree is None or tree.shape != "dynamic" or any(record.status != "ok" for record in answers):
            continue
        if rule_of(tree) in ("fixed", "vote"):
            first, alike = answers[0], digest([tree.k, tree.nodes, {**tree.settings, "stop": None}])
            confidence, prompts = tree.settings.get("calibrated"), tuple(sorted(point.prompts))
            key = (first.head, first.head_path, confidence, first.sampling, prompts, alike)
            trees.setdefault(key, {}).setdefault((rule_of(tree), tree.levels), answers)
    baselines, measured = baselines_of(records), []
    for (kind, path, confidence, sampling, prompts, _), by_rule in trees.items():
        depths = sorted(depth for rule, depth in by_rule if rule == "fixed" and ("vote", depth) in by_rule)
        if len(depths) < 2:
            continue
        spent: dict[str, list[dict[str, Any]]] = {
            rule: [
                {
                    "depth": depth,
                    "tau": tau(answers := by_rule[rule, depth]),
                    "draft_forwards": sum(record.draft_forwards for record in answers),
                    "draft_forwards_wasted": sum(record.draft_forwards_wasted for record in answers),
                    "speedup": speedups(Group(answers, baselines.get(sampling, {})).pairs)["speedup"],
                    "modelled": _modelled(answers, tuning),
                }
                for depth in depths
            ]
            for rule in ("fixed", "vote")
        }
        fixed, vote = spent["fixed"], spent["vote"]
        best_tau = max(fixed, key=lambda one: one["tau"] or 0.0)
        best_speed = max(vote, key=lambda one: one["modelled"] or 0.0)
        waste = _ratio(vote[-1]["draft_forwards_wasted"], fixed[-1]["draft_forwards_wasted"])
        kept = _ratio(vote[-1]["tau"], best_tau["tau"])
        modelled = _ratio(vote[-1]["modelled"], best_speed["modelled"])
        measured.append(
            {
                "head": kind, "head_path": path, "calibrated": confidence,
                "temperature": sampling[0], "top_k": sampling[1], "top_p": sampling[2],
                "prompts": len(prompts), "largest": depths[-1], **spent,
                "waste": waste, "waste_holds": None if waste is None else waste <= LIMITS["waste"],
                "tau": kept, "tau_best_depth": best_tau["depth"],
                "tau_holds": None if kept is None else kept >= LIMITS["tau"],
                "modelled": modelled, "modelled_best_depth": None if modelled is None else best_speed["depth"],
                "modelled_holds": None if modelled is None else modelled >= LIMITS["speed"],
            }
        )  # fmt: skip
    return measured


def _modelled(answers: Sequence[Record], tuning: Mapping[str, Any] | None) -> float | None:
    """Plain decoding's time per token over that of these trees' cycles, both by the costs that `tune` measured."""
    heads = tuning["heads"] if tuning else ()
    measured = next((head["costs_ms"] for head in heads if head["kind"] == answers[0].head), None)
    drafts = sum(nodes > 0 for record in answers for nodes in record.cycle_nodes)
    tree = answers[0].tree
    if measured is None or not drafts or tree is None:
        return None
    from aerie.infer.measure.replay import Costs  # imports torch

    costs = Costs(
        {int(k): (first, further) for k, (first, further) in measured["draft"].items()},
        {int(nodes): ms for nodes, ms in measured["verify"].items()},
        measured["rest"],
        measured["plain"],
    )
    cycles = sum(record.target_forwards for record in answers)
    nodes = 1 + sum(record.draft_nodes for record in answers) / drafts
    ms = costs.draft_ms(drafts, sum(record.draft_forwards for record in answers), tree.k)
    ms += drafts * costs.verify_ms(nodes) + (cycles - drafts) * costs.verify_ms(1) + cycles * costs.rest
    return costs.plain * sum(record.new_tokens - 1 for record in answers) / ms


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
