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
from aerie.infer.decode.stop import STOPS, Entropy, Heuristic, ProbabilitySum, Stop, Vote
from aerie.infer.decode.tree import Level, Tree
from tests.infer.laws import GREEDY, VOCAB, TableDrafter, paths


def level(depth: int, survival: list[float], log_q: Any = None, rows: Any = None) -> Level:
    """A level of nodes with these survivals, best first, from these rows of log q."""
    log_q = torch.zeros(1, 2) if log_q is None else log_q
    number = torch.arange(len(survival))
    row_of = torch.tensor(rows or [0] * len(survival))
    alive = torch.tensor(survival).log()
    above = torch.arange(len(log_q))
    return Level(depth, log_q, above, row_of, row_of, alive, alive, number, alive)


def depth_of(rule: Stop, levels: list[list[float]]) -> int | None:
    """The depth at which the rule ends a tree whose levels have these survivals; None: nowhere."""
    rule.begin()
    for depth, survival in enumerate(levels, start=1):
        if rule.ends(level(depth, survival)):
            return depth
    return None


def steady(share: float, depth: int = 18) -> list[list[float]]:
    """Levels of one node each, with the same chance of acceptance at each level."""
    return [[share**d] for d in range(1, depth + 1)]


def grown(drafter: TableDrafter, stop: StopConfig, **changes: Any) -> Tree:
    """The dynamic tree with these keys, or a chain of six tokens."""
    config: Any = ChainConfig(levels=6, stop=stop)
    if changes:
        config = DynamicConfig(**{"levels": 6, "stop": stop, **changes})
    return make_shape(config).grow(drafter, torch.tensor([2]), config.levels, GREEDY)


# --- all rules


class CountsReads(TorchDispatchMode):
    """Counts operations that make a GPU wait for a number."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = ("_local_scalar_dense", "nonzero", "masked_select")
        self.count += func.overloadpacket.__name__ in waiting
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", STOPS)
def test_one_read_a_level(config: Any) -> None:
    """A stop rule makes a GPU wait at most once a level, and the rules of the host never."""
    laws = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    rule = STOPS[config](config(), 6, 20)
    for depth in range(1, 6):
        with CountsReads() as reads:
            rule.ends(level(depth, [0.95**depth] * 4, laws, [0, 1, 2, 3]))
        checks = getattr(rule.config, "checks", (depth,))
        reads_none = config().rule in ("constant", "heuristic") or depth not in checks
        assert reads.count <= (0 if reads_none else 1)


RULES: list[Any] = [
    EntropyConfig(h=0.5),
    ConfidenceConfig(threshold=0.5),
    MarginalGainConfig(),
    VoteConfig(),
    VoteConfig(bonus=1.0),
    ExactConfig(),
    ProbabilitySumConfig(checks=(2, 4), threshold=0.6),
]


def test_late_reads_give_the_same_tree() -> None:
    """Read before the next level's forward, or after its launch."""
    depths = set()
    for rule, seed in itertools.product(RULES, range(6)):
        sizes: dict[str, Any] = {"levels": 6, "k": 3, "nodes": 14}
        drafter = TableDrafter(seed, sharpness=3.0)
        each, late = (grown(drafter, rule, stop_read=read, **sizes) for read in ("each", "late"))
        assert paths(late) == paths(each) and late.levels == each.levels
        assert late.draft_forwards == min(each.levels + 1, 6)
        depths.add(each.levels)
    assert len(depths) > 3


# --- chains: transformers' confidence and schedule, SVIP's entropy


def doubts(rule: Any, law: Tensor, token: int) -> bool:
    """Whether a chain ends with this token of log q: by transformers, or by SVIP's equation 7."""
    if isinstance(rule, ConfidenceConfig):
        return bool(ConfidenceCriteria(rule.threshold)(torch.tensor([[0, token]]), (law[None],)))
    return math.sqrt(rule.c * float(entropy(law.exp()))) > rule.h


