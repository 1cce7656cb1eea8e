"""Oracle lengths by context and the upper bound, by hand."""

import numpy as np
import pytest

from aerie.infer.measure.oracle import OracleArrays, by_context, summarise_oracle, upper_bound


def arrays(**columns: list[int]) -> OracleArrays:
    names = ("prompt", "position", "answered", "proposed", "accepted", "oracle", "cap")
    count = len(next(iter(columns.values())))
    return OracleArrays(*(np.array(columns.get(name, [0] * count), dtype=np.int64) for name in names))


LENGTHS = arrays(
    position=[10, 32, 33, 64, 9000], proposed=[5, 5, 5, 3, 5], accepted=[5, 2, 0, 3, 5], oracle=[7, 2, 0, 8, 8],
    cap=[8, 8, 8, 8, 8],
)  # fmt: skip


def test_buckets_hold_the_places_up_to_their_edge() -> None:
    first, second, last = by_context(LENGTHS)
    assert (first["above"], first["up_to"], first["cycles"]) == (0, 32, 2)
    assert (second["above"], second["up_to"], second["cycles"]) == (32, 64, 2)
    assert (last["above"], last["up_to"], last["cycles"]) == (8192, None, 1)
    assert (first["oracle"], first["variance"], first["delta"]) == (4.5, 6.25, 0.5)  # 7 and 2; -2 and +3
    assert (second["variance"], second["delta"], second["censored"]) == (16.0, 0.0, 0.5)


def test_the_upper_bound_drafts_what_is_accepted_and_no_more() -> None:
    found = upper_bound(LENGTHS)
    assert found["policy"]["tau"] == pytest.approx(15 / 5 + 1)
    assert found["policy"]["wasted_levels"] == pytest.approx((0 + 3 + 5 + 0 + 0) / 5)
    assert (found["oracle"]["tau"], found["oracle"]["levels"]) == (pytest.approx(6.0), pytest.approx(5.0))


def test_lengths_are_counted_and_nothing_gives_nothing() -> None:
    assert summarise_oracle(LENGTHS)["lengths"] == [1, 0, 1, 0, 0, 0, 0, 1, 2]
    empty = summarise_oracle(arrays(position=[]))
    assert empty["all"] is None and empty["by_context"] == [] and empty["upper_bound"]["policy"] is None
