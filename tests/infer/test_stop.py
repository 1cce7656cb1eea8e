"""Stop rules: each against its source; whatever ends a tree, the answer is the target's text."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.stopping_criteria import ConfidenceCriteria

from aerie.configs.read import validate
from aerie.configs.schema.decode import (
    ChainConfig,
    ConfidenceConfig,
    DynamicConfig,
    EntropyConfig,
    ExactConfig,
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
from tests.infer.laws import GREEDY, VOCAB, TableDrafter, check_connected, node_paths, paths

READINGS: tuple[Any, ...] = ("top_path", "minimum", "value_weighted", "per_node")


def level_of(
    depth: int, log_q: Tensor, rows: list[int], survival: list[float], candidates: Any = None
) -> Level:
    """A level whose nodes, best first, come from these rows of laws log q [r, Vd]; the frontier has all of them, or
    the best of these candidates."""
    at, alive = torch.tensor(rows), torch.tensor(survival).log()
    every = alive if candidates is None else torch.tensor(candidates).log()
    return Level(
        depth,
        log_q,
        torch.arange(len(log_q)),
        at,
        at,
        every,
        every,
        torch.arange(len(alive)),
        alive,
    )


def level(depth: int, survival: list[float], candidates: list[float] | None = None) -> Level:
    """A level whose frontier has these survivals; all nodes come from one law."""
    return level_of(
        depth, torch.zeros(1, 2), [0] * len(candidates or survival), survival, candidates
    )


def uncertain(*counts: int) -> Tensor:
    """log q [n, 8] of laws that are uniform over this many of eight tokens: their entropy is log(count)."""
    return torch.stack([(torch.arange(8) < count).float() / count for count in counts]).log()


def depth_of(rule: Stop, masses: list[list[float]]) -> int | None:
    """The depth at which the rule ends a tree whose levels have these survivals; None: it does not."""
    rule.begin()
    for depth, survival in enumerate(masses, start=1):
        if rule.ends(level(depth, survival)):
            return depth
    return None


def steady(share: float, depth: int = 18) -> list[list[float]]:
    """Levels of one node each, with the same chance of acceptance at each level."""
    return [[share**d] for d in range(1, depth + 1)]


class Reads(TorchDispatchMode):
    """Counts operations that make a GPU wait: reading a number from a tensor, or a shape that depends on values."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(
            at is not None and at.dtype == torch.bool for at in args[1]
        )
        self.count += name in ("_local_scalar_dense", "nonzero", "masked_select") or by_mask
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("width", [1, 4])
def test_a_stop_rule_makes_a_gpu_wait_at_most_once_a_level(width: int) -> None:
    configs: list[Any] = [kind() for kind in KINDS] + [
        EntropyConfig(over=over) for over in READINGS
    ]
    laws = torch.randn(width, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for config in [*configs, VoteConfig(over="selected")]:
        rule = KINDS[type(config)](config, 6, 20)
        for depth in range(1, 6):
            with Reads() as reads:
                grown_to = level_of(depth, laws, list(range(width)), [0.95**depth] * width)
                rule.ends(grown_to)
                if (growing := rule.expands(grown_to)) is not None:
                    torch.arange(width)[growing]
            free = config.rule in ("constant", "heuristic") or depth not in getattr(
                config, "checks", (depth,)
            )
            assert reads.count <= (0 if free else 1), config


def doubts(rule: Any, law: Tensor, token: int) -> bool:
    """Whether a chain ends with this token of a law log q: by transformers, or by SVIP's equation 7."""
    if isinstance(rule, ConfidenceConfig):
        return bool(ConfidenceCriteria(rule.threshold)(torch.tensor([[0, token]]), (law[None],)))
    return math.sqrt(rule.c * float(entropy(law.exp()))) > rule.h


DOUBTING: list[Any] = [
    ConfidenceConfig(threshold=threshold) for threshold in (0.0, 0.4, 0.6, 0.8, 1.0)
]
DOUBTING += [EntropyConfig(c=0.15, h=math.sqrt(0.15 * bound)) for bound in (0.4, 0.8, 1.2)]


@pytest.mark.parametrize("rule", DOUBTING)
def test_a_chain_ends_with_the_first_token_that_is_doubted(rule: Any) -> None:
    lengths = set()
    for seed in range(12):
        drafter = TableDrafter(seed, sharpness=4.0)
        tree = grown(drafter, rule)
        path = tuple(tree.tokens[1:].tolist())
        *earlier, last = (
            doubts(rule, drafter.law(path[:depth]), token) for depth, token in enumerate(path)
        )
        assert not any(earlier) and (last or len(path) == 6)
        assert tree.draft_forwards == drafter.calls == tree.levels == len(path)
        lengths.add(tree.levels)
    known = {0.0: {6}, 1.0: {1}}.get(getattr(rule, "threshold", 0.5))
    assert lengths == known if known else len(lengths) > 2


@pytest.mark.parametrize("rank", ["survival", "confidence"])
def test_a_tree_is_the_same_whenever_its_rule_is_read(rank: str) -> None:
    """Read before the next level's forward, or after its launch."""
    rules: list[StopConfig] = [
        EntropyConfig(h=0.5, over="value_weighted"),
        ConfidenceConfig(threshold=0.5),
    ]
    rules += [MarginalGainConfig(), VoteConfig(), VoteConfig(over="selected", bonus=1.0)]
    rules += [ExactConfig()] * (rank == "survival")
    depths = set()
    for rule, seed in itertools.product(
        [*rules, ProbabilitySumConfig(checks=(2, 4), threshold=0.6)], range(6)
    ):
        sizes: dict[str, Any] = {"levels": 6, "k": 3, "nodes": 14, "rank": rank}
        drafter = TableDrafter(seed, sharpness=3.0)
        each, late = (grown(drafter, rule, stop_read=read, **sizes) for read in ("each", "late"))
        assert paths(late) == paths(each) and late.levels == each.levels
        assert late.draft_forwards == min(each.levels + 1, 6)
        depths.add(each.levels)
    assert len(depths) > 3


def grown(drafter: TableDrafter, stop: StopConfig, **changes: Any) -> Tree:
    """The tree with these keys, or a chain of six tokens."""
    config = (
        DynamicConfig(**{"levels": 6, "stop": stop, **changes})
        if changes
        else ChainConfig(levels=6, stop=stop)
    )
    return make_shape(config).grow(drafter, torch.tensor([2]), config.levels, GREEDY)


def test_the_readings_for_trees_by_hand() -> None:
    """Entropies log 1 = 0, log 2 = 0.69, log 4 = 1.39, log 8 = 2.08; the bound is 1."""

    def asked(over: Any, counts: list[int], survival: list[float]) -> bool:
        rule = Entropy(EntropyConfig(c=1.0, h=1.0, over=over))
        return rule.ends(level_of(2, uncertain(*counts), list(range(len(counts))), survival))

    assert asked("top_path", [4, 1, 1], [0.5, 0.3, 0.1]) and not asked(
        "top_path", [2, 8, 8], [0.5, 0.3, 0.1]
    )
    assert asked("minimum", [8, 4, 4], [0.5, 0.3, 0.1]) and not asked(
        "minimum", [8, 8, 2], [0.5, 0.3, 0.1]
    )
    # 0.5 * 1.39 + 0.3 * 0 + 0.2 * 0 = 0.69; 0.5 * 1.39 + 0.5 * 0.69 = 1.04
    assert not asked("value_weighted", [4, 1, 1], [0.5, 0.3, 0.2])
    assert asked("value_weighted", [4, 2], [0.05, 0.05]) and not asked(
        "value_weighted", [4, 2], [0.01, 0.05]
    )
    assert not asked("per_node", [8, 8], [0.5, 0.3])  # `expands` decides node by node
    assert all(asked(over, [4], [0.5]) for over in READINGS)
    # two laws, three nodes: the first node comes from the second law
    mixed = level_of(2, uncertain(1, 8), [1, 0, 0], [0.4, 0.3, 0.2])
    rule = Entropy(EntropyConfig(c=1.0, h=1.0))
    assert rule.ends(mixed) and rule.expands(mixed) is None
    mask = Entropy(EntropyConfig(c=1.0, h=1.0, over="per_node")).expands(mixed)
    assert mask is not None and mask.tolist() == [False, True, True]


def test_per_node_nobody_stands_below_an_uncertain_node_and_the_others_are_expanded() -> None:
    """All levels are kept (120 nodes), so a missing node was never drafted."""
    bound, seen = 0.8, []
    for seed in range(8):
        drafter = TableDrafter(seed, sharpness=4.0)
        config = EntropyConfig(c=0.15, h=math.sqrt(0.15 * bound), over="per_node")
        tree = grown(drafter, config, k=3, nodes=120, levels=4)
        check_connected(tree)
        names = node_paths(tree)
        inner = {*tree.parents.tolist()} - {0}
        certain = [
            not path or float(entropy(drafter.law(path[:-1]).exp())) <= bound for path in names
        ]
        assert all(certain[node] for node in inner)
        for depth in range(1, tree.levels):
            nodes = (tree.depth == depth).nonzero()[:, 0].tolist()
            best = sorted(nodes, key=lambda node: -float(tree.survival[node]))[:3]  # noqa: B023
            assert [node in inner for node in best] == [certain[node] for node in best]
            seen += [certain[node] for node in best]
    assert min(seen.count(True), seen.count(False)) > 3


def test_the_lengths_are_those_of_transformers() -> None:
    """Against its own update function; without its threshold, which needs scikit-learn."""
    settings = SimpleNamespace(
        num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.0
    )
    theirs = SimpleNamespace(num_assistant_tokens=5, assistant_generation_config=settings)
    ours = Heuristic(HeuristicConfig(), levels=1000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        gamma = ours.gamma
        accepted = min(gamma, int(torch.randint(2 * gamma + 1, (1,), generator=generator)))
        ours.learn(accepted, gamma)
        AssistedCandidateGenerator.update_candidate_strategy(
            theirs, None, torch.zeros(1, gamma + 1, 2), accepted
        )
        assert ours.gamma == theirs.num_assistant_tokens
    for across in (False, True):  # a new prompt forgets the length unless told
        ours = Heuristic(HeuristicConfig(across_prompts=across), levels=1000)
        ours.learn(5, 5)
        ours.reset()
        assert ours.gamma == (7 if across else 5)


Nodes = dict[tuple[int, ...], float]


def published(
    drafter: TableDrafter, budget: int, threshold: float, max_depth: int
) -> tuple[Nodes, int]:
    """The released code's tree, built node by node, and its number of forwards."""
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
        before = [
            item for nodes in levels[:-1] for item in nodes.items()
        ]  # the newest level is not counted
        best = sorted(before, key=lambda item: -item[1])[:budget]
        found = sum(math.exp(value) for _, value in best)
        if found - weight <= threshold or len(levels) == max_depth:
            return dict(best), len(levels)
        weight = found


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.5, 0.8])
def test_with_a_frontier_as_wide_as_the_budget_it_grows_opt_trees_tree(threshold: float) -> None:
    """The released code's max_depth also counts a level that it drops: one more than ours."""
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
    assert [depth_of(rule, steady(share, 11)) for share in (0.3, 0.7, 0.77, 0.8, 0.9)] == [
        5,
        7,
        9,
        9,
        None,
    ]
    assert (
        depth_of(rule, [[0.2, 0.1], *[[0.1, 0.04]] * 4]) == 5
        and depth_of(rule, [[0.1, 0.06]] * 11) is None
    )


