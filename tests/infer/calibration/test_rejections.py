"""Tables of accepted and rejected tokens on a handful of laws."""

import numpy as np
import pytest

from aerie.infer.measure.bounds import divergence_before_rejection, entropy_by_outcome, sorted_laws, token_table
from tests.infer.calibration.made_up import laws


def test_entropy_is_averaged_by_outcome_for_each_task() -> None:
    made = laws(4, prompt=[0, 0, 1, 1], accepted=[True, False, True, True], entropy=[0.2, 2.0, 0.4, 0.6])
    every, sums, code = entropy_by_outcome(made, ("sums", "code"))
    assert (every["task"], every["accepted"], every["rejected"]) == ("all", pytest.approx(0.4), 2.0)
    assert (sums["task"], sums["accepted"], sums["rejected"]) == ("sums", pytest.approx(0.2), 2.0)
    assert (code["task"], code["laws"], code["rejected"]) == ("code", 2, None)
    assert len(entropy_by_outcome(made, ("sums", "sums"))) == 1


def test_figure_3a_looks_back_from_the_rejected_token_in_its_own_cycle() -> None:
    made = laws(
        5,
        cycle=[0, 0, 0, 1, 2],
        depth=[1, 2, 3, 1, 1],
        followed=[True, True, False, False, True],
        kl_qp=[0.1, 0.2, 3.0, 5.0, 9.0],
    )
    found = {row["offset"]: row for row in divergence_before_rejection(made)}
    assert list(found) == [-4, -3, -2, -1, 0]
    assert (found[0]["laws"], found[0]["kl"]) == (2, 4.0)
    assert (found[-1]["kl"], found[-2]["kl"], found[-3]["laws"], found[-3]["kl"]) == (0.2, 0.1, 0, None)


def test_an_infinite_divergence_is_counted_apart() -> None:
    found = divergence_before_rejection(laws(2, cycle=[0, 1], depth=[1, 1], kl_qp=[np.inf, 2.0]))
    assert (found[-1]["infinite"], found[-1]["laws"], found[-1]["kl"]) == (1, 2, 2.0)


def test_figure_3b_averages_sorted_laws_by_outcome() -> None:
    made = laws(3, accepted=[True, True, False], ranked=[[-0.1, -3.0], [-0.3, -5.0], [-2.0, -2.5]])
    found = sorted_laws(made)
    assert found["ranks"] == [1, 2]
    assert found["accepted"] == pytest.approx([-0.2, -4.0]) and found["rejected"] == [-2.0, -2.5]


def test_the_token_table_has_all_tokens_then_the_hardest_then_the_easiest() -> None:
    tokens = [token for token in range(6) for _ in range(5)] + [9]  # 9 is too rare
    chance = {0: 0.9, 1: 0.1, 2: 0.5, 3: 1.0, 4: 0.2, 5: 0.6, 9: 0.0}
    made = laws(31, token=tokens, acceptance=[chance[token] for token in tokens], entropy=np.arange(31.0))
    table = token_table(made, lambda token: f"<{token}>", most=4)
    assert [row["text"] for row in table] == ["all tokens", "<1>", "<4>", "<0>", "<3>"]
    assert table[0]["count"] == 31 and table[0]["entropy"] == 15.0
    assert (table[1]["count"], table[1]["entropy"], table[1]["acceptance"]) == (5, 7.0, pytest.approx(0.1))
