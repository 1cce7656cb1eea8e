"""What is said of recorded tables, on numbers worked out by hand and on random laws."""

import json

import numpy as np
import pandas as pd
import pytest

from aerie.infer.measure import bounds
from aerie.infer.measure.bounds import reliability
from tests.infer.calibration.made_up import analysis, laws
from tests.infer.made_up import nodes_and_cycles

CONFIDENCE = np.array([0.1, 0.2, 0.6, 0.8, 1.0])
ACCEPTANCE = np.array([0.0, 1.0, 1.0, 0.0, 1.0])


def test_bins_hold_counts_and_means_and_ece_and_brier_follow() -> None:
    found = reliability(CONFIDENCE, ACCEPTANCE, bins=2)
    low, high = found["bins"]
    assert (low["low"], low["high"], low["count"], high["count"]) == (0.0, 0.5, 2, 3)  # the last bin is closed
    assert (low["confidence"], low["acceptance"]) == (pytest.approx(0.15), pytest.approx(0.5))
    assert found["ece"] == pytest.approx((2 * abs(0.15 - 0.5) + 3 * abs(0.8 - 2 / 3)) / 5)
    assert found["brier"] == pytest.approx((0.01 + 0.64 + 0.16 + 0.64 + 0.0) / 5)
    # accepted with 0.3: 0.3 * (0.5 - 1)^2 + 0.7 * 0.5^2
    assert reliability(np.array([0.5]), np.array([0.3]))["brier"] == pytest.approx(0.25)

    # values on an edge in single precision are in the bin above it
    edges = (np.arange(20, dtype=np.float32) / np.float32(20)).astype(np.float64)
    assert [item["count"] for item in reliability(edges, np.zeros(20))["bins"]] == [1] * 20


def test_by_depth_counts_reached_nodes_and_accepted_lengths() -> None:
    """Cycle 0 accepts two tokens and misses the third level; cycle 1 accepts none of two siblings."""
    nodes = pd.DataFrame({"depth": [1, 2, 3, 1, 1], "confidence": [0.9, 0.7, 0.5, 0.6, 0.2]})
    nodes["acceptance"] = [1.0, 1.0, 0.0, 0.0, 0.0]
    first, second, third = bounds.by_depth(nodes, pd.DataFrame({"accepted": [2, 0]}))
    assert (first["nodes"], first["cycles"], first["survived"], first["conditional"]) == (3, 2, 0.5, 0.5)
    assert (first["confidence"], first["acceptance"]) == (pytest.approx(1.7 / 3), pytest.approx(1 / 3))
    assert (second["nodes"], second["cycles"], second["survived"], second["conditional"]) == (1, 1, 0.5, 1.0)
    assert (third["survived"], third["conditional"]) == (0.0, 0.0)


def test_halves_split_prompts_and_the_summary_is_json_even_without_nodes() -> None:
    nodes, cycles = nodes_and_cycles(np.random.default_rng(0))
    value = bounds.summarise(nodes, cycles, 0.0)
    fit, other = value["halves"]["fit"], value["halves"]["held_out"]
    assert fit["prompts"] + other["prompts"] == 12 and 0 < fit["prompts"] < 12
    assert fit["nodes"] + other["nodes"] == value["nodes"] == len(nodes)
    assert other["nodes"] == int(bounds.held_out(nodes.prompt).sum())
    assert value["halves"]["difference"]["ece"] == pytest.approx(other["ece"] - fit["ece"])
    empty = json.loads(json.dumps(bounds.summarise(nodes[:0], cycles[:0], 0.0), allow_nan=False))
    assert empty["ece"] is None and empty.keys() == value.keys() and len(empty["bins"]) == 20