DOUBTING: list[Any] = [ConfidenceConfig(threshold=q) for q in (0.0, 0.4, 0.6, 0.8, 1.0)]
DOUBTING += [EntropyConfig(c=0.15, h=math.sqrt(0.15 * bound)) for bound in (0.4, 0.8, 1.2)]


@pytest.mark.parametrize("rule", DOUBTING)
def test_a_chain_ends_with_its_first_doubted_token(rule: Any) -> None:
    lengths = set()
    for seed in range(12):
        drafter = TableDrafter(seed, sharpness=4.0)
        tree = grown(drafter, rule)
        path = tuple(tree.tokens[1:].tolist())
        laws = [drafter.law(path[:depth]) for depth in range(len(path))]
        *earlier, last = map(doubts, [rule] * len(path), laws, path)
        assert not any(earlier) and (last or len(path) == 6)
        assert tree.draft_forwards == drafter.calls == tree.levels == len(path)
        lengths.add(tree.levels)
    known = {0.0: {6}, 1.0: {1}}.get(getattr(rule, "threshold", 0.5))
    assert lengths == known if known else len(lengths) > 2


def test_entropy_is_that_of_the_best_node() -> None:
    """Uniform laws over 1 and 8 tokens have entropies of 0 and 2.08; the bound is 1."""
    log_q = torch.stack([(torch.arange(8) < count).float() / count for count in (1, 8)]).log()
    rule = Entropy(EntropyConfig(c=1.0, h=1.0))
    assert rule.ends(level(2, [0.4, 0.3, 0.2], log_q, [1, 0, 0]))
    assert not rule.ends(level(2, [0.4, 0.3, 0.2], log_q, [0, 1, 1]))


def test_lengths_are_those_of_transformers() -> None:
    """Against its own update function; without its threshold, which needs scikit-learn."""
    settings = SimpleNamespace(
        num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.0
    )
    theirs = SimpleNamespace(num_assistant_tokens=5, assistant_generation_config=settings)
    rule = Heuristic(HeuristicConfig(), levels=1000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        gamma = rule.gamma
        accepted = min(gamma, int(torch.randint(2 * gamma + 1, (1,), generator=generator)))
        rule.learn(accepted, gamma)
        scores = torch.zeros(1, gamma + 1, 2)
        AssistedCandidateGenerator.update_candidate_strategy(theirs, None, scores, accepted)
        assert rule.gamma == theirs.num_assistant_tokens


def test_a_new_prompt_forgets_the_length() -> None:
    rule = Heuristic(HeuristicConfig(), levels=1000)
    rule.learn(5, 5)
    rule.reset()
    assert rule.gamma == 5


# --- trees: OPT-Tree, Dynamic Depth Decoding, DEAGLE

Nodes = dict[tuple[int, ...], float]


def released_tree(
    drafter: TableDrafter, budget: int, threshold: float, max_depth: int
) -> tuple[Nodes, int]:
    """The tree of OPT-Tree's released code, built node by node, and its number of forwards."""
    levels: list[Nodes] = []
    frontier: Nodes = {(): 0.0}
    weight = 0.0
    while True:
        candidates: Nodes = {}
        for path, value in frontier.items():
            law = drafter.law(path).tolist()
            for token in sorted(range(VOCAB), key=lambda t: -law[t])[:budget]:
                candidates[(*path, token)] = value + law[token]
        frontier = dict(best_of(candidates.items(), budget))
        levels.append(frontier)
        if len(levels) == 1:
            continue
        # the newest level is not counted
        before = itertools.chain.from_iterable(nodes.items() for nodes in levels[:-1])
        best = best_of(before, budget)
        total = sum(math.exp(value) for _, value in best)
        if total - weight <= threshold or len(levels) == max_depth:
            return dict(best), len(levels)
        weight = total


def best_of(nodes: Any, count: int) -> list[tuple[tuple[int, ...], float]]:
    return sorted(nodes, key=lambda node: -node[1])[:count]


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.5, 0.8])
def test_marginal_gain_grows_opt_trees_tree(threshold: float) -> None:
    """With a frontier as wide as the budget. Its max_depth also counts a level that it drops."""
    budget, levels = 6, 5
    depths = set()
    for seed in range(10):
        drafter = TableDrafter(seed)
        expected, forwards = released_tree(drafter, budget, threshold, max_depth=levels + 1)
        stop = MarginalGainConfig(threshold=threshold)
        tree = grown(drafter, stop, levels=levels, k=budget, nodes=budget + 1)
        assert paths(tree) == pytest.approx(expected, abs=1e-5)
        assert tree.draft_forwards == drafter.calls == tree.levels == forwards - 1
        depths.add(tree.levels)
    assert len(depths) > 1 or threshold in (0.05, 0.8)


