"""SVIP's bounds, entropy ratio and Gamma fit, by hand and against scipy."""

import json

import numpy as np
import pytest
from scipy import stats

from aerie.infer.measure.bounds import (
    approximation,
    bounds,
    bretagnolle_huber,
    entropy_ratio,
    fit_gamma,
    oracle_bound,
    ratio_distribution,
    shares_by_c,
)
from tests.infer.calibration.made_up import laws


def random_laws(seed: int, count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.dirichlet(np.full(6, 0.5), count), generator.dirichlet(np.full(6, 0.5), count)


def test_equations_3_and_12_bound_the_acceptance_of_random_laws() -> None:
    p, q = random_laws(0)
    beta = np.minimum(p, q).sum(1)
    kl = (q * np.log(q / p)).sum(1)
    assert (beta >= oracle_bound(kl)).all() and (beta >= bretagnolle_huber(kl)).all()
    assert (oracle_bound(kl) < 0).any() and (bretagnolle_huber(kl) >= 0).all()


def test_the_bounds_by_hand() -> None:
    assert oracle_bound(np.array([0.5]))[0] == pytest.approx(0.5)
    assert approximation(np.array([0.6]), 0.15)[0] == pytest.approx(0.7)
    assert bretagnolle_huber(np.array([np.log(2.0)]))[0] == pytest.approx(1 - np.sqrt(0.5))


def test_means_are_cut_at_zero_and_holding_is_counted() -> None:
    made = laws(2, tvd=[0.2, 0.9], kl_qp=[0.08, 8.0], entropy=[1.0, 0.04])
    found = bounds(made, c=0.25)
    assert found["acceptance"] == pytest.approx(0.45)
    assert found["means"]["oracle"] == pytest.approx((0.8 + 0.0) / 2)  # 1 - sqrt(.04); 1 - 2 says nothing
    assert found["means"]["approximation"] == pytest.approx((0.5 + 0.9) / 2)
    assert found["holds"] == {"oracle": 1.0, "approximation": 0.5, "bretagnolle_huber": 1.0}  # .1 < .9
    assert found["tighter"] == 0.5
    assert found["curve"]["acceptance"] == pytest.approx([0.1, 0.8])  # sorted
    assert found["curve"]["approximation"] == pytest.approx([0.9, 0.5])


def test_the_entropy_ratio_is_cross_entropy_over_entropy() -> None:
    p, q = random_laws(1)
    entropy, kl = -(q * np.log(q)).sum(1), (q * np.log(q / p)).sum(1)
    cross = -(q * np.log(p)).sum(1)
    made = laws(50, kl_qp=kl, entropy=entropy)
    assert entropy_ratio(made) == pytest.approx(cross / entropy)


def test_equation_8_says_when_the_approximation_is_below_the_oracle_bound() -> None:
    p, q = random_laws(2)
    entropy, kl = -(q * np.log(q)).sum(1), (q * np.log(q / p)).sum(1)
    made = laws(50, kl_qp=kl, entropy=entropy, tvd=1 - np.minimum(p, q).sum(1))
    rows = shares_by_c(made, (0.1, 0.5, 3.0))
    for row in rows:
        below = approximation(entropy, row["c"]) <= oracle_bound(kl) + 1e-12
        assert row["conservative"] == pytest.approx(below.mean())
        assert row["holds"] >= row["conservative"]
    assert rows[0]["conservative"] < rows[1]["conservative"] < rows[2]["conservative"]
    assert rows[0]["bound"] > rows[2]["bound"]


def test_equation_9_is_the_gamma_law_that_is_most_likely() -> None:
    values = np.random.default_rng(0).gamma(0.7, 1 / 2.5, 4000)
    fitted = fit_gamma(values)
    alpha, _, scale = stats.gamma.fit(values, floc=0)
    assert fitted is not None
    assert (fitted.alpha, fitted.beta) == pytest.approx((alpha, 1 / scale), rel=1e-3)
    assert fitted.below(0.3) == pytest.approx(stats.gamma.cdf(0.3, alpha, scale=scale), abs=1e-4)
    assert fitted.below(0.3) == pytest.approx((values <= 0.3).mean(), abs=0.03)


def test_certain_and_infinite_laws_are_left_out_of_the_ratio_and_counted() -> None:
    made = laws(4, kl_qp=[0.5, np.inf, 0.1, 0.2], entropy=[1.0, 1.0, 0.0, 0.4])
    found = ratio_distribution(made)
    assert (found["laws"], found["left_out"]) == (2, 2)
    assert found["mean"] == pytest.approx(0.5)
    assert sum(found["counts"]) == 2 and found["gamma"] is None  # .5 and .5: no spread to fit
    json.dumps(ratio_distribution(laws(0)), allow_nan=False)


def test_the_expected_histogram_sums_to_the_laws() -> None:
    values = np.random.default_rng(1).gamma(1.5, 1.0, 300)
    found = ratio_distribution(laws(300, kl_qp=values, entropy=np.ones(300)))
    assert sum(found["expected"]) == pytest.approx(300) and sum(found["counts"]) == 300
    assert len(found["counts"]) == len(found["edges"]) == len(found["expected"])
