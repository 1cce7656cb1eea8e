"""Trees against brute force: EAGLE-2's expansion and reranking, node by node in plain Python."""

import math
from itertools import count

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import ChainConfig, DynamicConfig, ProbabilitySumConfig, StaticConfig, TreeConfig
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.tree import Tree, ancestors, describe, root_only

VOCAB = 11
GREEDY = Sampler(Decoding(False, 0.0, 0, 1.0, 0.0, 8), torch.Generator())


class TableDrafter:
    """Laws that are a fixed function of the path, so that a tree can be checked by enumeration."""

    def __init__(self, seed: int, sharpness: float = 2.0) -> None:
        self.seed, self.sharpness = seed, sharpness
        self.rows: list[tuple[int, ...]] = []
        self.calls = 0

    def law(self, path: tuple[int, ...]) -> Tensor:
        seed = hash((self.seed, path)) % 2**31
        return (self.sharpness * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)

    def target_ids(self, columns: Tensor) -> Tensor:
        return columns

    def start(self) -> Tensor:
        self.rows, self.calls = [()], 1
        return self.law(())[None]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.calls += 1
        self.rows = [(*self.rows[p], t) for t, p in zip(tokens.tolist(), parents.tolist(), strict=True)]
        return torch.stack([self.law(path) for path in self.rows])


def check_connected(tree: Tree) -> None:
    """Every node's parent is in the tree, one level above and before it."""
    parents = tree.parents[1:]
    assert bool((parents >= 0).all()) and bool((parents < torch.arange(1, len(tree))).all())
    assert bool((tree.depth[1:] == tree.depth[parents] + 1).all())


def brute_force(drafter: TableDrafter, levels: int, k: int, nodes: int) -> dict[tuple[int, ...], float]:
    """path -> log survival of EAGLE-2's tree, root left out."""
    pool: list[tuple[float, int, tuple[int, ...]]] = []
    order = count()
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(levels):
        level = []
        for path, value in frontier:
            law = drafter.law(path).tolist()
            for token in sorted(range(VOCAB), key=lambda t: -law[t])[:k]:
                level.append(((*path, token), value + law[token]))
        pool += [(-value, next(order), path) for path, value in level]
        frontier = sorted(level, key=lambda item: -item[1])[:k]
    return {path: -value for value, _, path in sorted(pool)[: nodes - 1]}


def paths(tree: Tree) -> dict[tuple[int, ...], float]:
    out: dict[tuple[int, ...], float] = {}
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    names: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        names.append((*names[parents[node]], tokens[node]))
        out[names[-1]] = float(tree.survival[node])
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("levels", "k", "nodes"), [(1, 3, 4), (3, 2, 6), (4, 4, 20), (6, 3, 60), (5, 1, 9)])
def test_the_dynamic_tree_is_eagle_2s(seed: int, levels: int, k: int, nodes: int) -> None:
    drafter = TableDrafter(seed)
    tree = make_shape(DynamicConfig(levels=levels, k=k, nodes=nodes)).grow(drafter, torch.tensor([7]), levels, GREEDY)
    expected = brute_force(drafter, levels, k, nodes)
    found = paths(tree)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert math.isclose(found[path], value, abs_tol=1e-5)
    check_connected(tree)
    assert tree.draft_forwards == drafter.calls == levels
    assert len(tree) <= nodes and int(tree.tokens[0]) == 7


def test_confidence_is_the_nodes_own_and_survival_the_paths() -> None:
    drafter = TableDrafter(1)
    tree = make_shape(DynamicConfig(levels=4, k=3, nodes=15)).grow(drafter, torch.tensor([0]), 4, GREEDY)
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        assert float(tree.survival[node]) == pytest.approx(
            float(tree.survival[parent] + tree.confidence[node]), abs=1e-6
        )


def test_certain_drafts_stay_connected_although_every_survival_ties() -> None:
    """q = 1 along a path makes a child tie with its parent; the shallower must win the cut."""

    class Certain(TableDrafter):
        def law(self, path: tuple[int, ...]) -> Tensor:
            law = torch.full((VOCAB,), -200.0)
            law[len(path) % VOCAB] = 0.0
            return law

    for nodes in range(2, 12):
        tree = make_shape(DynamicConfig(levels=8, k=4, nodes=nodes)).grow(Certain(0), torch.tensor([0]), 8, GREEDY)
        check_connected(tree)
        assert int(tree.depth.max()) == min(8, nodes - 1)


