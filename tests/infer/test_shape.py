"""Trees against brute force: chains, static trees, EAGLE-2's expansion and reranking.

Stop rules: each against its source; whatever ends a tree, the answer is the target's text.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.stopping_criteria import ConfidenceCriteria

from aerie.configs.read import validate
from aerie.configs.schema.decode import (
    ChainConfig,
    Choice,
    ConfidenceConfig,
    ConstantConfig,
    DynamicConfig,
    EntropyConfig,
    ExactConfig,
    HeuristicConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    StaticConfig,
    StopConfig,
    VoteConfig,
)
from aerie.infer.decode.roles import unchanged
from aerie.infer.decode.sampling import Sampler, entropy
from aerie.infer.decode.shape import StaticTree, make_shape
from aerie.infer.decode.stop import STOPS, Entropy, Heuristic, ProbabilitySum, Stop, Vote
from aerie.infer.decode.tree import Level, Tree
from tests.infer.laws import (
    GREEDY,
    VOCAB,
    Counting,
    TableDrafter,
    check_connected,
    node_paths,
    paths,
    sampler,
)

ROOT = torch.tensor([7])
EAGLE1, MEDUSA = StaticConfig(choices="eagle1").paths, StaticConfig(choices="medusa63").paths
LINE = ((0,), (0, 0), (0, 0, 0))


class Node(NamedTuple):
    path: tuple[int, ...]
    survival: float
    smallest: float  # confidence on the path
    confidence: float


def brute_force(drafter: TableDrafter, config: DynamicConfig) -> dict[tuple[int, ...], float]:
    """path -> log survival of EAGLE-2's tree or of an ablation, without the root."""
    is_by_value = config.rank == "survival"
    expanded = "survival" if is_by_value else "confidence"
    reranked = "survival" if is_by_value else "smallest"
    pool: list[Node] = []
    picked: list[Node] = []
    frontier = [Node((), 0.0, 0.0, 0.0)]
    for _ in range(config.levels):
        level = [
            Node((*path, token), survival + q, min(smallest, q), q)
            for path, survival, smallest, _ in frontier
            for token, q in best_of(enumerate(drafter.law(path).tolist()), 1, config.k)
        ]
        frontier = best_of(level, Node._fields.index(expanded), config.k)
        pool += level
        picked += frontier
    if config.rerank:
        picked = best_of(pool, Node._fields.index(reranked), config.nodes - 1)
    return {node.path: node.survival for node in picked}


def best_of(items: Iterable[Any], place: int, count: int) -> list[Any]:
    """The items with the largest values at this place; the earlier one of equals."""
    return sorted(items, key=lambda item: -item[place])[:count]


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
    trees = []
    for keeps_pool in (True, False):
        shape = make_shape(KEPT[name])
        shape.keeps_pool = keeps_pool
        trees.append(shape.grow(drafter, ROOT, 4, sampler(temperature, 0.9, 3)))
    tree, plain = trees
    assert plain.pool is None and tree.tokens.equal(plain.tokens) and tree.mask.equal(plain.mask)
    pool, names = tree.pool, node_paths(tree)
    assert pool is not None and len(pool.levels) == tree.levels
    laws = pool.log_laws()
    assert list(laws) == sorted(laws) and {*tree.parents.tolist()} <= laws.keys()
    assert all(law.equal(drafter.law(names[node])) for node, law in laws.items())
    assert pool.stopped_by == ("probability_sum" if name == "chain" else None)
    for depth, (branches, survival) in enumerate(pool.frontiers(), start=1):
        below = [drafter.survival(path) for path in branches]
        assert temperature > 0 or survival.tolist() == pytest.approx(below, abs=1e-4)
        if name in ("all levels", "chain"):
            assert {*branches} == {path for path in names if len(path) == depth}
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
    expected: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}  # ranks -> tokens
    for choice in choices:
        above = expected[choice[:-1]]
        ranked = drafter.law(above).sort(descending=True).indices
        expected[choice] = (*above, int(ranked[choice[-1]]))
    survival = {path: drafter.survival(path) for path in expected.values() if path}
    assert paths(tree) == pytest.approx(survival, abs=1e-4)
    check_connected(tree)
    assert tree.draft_laws is None and len(tree) == len(choices) + 1
    assert tree.draft_forwards == drafter.calls == tree.levels == max(map(len, choices))