def test_equations_22_to_24_by_depth() -> None:
    frontier = pd.DataFrame({"prompt": 0, "cycle": [0, 0, 0, 1, 1], "depth": [1, 1, 2, 1, 2]})
    frontier["survival"], frontier["accepted"] = [0.6, 0.3, 0.6, 0.7, 0.2], [True, False, True, True, False]
    cycles = pd.DataFrame({"prompt": [0, 0], "cycle": [0, 1], "accepted": [1, 1]})
    first, second = bounds.level_table(frontier, cycles)
    assert (first["mass"], first["held"], first["reached"]) == (pytest.approx(0.8), 1.0, 1.0)
    assert (second["mass"], second["held"], second["reached"]) == (pytest.approx(0.4), 0.5, 0.0)
    assert (second["cycles"], second["expected"]) == (2, pytest.approx(1.2))


def test_equation_13_failures_are_counted_over_all_drafted_children() -> None:
    # p = (.5, .5), q = (.8, .2): TV .3, KL(p||q) = .5 ln(.5/.8) + .5 ln(.5/.2) = .2231, bound .334
    kl = 0.5 * np.log(0.5 / 0.8) + 0.5 * np.log(0.5 / 0.2)
    made = laws(3, q=[0.8] * 3, p=[0.5] * 3, largest_gap=[0.3, 0.31, 0.1], tvd=[0.3] * 3, kl_pq=[kl, 0.1, np.inf])
    found = bounds.token_inequalities(made)
    assert found["gap_above_tv"] == pytest.approx(1 / 3)  # .31 > .3: no pair of laws does that
    assert found["tv_above_bound"] == pytest.approx(1 / 3)  # .3 > sqrt(.05), and an infinite bound cannot fail
    assert found["gap"] == pytest.approx(0.3) and found["bound"] == pytest.approx((np.sqrt(kl / 2) + np.sqrt(0.05)) / 2)


def test_equations_15_to_19_fail_where_an_indicator_is_far_from_the_confidence() -> None:
    # agrees with c = .6, TV = .1, bound .2: |1 - .6| = .4 is above both; with TV .5 it is within
    made = laws(3, agrees=[True, True, False], top_q=[0.6, 0.6, 0.2], tvd=[0.1, 0.5, 0.1], kl_pq=[0.08, 0.5, 0.08])
    found = bounds.deagle_bound(made)
    assert found["greedy_agreement"] == found["above_tv"] == pytest.approx(2 / 3)  # tokens 0 and 2 (.2 > .1)
    assert found["above_bound"] == pytest.approx(1 / 3)  # token 2: .2 is not above sqrt(.04) = .2


def random_laws(seed: int, count: int = 50) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    p, q = generator.dirichlet(np.full(6, 0.5), count), generator.dirichlet(np.full(6, 0.5), count)
    kl, entropy = (q * np.log(q / p)).sum(1), -(q * np.log(q)).sum(1)
    return laws(count, kl_qp=kl, entropy=entropy, tvd=1 - np.minimum(p, q).sum(1))


def test_equations_3_and_12_bound_the_acceptance_of_random_laws() -> None:
    found = bounds.acceptance_bounds(random_laws(0), c=0.15)
    assert found["holds"]["oracle"] == found["holds"]["bretagnolle_huber"] == 1.0 > found["holds"]["approximation"]
    made = laws(2, tvd=[0.2, 0.9], kl_qp=[0.08, 8.0], entropy=[1.0, 0.04])
    found = bounds.acceptance_bounds(made, c=0.25)
    assert found["acceptance"] == pytest.approx(0.45)
    assert found["means"]["oracle"] == pytest.approx((0.8 + 0.0) / 2)  # 1 - sqrt(.04); 1 - 2 says nothing
    assert found["means"]["approximation"] == pytest.approx((0.5 + 0.9) / 2)
    assert found["holds"] == {"oracle": 1.0, "approximation": 0.5, "bretagnolle_huber": 1.0}  # .1 < .9
    assert found["tighter"] == 0.5 and found["curve"]["acceptance"] == pytest.approx([0.1, 0.8])  # sorted
    assert found["curve"]["approximation"] == pytest.approx([0.9, 0.5])


