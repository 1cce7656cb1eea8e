"""Dynamic Depth Decoding looks at the summed survival at a few depths only."""

from aerie.configs.schema.decode import ProbabilitySumConfig, VoteConfig
from aerie.infer.decode.stop import ProbabilitySum, Vote
from tests.infer.stops.levels import depth_of, steady


def test_it_ends_at_the_first_check_below_the_threshold() -> None:
    rule = ProbabilitySum(ProbabilitySumConfig())
    assert [depth_of(rule, steady(share, 11)) for share in (0.3, 0.7, 0.77, 0.8, 0.9)] == [5, 7, 9, 9, None]
    assert depth_of(rule, [[0.2, 0.1], *[[0.1, 0.04]] * 4]) == 5 and depth_of(rule, [[0.1, 0.06]] * 11) is None


def test_asked_at_every_depth_it_is_deagles_probability_signal() -> None:
    every = ProbabilitySum(ProbabilitySumConfig(checks=tuple(range(1, 19)), threshold=0.15))
    signal = Vote(VoteConfig(signals=("probability",)))
    for step in range(1, 100):
        assert depth_of(every, steady(step / 100)) == depth_of(signal, steady(step / 100))
