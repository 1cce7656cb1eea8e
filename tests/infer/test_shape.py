"""Trees against brute force: chains, static trees, EAGLE-2's expansion and reranking."""

import itertools
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import (
    ChainConfig,
    Choice,
    ConstantConfig,
    DynamicConfig,
    ExactConfig,
    HeuristicConfig,
    ProbabilitySumConfig,
    StaticConfig,
)
from aerie.infer.decode.roles import Shape, unchanged
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import StaticTree, make_shape
from aerie.infer.decode.stop import Heuristic, Stop
from aerie.infer.decode.tree import Tree
from tests.infer.laws import (
    GREEDY,
    VOCAB,
    TableDrafter,
    check_connected,
    node_paths,
    paths,
    sampler,
)

ROOT = torch.tensor([7])
EAGLE1, MEDUSA = StaticConfig(choices="eagle1").paths, StaticConfig(choices="medusa63").paths
LINE = ((0,), (0, 0), (0, 0, 0))


def brute_force(drafter: TableDrafter, config: DynamicConfig) -> dict[tuple[int, ...], float]:
    """path -> log survival of EAGLE-2's tree or of an ablation, without the root."""
    order, by_value = count(), config.rank == "survival"
    pool: list[Any] = []
    picked: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[tuple[int, ...], float, float]] = [
        ((), 0.0, 0.0)
    ]  # path, survival, smallest confidence
    for _ in range(config.levels):
        level = []
        for path, value, smallest in frontier:
            law = drafter.law(path).tolist()
            for token in sorted(range(VOCAB), key=lambda t: -law[t])[: config.k]:
                level.append(
                    ((*path, token), value + law[token], min(smallest, law[token]), law[token])
                )
        pool += [
            (-(value if by_value else low), next(order), path, value)
            for path, value, low, _ in level
        ]
        best = sorted(level, key=lambda item: -(item[1] if by_value else item[3]))[: config.k]
        picked |= {path: value for path, value, _, _ in best}
        frontier = [(path, value, low) for path, value, low, _ in best]
    return (
        {path: value for _, _, path, value in sorted(pool)[: config.nodes - 1]}
        if config.rerank
        else picked
    )


@pytest.mark.parametrize(
    ("levels", "k", "nodes"), [(1, 3, 4), (3, 2, 6), (4, 4, 20), (6, 3, 60), (5, 1, 9)]
)
@pytest.mark.parametrize("rank", ["survival", "confidence"])
@pytest.mark.parametrize("rerank", [True, False])
def test_the_dynamic_tree_and_its_ablations_are_eagle_2s(
    levels: int, k: int, nodes: int, rank: Any, rerank: bool
) -> None:
    config = DynamicConfig(levels=levels, k=k, nodes=nodes, rank=rank, rerank=rerank)
    for seed in range(6):
        drafter = TableDrafter(seed)
        tree = make_shape(config).grow(drafter, ROOT, levels, GREEDY)
        assert paths(tree) == pytest.approx(brute_force(drafter, config), abs=1e-5)
        check_connected(tree)
        assert tree.draft_forwards == drafter.calls == tree.levels == levels
        assert len(tree) <= config.nodes and int(tree.tokens[0]) == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_exact_rule_ends_a_draft_where_no_deeper_node_can_be_in_its_tree(
    temperature: float,
) -> None:
    forwards = list[int]()
    for (k, nodes), seed in itertools.product(
        [(1, 4), (2, 6), (3, 20), (5, 5), (8, 40), (14, 12)], range(8)
    ):
        early, whole = (
            make_shape(
                DynamicConfig(levels=7, k=k, nodes=nodes, children="sampled", stop=stop)
            ).grow(TableDrafter(seed, sharpness=4.0), ROOT, 7, sampler(temperature, 1.0, seed))
            for stop in (ExactConfig(), ConstantConfig())
        )
        assert paths(early) == paths(whole) and torch.equal(early.mask, whole.mask)
        assert early.levels == early.draft_forwards >= int(early.depth.max())
        forwards.append(early.draft_forwards)
    assert min(forwards) == 3 and max(forwards) == 7


def test_certain_drafts_stay_connected_although_every_survival_ties() -> None:
    """q = 1 along a path makes a child tie with its parent; the shallower must win the cut."""

    class Certain(TableDrafter):
        def law(self, path: tuple[int, ...]) -> Tensor:
            return torch.full((VOCAB,), -200.0).index_fill_(0, torch.tensor(len(path) % VOCAB), 0.0)

    for nodes in range(2, 12):
        tree = make_shape(DynamicConfig(levels=8, k=4, nodes=nodes)).grow(
            Certain(0), ROOT, 8, GREEDY
        )
        check_connected(tree)
        assert int(tree.depth.max()) == min(8, nodes - 1)


