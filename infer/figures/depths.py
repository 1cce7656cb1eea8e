"""DEAGLE's tables and figure 2: fixed trees, the vote and each of its signals, by the largest depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.figures.lines import Line, identity, values_of
from infer.table import sampling_text

KEY = "tree.levels"
SIGNALS = 3
# DEAGLE, tables 2 and 4: speedup with Llama3 8B on MT-bench at temperature 0
PUBLISHED_COLUMNS = ("fixed (EAGLE-3)", "vote", "expectation", "momentum", "probability")
PUBLISHED = {
    6: (3.73, 3.75, 3.73, 3.59, 3.56),
    8: (3.85, 3.95, 3.85, 3.77, 3.76),
    10: (3.80, 3.96, 3.84, 3.77, 3.78),
    12: (3.53, 3.92, 3.90, 3.69, 3.78),
    14: (3.40, 3.90, 3.88, 3.69, 3.75),
    16: (3.16, 3.89, 3.87, 3.63, 3.75),
    18: (3.01, 3.94, 3.88, 3.65, 3.77),
}


@dataclass(frozen=True)
class Depths:
    """What one head did at one sampling on the same prompts: a line for each rule that ends its trees."""

    title: str
    lines: tuple[Line, ...]

    @property
    def depths(self) -> list[int]:
        """Every depth that a line was measured at."""
        return values_of(self.lines)


def depth_tables(sweeps: Sequence[dict[str, Any]]) -> list[Depths]:
    """The points of every sweep over the depth of dynamic trees, by head, confidence, sampling and prompts."""
    groups: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for point in sweeps:
        if is_of_depth(point):
            calibrated = point["tree"].get("calibrated")
            head = f"{point['head_path'] or point['head']} head" + (f", {calibrated} confidence" if calibrated else "")
            place = (head, sampling_text(point), point["task"], point["prompts"])
            groups.setdefault(place, {}).setdefault(identity(point), {}).setdefault(point["value"], point)
    tables = []
    for (head, sampling, task, prompts), lines in groups.items():
        ordered = [tuple(by_depth[depth] for depth in sorted(by_depth)) for by_depth in lines.values()]
        where = "all tasks" if task == "all" else task
        title = f"{head}, T {sampling}, {prompts} prompt{'s' * (prompts != 1)} of {where}"
        tables.append(Depths(title, tuple(Line(rule_words(points[0]), points) for points in ordered)))
    return tables


def is_of_depth(point: dict[str, Any]) -> bool:
    """Whether a point is of a sweep over how deep a dynamic tree may be."""
    return point["key"] == KEY and bool(point["tree"]) and point["tree"].get("shape") == "dynamic"


def rule_of(tree: dict[str, Any]) -> str:
    """'fixed', 'vote' (all signals), one signal's name, or the name of another rule; of a summary's tree."""
    stop = tree.get("stop", {"rule": "constant"})
    if stop["rule"] == "vote":
        return "vote" if len(stop["signals"]) == SIGNALS else " and ".join(stop["signals"])
    return "fixed" if stop["rule"] == "constant" else str(stop["rule"])


def rule_words(point: dict[str, Any]) -> str:
    """The rule in words, with what else its row has otherwise."""
    rule, stop = rule_of(point["tree"]), point["tree"].get("stop", {"rule": "constant"})
    alone = stop["rule"] == "vote" and len(stop["signals"]) == 1
    words = {"fixed": f"fixed ({point['method']})", "vote": "vote (DEAGLE)"}.get(
        rule, f"{rule} alone" if alone else rule
    )
    variant = str(point["tree"].get("variant", "")).split(", ")
    return ", ".join([words, *(part for part in variant if part and not part.startswith("signals "))])
