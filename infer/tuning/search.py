"""Every tree's tokens per second as a recording and the costs predict them, best first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infer.config import TreeConfig
from infer.tuning.costs import Costs
from infer.tuning.recording import Recording
from infer.tuning.replay import Cycles, accepted, cycles, path_ranks

NODES = (3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 60)


@dataclass(frozen=True)
class Prediction:
    """A tree with what it is predicted to do; speedup is against plain decoding, in decode time."""

    tree: TreeConfig
    tau: float
    ms_per_token: float
    speedup: float


def price(counted: Cycles, k: int, nodes: float, costs: Costs) -> float:
    """Milliseconds of these cycles, each verifying so many nodes."""
    idle = counted.target_forwards - counted.draft_trees
    return (
        costs.draft_ms(counted.draft_trees, counted.draft_levels, k)
        + counted.draft_trees * costs.verify_ms(nodes)
        + idle * costs.verify_ms(1)
        + counted.target_forwards * costs.rest
    )


def predict(tree: TreeConfig, recording: Recording, costs: Costs) -> Prediction:
    """What one dynamic tree or chain is predicted to do; a chain has one child a node, whatever its k and nodes say."""
    if tree.shape == "chain":
        tree = replace(tree, k=1, nodes=tree.levels + 1)
    ranks = path_ranks(recording, tree.levels, tree.k)
    return _prediction(tree, cycles(recording, accepted(ranks, tree.nodes), tree.levels), costs)


def predictions(
    recording: Recording,
    costs: Costs,
    levels: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    nodes: Sequence[int] = NODES,
) -> list[Prediction]:
    """Every tree of these levels, k and nodes (null: all that the recording holds), the fastest first.

    With k = 1 it is a chain, verified whole. A tree that has fewer candidates than nodes is left out.
    """
    found = []
    for depth in levels or range(1, recording.levels + 1):
        for k in widths or range(1, recording.k + 1):
            ranks = path_ranks(recording, depth, k)
            candidates = k + (depth - 1) * k * k
            for count in [depth + 1] if k == 1 else [count for count in nodes if count <= candidates + 1]:
                counted = cycles(recording, accepted(ranks, count), depth)
                found.append(_prediction(_tree(depth, k, count), counted, costs))
    return sorted(found, key=lambda one: one.ms_per_token)


def _tree(levels: int, k: int, nodes: int) -> TreeConfig:
    return TreeConfig(shape="chain" if k == 1 else "dynamic", levels=levels, k=k, nodes=nodes)


def _prediction(tree: TreeConfig, counted: Cycles, costs: Costs) -> Prediction:
    each = price(counted, tree.k, tree.nodes, costs) / max(counted.tokens, 1)
    return Prediction(tree, counted.tau, each, costs.plain / each)
