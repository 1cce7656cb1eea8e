"""The inequalities of DEAGLE's section 3.2 counted on laws worked out by hand."""

import json

import numpy as np
import pytest

from aerie.infer.measure.bounds import deagle_bound, pinsker, token_inequalities
from tests.infer.calibration.made_up import laws


def test_equation_12_keeps_pinskers_half() -> None:
    assert pinsker(np.array([0.0, 0.5, 2.0])).tolist() == pytest.approx([0.0, 0.5, 1.0])


def test_equation_13_failures_are_counted_over_all_drafted_children() -> None:
    # p = (.5, .5), q = (.8, .2): TV .3, KL(p||q) = .5 ln(.5/.8) + .5 ln(.5/.2) = .2231, bound .334
    kl = 0.5 * np.log(0.5 / 0.8) + 0.5 * np.log(0.5 / 0.2)
    made = laws(2, q=[0.8, 0.8], p=[0.5, 0.5], largest_gap=[0.3, 0.31], tvd=[0.3, 0.3], kl_pq=[kl, 0.1])
    found = token_inequalities(made)
    assert found["gap_above_tv"] == 0.5  # .31 > .3: no pair of laws does that
    assert found["tv_above_bound"] == 0.5  # .3 > sqrt(.05)
    assert found["gap"] == pytest.approx(0.3) and found["tv"] == pytest.approx(0.3)
    assert found["bound"] == pytest.approx((np.sqrt(kl / 2) + np.sqrt(0.05)) / 2)


def test_a_draft_vocabulary_that_misses_tokens_has_an_infinite_bound_that_cannot_fail() -> None:
    found = token_inequalities(laws(2, tvd=[0.4, 0.1], largest_gap=[0.4, 0.1], kl_pq=[np.inf, 0.5]))
    assert (found["bound_infinite"], found["tv_above_bound"], found["bound"]) == (0.5, 0.0, 0.5)
    assert found["bound_vacuous"] == 0.5
    json.dumps(found, allow_nan=False)


def test_equations_15_to_19_fail_where_an_indicator_is_far_from_the_confidence() -> None:
    # agrees with c = .6, TV = .1, bound .2: |1 - .6| = .4 is above both; with TV .5 it is within
    made = laws(3, agrees=[True, True, False], top_q=[0.6, 0.6, 0.2], tvd=[0.1, 0.5, 0.1], kl_pq=[0.08, 0.5, 0.08])
    found = deagle_bound(made, bins=5)
    assert found["greedy_agreement"] == pytest.approx(2 / 3)
    assert found["above_tv"] == pytest.approx(2 / 3)  # tokens 0 and 2 (.2 > .1)
    assert found["above_bound"] == pytest.approx(1 / 3)  # token 2: .2 is not above sqrt(.04) = .2
    assert (found["above_tv_where_agreed"], found["above_tv_where_not"]) == (0.5, 1.0)
    low, high = found["bins"]
    assert (low["count"], low["agreement"], low["above_tv"]) == (1, 0.0, True)
    # the bin of c = .6: agreement 1, gap .4, mean TV .3, mean bound (.2 + .5) / 2 = .35
    assert (high["count"], high["above_tv"], high["above_bound"]) == (2, True, True)
    assert high["bound"] == pytest.approx(0.35)
    assert found["tokens_in_bins_above_bound"] == pytest.approx(2 / 3)


def test_no_laws_give_no_shares() -> None:
    found = {**token_inequalities(laws(0)), **deagle_bound(laws(0))}
    assert found["greedy_agreement"] is None and found["above_tv"] is None and found["bins"] == []