def test_equation_8_says_when_the_approximation_is_below_the_oracle_bound() -> None:
    made = random_laws(2)
    rows = bounds.entropy_ratio(made, (0.1, 0.5, 3.0))["by_c"]
    for row in rows:
        below = np.sqrt(row["c"] * made.entropy) >= np.sqrt(made.kl_qp / 2) - 1e-12
        assert row["conservative"] == pytest.approx(below.mean()) and row["holds"] >= row["conservative"]
    assert rows[0]["conservative"] < rows[1]["conservative"] < rows[2]["conservative"]


def test_equation_9_is_the_gamma_law_that_is_most_likely() -> None:
    values = np.random.default_rng(0).gamma(0.7, 1 / 2.5, 4000)
    ratio = bounds.entropy_ratio(laws(4000, kl_qp=values, entropy=np.ones(4000)))["ratio"]
    assert sum(ratio["expected"]) == pytest.approx(4000) and sum(ratio["counts"]) == 4000
    assert ratio["gamma"] == {"alpha": pytest.approx(0.7, rel=0.1), "beta": pytest.approx(2.5, rel=0.1)}
    # certain and infinite laws are left out; .5 twice: no spread to fit
    ratio = bounds.entropy_ratio(laws(4, kl_qp=[0.5, np.inf, 0.1, 0.2], entropy=[1.0, 1.0, 0.0, 0.4]))["ratio"]
    assert (ratio["laws"], sum(ratio["counts"]), ratio["gamma"]) == (2, 2, None)


def test_figure_3a_looks_back_from_the_rejected_token_in_its_own_cycle() -> None:
    followed, kl = [True, True, False, False, True, False], [0.1, 0.2, 3.0, 5.0, 9.0, np.inf]
    made = laws(6, cycle=[0, 0, 0, 1, 2, 3], depth=[1, 2, 3, 1, 1, 1], followed=followed, kl_qp=kl)
    found = {row["offset"]: row for row in bounds.divergence_before_rejection(made)}
    assert list(found) == [-4, -3, -2, -1, 0]
    assert [found[offset]["kl"] for offset in (0, -1, -2, -3)] == [4.0, 0.2, 0.1, None]  # without the infinite one


def test_the_token_table_has_all_tokens_then_the_hardest_then_the_easiest() -> None:
    tokens = [token for token in range(6) for _ in range(5)] + [9]  # 9 is too rare
    chance = {0: 0.9, 1: 0.1, 2: 0.5, 3: 1.0, 4: 0.2, 5: 0.6, 9: 0.0}
    made = laws(31, token=tokens, acceptance=[chance[token] for token in tokens], entropy=np.arange(31.0))
    table = bounds.token_table(made, lambda token: f"<{token}>", most=4)
    assert [row["text"] for row in table] == ["all tokens", "<1>", "<4>", "<0>", "<3>"]
    assert table[0]["count"] == 31 and table[0]["entropy"] == 15.0
    assert (table[1]["count"], table[1]["entropy"], table[1]["acceptance"]) == (5, 7.0, pytest.approx(0.1))


def test_oracle_lengths_by_context() -> None:
    cycles = pd.DataFrame({"position": [10, 32, 33, 64, 9000, 9001], "levels": [5, 5, 5, 3, 5, 0], "cap": 8})
    cycles["accepted"], cycles["oracle"] = [5, 2, 0, 3, 5, 0], [7, 2, 0, 8, 8, np.nan]  # the last one drafted nothing
    found = bounds.oracle_summary(cycles)
    first, second, last = found["by_context"]
    assert (first["above"], first["up_to"], first["cycles"]) == (0, 32, 2)
    assert (last["above"], last["up_to"], last["cycles"]) == (8192, None, 1)
    assert (first["oracle"], first["variance"], first["delta"]) == (4.5, 6.25, 0.5)  # 7 and 2; -2 and +3
    assert (second["variance"], second["delta"], second["censored"]) == (16.0, 0.0, 0.5)
    assert bounds.oracle_summary(cycles[:0]) is None


def test_a_whole_analysis_is_json() -> None:
    assert json.loads(json.dumps(analysis(), allow_nan=False))["laws"]["tokens"][0]["count"] == 80
