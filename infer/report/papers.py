"""The papers' tables: sweeps as grids, rules that end drafts, draft lengths along an answer, published figures."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.record import Record, SummaryRow
from aerie.infer.measure.statistics import ALL_TASKS, VANILLA, Group, told_apart
from aerie.infer.report.claims import LEVELS, RULE_NAMES, rule_of
from aerie.infer.report.tables import grouped, label, sampling_text, tree_text
from aerie.model.storage import digest

SIZES = ("levels", "k", "nodes")
KEEPS_SIZES = (
    "tree.stop",
    "tree.rank",
    "tree.calibrated",
    "tree.children",
)  # varying these leaves a tree's sizes alone


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
    """The lines of a sweep, in the order of its points; two that look alike stay two."""
    seen: dict[str, int] = {}
    lines: dict[tuple[str, int], list[SummaryRow]] = {}
    for point in points:
        same = _identity(point)
        repeat = seen.setdefault(same + repr(point.value), 0)
        seen[same + repr(point.value)] += 1
        lines.setdefault((same, repeat), []).append(point)
    words = [_words(members[0]) for members in lines.values()]
    differs = [place == 0 or len(set(column)) > 1 for place, column in enumerate(zip(*words, strict=True))]
    return tuple(
        Line(
            ", ".join(word for word, kept in zip(each, differs, strict=True) if word and kept) or "all", tuple(members)
        )
        for each, members in zip(words, lines.values(), strict=True)
    )


def _identity(point: SummaryRow) -> str:
    """What a point shares with the others of its line: everything but the key that varies, and what follows from it."""
    key, tree = str(point.key), point.tree
    names = {"method", "head", "head_path", "temperature", "top_k", "top_p"}
    names -= {"head", "head_path"} if key == "head" else {key}
    rest: dict[str, Any] = {name: getattr(point, name) for name in sorted(names)}
    if tree is None or key == "method":
        return digest(rest)
    path = key.partition(".")[2]
    settings = dict(_flat({**tree.settings, "shape": tree.shape}))
    if not path or key in {f"tree.{size}" for size in SIZES} or key.startswith(KEEPS_SIZES):
        nodes_follow = tree.shape == "chain" or not tree.settings.get("rerank", True)
        settings |= {size: getattr(tree, size) for size in SIZES if not (size == "nodes" and nodes_follow)}
    rest |= {f"tree.{name}": value for name, value in settings.items() if not f"{name}.".startswith(f"{path}.")}
    return digest(rest)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _words(point: SummaryRow) -> tuple[str, ...]:
    """What a line may be called by: method, variant, head, sampling and sizes, without what varies along it."""
    key, tree = str(point.key), point.tree
    leaf = key.split(".")[-1]
    sampling = "" if key == "temperature" else f"T {sampling_text(point)}"
    head = "" if key == "head" else f"{point.head_path or point.head} head"
    if key == "method" or tree is None:
        return "" if key == "method" else point.method, "", head, sampling, ""
    variant = [part for part in tree.variant.split(", ") if not part.startswith(f"{leaf.replace('_', ' ')} ")]
    sizes = "" if leaf in SIZES else tree_text(replace(point, tree=replace(tree, variant="", text=None)))
    return point.method, ", ".join(variant), head, sampling, sizes


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
        ascii_name = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name)
        picture = f"sweep-{number}-{ascii_name}" if numeric(values) and len(values) > 1 else None
        grids.append(Grid(name, sweep_lines(points), values, picture))
    return grids


def _is_ablation(point: SummaryRow) -> bool:
    return point.key in ("tree.rank", "tree.rerank")


def ablation(sweeps: Sequence[SummaryRow]) -> Grid | None:
    """EAGLE-2's ablation with the published figures beside; null without a sweep over tree.rank or tree.rerank."""
    paper = published("ablation")
    points = [
        replace(point, value=paper.values[2 * (settings["rank"] == "survival") + settings["rerank"]])
        for point in sweeps
        if _is_ablation(point) and point.tree and "rerank" in (settings := point.tree.settings)
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
        return (
            f"{head}, T {sampling_text(point)}, {prompts} of {'all tasks' if point.task == ALL_TASKS else point.task}"
        )

    grids = []
    for number, (name, points) in enumerate(grouped(filter(_is_depth, sweeps), title).items()):
        lines = []
        for members in grouped(points, _identity).values():
            by_depth = {point.value: point for point in reversed(members)}  # of two at one depth the first stays
            lines.append(Line(_rule_words(members[0]), tuple(by_depth[depth] for depth in sorted(by_depth))))
        grids.append(
            Grid(name, tuple(lines), values_of(points), f"sweep-depths-{number}" if number else "sweep-depths")
        )
    return grids


def _rule_words(point: SummaryRow) -> str:
    """The rule in words, with what else its row has otherwise."""
    assert point.tree is not None
    rule = rule_of(point.tree)
    alone = len(point.tree.settings.get("stop", {}).get("signals", ())) == 1
    words = {"fixed": f"fixed ({point.method})", "vote": "vote (DEAGLE)"}.get(rule, rule + " alone" * alone)
    return ", ".join([words, *(p for p in point.tree.variant.split(", ") if p and not p.startswith("signals "))])


def context_grids(sweeps: Sequence[SummaryRow]) -> dict[str, Grid]:
    """'cumulative' (from the start to a length) and 'bucket' (between two lengths), the same lines in both."""
    points = told_apart([point for point in sweeps if point.sweep == CONTEXT and point.tree is not None])
    by_label = grouped(points, lambda point: label(point, points))
    lines = {
        span: [
            Line(name, tuple(point for point in members if point.span == span)) for name, members in by_label.items()
        ]
        for span in ("cumulative", "bucket")
    }
    return {span: Grid(span, tuple(members), values_of(points)) for span, members in lines.items()} if points else {}


def chains_of(buckets: Grid) -> tuple[Line, ...]:
    """The chains at the first sampling."""
    lines: list[Any] = [line for line in buckets.lines if line.points]
    chains = [line for line in lines if line.points[0].tree.shape == "chain"]
    return tuple(line for line in chains if line.points[0].temperature == chains[0].points[0].temperature)


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


def policies(rows: Sequence[SummaryRow], parts: Sequence[tuple[int, SummaryRow]]) -> list[dict[str, Any]]:
    """The stop rules of one head's chains or trees at one sampling, where there are two or more; chains first.

    `parts` of a chain are its points by task, `mean` their mean speedup. `paper` is the line of SVIP's table 3 that a
    method as its paper has it, decoding greedily, stands beside.
    """
    paper = {line.label: line for line in published("reasoning").lines}
    tasks = tuple(dict.fromkeys(part.task for _, part in parts))
    groups: dict[tuple[bool, str, str], list[dict[str, Any]]] = {}
    for position, row in enumerate(rows):
        tree = row.tree
        if not row.target_forwards or tree is None or "stop" not in tree.settings or tree.shape == "static":
            continue
        chain, rule = tree.shape == "chain", tree.settings["stop"]["rule"]
        points = [replace(part, value=part.task) for at, part in parts if at == position and part.status == "ok"]
        gains = [point.speedup for point in points if point.speedup is not None]
        as_published = chain and not tree.variant and not row.temperature
        groups.setdefault((chain, str(row.head_path or row.head), sampling_text(row)), []).append(
            {
                "name": RULE_NAMES.get(rule, rule),
                "rule": rule,
                "row": row,
                "levels": (row.draft_forwards or 0) / row.target_forwards,  # a chain's mean draft length
                "parts": Line(row.method, tuple(points)),
                "mean": sum(gains) / len(gains) if gains and len(gains) == len(tasks) else None,
                "paper": paper.get(row.method) if as_published else None,
            }
        )
    tables = []
    for (chain, head, sampling), rules in groups.items():
        if len({rule["rule"] for rule in rules}) > 1:
            title = f"{head}, {'chains' if chain else 'trees'}, T {sampling}"
            plain = [at for at, one in enumerate(rows) if one.method == VANILLA and sampling_text(one) == sampling]
            answers = {part.task: (part.new_tokens or 0) / part.prompts for at, part in parts if at in plain[:1]}
            shown = tasks if chain else ()
            tables.append({"title": title, "chain": chain, "rules": rules, "tasks": shown, "tokens": answers})
    return sorted(tables, key=lambda table: not table["chain"])


TASKS = {
    "mean": "mean",
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "cnn_dm": "CNN/DM",
    "natural_questions": "NQ",
}


@cache
def published_methods() -> dict[tuple[str, float], list[Line]]:
    """The lines of published.csv by method and temperature; a line's label is its model, its note the paper."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = grouped(rows, lambda row: (row["method"], float(row["temperature"])))
    return {
        key: [
            Line(row["model"], _published(list(TASKS), [row[task] for task in TASKS]), row["source"]) for row in members
        ]
        for key, members in lines.items()
    }


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
            own = [replace(part, value=part.task) for at, part in parts if at == position and part.status == "ok"]
            shown.setdefault(key, []).append(Line(tree_text(row), (whole, *own)))
    return [(*key, line) for key, lines in shown.items() for line in (*lines, *known[key])]


def traces(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Draft lengths along one answer, for each head and sampling whose chains have two rules or more (four at most).

    The prompt is the one whose shortest answer among the rules is the longest. `begins` are new tokens so far.
    """
    chains: dict[tuple[str, str], dict[str, dict[Any, Record]]] = {}
    for members in groups:
        first, tree = members.first, members.first.tree
        if tree is not None and tree.shape == "chain" and "stop" in tree.settings and not members.failed:
            rules = chains.setdefault((first.head_path or first.head or "", sampling_text(first)), {})
            answers = {record.prompt_key: record for record in members.records if record.cycle_nodes}
            rules.setdefault(tree.settings["stop"]["rule"], answers)
    pictures = []
    for (head, sampling), rules in chains.items():
        every = list(rules.values())
        shared = [key for key in every[0] if all(key in answers for answers in every)]
        if len(every) > 1 and shared:
            prompt = max(shared, key=lambda key: min(answers[key].new_tokens for answers in every))
            lines = [
                {
                    "rule": RULE_NAMES.get(rule, rule),
                    "begins": [1 + sum(record.cycle_tokens[:at]) for at in range(len(record.cycle_tokens))],
                    "drafted": record.cycle_nodes,
                    "accepted": record.accepted,
                }
                for rule, record in [(rule, answers[prompt]) for rule, answers in rules.items()][:4]
            ]
            pictures.append({"title": f"{head}, T {sampling}, prompt {prompt[0]}/{prompt[1]}", "traces": lines})
    return pictures
