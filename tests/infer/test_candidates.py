"""EAGLE-2's ablations against brute force: ranked by confidence, without reranking, without both."""

import math
from itertools import count

import pytest
import torch

from aerie.configs.schema.decode import DynamicConfig, TreeConfig
from aerie.infer.decode.shape import make_shape
from tests.infer.test_shape import GREEDY, VOCAB, TableDrafter, brute_force, check_connected, paths

Path = tuple[int, ...]


def ablated(drafter: TableDrafter, config: TreeConfig) -> dict[Path, float]:
    """path -> log survival of the tree, root left out, node by node."""
    order, pool = count(), []
    picked: dict[Path, float] = {}
    frontier: list[tuple[Path, float, float]] = [((), 0.0, 0.0)]  # path, survival, smallest confidence
    by_value = config.rank == "survival"
    for _ in range(config.levels):
        level = []
        for path, value, smallest in frontier:
            law = drafter.law(path).tolist()
            for token in sorted(range(VOCAB), key=lambda t: -law[t])[: config.k]:
                level.append(((*path, token), value + law[token], min(smallest, law[token]), law[token]))
        pool += [(-(value if by_value else low), next(order), path, value) for path, value, low, _ in level]
        best = sorted(level, key=lambda item: -(item[1] if by_value else item[3]))[: config.k]
        picked |= {path: value for path, value, _, _ in best}
        frontier = [(path, value, low) for path, value, low, _ in best]
    return {path: value for _, _, path, value in sorted(pool)[: config.nodes - 1]} if config.rerank else picked


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("levels", "k"), [(1, 3), (3, 2), (4, 4), (6, 3)])
@pytest.mark.parametrize(
    ("rank", "rerank"), [("survival", True), ("confidence", True), ("survival", False), ("confidence", False)]
)
def test_every_ablation_is_its_definition(seed: int, levels: int, k: int, rank: str, rerank: bool) -> None:
    nodes = levels * k + (1 if not rerank else -1)
    config = DynamicConfig(levels=levels, k=k, nodes=max(2, nodes), rank=rank, rerank=rerank)  # type: ignore[arg-type]
    drafter = TableDrafter(seed)
    tree = make_shape(config).grow(drafter, torch.tensor([7]), levels, GREEDY)
    expected, found = ablated(drafter, config), paths(tree)
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[path], value, abs_tol=1e-5) for path, value in expected.items())
    check_connected(tree)
    assert tree.draft_forwards == drafter.calls == levels
    if rank == "survival" and rerank:
        assert expected == brute_force(drafter, levels, k, config.nodes)
    if not rerank:
        assert torch.bincount(tree.depth).tolist() == [1] + [k] * levels


def test_by_confidence_no_kept_node_is_weaker_than_one_that_was_left_out_with_its_ancestors() -> None:
    for seed in range(6):
        drafter = TableDrafter(seed)
        config = DynamicConfig(levels=4, k=3, nodes=14, rank="confidence")
        everything = DynamicConfig(levels=4, k=3, nodes=200, rank="confidence")
        kept = paths(make_shape(config).grow(drafter, torch.tensor([7]), 4, GREEDY))
        drafted = paths(make_shape(everything).grow(drafter, torch.tensor([7]), 4, GREEDY))

        def weakest(path: Path, drafter: TableDrafter = drafter) -> float:
            return min(float(drafter.law(path[:at])[path[at]]) for at in range(len(path)))

        assert len(kept) == 13 and all(path[:-1] in kept or len(path) == 1 for path in kept)
        assert min(map(weakest, kept)) >= max(map(weakest, drafted.keys() - kept.keys())) - 1e-6


def test_the_rankings_differ() -> None:
    trees = {}
    for rank in ("survival", "confidence"):
        config = DynamicConfig(levels=5, k=3, nodes=10, rank=rank)
        trees[rank] = paths(make_shape(config).grow(TableDrafter(3), torch.tensor([7]), 5, GREEDY))
    assert trees["survival"].keys() != trees["confidence"].keys()


@pytest.mark.parametrize("rank", ["survival", "confidence"])
def test_without_reranking_a_shorter_tree_is_smaller(rank: str) -> None:
    config = DynamicConfig(levels=5, k=3, nodes=16, rank=rank, rerank=False)  # type: ignore[arg-type]
    tree = make_shape(config).grow(TableDrafter(1), torch.tensor([7]), 2, GREEDY)
    assert len(tree) == 7 and tree.levels == 2
