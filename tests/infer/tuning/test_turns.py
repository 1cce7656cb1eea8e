"""Times of decoders in turn say how they compare, whatever the machine's pace."""

from dataclasses import replace

import pytest

from aerie.infer.decode.engine import Statistics
from aerie.infer.measure.tune import cycle_ms, paced


def answer(ms: float, cycles: int) -> Statistics:
    """An answer of so many cycles that took so long beside its prefill."""
    times = {"prefill": 5.0, "draft": 0.25 * ms, "verify": 0.75 * ms, "commit": 0.0, "other": 0.0, "wall": 5.0 + ms}
    return Statistics(8, {}, cycle_tokens=[2] * cycles, ms=times)


def slowed(turn: list[Statistics], factor: float) -> list[Statistics]:
    return [replace(one, ms={phase: factor * value for phase, value in one.ms.items()}) for one in turn]


def test_a_turn_that_is_slowed_in_all_counts_as_any_other() -> None:
    turns = [[answer(40.0 + turn, 10), answer(60.0, 5), answer(66.0, 6)] for turn in range(5)]
    quiet = paced(turns)
    assert [cycle_ms(turn[0]) for turn in quiet] == pytest.approx([4.2] * 5)
    assert quiet[0][1].ms["draft"] == pytest.approx(0.25 * 60.0 * 42.0 / 40.0)
    loud = paced([slowed(turn, factor) for turn, factor in zip(turns, (1.0, 3.0, 1.0, 2.5, 1.0), strict=True)])
    usual = cycle_ms(loud[0][0]) / cycle_ms(quiet[0][0])
    assert usual < 1.2
    for calm, busy in zip(quiet, loud, strict=True):
        assert [cycle_ms(one) / usual for one in busy] == pytest.approx([cycle_ms(one) for one in calm])
