"""Rows compared in pairs: what is pooled, what the interval is over, and what is refused."""

import pytest

from aerie.configs.errors import UserError
from aerie.infer.measure.record import Record
from aerie.infer.measure.statistics import tau_difference
from tests.infer.made_up import milliseconds, record


def answer(row: int, prompt: str, tau: int, cycles: int) -> Record:
    """An answer of `cycles` cycles of `tau` tokens each."""
    return record(
        row=row,
        prompt_id=prompt,
        accepted=(tau - 1,) * cycles,
        cycle_tokens=(tau,) * cycles,
        new_tokens=1 + tau * cycles,
        target_forwards=cycles,
        ms=milliseconds(prefill=1.0, wall=5.0),
    )


def test_rows_are_pooled_and_prompts_weigh_by_their_cycles() -> None:
    records = [answer(1, "a", 4, 3), answer(1, "b", 2, 1), answer(2, "a", 2, 2), answer(2, "b", 2, 2)]
    found = tau_difference(records, [1], [2])
    assert (found.of, found.against) == ((12 + 2) / 4, 2.0)
    both = tau_difference(records, [1, 2], [2])
    assert both.of == (14 + 8) / 8 and both.prompts == 2


def test_a_constant_difference_has_no_spread_and_a_changing_one_has() -> None:
    same = [answer(row, str(n), tau, 5) for n in range(8) for row, tau in ((1, 4), (2, 3))]
    assert tau_difference(same, [1], [2]).ci95 == (1.0, 1.0)
    mixed = [answer(row, str(n), tau, 5) for n in range(8) for row, tau in ((1, 2 + n % 4), (2, 3))]
    low, high = tau_difference(mixed, [1], [2]).ci95
    assert low < 0.5 < high and tau_difference(mixed, [2], [1]).ci95 == pytest.approx((-high, -low))


def test_rows_that_were_not_measured_on_the_same_prompts_are_refused() -> None:
    records = [answer(1, "a", 4, 3), answer(2, "b", 2, 1)]
    with pytest.raises(UserError, match="row 3: nothing was measured"):
        tau_difference(records, [1], [3])
    with pytest.raises(UserError, match="is not in both"):
        tau_difference(records, [1], [2])