KEPT = {
    "chain": ChainConfig(levels=4, stop=ProbabilitySumConfig(checks=(3,), threshold=1.0)),
    "static": StaticConfig(choices="eagle1"),
    "dynamic": DynamicConfig(levels=4, k=3, nodes=9),
    "wide": DynamicConfig(levels=4, k=4, nodes=5),
    "wider than the vocabulary": DynamicConfig(levels=4, k=59, nodes=60),
    "all levels": DynamicConfig(levels=4, k=3, nodes=13, rank="confidence", rerank=False),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_kept_pool_holds_the_laws_and_frontiers_of_the_same_tree(
    name: str, temperature: float
) -> None:
    drafter = TableDrafter(5)

    def growing(keeps_pool: bool) -> Shape:
        shape = make_shape(KEPT[name])
        shape.keeps_pool = keeps_pool
        return shape

    tree, plain = (
        growing(keeps_pool).grow(TableDrafter(5), ROOT, 4, sampler(temperature, 0.9, 3))
        for keeps_pool in (True, False)
    )
    assert plain.pool is None and tree.tokens.equal(plain.tokens) and tree.mask.equal(plain.mask)
    pool, names = tree.pool, node_paths(tree)
    assert pool is not None and len(pool.levels) == tree.levels
    laws = pool.log_laws()
    assert list(laws) == sorted(laws) and {*tree.parents.tolist()} <= laws.keys()
    assert all(law.equal(drafter.law(names[node])) for node, law in laws.items())
    assert pool.stopped_by == ("probability_sum" if name == "chain" else None)
    for depth, (branches, survival) in enumerate(pool.frontiers(), start=1):
        below = [
            sum(float(drafter.law(path[:at])[path[at]]) for at in range(depth)) for path in branches
        ]
        assert temperature > 0 or survival.tolist() == pytest.approx(below, abs=1e-4)
        assert name not in ("all levels", "chain") or {*branches} == {
            path for path in names if len(path) == depth
        }
        assert name != "dynamic" or len(branches) == 3


def grow(
    drafter: TableDrafter,
    chosen: Sampler,
    choices: tuple[Choice, ...] = EAGLE1,
    children: Any = "sampled",
) -> Tree:
    return StaticTree(Stop(), choices, children, unchanged).grow(drafter, ROOT, 9, chosen)


@pytest.mark.parametrize("choices", [LINE, EAGLE1, MEDUSA, ((0,), (3,), (3, 2), (3, 0), (3, 2, 1))])
@pytest.mark.parametrize(("temperature", "children"), [(0.0, "sampled"), (1.0, "best")])
def test_best_children_are_those_of_the_ranks(
    choices: tuple[Choice, ...], temperature: float, children: Any
) -> None:
    drafter = TableDrafter(5)
    tree = grow(drafter, sampler(temperature, 1.0), choices, children)
    expected: dict[tuple[int, ...], float] = {}
    for choice in choices:
        path: tuple[int, ...] = ()
        value = 0.0
        for rank in choice:
            law = drafter.law(path)
            path = (*path, int(law.sort(descending=True).indices[rank]))
            value += float(law[path[-1]])
        expected[path] = value
    assert paths(tree) == pytest.approx(expected, abs=1e-4)
    check_connected(tree)
    assert tree.draft_laws is None and len(tree) == len(choices) + 1
    assert tree.draft_forwards == drafter.calls == tree.levels == max(map(len, choices))


@pytest.mark.parametrize(
    ("choices", "rule"),
    [(LINE, "R1"), (EAGLE1, "R3")],
)
@pytest.mark.parametrize(
    ("temperature", "top_p", "mapped"), [(1.0, 1.0, False), (1.0, 1.0, True), (0.6, 0.8, False)]
)
def test_drawn_children_keep_the_form_and_record_their_laws(
    choices: tuple[Choice, ...],
    rule: str,
    temperature: float,
    top_p: float,
    mapped: bool,
) -> None:
    """If the processors leave too few tokens, a node has fewer children; all are distinct."""
    fewer = 0
    for seed in range(8):
        drafter, chosen = (
            TableDrafter(seed, sharpness=1.0, mapped=mapped),
            sampler(temperature, top_p, seed),
        )
        tree = grow(drafter, chosen, choices)
        check_connected(tree)
        assert (
            tree.draft_laws is not None
            and tree.draft_laws.rule == rule
            and len(tree.draft_laws.laws) == len(tree)
        )
        assert (
            int(tree.depth.max()) == tree.levels == len(choices[-1])
        )  # the path of first draws is never cut
        laws, names = tree.draft_laws.over(2 * VOCAB), node_paths(tree)
        family_of: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
            family_of.setdefault(parent, []).append(node)
        for parent, family in family_of.items():
            law = torch.zeros(2 * VOCAB)
            law[drafter.target_ids(torch.arange(VOCAB))] = chosen.law(
                drafter.law(names[parent])[None]
            )[0]
            torch.testing.assert_close(laws[parent], law)
            tokens = tree.tokens[family]
            assert len(set(tokens.tolist())) == len(tokens)
            torch.testing.assert_close(tree.confidence[family], law[tokens].log())
        assert bool(tree.survival.isfinite().all())
        wanted, survivors = sum(len(choice) == 1 for choice in choices), int((laws[0] > 0).sum())
        assert len(family_of[0]) == min(wanted, survivors)
        form = [
            len(list(group))
            for _, group in itertools.groupby(sorted(choice[:-1] for choice in choices))
        ]
        fewer += sorted(map(len, family_of.values())) != sorted(form)
    assert fewer > 4 if rule == "R3" and top_p < 1 else fewer == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("levels", [1, 2, 4])
def test_growth_ends_at_what_is_left_to_write_and_at_the_stop_rule(
    levels: int, temperature: float
) -> None:
    for stop, left in ((Stop(), levels), (Heuristic(HeuristicConfig(start=levels)), 9)):
        drafter = TableDrafter(3, sharpness=1.0)
        tree = StaticTree(stop, EAGLE1, "sampled", unchanged).grow(
            drafter, ROOT, left, sampler(temperature, 1.0)
        )
        assert len(tree) == 1 + sum((4, 8, 8, 3, 2)[:levels])
        assert (
            tree.levels == tree.draft_forwards == drafter.calls == int(tree.depth.max()) == levels
        )
