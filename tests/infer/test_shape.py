"""Trees against brute force: chains, static trees, EAGLE-2's expansion and reranking, node by node."""

import itertools
import math
from itertools import count

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from aerie.configs.schema.decode import (
    ChainConfig,
    Choice,
    DynamicConfig,
    HeuristicConfig,
    ProbabilitySumConfig,
    StaticConfig,
    TreeConfig,
)
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.shape import Chain, Children, StaticTree, make_shape
from aerie.infer.decode.stop import Heuristic, Stop
from aerie.infer.decode.tree import Level, Tree, ancestors
from tests.infer.laws import SETTINGS, sampler

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


ROOT = torch.tensor([7])


class Mapped(TableDrafter):
    """A drafter with a vocabulary of its own: its column c is the target's token 2c + 1."""

    def target_ids(self, columns: Tensor) -> Tensor:
        return 2 * columns + 1


class Remembers(Stop):
    """Stops at a depth, and remembers which levels it was shown."""

    def __init__(self, levels: int) -> None:
        super().__init__(levels=levels)
        self.seen: list[Level] = []

    def ends(self, level: Level) -> bool:
        self.seen.append(level)
        return level.depth >= self.levels


def chain(drafter: TableDrafter, chosen: Sampler, levels: int = 3, sampled: bool = True) -> Tree:
    return Chain(Stop(), levels, sampled).grow(drafter, ROOT, levels, chosen)


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_tokens_are_drawn_from_q_under_the_processors(temperature: float, top_p: float) -> None:
    drafter, chosen, draws = TableDrafter(3, sharpness=1.0), sampler(temperature, top_p), 2000
    counts = torch.zeros(VOCAB)
    for _ in range(draws):
        counts[chain(drafter, chosen, levels=1).tokens[1]] += 1
    law = chosen.law(drafter.law(())[None])[0]
    assert not counts[law == 0].any() and (law > 0).sum() > 2
    alive = law > 0
    assert chisquare(counts[alive].numpy(), (law[alive] / law.sum() * draws).numpy()).pvalue > 1e-3


def test_the_laws_of_the_draws_are_recorded() -> None:
    drafter, chosen = TableDrafter(4), sampler(0.6, 0.8)
    tree = chain(drafter, chosen)
    assert tree.proposal is not None and tree.proposal.rule == "R1" and tree.proposal.ids is None
    path: tuple[int, ...] = ()
    for node, token in enumerate(tree.tokens[1:].tolist()):
        law = chosen.law(drafter.law(path)[None])[0]
        torch.testing.assert_close(tree.proposal.laws[node], law)
        assert float(tree.confidence[node + 1]) == pytest.approx(float(law[token].log()), abs=1e-6)
        path = (*path, token)
    check_connected(tree)
    assert len(tree.proposal.laws) == len(tree) == 4


def test_a_draft_vocabulary_is_mapped_in_tokens_and_laws() -> None:
    drafter, chosen = Mapped(4), sampler(1.0, 1.0)
    tree = chain(drafter, chosen)
    assert tree.proposal is not None
    law = tree.proposal.over(2 * VOCAB + 2)[0]
    torch.testing.assert_close(law[1 : 2 * VOCAB : 2], chosen.law(drafter.law(())[None])[0])
    assert float(law[::2].sum()) == 0.0 and bool((tree.tokens[1:] % 2 == 1).all())


@pytest.mark.parametrize(("temperature", "sampled"), [(0.0, True), (0.0, False), (1.0, False)])
def test_greedy_or_with_best_children_it_is_the_argmax_path(temperature: float, sampled: bool) -> None:
    drafter = TableDrafter(3)
    tree = chain(drafter, sampler(temperature, 1.0), sampled=sampled)
    path: tuple[int, ...] = ()
    for token in tree.tokens[1:].tolist():
        assert token == int(drafter.law(path).argmax())
        path = (*path, token)
    assert tree.proposal is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_rule_is_shown_the_token_that_stays(temperature: float) -> None:
    """The token on which it ends growth is in the chain, and no forward is paid after it."""
    drafter, stop = TableDrafter(3), Remembers(2)
    tree = Chain(stop, 6).grow(drafter, ROOT, 6, sampler(temperature, 1.0))
    assert len(tree) == 3 and drafter.calls == 2 and tree.levels == tree.draft_forwards == 2
    assert [level.depth for level in stop.seen] == [1, 2]
    assert [float(level.confidence) for level in stop.seen] == tree.confidence[1:].tolist()
    torch.testing.assert_close(stop.seen[1].log_q[0], drafter.law((int(tree.tokens[1]),)))  # the law, unprocessed


ROOT = torch.tensor([7])
EAGLE1 = StaticConfig(choices="eagle1").paths
MEDUSA = StaticConfig(choices="medusa63").paths


def grow(
    drafter: TableDrafter, chosen: Sampler, choices: tuple[Choice, ...] = EAGLE1, children: Children = "sampled"
) -> Tree:
    return StaticTree(Stop(), choices, children).grow(drafter, ROOT, 9, chosen)


