"""Laws of distinct n-grams and of the simulated prompt lookup."""

import random

import pytest

from aerie.infer.report.statistics import (
    distinct_ngrams,
    pooled_prompt_lookup_tau,
    prompt_lookup_cycles,
    prompt_lookup_tau,
    repeated_share,
    repeats,
)


def test_ngrams_are_pooled_over_answers_and_do_not_cross_them() -> None:
    assert distinct_ngrams([[1, 2, 3, 4, 5], [1, 2, 3, 4], [7, 8]], size=4) == (2, 3)


def test_an_ngram_is_repeated_where_its_own_answer_has_had_it_before() -> None:
    assert repeats([1, 2, 1, 2, 1, 2, 3], size=2) == [False, False, True, True, True, False]
    answer = [1, 2, 3, 4, 5]
    assert repeated_share([answer, answer]) == 0.0  # two answers that are alike are no loop
    assert repeated_share([answer, [7] * 6]) == 2 / 5 and repeated_share([[1, 2], []]) is None


def test_an_output_without_repeats_gains_nothing() -> None:
    assert prompt_lookup_tau([1, 2, 3], [10, 11, 12, 13, 14]) == 1.0


def test_an_output_that_copies_the_prompt_is_taken_in_strides() -> None:
    prompt = list(range(100, 130))
    # 100 is the prefill's; then 10 drafted + 1 bonus, 10 + 1, and the 7 that are left
    assert prompt_lookup_cycles(prompt, prompt) == [11, 11, 7]
    assert prompt_lookup_tau(prompt, prompt) == pytest.approx(29 / 3)


def test_a_draft_is_kept_up_to_its_first_wrong_token() -> None:
    # after 1 the prompt says 2 3 4; the output says 2 3 9: two accepted and the bonus 9
    assert prompt_lookup_cycles([1, 2, 3, 4], [1, 2, 3, 9]) == [3]


def test_longer_ngrams_are_tried_first() -> None:
    # the bigram 1 2 was followed by 7, the leftmost 2 alone by 5
    prompt = [2, 5, 1, 2, 7]
    assert prompt_lookup_cycles([*prompt, 1], [2, 7], max_ngram=3) == [1]
    assert prompt_lookup_cycles([*prompt, 1], [2, 7, 1], max_ngram=3) == [2]
    assert prompt_lookup_cycles([*prompt, 1], [2, 7, 1], max_ngram=1) == [1, 1]


def test_leftmost_and_latest_match_differ_where_the_context_changed_its_mind() -> None:
    prompt = [1, 2, 9, 1, 3, 8]
    assert prompt_lookup_cycles(prompt, [1, 3, 8]) == [1, 1]
    assert prompt_lookup_cycles(prompt, [1, 3, 8], latest=True) == [2]


@pytest.mark.parametrize("latest", [False, True])
def test_cycles_equal_those_of_a_search_through_every_window(latest: bool) -> None:
    generator = random.Random(0)
    for _ in range(60):
        prompt = [generator.randrange(4) for _ in range(generator.randrange(1, 20))]
        output = [generator.randrange(4) for _ in range(generator.randrange(1, 40))]
        assert prompt_lookup_cycles(prompt, output, latest=latest) == searched_cycles(prompt, output, latest)


def test_pooled_tau_weighs_cycles_not_answers() -> None:
    copied = list(range(100, 130))
    assert pooled_prompt_lookup_tau([(copied, copied), ([1], [5, 6, 7])]) == pytest.approx((29 + 2) / (3 + 2))
    assert pooled_prompt_lookup_tau([([1], [5])]) == 1.0


def searched_cycles(prompt: list[int], output: list[int], latest: bool) -> list[int]:
    """The definition, without an index."""
    done, cycles = 1, []
    while done < len(output):
        context = prompt + output[:done]
        draft: list[int] = []
        for size in (3, 2, 1):
            starts = [i for i in range(len(context) - size) if context[i : i + size] == context[-size:]]
            if starts:
                start = (starts[-1] if latest else starts[0]) + size
                draft = context[start : start + 10]
                break
        kept = 0
        while kept < min(len(draft), len(output) - done) and draft[kept] == output[done + kept]:
            kept += 1
        cycles.append(min(kept + 1, len(output) - done))
        done += cycles[-1]
    return cycles