def vote(nodes: int = 60, **changes: Any) -> Vote:
    return Vote(validate(changes, VoteConfig, "vote", {}), nodes=nodes)


def test_each_signal_alone_and_two_of_three_votes_end_a_tree_by_hand() -> None:
    def ended(*masses: float, **settings: Any) -> int | None:
        return depth_of(vote(**settings), [[mass] for mass in masses])

    # the expectation, where the sum of (1 - S_t) has reached the bonus: at 0.8, 0.2 + 0.36 + 0.488 >= 1 at depth 3
    for share, depths in ((0.8, [3, 5, 6]), (0.95, [7, 10, 12])):
        found = [
            depth_of(vote(signals=("expectation",), bonus=bonus), steady(share))
            for bonus in (1.0, 2.0, 3.0)
        ]
        assert found == depths
    momentum, masses = (
        {"signals": ("momentum",)},
        (0.9, 0.5, 0.45, 0.2),
    )  # ratios 0.9, 0.56, 0.9, 0.44
    assert (
        ended(*masses, 0.19, **momentum) == 4 and ended(*masses, 0.19, **momentum, declines=1) == 2
    )
    assert ended(*masses, 0.19, **momentum, consecutive=True) is None
    assert ended(*masses, 0.1, **momentum, consecutive=True) == 5
    # low and one decline; expectation 1 + 1.7 = 2.7 <= 3 with a bonus of 1, two votes at 3
    assert ended(0.9, 0.7, 0.1, bonus=1.0) == 3
    assert ended(0.9, 0.7, 0.1, 0.1) is None  # 3 + 1.8 > 4, no second decline
    assert ended(0.9, 0.7, 0.1, 0.05) == 4  # low, and the second decline
    assert ended(0.5, 0.25, bonus=1.0) == 2  # momentum twice; expectation 1.75 <= 2; not low
    assert ended(0.5, 0.25, 0.2) is None and ended(0.5, 0.25, 0.14) == 3
    assert ended(0.5, 0.25, 0.14, bonus=1.0, votes=3) == 3
    assert (
        ended(0.9, 0.8, 0.7, 0.6, votes=1, bonus=1.0) == 4
    )  # 1 + 3.0 <= 4, the first signal of all


