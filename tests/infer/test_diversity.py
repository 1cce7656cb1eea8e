"""Laws of distinct and repeated n-grams."""

from aerie.infer.measure.statistics import distinct_ngrams, repeated_share, repeats


def test_ngrams_are_pooled_over_answers_and_do_not_cross_them() -> None:
    assert distinct_ngrams([[1, 2, 3, 4, 5], [1, 2, 3, 4], [7, 8]], size=4) == (2, 3)


def test_an_ngram_is_repeated_where_its_own_answer_has_had_it_before() -> None:
    assert repeats([1, 2, 1, 2, 1, 2, 3], size=2) == [False, False, True, True, True, False]
    answer = [1, 2, 3, 4, 5]
    assert repeated_share([answer, answer]) == 0.0  # two answers that are alike are no loop
    assert repeated_share([answer, [7] * 6]) == 2 / 5 and repeated_share([[1, 2], []]) is None