def test_probability_sum_ends_at_the_first_check_below_its_threshold() -> None:
    rule = ProbabilitySum(ProbabilitySumConfig())
    depths = [depth_of(rule, steady(share, 11)) for share in (0.3, 0.7, 0.77, 0.8, 0.9)]
    assert depths == [5, 7, 9, 9, None]
    assert depth_of(rule, [[0.2, 0.1], *[[0.1, 0.04]] * 4]) == 5
    assert depth_of(rule, [[0.1, 0.06]] * 11) is None


def ended(levels: list[list[float]], **settings: Any) -> int | None:
    return depth_of(Vote(validate(settings, VoteConfig, "vote", {})), levels)


@pytest.mark.parametrize(("share", "depths"), [(0.8, [3, 5, 6]), (0.95, [7, 10, 12])])
def test_the_expectation_alone(share: float, depths: list[int]) -> None:
    """It votes once the sum of (1 - S_t) has reached the bonus: at 0.8, 0.2 + 0.36 + 0.488 >= 1."""
    bonuses = (1.0, 2.0, 3.0)
    signals = ("expectation",)
    assert [ended(steady(share), signals=signals, bonus=bonus) for bonus in bonuses] == depths


def momentum(*masses: float, **settings: Any) -> int | None:
    return ended([[mass] for mass in masses], signals=("momentum",), **settings)


def vote(*masses: float, **settings: Any) -> int | None:
    return ended([[mass] for mass in masses], **settings)


def test_momentum_and_votes_by_hand() -> None:
    # ratios 0.9, 0.56, 0.9, 0.44
    assert momentum(0.9, 0.5, 0.45, 0.2, 0.19) == 4
    assert momentum(0.9, 0.5, 0.45, 0.2, 0.19, declines=1) == 2
    # low and one decline; expectation 1 + 1.7 = 2.7 <= 3 with a bonus of 1, two votes at 3
    assert vote(0.9, 0.7, 0.1, bonus=1.0) == 3
    assert vote(0.9, 0.7, 0.1, 0.1) is None  # 3 + 1.8 > 4, no second decline
    assert vote(0.9, 0.7, 0.1, 0.05) == 4  # low, and the second decline
    assert vote(0.5, 0.25, bonus=1.0) == 2  # momentum twice; expectation 1.75 <= 2; not low
    assert vote(0.5, 0.25, 0.2) is None
    assert vote(0.5, 0.25, 0.14) == 3


ROUNDED_UP = ([[1.0]] * 18, [[0.7, 0.2, 0.1000001]] * 18)


@pytest.mark.parametrize("levels", [*(steady(step / 20) for step in range(1, 20)), *ROUNDED_UP])
def test_equation_22_to_the_letter_always_votes(levels: list[list[float]]) -> None:
    """E_d <= d, even if a certain draft is rounded up: one more vote ends the tree."""
    alone = [ended(levels, signals=(signal,)) for signal in ("probability", "momentum")]
    first = min((depth for depth in alone if depth), default=None)
    assert ended(levels, bonus=0.0) == first
