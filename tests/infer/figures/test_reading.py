"""The reading in words: each sentence is true of its figures, and what was not measured is not spoken of."""

from typing import Any

import pytest

from aerie.infer.report.page import reading
from tests.infer.figures.made_up import point

NOTHING: dict[str, Any] = {"analysis": None, "tuning": None, "deagle": [], "lengths": []}


def test_nothing_measured_is_nothing_said() -> None:
    assert reading({"rows": []}, NOTHING) == []
    failed = {"status": "error", "tree": {"levels": 1}, "method": "eagle2", "message": "x", "temperature": 0.0}
    assert reading({"rows": [failed]}, NOTHING) == []


@pytest.mark.parametrize(
    ("bounds", "said"), [([1.5, 2.5], "all above 1"), ([0.5, 0.9], "all below 1"), ([0.9, 1.2], "1 is in it")]
)
def test_an_interval_says_on_which_side_of_one_it_lies(bounds: list[float], said: str) -> None:
    one = {**point("s", "k", 0, "eagle2"), "speedup_ci95": bounds}
    long, fast = reading({"rows": [one]}, NOTHING)
    assert long.startswith("A target forward yields 2.00 tokens on average with eagle2, 6 levels, k 10, 60 nodes")
    assert f"2.00 times the speed of the target alone (95 % {bounds[0]:.2f}–{bounds[1]:.2f}, {said})." in fast


def test_a_single_prompt_has_no_interval_and_a_lossy_row_says_so() -> None:
    one = {**point("s", "k", 0, "eagle2"), "verify": "typical: not lossless"}
    fast = reading({"rows": [one]}, NOTHING)[1]
    assert "(too few prompts for an interval), which is NOT lossless." in fast


@pytest.mark.parametrize(("isotonic", "said"), [(0.02, "lowers"), (0.08, "does not lower")])
def test_the_calibrators_gain_is_said_as_it_is(isotonic: float, said: str) -> None:
    held_out = {name: {"ece": ece} for name, ece in (("before", 0.07), ("temperature", 0.075), ("isotonic", isotonic))}
    details = {**NOTHING, "analysis": {"calibrator": {"held_out": held_out}}}
    (sentence,) = reading({"rows": []}, details)
    assert f"the calibrator {said} the expected calibration error: 0.0700 before, 0.0750 with a temperature" in sentence
    assert reading({"rows": []}, {**NOTHING, "analysis": {"calibrator": None}}) == []


def test_what_the_tree_was_tuned_to_is_said_and_its_measurement_where_there_is_one() -> None:
    chain, usual = {"shape": "chain", "levels": 4}, {"shape": "dynamic", "levels": 6, "k": 10, "nodes": 60}
    head = {
        "kind": "eagle1",
        "choice": {"method": "eagle-chain", "tree": chain, "speedup": 2.0},
        "published": {"tree": usual, "speedup": 1.5},
    }
    tuning: dict[str, Any] = {"chosen": "eagle1", "heads": [head], "measured": None}
    (sentence,) = reading({"rows": []}, {**NOTHING, "tuning": tuning})
    assert sentence == (
        "Tuned to this machine: eagle-chain on the eagle1 head with a chain of at most 4 tokens, predicted to be 2.00 "
        "times as fast as the target alone; its published tree (at most 6 levels, k 10 and 60 nodes): 1.50 times."
    )
    against = {"chosen_against_it": 1.2, "chosen_against_it_ci95": [1.1, 1.3]}
    tuning["measured"] = {"against_published": against, "predicted_over_measured": 1.05}
    assert reading({"rows": []}, {**NOTHING, "tuning": tuning})[1].endswith(
        "1.20 times the speed of the published tree (95 % 1.10–1.30, all above 1). Predicted over measured speedup is "
        "1.050: within 15 %."
    )
    best = {"chosen_against_it": 0.9, "chosen_against_it_ci95": [0.8, 0.95]}
    tuning["measured"] = {
        "against_published": against, "against_best_of_grid": best, "predicted_over_measured": 1.2
    }  # fmt: skip
    assert reading({"rows": []}, {**NOTHING, "tuning": tuning})[1].endswith(
        "Against the best of a grid it has 0.90 times (95 % 0.80–0.95, all below 1). Predicted over measured speedup "
        "is 1.200: NOT within 15 %."
    )