@pytest.mark.parametrize("over", ["frontier", "selected"])
@pytest.mark.parametrize("expectation", ["tail_sum", "leaf_sum"])
def test_equations_22_and_26_to_the_letter_always_vote(expectation: str, over: str) -> None:
    """E_d <= d, even if a certain draft is rounded up, so the vote becomes 'probability or momentum'."""
    for masses in [
        *(steady(step / 20) for step in range(1, 20)),
        [[1.0]] * 18,
        [[0.7, 0.2, 0.1000001]] * 18,
    ]:
        literal = depth_of(vote(expectation=expectation, bonus=0.0, over=over), masses)
        assert literal == depth_of(vote(signals=("probability", "momentum"), votes=1), masses)


def test_over_the_selected_nodes_the_tail_counts_what_reranking_would_keep() -> None:
    """Three drafted nodes are kept. The frontiers hold 0.9 and 0.8; the best three of all are 0.6, 0.5 and 0.45."""
    frontiers = ([0.6, 0.3], [0.5, 0.45], [0.48, 0.4])
    candidates = ([0.6, 0.3, 0.1], [0.5, 0.45, 0.05, 0.0], [0.48, 0.4, 0.0, 0.0])
    # selected: 1.2 + 1.0 > 1, 1.2 + 1.55 > 2, 1.2 + 0.6 + 0.5 + 0.48 <= 3; frontier: 1.2 + 0.9 + 0.95 + 0.88 > 3
    for over, last in (("selected", True), ("frontier", False)):
        rule = vote(signals=("expectation",), over=over, nodes=4, bonus=1.2)
        rule.begin()
        ended = [
            rule.ends(level(n, *both))
            for n, both in enumerate(zip(frontiers, candidates, strict=True), start=1)
        ]
        assert ended == [False, False, last]
