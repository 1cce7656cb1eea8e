"""The choice put to the test: vanilla, the choice, the published tree and a grid, interleaved, in pairs of prompts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infer.aggregate import group, row, speedups
from infer.config import MethodConfig, TreeConfig
from infer.methods import tree_of, usual_method
from infer.records import Record
from infer.tuning.search import Prediction
from infer.tuning.tune import method_of

# twelve trees that somebody would try by hand: (levels, k, nodes); k = 1: a chain
GRID = (
    *((levels, 1, levels + 1) for levels in (3, 5, 8)),
    *((levels, 2, 12) for levels in (4, 6, 8)),
    *((levels, 4, 24) for levels in (4, 6, 8)),
    *((levels, 8, 60) for levels in (5, 7, 9)),
)
VANILLA, CHOSEN, PUBLISHED = 0, 1, 2  # rows; the grid follows


@dataclass(frozen=True)
class Outcome:
    """A row's measured speed, the chosen row's speed relative to it (paired, with a 95 % interval)."""

    method: MethodConfig
    tau: float | None
    speedup: float | None
    speedup_ci95: list[float] | None
    chosen_against_it: float | None
    chosen_against_it_ci95: list[float] | None


def rows(kind: str, choice: MethodConfig, grid: bool) -> list[MethodConfig]:
    """vanilla, the choice, the published method, and the grid where it is asked for."""
    named = [MethodConfig("vanilla"), choice, MethodConfig(usual_method(kind))]
    if grid:
        shapes = [one for one in GRID if one[1] == 1 or kind != "draft_lm"]
        named += [
            method_of(kind, TreeConfig(shape="chain" if k == 1 else "dynamic", levels=levels, k=k, nodes=nodes))
            for levels, k, nodes in shapes
        ]
    return named


def outcomes(methods: Sequence[MethodConfig], records: Sequence[Record], seed: int) -> list[Outcome]:
    """What was measured of each row."""
    groups = {members.first.row: members for members in group(records)}
    chosen = {record.prompt_key: record for record in groups[CHOSEN].records if record.status == "ok"}
    found = []
    for number, method in enumerate(methods):
        members = groups[number]
        measured = row(members, seed)
        pairs = [(chosen[one.prompt_key], one) for one in members.records if one.prompt_key in chosen]
        against = speedups([(ours, one) for ours, one in pairs if one.status == "ok"], seed)
        found.append(
            Outcome(
                method,
                measured.get("tau"),
                measured.get("speedup"),
                measured.get("speedup_ci95"),
                against["speedup"],
                against["speedup_ci95"],
            )
        )
    return found


def names(methods: Sequence[MethodConfig]) -> list[str]:
    """What each row is called in a table."""
    found: list[str] = []
    for method in methods:
        tree = tree_of(method, "tune")
        if tree is None:
            found.append(method.method)
            continue
        chain = tree.shape == "chain"
        shape = f"chain of {tree.levels}" if chain else f"{tree.levels} levels, k {tree.k}, {tree.nodes} nodes"
        rule = "" if tree.stop.rule == "constant" else f", {tree.stop.rule}"
        by = f", {tree.calibrated} confidence" if tree.calibrated else ""
        found.append(f"{method.method}, {shape}{rule}{by}")
    return found


def verdict(found: Sequence[Outcome], predicted: Prediction) -> dict[str, Any]:
    """What measured.json says first: against the published tree, the best of the grid, and the prediction."""
    chosen, grid = found[CHOSEN], found[PUBLISHED + 1 :]
    best = max(grid, key=lambda one: one.speedup or 0.0, default=None)
    measured = chosen.speedup
    return {
        "against_published": asdict(found[PUBLISHED]),
        "against_best_of_grid": None if best is None else asdict(best),
        "predicted_over_measured": None if not measured else predicted.speedup / measured,
        "predicted_tau_over_measured": None if not chosen.tau else predicted.tau / chosen.tau,
    }
