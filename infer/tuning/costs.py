"""What a cycle costs on this machine, by the shape of its tree: measured in decoding, the shapes in turn."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from infer.config import TreeConfig
from infer.decoders import drafting
from infer.engine import SpeculativeDecoder, Statistics
from infer.proposer import CachedDrafter
from infer.tuning.turns import cycle_ms, in_turns

SHALLOW, DEEP = 2, 8  # two depths give the first level's cost and that of each further one
WIDTHS = (1, 2, 4, 8, 10)
NODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 60)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one cycle's parts. Widths and node counts that were not measured are interpolated.

    draft[k] is (one level, each further level) of a tree with frontier k; verify[n] is v(n), a target forward over n
    nodes with the choice among them; rest is what a drafting cycle costs beside them (committing); plain is a whole
    cycle without drafting.
    """

    draft: dict[int, tuple[float, float]]
    verify: dict[int, float]
    rest: float
    plain: float

    def draft_ms(self, trees: int, levels: int, k: int) -> float:
        """Of this many trees with so many levels in sum."""
        widths = sorted(self.draft)
        first, further = (float(np.interp(k, widths, [self.draft[width][part] for width in widths])) for part in (0, 1))
        return trees * first + max(levels - trees, 0) * further

    def verify_ms(self, nodes: float) -> float:
        """v(nodes)."""
        counts = sorted(self.verify)
        return float(np.interp(nodes, counts, [self.verify[count] for count in counts]))


def measure_costs(
    vanilla: SpeculativeDecoder, drafter: CachedDrafter, prompts: Sequence[Tensor], repetitions: int = 3
) -> Costs:
    """The costs of a drafter's trees on these prompts [1, T]: medians over prompts and repetitions."""
    shapes = _shapes()
    target = vanilla.target
    decoders = [vanilla, *(SpeculativeDecoder(target, drafting(drafter, tree)) for tree in shapes)]
    plain, *found = in_turns(decoders, prompts, repetitions, "costs")
    return _fitted(plain, dict(zip(shapes, found, strict=True)))


def _shapes() -> list[TreeConfig]:
    """Every width at two depths, and every node count at least once."""
    shapes, pending = [], list(NODES)
    for k in WIDTHS:
        for levels in (SHALLOW, DEEP):
            most = k + (levels - 1) * k * k + 1
            nodes = next((count for count in pending if count <= most), None)
            if nodes is not None:
                pending.remove(nodes)
            shapes.append(_tree(levels, k, nodes or min(most, NODES[-1])))
    return [*shapes, *(_tree(DEEP, WIDTHS[-1], nodes) for nodes in pending)]


def _tree(levels: int, k: int, nodes: int) -> TreeConfig:
    return TreeConfig(levels=levels, k=k, nodes=nodes)


def _fitted(plain: Sequence[Statistics], found: dict[TreeConfig, list[Statistics]]) -> Costs:
    draft: dict[int, tuple[float, float]] = {}
    for k in WIDTHS:
        points = [_per_tree(found[tree]) for tree in found if tree.k == k]  # (levels, ms) of a tree
        levels, times = np.array(points).T
        slope = max(float(np.polyfit(levels, times, 1)[0]), 0.0)
        draft[k] = (float(np.mean(times - slope * (levels - 1))), slope)
    counts = sorted({tree.nodes for tree in found})
    verify = {
        count: statistics.median(
            _each(one, "verify") for tree, members in found.items() if tree.nodes == count for one in members
        )
        for count in counts
    }
    verify[1] = statistics.median(_each(one, "verify") for one in plain)
    verify = dict(zip(sorted(verify), _rising([verify[count] for count in sorted(verify)]), strict=True))
    rest = [_each(one, "commit") + _each(one, "other") for members in found.values() for one in members]
    return Costs(draft, verify, statistics.median(rest), statistics.median(cycle_ms(one) for one in plain))


def _rising(values: Sequence[float]) -> list[float]:
    """The middle between the rising curves around the values: more nodes never cost less."""
    measured = np.array(values)
    above, below = np.maximum.accumulate(measured), np.minimum.accumulate(measured[::-1])[::-1]
    return [float(value) for value in (above + below) / 2]


def _each(counted: Statistics, phase: str) -> float:
    return counted.ms[phase] / counted.target_forwards


def _per_tree(members: Sequence[Statistics]) -> tuple[float, float]:
    """Mean levels of a tree, and the median of its drafting time. (A cycle without a draft costs next to nothing.)"""
    trees = [sum(1 for _ in one.cycle_tokens) for one in members]
    levels = statistics.mean(one.draft_forwards / count for one, count in zip(members, trees, strict=True))
    return levels, statistics.median(one.ms["draft"] / count for one, count in zip(members, trees, strict=True))
