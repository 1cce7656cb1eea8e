"""The two numberings of taps: explicit ones are believed, others are told apart as the servers do, and said."""

from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.model.formats.content import read_taps

HERE, NUMBERED = Path("config.json"), "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("ids", "fallback", "taps"),
    [
        ([1, 3, 4], (2, 4, 5), (2, 4, 5)),  # outputs of blocks, as SpecForge counts
        ([2, 4, 5], (2, 4, 5), (2, 4, 5)),  # entries of hidden_states
        ([1, 7, 9], (2, 4, 5), (2, 8, 10)),  # SGLang's rule: a list that begins with 1 counts outputs
        ([3, 7, 9], (2, 4, 5), (3, 7, 9)),
        ([1, 4, 5], (1, 4, 5), (1, 4, 5)),  # whoever knows the target's taps is believed
        ([1, 7, 9], None, (2, 8, 10)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_foreign_numbers_are_told_apart_and_the_guess_is_said(
    ids: list[int], fallback: tuple[int, ...] | None, taps: tuple[int, ...], nested: bool
) -> None:
    values: dict[str, Any] = {"eagle_config": {NUMBERED: ids}} if nested else {NUMBERED: ids}
    found, guess = read_taps(values, fallback, HERE)
    assert found == taps and guess is not None and str(list(taps)) in guess


def test_specforges_numbers_count_outputs_unless_the_target_says_otherwise() -> None:
    values = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {NUMBERED: [3, 7, 9]}}
    assert read_taps(values, (2, 4, 5), HERE)[0] == (4, 8, 10)
    assert read_taps(values, (3, 7, 9), HERE)[0] == (3, 7, 9)  # whoever knows the taps is believed
    assert read_taps({**values, "architectures": ["Eagle3LlamaForCausalLM"]}, (2, 4, 5), HERE)[0] == (3, 7, 9)  # vLLM's


def test_speculators_numbers_are_entries_by_definition() -> None:
    assert read_taps({NUMBERED: [1, 7, 9]}, (2, 4, 5), HERE, is_speculators=True) == ((1, 7, 9), None)


def test_our_own_numbers_are_believed_over_all_others_if_the_convention_is_named() -> None:
    values = {"after_blocks": [3, 4, 5], "tap_convention": "hidden_states", NUMBERED: [1, 3, 4]}
    assert read_taps(values, (2, 4, 5), HERE) == ((3, 4, 5), None)
    with pytest.raises(UserError, match="tap_convention is 'outputs'"):
        read_taps({**values, "tap_convention": "outputs"}, None, HERE)


def test_without_numbers_the_callers_are_taken_and_said_or_nothing_is_loaded() -> None:
    found, guess = read_taps({}, (2, 4, 5), HERE)
    assert found == (2, 4, 5) and guess == "names no taps; [2, 4, 5] are taken (entries of hidden_states)"
    with pytest.raises(UserError, match="does not say which of the target's states"):
        read_taps({}, None, HERE)


@pytest.mark.parametrize("ids", [[4, 2, 5], [2, 2, 5], []])
def test_numbers_out_of_order_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="must ascend"):
        read_taps({NUMBERED: ids}, (2, 4, 5), HERE)


@pytest.mark.parametrize("ids", ["2,4,5", [True, 4, 5], [-1, 4, 5], [2.0, 4, 5]])
def test_numbers_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(UserError, match="must be a list of block numbers"):
        read_taps({NUMBERED: ids}, (2, 4, 5), HERE)