def test_a_chain_is_the_argmax_path() -> None:
    drafter = TableDrafter(3)
    tree = make_shape(ChainConfig(levels=4)).grow(drafter, torch.tensor([2]), 4, GREEDY)
    path: tuple[int, ...] = ()
    for token in tree.tokens[1:].tolist():
        assert token == int(drafter.law(path).argmax())
        path = (*path, token)
    check_connected(tree)
    assert tree.draft_forwards == drafter.calls == 4


@pytest.mark.parametrize("config", [DynamicConfig(levels=6, k=3, nodes=7), ChainConfig(levels=6)])
def test_no_level_is_drafted_beyond_what_is_left_to_write(config: TreeConfig) -> None:
    drafter = TableDrafter(3)
    tree = make_shape(config).grow(drafter, torch.tensor([2]), 2, GREEDY)
    assert int(tree.depth.max()) == 2 and drafter.calls == 2


@pytest.mark.parametrize("levels", [1, 2, 3, 5, 8, 13])
def test_ancestors_are_those_of_walking_up(levels: int) -> None:
    parents = [0]
    generator = torch.Generator().manual_seed(levels)
    depth = [0]
    for node in range(1, 40):
        parent = int(torch.randint(node, (1,), generator=generator))
        while depth[parent] >= levels:
            parent = parents[parent]
        parents.append(parent)
        depth.append(depth[parent] + 1)
    mask = ancestors(torch.tensor(parents), levels)
    for node in range(40):
        expected, walker = {node, 0}, node
        while walker:
            walker = parents[walker]
            expected.add(walker)
        assert set(mask[node].nonzero().flatten().tolist()) == expected


def test_the_root_alone_is_a_tree_of_one() -> None:
    tree = root_only(torch.tensor([4]))
    assert len(tree) == 1 and tree.draft_forwards == 0 and bool(tree.mask.all())


def test_a_tree_prints_one_line_a_node() -> None:
    tree = make_shape(DynamicConfig(levels=2, k=2, nodes=5)).grow(TableDrafter(0), torch.tensor([0]), 2, GREEDY)
    lines = describe(tree, [str(t) for t in tree.tokens.tolist()]).splitlines()
    assert len(lines) == 5 and lines[0].startswith("'0'") and "survival" in lines[1]


KEPT = {
    "chain": ChainConfig(levels=4, stop=ProbabilitySumConfig(checks=(3,), threshold=1.0)),
    "static": StaticConfig(choices="eagle1"),
    "dynamic": DynamicConfig(levels=4, k=3, nodes=9),
    "all levels": DynamicConfig(levels=4, k=3, nodes=13, rank="confidence", rerank=False),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_kept_pool_holds_the_laws_and_frontiers_of_the_same_tree(name: str, temperature: float) -> None:
    shape = make_shape(KEPT[name])

    def grown(keep: bool) -> Tree:
        chosen = Sampler(Decoding(temperature > 0, temperature, 0, 0.9, 0.0, 8), torch.Generator().manual_seed(3))
        return shape.grow(TableDrafter(5), torch.tensor([7]), 4, chosen, keep)

    tree, plain, drafter = grown(keep=True), grown(keep=False), TableDrafter(5)
    assert plain.pool is None and tree.tokens.equal(plain.tokens) and tree.mask.equal(plain.mask)
    pool, names = tree.pool, [(), *paths(tree)]
    assert pool is not None and len(pool.levels) == tree.levels
    assert [pool.paths()[candidate] for candidate in pool.kept.tolist()] == names
    laws = pool.laws()
    assert list(laws) == sorted(laws) and {*tree.parents.tolist()} <= laws.keys()
    assert all(law.equal(drafter.law(names[node])) for node, law in laws.items())
    assert pool.stopped_by == ("probability_sum" if name == "chain" else None)
    for depth, (branches, survival) in enumerate(pool.frontiers(), start=1):
        below = [sum(float(drafter.law(path[:at])[path[at]]) for at in range(depth)) for path in branches]
        assert temperature > 0 or survival.tolist() == pytest.approx(below, abs=1e-4)
        if name == "all levels" or name == "chain":
            assert {*branches} == {path for path in names if len(path) == depth}
    assert name != "dynamic" or all(len(branches) == 3 for branches, _ in pool.frontiers())
