"""Laws of reliability, ECE and Brier; the expected numbers are worked out by hand."""

import json

import numpy as np
import pytest

from aerie.infer.measure.bounds import brier, by_depth, ece, is_held_out, reliability, summarise
from aerie.infer.measure.record import CycleArrays
from tests.infer.made_up import cycles

CONFIDENCE = np.array([0.1, 0.2, 0.6, 0.8, 1.0])
ACCEPTANCE = np.array([0.0, 1.0, 1.0, 0.0, 1.0])


def two_cycles() -> CycleArrays:
    """Cycle 0 accepts two tokens and misses the third level; cycle 1 accepts none of two siblings."""
    return CycleArrays(
        prompt=np.array([0, 0, 0, 1, 1]),
        depth=np.array([1, 2, 3, 1, 1]),
        confidence=np.array([0.9, 0.7, 0.5, 0.6, 0.2]),
        survival=np.array([0.9, 0.63, 0.315, 0.6, 0.2]),
        acceptance=np.array([1.0, 1.0, 0.0, 0.0, 0.0]),
        accepted_length=np.array([2, 0]),
        cycle_prompt=np.array([0, 1]),
        temperature=0.0,
    )


def test_bins_hold_counts_and_means_and_the_last_one_its_upper_edge() -> None:
    low, high = reliability(CONFIDENCE, ACCEPTANCE, bins=2)
    assert (low.low, low.high, low.count) == (0.0, 0.5, 2)
    assert low.confidence == pytest.approx(0.15)
    assert low.acceptance == pytest.approx(0.5)
    assert (high.low, high.high, high.count) == (0.5, 1.0, 3)
    assert high.confidence == pytest.approx(0.8)
    assert high.acceptance == pytest.approx(2 / 3)


def test_every_node_is_in_the_bin_that_contains_it_even_on_an_edge_in_single_precision() -> None:
    edges = np.arange(20, dtype=np.float32) / np.float32(20)
    for item in reliability(edges.astype(np.float64), np.zeros(20), bins=20):
        assert item.count == 1
        assert item.confidence == pytest.approx(item.low, abs=1e-6)


def test_an_empty_bin_has_no_means_and_no_weight() -> None:
    bins = reliability(np.array([0.9]), np.array([1.0]), bins=20)
    assert [item.count for item in bins].count(0) == 19
    assert bins[0].confidence is None and bins[0].acceptance is None
    assert ece(bins) == pytest.approx(0.1)


def test_ece_weighs_the_gaps_by_count() -> None:
    expected = (2 * abs(0.15 - 0.5) + 3 * abs(0.8 - 2 / 3)) / 5
    assert ece(reliability(CONFIDENCE, ACCEPTANCE, bins=2)) == pytest.approx(expected)


def test_brier_is_the_squared_error_of_what_happened() -> None:
    assert brier(CONFIDENCE, ACCEPTANCE) == pytest.approx((0.01 + 0.64 + 0.16 + 0.64 + 0.0) / 5)


def test_brier_of_a_probability_is_its_expectation_over_outcomes() -> None:
    # accepted with 0.3: 0.3 * (0.5 - 1)^2 + 0.7 * 0.5^2
    assert brier(np.array([0.5]), np.array([0.3])) == pytest.approx(0.25)
    assert brier(np.array([0.3]), np.array([0.3])) == pytest.approx(0.21)


def test_by_depth_counts_reached_nodes_and_accepted_lengths() -> None:
    first, second, third = by_depth(two_cycles())
    assert (first["nodes"], first["cycles"], first["survived"], first["conditional"]) == (3, 2, 0.5, 0.5)
    assert first["confidence"] == pytest.approx((0.9 + 0.6 + 0.2) / 3)
    assert first["acceptance"] == pytest.approx(1 / 3)
    assert (second["nodes"], second["cycles"], second["survived"], second["conditional"]) == (1, 1, 0.5, 1.0)
    assert (third["nodes"], third["cycles"], third["survived"], third["conditional"]) == (1, 1, 0.0, 0.0)


def test_halves_split_prompts_not_nodes_and_differ_by_what_they_say() -> None:
    arrays = cycles(np.random.default_rng(0))
    value = summarise(arrays, bins=20, seed=0)
    fit, held_out = value["halves"]["fit"], value["halves"]["held_out"]
    held_out_prompts = [prompt for prompt in range(12) if is_held_out(prompt)]
    assert 0 < len(held_out_prompts) < 12
    assert (fit["prompts"], held_out["prompts"]) == (12 - len(held_out_prompts), len(held_out_prompts))
    assert held_out["nodes"] == int(np.isin(arrays.prompt, held_out_prompts).sum())
    assert fit["nodes"] + held_out["nodes"] == value["nodes"] == arrays.prompt.size
    assert value["halves"]["difference"]["ece"] == pytest.approx(held_out["ece"] - fit["ece"])


def test_another_seed_splits_the_prompts_otherwise() -> None:
    splits = {tuple(is_held_out(prompt, seed) for prompt in range(30)) for seed in range(4)}
    assert len(splits) == 4


def test_the_summary_is_json_with_the_contracts_keys_even_without_nodes() -> None:
    none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
    empty = CycleArrays(none, none, nothing, nothing, nothing, none, none, temperature=1.0)
    for arrays in (two_cycles(), empty):
        value = json.loads(json.dumps(summarise(arrays), allow_nan=False))
        assert {"temperature", "ece", "brier", "bins", "by_depth", "halves"} <= value.keys()
        assert len(value["bins"]) == 20
        assert set(value["bins"][0]) == {"low", "high", "count", "confidence", "acceptance"}
    assert summarise(empty)["ece"] is None


def test_a_perfectly_calibrated_head_has_a_small_ece_and_an_overconfident_one_has_not() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.random(20_000)
    calibrated = (generator.random(20_000) < confidence).astype(np.float64)
    overconfident = (generator.random(20_000) < confidence**2).astype(np.float64)
    small = ece(reliability(confidence, calibrated))
    large = ece(reliability(confidence, overconfident))
    assert small is not None and small < 0.02
    assert large is not None and large == pytest.approx(1 / 2 - 1 / 3, abs=0.02)
