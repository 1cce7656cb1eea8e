"""SVIP's rule, on chains and in its four readings for trees."""

import math

import pytest
import torch

from aerie.configs.schema.decode import ChainConfig, DynamicConfig, EntropyConfig
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.stop import Entropy, entropy
from aerie.infer.decode.tree import Tree
from tests.infer.stops.levels import level_of, uncertain
from tests.infer.test_shape import GREEDY, TableDrafter, check_connected


def grown(drafter: TableDrafter, stop: EntropyConfig, **changes: int) -> Tree:
    config = DynamicConfig(**{"levels": 6, "stop": stop, **changes}) if changes else ChainConfig(levels=6, stop=stop)  # type: ignore[arg-type]
    return make_shape(config).grow(drafter, torch.tensor([2]), config.levels, GREEDY)


def node_paths(tree: Tree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        found.append((*found[int(tree.parents[node])], int(tree.tokens[node])))
    return found


def test_the_entropy_is_in_nats_and_allows_impossible_tokens() -> None:
    torch.testing.assert_close(entropy(uncertain(1, 2, 8)), torch.tensor([0.0, math.log(2), math.log(8)]))


def test_the_released_code_stops_above_0_6_nats_and_the_papers_text_above_0_09() -> None:
    assert EntropyConfig().max_entropy == pytest.approx(0.6)
    assert EntropyConfig(c=1.0).max_entropy == pytest.approx(0.09)


@pytest.mark.parametrize("bound", [0.4, 0.8, 1.2])
def test_equation_7_a_chain_ends_with_the_token_of_the_first_uncertain_law(bound: float) -> None:
    config = EntropyConfig(c=0.15, h=math.sqrt(0.15 * bound))
    lengths = set()
    for seed in range(12):
        drafter = TableDrafter(seed, sharpness=4.0)
        tree = grown(drafter, config)
        path = tuple(tree.tokens[1:].tolist())
        entropies = [float(entropy(drafter.law(path[:depth])[None])) for depth in range(len(path))]
        assert all(found <= bound for found in entropies[:-1])
        assert entropies[-1] > bound or len(path) == 6
        assert tree.draft_forwards == drafter.calls == tree.levels == len(path)
        lengths.add(len(path))
    assert len(lengths) > 2


def asked(over: str, counts: list[float], survival: list[float]) -> bool:
    """Whether the rule with bound 1 nat ends a level whose nodes came from laws with these entropies, e^counts."""
    config = EntropyConfig(c=1.0, h=1.0, over=over)  # type: ignore[arg-type]
    return Entropy(config).ends(level_of(2, uncertain(*counts), list(range(len(counts))), survival))


def test_the_readings_for_trees_by_hand() -> None:
    """Entropies log 1 = 0, log 2 = 0.69, log 4 = 1.39, log 8 = 2.08; the bound is 1."""
    assert asked("top_path", [4, 1, 1], [0.5, 0.3, 0.1]) and not asked("top_path", [2, 8, 8], [0.5, 0.3, 0.1])
    assert asked("minimum", [8, 4, 4], [0.5, 0.3, 0.1]) and not asked("minimum", [8, 8, 2], [0.5, 0.3, 0.1])
    # 0.5 * 1.39 + 0.3 * 0 + 0.2 * 0 = 0.69; 0.5 * 1.39 + 0.5 * 0.69 = 1.04
    assert not asked("value_weighted", [4, 1, 1], [0.5, 0.3, 0.2])
    assert asked("value_weighted", [4, 2], [0.05, 0.05]) and not asked("value_weighted", [4, 2], [0.01, 0.05])
    assert not asked("per_node", [8, 8], [0.5, 0.3])  # `expands` says it node by node
    assert all(asked(over, [4], [0.5]) for over in ("top_path", "minimum", "value_weighted", "per_node"))


def test_every_reading_looks_at_the_law_that_the_node_came_from() -> None:
    """Two laws, three nodes: the first node stands below the second law."""
    level = level_of(2, uncertain(1, 8), [1, 0, 0], [0.4, 0.3, 0.2])
    rule = Entropy(EntropyConfig(c=1.0, h=1.0))
    assert rule.ends(level) and rule.expands(level) is None
    mask = Entropy(EntropyConfig(c=1.0, h=1.0, over="per_node")).expands(level)
    assert mask is not None and mask.tolist() == [False, True, True]


@pytest.mark.parametrize("over", ["top_path", "value_weighted", "minimum", "per_node"])
def test_a_tree_one_node_wide_is_a_chain_in_every_reading(over: str) -> None:
    for seed in range(6):
        config = EntropyConfig(over=over, h=0.4)  # type: ignore[arg-type]
        tree, chain = grown(TableDrafter(seed), config, k=1, nodes=7), grown(TableDrafter(seed), config)
        assert tree.tokens.tolist() == chain.tokens.tolist() and tree.draft_forwards == chain.draft_forwards


def test_per_node_nobody_stands_below_an_uncertain_node_and_the_others_are_expanded() -> None:
    """All levels are kept (120 nodes), so that what is missing was not drafted."""
    bound, leaves, inner = 0.8, 0, 0
    for seed in range(8):
        drafter = TableDrafter(seed, sharpness=4.0)
        config = EntropyConfig(c=0.15, h=math.sqrt(0.15 * bound), over="per_node")
        tree = grown(drafter, config, k=3, nodes=120, levels=4)
        check_connected(tree)
        names = node_paths(tree)
        parents = {names[int(parent)] for parent in tree.parents[1:]} - {()}
        for parent in parents:
            assert float(entropy(drafter.law(parent[:-1])[None])) <= bound
        for depth in range(1, tree.levels):
            level = [node for node in range(1, len(tree)) if int(tree.depth[node]) == depth]
            for node in sorted(level, key=lambda node: -float(tree.survival[node]))[:3]:
                certain = float(entropy(drafter.law(names[node][:-1])[None])) <= bound
                assert (names[node] in parents) == certain
                leaves, inner = leaves + (not certain), inner + certain
    assert leaves > 3 and inner > 3