@pytest.mark.parametrize(("choices", "rule"), [(LINE, "R1"), (EAGLE1, "R3")])
@pytest.mark.parametrize(
    ("temperature", "top_p", "mapped"), [(1.0, 1.0, False), (1.0, 1.0, True), (0.6, 0.8, False)]
)
def test_drawn_children_keep_the_form_and_record_their_laws(
    choices: tuple[Choice, ...], rule: str, temperature: float, top_p: float, mapped: bool
) -> None:
    """If the processors leave too few tokens, a node has fewer children; all are distinct."""
    form = Counter(choice[:-1] for choice in choices)
    fewer = 0
    for seed in range(8):
        drafter = TableDrafter(seed, sharpness=1.0, mapped=mapped)
        chosen = sampler(temperature, top_p, seed)
        tree = grow(drafter, chosen, choices)
        check_connected(tree)
        assert tree.draft_laws is not None and tree.draft_laws.rule == rule
        # the path of first draws is never cut
        assert int(tree.depth.max()) == tree.levels == len(choices[-1])
        laws, names = tree.draft_laws.over(2 * VOCAB), node_paths(tree)
        families = Counter(tree.parents.tolist()[1:])
        for parent in families:
            law = torch.zeros(2 * VOCAB)
            ids = drafter.target_ids(torch.arange(VOCAB))
            law[ids] = chosen.law(drafter.law(names[parent])[None])[0]
            torch.testing.assert_close(laws[parent], law)
            family = (tree.parents == parent) & (tree.depth > 0)
            torch.testing.assert_close(tree.confidence[family], law[tree.tokens[family]].log())
        assert len({*names}) == len(tree) and bool(tree.survival.isfinite().all())
        assert families[0] == min(form[()], int((laws[0] > 0).sum()))
        fewer += sorted(families.values()) != sorted(form.values())
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


@pytest.mark.parametrize("config", STOPS)
def test_one_read_a_level(config: Any) -> None:
    """A stop rule makes a GPU wait at most once a level, and the rules of the host never."""
    laws = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    rule = STOPS[config](config(), 6, 20)
    for depth in range(1, 6):
        with Counting() as counting:
            rule.ends(level(depth, [0.95**depth] * 4, laws, [0, 1, 2, 3]))
        checks = getattr(rule.config, "checks", (depth,))
        reads_none = config().rule in ("constant", "heuristic") or depth not in checks
        assert counting.reads <= (0 if reads_none else 1)


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


# --- trees: OPT-Tree, Dynamic Depth Decoding, DEAGLE

Nodes = dict[tuple[int, ...], float]


def released_tree(
    drafter: TableDrafter, budget: int, threshold: float, max_depth: int
) -> tuple[Nodes, int]:
    """The tree of OPT-Tree's released code, built node by node, and its number of forwards."""
    kept: list[tuple[tuple[int, ...], float]] = []  # without the newest level, which is not counted
    frontier: Any = [((), 0.0)]
    weight = 0.0
    for forwards in range(1, max_depth + 1):
        candidates = [
            ((*path, token), value + q)
            for path, value in frontier
            for token, q in best_of(enumerate(drafter.law(path).tolist()), 1, budget)
        ]
        if forwards > 1:
            kept = best_of(kept + frontier, 1, budget)
            gain = sum(math.exp(value) for _, value in kept) - weight
            if gain <= threshold:
                break
            weight += gain
        frontier = best_of(candidates, 1, budget)
    return dict(kept), forwards


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


EXPECTATION, MOMENTUM = ({"signals": (name,)} for name in ("expectation", "momentum"))
FALLING = [[0.9], [0.5], [0.45], [0.2], [0.19]]  # ratios 0.56, 0.9, 0.44, 0.95


@pytest.mark.parametrize(
    ("levels", "settings", "depth"),
    [
        # once the sum of (1 - S_t) has reached the bonus: at 0.8, 0.2 + 0.36 + 0.488 >= 1
        *(
            (steady(0.8), {**EXPECTATION, "bonus": bonus}, d)
            for bonus, d in ((1, 3), (2, 5), (3, 6))
        ),
        *((steady(0.95), {**EXPECTATION, "bonus": bonus}, d) for bonus, d in ((1, 7), (3, 12))),
        (FALLING, MOMENTUM, 4),
        (FALLING, {**MOMENTUM, "declines": 1}, 2),
        # low and one decline; expectation 1 + 1.7 = 2.7 <= 3 with a bonus of 1, two votes at 3
        ([[0.9], [0.7], [0.1]], {"bonus": 1.0}, 3),
        ([[0.9], [0.7], [0.1], [0.1]], {}, None),  # 3 + 1.8 > 4, no second decline
        ([[0.9], [0.7], [0.1], [0.05]], {}, 4),  # low, and the second decline
        ([[0.5], [0.25]], {"bonus": 1.0}, 2),  # momentum twice; expectation 1.75 <= 2; not low
        ([[0.5], [0.25], [0.2]], {}, None),
        ([[0.5], [0.25], [0.14]], {}, 3),
    ],
)
def test_votes_by_hand(levels: Any, settings: Any, depth: int | None) -> None:
    assert ended(levels, **settings) == depth


ROUNDED_UP = ([[1.0]] * 18, [[0.7, 0.2, 0.1000001]] * 18)


@pytest.mark.parametrize("levels", [*(steady(step / 20) for step in range(1, 20)), *ROUNDED_UP])
def test_equation_22_to_the_letter_always_votes(levels: list[list[float]]) -> None:
    """E_d <= d, even if a certain draft is rounded up: one more vote ends the tree."""
    alone = [ended(levels, signals=(signal,)) for signal in ("probability", "momentum")]
    first = min((depth for depth in alone if depth), default=None)
    assert ended(levels, bonus=0.0) == first
