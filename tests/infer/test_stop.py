"""Stop rules: each against its source, and whatever ends a tree, the target's text is what is written."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.stopping_criteria import ConfidenceCriteria

from aerie.configs.read import validate
from aerie.configs.schema.decode import (
    ChainConfig,
    ConfidenceConfig,
    DynamicConfig,
    EntropyConfig,
    HeuristicConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    StopConfig,
    VoteConfig,
)
from aerie.infer.decode.sampling import entropy
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.stop import STOPS as KINDS
from aerie.infer.decode.stop import Entropy, Heuristic, ProbabilitySum, Stop, Vote
from aerie.infer.decode.tree import Level, Tree
from tests.infer.laws import GREEDY, TableDrafter, check_connected, node_paths, paths
from tests.infer.laws import TABLE_VOCAB as VOCAB


def level_of(depth: int, log_q: Tensor, rows: list[int], survival: list[float], candidates: Any = None) -> Level:
    """A level whose nodes, the best first, come from these rows of laws log q [r, Vd]; the frontier holds them all,
    or the best of these candidates."""
    at, alive = torch.tensor(rows), torch.tensor(survival).log()
    every = alive if candidates is None else torch.tensor(candidates).log()
    return Level(depth, log_q, torch.arange(len(log_q)), at, at, every, every, torch.arange(len(alive)), alive)


def level(depth: int, survival: list[float], candidates: list[float] | None = None) -> Level:
    """A level whose frontier has these survivals; every node came from the same law."""
    return level_of(depth, torch.zeros(1, 2), [0] * len(candidates or survival), survival, candidates)


def make_stop(config: Any, levels: int = 6, nodes: int = 20) -> Stop:
    return KINDS[type(config)](config, levels, nodes)


def uncertain(*counts: float) -> Tensor:
    """log q [n, 8] of laws that are uniform over this many of eight tokens: their entropy is log(count)."""
    laws = torch.full((len(counts), 8), float("-inf"))
    for row, count in enumerate(counts):
        laws[row, : int(count)] = -torch.tensor(count).log()
    return laws


def depth_of(rule: Stop, masses: list[list[float]]) -> int | None:
    """The depth at which the rule ends a tree whose levels have these survivals; null: it does not."""
    rule.begin()
    for depth, survival in enumerate(masses, start=1):
        if rule.ends(level(depth, survival)):
            return depth
    return None


def steady(share: float, depth: int = 18) -> list[list[float]]:
    """Levels of one node each, of which each survives with the same chance."""
    return [[share**d] for d in range(1, depth + 1)]


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.6, 0.8, 1.0])
def test_a_chain_ends_with_the_first_token_that_transformers_doubts(threshold: float) -> None:
    criterion, lengths = ConfidenceCriteria(threshold), set()
    for seed in range(12):
        drafter = TableDrafter(seed, sharpness=4.0)
        tree = grown(drafter, ConfidenceConfig(threshold=threshold))
        path: tuple[int, ...] = ()
        for token in tree.tokens[1:].tolist():
            doubted = criterion(torch.tensor([[0, token]]), (drafter.law(path)[None],))
            path = (*path, token)
            assert doubted == (len(path) == tree.levels < 6) or len(path) == 6
        lengths.add(tree.levels)
        assert tree.draft_forwards == drafter.calls == tree.levels
    assert threshold in (0.0, 1.0) or len(lengths) > 2
    assert threshold > 0.0 or lengths == {6}
    assert threshold < 1.0 or lengths == {1}


def grown(drafter: TableDrafter, stop: StopConfig, **changes: Any) -> Tree:
    """The tree of these keys, or a chain of six tokens."""
    config = DynamicConfig(**{"levels": 6, "stop": stop, **changes}) if changes else ChainConfig(levels=6, stop=stop)
    return make_shape(config).grow(drafter, torch.tensor([2]), config.levels, GREEDY)


@pytest.mark.parametrize("bound", [0.4, 0.8, 1.2])
def test_equation_7_a_chain_ends_with_the_token_of_the_first_uncertain_law(bound: float) -> None:
    config = EntropyConfig(c=0.15, h=math.sqrt(0.15 * bound))
    lengths = set()
    for seed in range(12):
        drafter = TableDrafter(seed, sharpness=4.0)
        tree = grown(drafter, config)
        path = tuple(tree.tokens[1:].tolist())
        entropies = [float(entropy(drafter.law(path[:depth]).exp())) for depth in range(len(path))]
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
    # two laws, three nodes: the first node stands below the second law
    mixed = level_of(2, uncertain(1, 8), [1, 0, 0], [0.4, 0.3, 0.2])
    rule = Entropy(EntropyConfig(c=1.0, h=1.0))
    assert rule.ends(mixed) and rule.expands(mixed) is None
    mask = Entropy(EntropyConfig(c=1.0, h=1.0, over="per_node")).expands(mixed)
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
            assert float(entropy(drafter.law(parent[:-1]).exp())) <= bound
        for depth in range(1, tree.levels):
            level = [node for node in range(1, len(tree)) if int(tree.depth[node]) == depth]
            for node in sorted(level, key=lambda node: -float(tree.survival[node]))[:3]:
                certain = float(entropy(drafter.law(names[node][:-1]).exp())) <= bound
                assert (names[node] in parents) == certain
                leaves, inner = leaves + (not certain), inner + certain
    assert leaves > 3 and inner > 3


@pytest.mark.parametrize("across", [False, True])
def test_a_new_prompt_forgets_the_length_unless_told(across: bool) -> None:
    rule = make_stop(HeuristicConfig(across_prompts=across), 40, 41)
    assert isinstance(rule, Heuristic)
    rule.learn(5, 5)
    rule.reset()
    assert rule.gamma == (7 if across else 5)


def test_the_lengths_are_those_of_transformers() -> None:
    """Its own update, on the state that it reads; without its threshold, which needs scikit-learn."""
    settings = SimpleNamespace(num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.0)
    theirs = SimpleNamespace(num_assistant_tokens=5, assistant_generation_config=settings)
    ours = Heuristic(HeuristicConfig(), levels=1000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        gamma = ours.gamma
        accepted = min(gamma, int(torch.randint(2 * gamma + 1, (1,), generator=generator)))
        ours.learn(accepted, gamma)
        AssistedCandidateGenerator.update_candidate_strategy(theirs, None, torch.zeros(1, gamma + 1, 2), accepted)
        assert ours.gamma == theirs.num_assistant_tokens


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
        tree = grown(drafter, stop, levels=levels, k=budget, nodes=budget + 1)
        assert paths(tree) == pytest.approx(expected, abs=1e-5)
        assert tree.draft_forwards == drafter.calls == tree.levels == forwards - 1
        depths.add(tree.levels)
    assert len(depths) > 1 or threshold in (0.05, 0.8)


def test_it_ends_at_the_first_check_below_the_threshold() -> None:
    rule = ProbabilitySum(ProbabilitySumConfig())
    assert [depth_of(rule, steady(share, 11)) for share in (0.3, 0.7, 0.77, 0.8, 0.9)] == [5, 7, 9, 9, None]
    assert depth_of(rule, [[0.2, 0.1], *[[0.1, 0.04]] * 4]) == 5 and depth_of(rule, [[0.1, 0.06]] * 11) is None


def vote(nodes: int = 60, **changes: Any) -> Vote:
    return Vote(validate(changes, VoteConfig, "vote", {}), nodes=nodes)


@pytest.mark.parametrize(
    ("share", "depths"), [(0.8, (3, 5, 6)), (0.9, (5, 7, 9)), (0.95, (7, 10, 12)), (0.98, (10, 15, 18))]
)
def test_expectation_alone_ends_when_the_shortfall_has_reached_the_bonus(share: float, depths: tuple[int, ...]) -> None:
    """sum of (1 - S_t) >= bonus: at 0.8, for bonus 1, 0.2 + 0.36 + 0.488 >= 1 at depth 3."""
    for bonus, depth in zip((1.0, 2.0, 3.0), depths, strict=True):
        assert depth_of(vote(signals=("expectation",), bonus=bonus), steady(share)) == depth


def test_momentum_alone_ends_at_the_second_sharp_decline() -> None:
    masses = [[0.9], [0.5], [0.45], [0.2], [0.19]]  # ratios 0.9, 0.56, 0.9, 0.44
    assert depth_of(vote(signals=("momentum",)), masses) == 4
    assert depth_of(vote(signals=("momentum",), declines=1), masses) == 2
    assert depth_of(vote(signals=("momentum",), consecutive=True), masses) is None
    assert depth_of(vote(signals=("momentum",), consecutive=True), [*masses[:4], [0.1]]) == 5


def test_two_of_three_votes_end_a_tree() -> None:
    # S: 0.9, 0.7, 0.1: low and one decline; expectation 1 + 1.7 = 2.7 <= 3 with a bonus of 1, two votes at 3
    assert depth_of(vote(bonus=1.0), [[0.9], [0.7], [0.1]]) == 3
    assert depth_of(vote(), [[0.9], [0.7], [0.1], [0.1]]) is None  # 3 + 1.8 > 4, no second decline
    assert depth_of(vote(), [[0.9], [0.7], [0.1], [0.05]]) == 4  # low, and the second decline
    # S: 0.5, 0.25: momentum twice; expectation 1.75 <= 2; not low
    assert depth_of(vote(bonus=1.0), [[0.5], [0.25]]) == 2
    assert depth_of(vote(), [[0.5], [0.25], [0.2]]) is None and depth_of(vote(), [[0.5], [0.25], [0.14]]) == 3
    assert depth_of(vote(bonus=1.0, votes=3), [[0.5], [0.25], [0.14]]) == 3
    one = vote(votes=1, bonus=1.0)
    assert depth_of(one, [[0.9], [0.8], [0.7], [0.6], [0.5]]) == 4  # 1 + 3.0 <= 4, the first signal of all


@pytest.mark.parametrize("over", ["frontier", "selected"])
@pytest.mark.parametrize("expectation", ["tail_sum", "leaf_sum"])
def test_equations_22_and_26_to_the_letter_always_vote(expectation: str, over: str) -> None:
    """E_d <= d, even where a certain draft is rounded up: with them the vote is 'probability or momentum'."""
    for masses in [*(steady(step / 20) for step in range(1, 20)), [[1.0]] * 18, [[0.7, 0.2, 0.1000001]] * 18]:
        literal = depth_of(vote(expectation=expectation, bonus=0.0, over=over), masses)
        assert literal == depth_of(vote(signals=("probability", "momentum"), votes=1), masses)


def test_over_the_selected_nodes_the_tail_counts_what_reranking_would_keep() -> None:
    """Three drafted nodes are kept. The frontiers hold 0.9 and 0.8; the best three of all are 0.6, 0.5 and 0.45."""
    rule = vote(signals=("expectation",), over="selected", nodes=4, bonus=1.2)
    rule.begin()
    assert not rule.ends(level(1, [0.6, 0.3], candidates=[0.6, 0.3, 0.1]))  # 1.2 + 1.0 > 1
    assert not rule.ends(level(2, [0.5, 0.45], candidates=[0.5, 0.45, 0.05, 0.0]))  # 1.2 + 1.55 > 2
    assert rule.ends(level(3, [0.48, 0.4], candidates=[0.48, 0.4, 0.0, 0.0]))  # 1.2 + 0.6 + 0.5 + 0.48 <= 3
    frontier = vote(signals=("expectation",), nodes=4, bonus=1.2)
    frontier.begin()
    assert not frontier.ends(level(1, [0.6, 0.3]))
    assert not frontier.ends(level(2, [0.5, 0.45]))  # 1.2 + 0.9 + 0.95 > 2
    assert not frontier.ends(level(3, [0.48, 0.4]))  # 1.2 + 0.9 + 0.95 + 0.88 > 3
