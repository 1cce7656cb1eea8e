"""OPT-Tree's rule, by hand and against its published procedure."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from aerie.configs.schema.decode import DynamicConfig, MarginalGainConfig
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.stop import MarginalGain
from tests.infer.stops.levels import depth_of, level, steady
from tests.infer.test_shape import GREEDY, VOCAB, TableDrafter, paths

Nodes = dict[tuple[int, ...], float]


def published(drafter: TableDrafter, budget: int, threshold: float, max_depth: int) -> tuple[Nodes, int]:
    """The tree of the released code, node by node, and the forwards that it paid."""
    levels: list[Nodes] = []
    frontier: Nodes = {(): 0.0}
    weight = 0.0
    while True:
        grown: Nodes = {}
        for path, value in frontier.items():
            law = drafter.law(path).tolist()
            for token in sorted(range(VOCAB), key=lambda t: -law[t])[:budget]:
                grown[(*path, token)] = value + law[token]
        frontier = dict(sorted(grown.items(), key=lambda item: -item[1])[:budget])
        levels.append(frontier)
        if len(levels) == 1:
            continue
        before = [item for nodes in levels[:-1] for item in nodes.items()]  # the newest level is not counted
        best = sorted(before, key=lambda item: -item[1])[:budget]
        found = sum(math.exp(value) for _, value in best)
        if found - weight <= threshold or len(levels) == max_depth:
            return dict(best), len(levels)
        weight = found


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.5, 0.8])
def test_with_a_frontier_as_wide_as_the_budget_it_grows_opt_trees_tree(threshold: float) -> None:
    """The released code's max_depth counts the level that it throws away: one more than ours."""
    budget, levels, depths = 6, 5, set()
    for seed in range(10):
        expected, forwards = published(TableDrafter(seed), budget, threshold, max_depth=levels + 1)
        drafter = TableDrafter(seed)
        stop = MarginalGainConfig(threshold=threshold)
        config = DynamicConfig(levels=levels, k=budget, nodes=budget + 1, stop=stop)
        tree = make_shape(config).grow(drafter, torch.tensor([2]), levels, GREEDY)
        found = paths(tree)
        assert found.keys() == expected.keys()
        assert all(math.isclose(found[path], value, abs_tol=1e-5) for path, value in expected.items())
        assert tree.draft_forwards == drafter.calls
        assert forwards == tree.levels + 1
        assert tree.draft_forwards == tree.levels
        depths.add(tree.levels)
    assert len(depths) > 1 or threshold in (0.05, 0.8)


def test_a_level_that_adds_no_more_than_the_threshold_is_the_last() -> None:
    rule = MarginalGain(MarginalGainConfig(threshold=0.5), nodes=60)
    assert depth_of(rule, steady(0.8)) == 4  # 0.8, 0.64, 0.512, 0.41
    assert depth_of(rule, steady(0.8)) == 4  # and again: a new tree starts from nothing
    assert depth_of(rule, [[0.5]]) == 1 and depth_of(rule, [[0.51], [0.51]]) is None


def test_what_the_budget_has_no_room_for_adds_nothing() -> None:
    """Two drafted nodes: 0.9 and 0.5, then 0.8 in the place of 0.5 adds 0.3."""
    rule = MarginalGain(MarginalGainConfig(threshold=0.25), nodes=3)
    rule.begin()
    assert not rule.ends(level(1, [0.9], candidates=[0.9, 0.5]))
    assert not rule.ends(level(2, [0.8], candidates=[0.8, 0.1]))
    assert rule.ends(level(3, [0.75], candidates=[0.75, 0.05]))


@pytest.mark.parametrize("threshold", [0.1, 0.3])
def test_in_a_narrower_tree_it_weighs_the_nodes_that_reranking_keeps(threshold: float) -> None:
    """Two are expanded of four candidates a level, and 13 kept of all: more than the expanded ones."""
    config = DynamicConfig(levels=6, k=2, nodes=14)
    for seed in range(10):
        drafter = TableDrafter(seed, sharpness=3.0)
        expected = [0.0]
        for levels in range(1, 7):
            tree = make_shape(replace(config, levels=levels)).grow(drafter, torch.tensor([2]), levels, GREEDY)
            expected.append(float(tree.survival[1:].exp().sum()))
        gains = [after - before for before, after in pairwise(expected)]
        depth = next((level for level, gain in enumerate(gains, start=1) if gain <= threshold), 6)
        stop = MarginalGainConfig(threshold=threshold)
        assert make_shape(replace(config, stop=stop)).grow(drafter, torch.tensor([2]), 6, GREEDY).levels == depth
