"""EAGLE-2's ablations against brute force: ranked by confidence, without reranking, without both."""

import math
from itertools import count
from typing import Any

import pytest
import torch

from aerie.configs.schema.decode import TreeConfig
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.tree import Candidates, check_connected
from tests.infer.test_shape import GREEDY, VOCAB, TableDrafter, brute_force, paths

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
    config = TreeConfig(levels=levels, k=k, nodes=max(2, nodes), rank=rank, rerank=rerank)  # type: ignore[arg-type]
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
        config = TreeConfig(levels=4, k=3, nodes=14, rank="confidence")
        everything = TreeConfig(levels=4, k=3, nodes=200, rank="confidence")
        kept = paths(make_shape(config).grow(drafter, torch.tensor([7]), 4, GREEDY))
        drafted = paths(make_shape(everything).grow(drafter, torch.tensor([7]), 4, GREEDY))

        def weakest(path: Path, drafter: TableDrafter = drafter) -> float:
            return min(float(drafter.law(path[:at])[path[at]]) for at in range(len(path)))

        assert len(kept) == 13 and all(path[:-1] in kept or len(path) == 1 for path in kept)
        assert min(map(weakest, kept)) >= max(map(weakest, drafted.keys() - kept.keys())) - 1e-6


def test_the_rankings_differ() -> None:
    trees = {}
    for rank in ("survival", "confidence"):
        config = TreeConfig(levels=5, k=3, nodes=10, rank=rank)
        trees[rank] = paths(make_shape(config).grow(TableDrafter(3), torch.tensor([7]), 5, GREEDY))
    assert trees["survival"].keys() != trees["confidence"].keys()


@pytest.mark.parametrize("rank", ["survival", "confidence"])
def test_without_reranking_a_shorter_tree_is_smaller(rank: str) -> None:
    config = TreeConfig(levels=5, k=3, nodes=16, rank=rank, rerank=False)  # type: ignore[arg-type]
    tree = make_shape(config).grow(TableDrafter(1), torch.tensor([7]), 2, GREEDY)
    assert len(tree) == 7 and tree.levels == 2


def test_ablations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="dynamic tree"):
        TreeConfig("chain", rank="confidence")
    with pytest.raises(ValueError, match="set nodes to 61"):
        TreeConfig(rerank=False)


@pytest.mark.parametrize("seed", range(30))
def test_the_kept_candidates_are_those_of_naive_loops(seed: int) -> None:
    """Random levels and scores: which are kept, and the tree's every column, with equal scores among them."""
    dice = torch.Generator().manual_seed(seed)
    k, levels, count = (int(torch.randint(low, 5, (1,), generator=dice)) for low in (2, 1, 1))
    pool = Candidates(torch.tensor([7]))
    nodes: list[dict[str, Any]] = [{"token": 7, "parent": 0, "depth": 0, "path": [0], "score": 0.0}]
    frontier = [0]
    for depth in range(1, levels + 1):
        size = len(frontier) * k
        tokens = torch.randint(0, 50, (size,), generator=dice)
        above = torch.tensor([nodes[parent]["score"] for parent in frontier]).repeat_interleave(k)
        score = above - torch.randint(0, 3, (size,), generator=dice)
        confidence, survival = torch.randn(2, size, generator=dice)
        first = pool.add(tokens, torch.tensor(frontier), confidence, survival, score)
        assert first == len(nodes)
        for row in range(size):
            parent = frontier[row // k]
            values = {"token": int(tokens[row]), "parent": parent, "depth": depth, "score": float(score[row])}
            laws = {"confidence": float(confidence[row]), "survival": float(survival[row])}
            nodes.append({**values, **laws, "path": [*nodes[parent]["path"], first + row]})
        frontier = sorted(torch.randperm(size, generator=dice)[: min(k, size)].add(first).tolist())
        pool.pick(torch.tensor(frontier))
    wanted = sorted(sorted(range(len(nodes)), key=lambda node: -nodes[node]["score"])[: count * k])
    assert pool.best(count * k).tolist() == wanted
    picked = pool.picked().tolist()
    assert picked[0] == 0 and len(picked) == 1 + k * levels
    for kept in (wanted, picked):
        tree = pool.tree(torch.tensor(kept), k, draft_forwards=levels)
        assert tree.tokens.tolist() == [nodes[node]["token"] for node in kept]
        assert tree.parents.tolist() == [kept.index(nodes[node]["parent"]) for node in kept]
        assert tree.depth.tolist() == [nodes[node]["depth"] for node in kept]
        assert tree.mask.tolist() == [[other in nodes[node]["path"] for other in kept] for node in kept]
        for name in ("confidence", "survival"):
            assert getattr(tree, name).tolist() == pytest.approx([nodes[node].get(name, 0.0) for node in kept])
        assert (tree.levels, tree.draft_forwards) == (levels, levels)


def test_a_kept_node_without_its_parent_is_noticed() -> None:
    pool, zero = Candidates(torch.tensor([7])), torch.zeros(2)
    pool.add(torch.tensor([1, 2]), torch.tensor([0]), zero, zero, zero)
    pool.add(torch.tensor([3, 4]), torch.tensor([2]), zero, zero, zero)
    with pytest.raises(AssertionError, match="parent was cut"):
        pool.tree(torch.tensor([0, 1, 3]), 2, 2)