@pytest.mark.parametrize("choices", [EAGLE1, MEDUSA, ((0,), (3,), (3, 2), (3, 0), (3, 2, 1))])
@pytest.mark.parametrize(("temperature", "children"), [(0.0, "sampled"), (0.0, "replaced"), (1.0, "best")])
def test_best_children_are_those_of_the_ranks(
    choices: tuple[Choice, ...], temperature: float, children: Children
) -> None:
    drafter = TableDrafter(5)
    tree = grow(drafter, sampler(temperature, 1.0), choices, children)
    expected: dict[tuple[int, ...], float] = {}
    for choice in choices:
        path: tuple[int, ...] = ()
        value = 0.0
        for rank in choice:
            law = drafter.law(path)
            token = int(law.sort(descending=True).indices[rank])
            value += float(law[token])
            path = (*path, token)
        expected[path] = value
    found = paths(tree)
    assert found.keys() == expected.keys()
    assert all(found[path] == pytest.approx(value, abs=1e-4) for path, value in expected.items())
    check_connected(tree)
    assert tree.proposal is None and len(tree) == len(choices) + 1
    assert tree.draft_forwards == drafter.calls == tree.levels == max(map(len, choices))


@pytest.mark.parametrize(("children", "rule"), [("sampled", "R3"), ("replaced", "R4")])
@pytest.mark.parametrize("seed", range(4))
def test_sampled_children_keep_the_form_and_record_their_laws(children: Children, rule: str, seed: int) -> None:
    drafter, chosen = TableDrafter(seed, sharpness=1.0), sampler(1.0, 1.0, seed)
    tree = grow(drafter, chosen, EAGLE1, children)
    check_connected(tree)
    assert tree.proposal is not None and tree.proposal.rule == rule
    form = inner_families(tree)
    families = [len(list(group)) for _, group in itertools.groupby(sorted(EAGLE1, key=above), key=above)]
    assert sorted(map(len, form.values())) == sorted(families)
    names = node_paths(tree)
    for parent, family in form.items():
        torch.testing.assert_close(tree.proposal.laws[parent], chosen.law(drafter.law(names[parent])[None])[0])
        tokens = tree.tokens[family].tolist()
        assert children == "replaced" or len(set(tokens)) == len(tokens)
        for node in family:
            own = drafter.law(names[parent])[int(tree.tokens[node])]
            assert float(tree.confidence[node]) == pytest.approx(float(own), abs=1e-4)


def above(choice: Choice) -> Choice:
    return choice[:-1]


def inner_families(tree: Tree) -> dict[int, list[int]]:
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        families.setdefault(parent, []).append(node)
    return families


def node_paths(tree: Tree) -> list[tuple[int, ...]]:
    names: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        names.append((*names[int(tree.parents[node])], int(tree.tokens[node])))
    return names


@pytest.mark.parametrize("children", ["sampled", "replaced"])
def test_siblings_are_drawn_one_after_the_other(children: Children) -> None:
    """Ordered pairs of siblings against q(x) q(y) / (1 - q(x)), or q(x) q(y) with replacement."""
    drafter, chosen, draws = TableDrafter(3, sharpness=0.7), sampler(1.0, 0.8), 2000
    law = chosen.law(drafter.law(())[None])[0].double()
    pairs = torch.outer(law, law)
    if children == "sampled":
        pairs = pairs / (1 - law)[:, None]
        pairs.fill_diagonal_(0.0)
    counts = torch.zeros(VOCAB, VOCAB)
    for _ in range(draws):
        tokens = grow(drafter, chosen, ((0,), (1,)), children).tokens
        counts[tokens[1], tokens[2]] += 1
    likely = pairs * draws >= 5
    assert not counts[pairs == 0].any()
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([pairs[likely], pairs[~likely].sum()[None]]) * draws
    keep = wanted > 1
    assert (
        chisquare(observed[keep].numpy(), (wanted[keep] * observed[keep].sum() / wanted[keep].sum()).numpy()).pvalue
        > 1e-3
    )


def test_fewer_survivors_than_children_are_fewer_children() -> None:
    """Under top-p every node has as many children as q has survivors, or as the form asks for; all distinct."""
    fewer = 0
    for seed in range(12):
        drafter, chosen = TableDrafter(seed), sampler(0.6, 0.8, seed)
        tree = grow(drafter, chosen)
        check_connected(tree)
        assert tree.proposal is not None and len(tree.proposal.laws) == len(tree)
        names, families = node_paths(tree), inner_families(tree)
        for parent, family in families.items():
            law = chosen.law(drafter.law(names[parent])[None])[0]
            torch.testing.assert_close(tree.proposal.laws[parent], law)
            tokens = tree.tokens[family].tolist()
            assert bool((law[tokens] > 0).all()) and len(set(tokens)) == len(tokens)
        survivors = int((chosen.law(drafter.law(())[None])[0] > 0).sum())
        assert len(families[0]) == min(4, survivors)
        assert int(tree.depth.max()) == tree.levels == 5  # the first-drawn line is never dropped
        assert bool(torch.isfinite(tree.survival).all())
        fewer += len(tree) < 26
    assert fewer > 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("levels", [1, 2, 4])
def test_growth_ends_at_what_is_left_to_write_and_at_the_stop_rule(levels: int, temperature: float) -> None:
    for shape, limit in (
        (StaticTree(Stop(), EAGLE1, "sampled"), levels),
        (StaticTree(Heuristic(HeuristicConfig(start=levels)), EAGLE1, "sampled"), 9),
    ):
        drafter = TableDrafter(3, sharpness=1.0)
        tree = shape.grow(drafter, ROOT, limit, sampler(temperature, 1.0))
        assert len(tree) == 1 + sum((4, 8, 8, 3, 2)[:levels])
        assert tree.levels == tree.draft_forwards == drafter.calls == int(tree.depth.max()) == levels
        assert tree.proposal is None or len(tree.proposal.laws) == len(tree)
