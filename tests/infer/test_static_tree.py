"""A static tree has the form it was given, its children the ranks or draws that the form names, nothing dropped."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from aerie.configs.schema.decode import Choice, HeuristicConfig, StaticConfig
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Children, StaticTree, make_shape
from aerie.infer.decode.stop import Heuristic, Stop
from aerie.infer.decode.tree import Tree
from tests.infer.laws import sampler
from tests.infer.test_chain import Mapped, Remembers
from tests.infer.test_shape import VOCAB, TableDrafter, check_connected, paths

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


def test_a_small_draft_vocabulary_leaves_ranks_out() -> None:
    tree = grow(TableDrafter(2), sampler(0.0, 1.0), tuple((rank,) for rank in range(VOCAB + 5)))
    assert sorted(tree.tokens[1:].tolist()) == list(range(VOCAB))


def test_a_draft_vocabulary_is_mapped_in_tokens_and_laws() -> None:
    tree = grow(Mapped(4), sampler(1.0, 1.0))
    assert tree.proposal is not None
    assert bool((tree.tokens[1:] % 2 == 1).all())
    assert float(tree.proposal.over(2 * VOCAB + 2)[0, ::2].sum()) == 0.0


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


def test_a_stop_rule_sees_the_frontier_by_falling_survival() -> None:
    drafter, stop = TableDrafter(3), Remembers(9)
    StaticTree(stop, EAGLE1, "best").grow(drafter, ROOT, 9, sampler(0.0, 1.0))
    assert [len(level.alive) for level in stop.seen] == [4, 4, 1, 1]
    for level in stop.seen:
        assert bool((level.alive.diff() <= 0).all()) and level.survival[level.frontier].equal(level.alive)


def test_room_is_made_for_every_node_that_is_fed() -> None:
    fed: list[int] = []

    class Counting(TableDrafter):
        def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
            fed.append(len(tokens))
            return super().step(tokens, parents)

    shape = StaticTree(Stop(), EAGLE1, "best")
    shape.grow(Counting(0), ROOT, 9, sampler(0.0, 1.0))
    assert sum(fed) == shape.draft_slots == 10 and shape.max_nodes == 26


def test_the_recipe_chooses_the_tree_and_its_children() -> None:
    for children, rule in (("sampled", "R3"), ("replaced", "R4"), ("best", None)):
        config = StaticConfig(choices="eagle1", children=children)  # type: ignore[arg-type]
        tree = make_shape(config).grow(TableDrafter(1, sharpness=1.0), ROOT, 9, sampler(1.0, 1.0))
        assert tree.levels == 5  # the tree's own, whatever the recipe's default says
        assert (tree.proposal.rule if tree.proposal else None) == rule
