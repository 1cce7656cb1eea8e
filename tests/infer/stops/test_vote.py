"""DEAGLE's vote: its signals one by one, what the paper leaves open, and the readings that decide nothing."""

from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import VoteConfig
from aerie.infer.decode.stop import Vote
from tests.infer.stops.levels import depth_of, level, steady

SHARES = [round(0.05 * step, 2) for step in range(1, 20)]


def vote(nodes: int = 60, **changes: Any) -> Vote:
    return Vote(validate(changes, VoteConfig, "vote", {}), nodes=nodes)


@pytest.mark.parametrize(
    ("share", "depths"), [(0.8, (3, 5, 6)), (0.9, (5, 7, 9)), (0.95, (7, 10, 12)), (0.98, (10, 15, 18))]
)
def test_expectation_alone_ends_when_the_shortfall_has_reached_the_bonus(share: float, depths: tuple[int, ...]) -> None:
    """sum of (1 - S_t) >= bonus: at 0.8, for bonus 1, 0.2 + 0.36 + 0.488 >= 1 at depth 3."""
    for bonus, depth in zip((1.0, 2.0, 3.0), depths, strict=True):
        assert depth_of(vote(signals=("expectation",), bonus=bonus), steady(share)) == depth


def test_probability_alone_ends_below_0_15() -> None:
    rule = vote(signals=("probability",))
    assert depth_of(rule, [[0.5, 0.4], [0.1, 0.06], [0.1, 0.04]]) == 3
    assert depth_of(rule, [[0.5], [0.149]]) == 2 and depth_of(rule, [[0.5], [0.15001]]) is None


def test_momentum_alone_ends_at_the_second_sharp_decline() -> None:
    masses = [[0.9], [0.5], [0.45], [0.2], [0.19]]  # ratios 0.9, 0.56, 0.9, 0.44
    assert depth_of(vote(signals=("momentum",)), masses) == 4
    assert depth_of(vote(signals=("momentum",), declines=1), masses) == 2
    assert depth_of(vote(signals=("momentum",), consecutive=True), masses) is None
    assert depth_of(vote(signals=("momentum",), consecutive=True), [*masses[:4], [0.1]]) == 5


def test_whether_the_first_level_can_decline_is_an_option() -> None:
    masses = [[0.5], [0.2], [0.1], [0.09]]  # against S_0 = 1: 0.5, 0.4, 0.5
    assert depth_of(vote(signals=("momentum",)), masses) == 2
    assert depth_of(vote(signals=("momentum",), momentum_from=2), masses) == 3


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


def test_the_expectation_alone_leaves_eight_levels_as_they_are() -> None:
    """DEAGLE, table 4: at depths 6 and 8 it is as fast as the fixed tree, whose 8 levels had some 5 tokens accepted."""
    share = 0.88
    assert 4.5 < sum(share**depth for depth in range(1, 9)) < 5.5
    found = {bonus: depth_of(vote(signals=("expectation",), bonus=bonus), steady(share)) for bonus in (1.0, 2.0, 3.0)}
    assert found == {1.0: 4, 2.0: 6, 3.0: 8} and VoteConfig().bonus == 3.0


@pytest.mark.parametrize(
    ("share", "depth"), [(0.65, 5), (0.7, 6), (0.8, 9), (0.85, 12), (0.59, 4), (0.3, 2), (0.9, None)]
)
def test_the_vote_on_a_steady_survival(share: float, depth: int | None) -> None:
    """Where no decline is sharp, two signals wait for the probability; where each is, it is low at once."""
    assert depth_of(vote(), steady(share)) == depth


def test_a_new_tree_remembers_nothing() -> None:
    for over in ("frontier", "selected"):
        for signal, depth in (("expectation", 6), ("momentum", None), ("probability", 9)):
            rule = vote(signals=(signal,), over=over)
            depth_of(rule, steady(0.5, depth=4))
            assert depth_of(rule, steady(0.8)) == depth


@pytest.mark.parametrize("over", ["frontier", "selected"])
@pytest.mark.parametrize("expectation", ["tail_sum", "leaf_sum"])
def test_equations_22_and_26_to_the_letter_always_vote(expectation: str, over: str) -> None:
    """E_d <= d, even where a certain draft is rounded up: with them the vote is 'probability or momentum'."""
    for masses in [*map(steady, SHARES), [[1.0]] * 18, [[0.7, 0.2, 0.1000001]] * 18]:
        literal = depth_of(vote(expectation=expectation, bonus=0.0, over=over), masses)
        either = depth_of(vote(signals=("probability", "momentum"), votes=1), masses)
        assert literal == either
    certain = [[0.99], [0.98], [0.1]]
    assert depth_of(vote(bonus=0.0), certain) == 3 and depth_of(vote(), certain) is None


def test_the_leaf_sum_is_all_but_a_constant_depth() -> None:
    """A level's leaves hold at most 1: bonus + S_d lies between the bonus and one more."""
    for bonus in (1.0, 2.0, 3.0):
        rule = vote(signals=("expectation",), expectation="leaf_sum", bonus=bonus)
        assert {depth_of(rule, steady(share)) for share in SHARES} == {int(bonus) + 1}
        assert depth_of(rule, [[0.5, 0.5, 3e-7]] * 5) == int(bonus) + 1  # rounded up, it is still no more than 1


@pytest.mark.parametrize(
    "changes",
    [
        {"signals": ("expectation",), "bonus": 0.0},
        {"signals": ("expectation",), "bonus": 0.0, "expectation": "leaf_sum"},
        {"votes": 1, "bonus": 0.0},
    ],
)
def test_a_vote_that_the_literal_expectation_decides_alone_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="first level"):
        vote(**changes)


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
