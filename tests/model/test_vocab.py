"""The draft vocabulary: most frequent tokens, ties by id, forced ones always in, and the published form of it."""

import time

import numpy as np
import pytest
import torch

from aerie.configs.errors import UserError
from aerie.model.vocab import DraftVocabulary


def ids_of(vocabulary: DraftVocabulary) -> list[int]:
    ids: list[int] = vocabulary.ids.tolist()
    return ids


def test_the_most_frequent_tokens_are_in_and_ties_go_to_the_smaller_id() -> None:
    counts = np.array([0, 5, 2, 9, 2, 2, 0])
    assert ids_of(DraftVocabulary.most_frequent(counts, 3)) == [1, 2, 3]
    assert ids_of(DraftVocabulary.most_frequent(counts, 4)) == [1, 2, 3, 4]
    assert ids_of(DraftVocabulary.most_frequent(counts, 6)) == [0, 1, 2, 3, 4, 5]


def test_forced_tokens_are_in_however_rare() -> None:
    counts = np.array([0, 5, 2, 9, 2, 2, 0])
    assert ids_of(DraftVocabulary.most_frequent(counts, 3, forced={6, 0})) == [0, 3, 6]
    assert ids_of(DraftVocabulary.most_frequent(counts, 2, forced=[3])) == [1, 3]


def test_d2t_holds_offsets_and_t2d_marks_the_same_tokens() -> None:
    vocabulary = DraftVocabulary.of_ids(torch.tensor([9, 2, 5]), 12)
    assert vocabulary.d2t.tolist() == [2, 4, 7] and vocabulary.d2t.dtype == torch.int64
    assert vocabulary.t2d.nonzero().flatten().tolist() == [2, 5, 9] and vocabulary.t2d.dtype == torch.bool
    assert (vocabulary.size, vocabulary.vocab_size) == (3, 12)
    vocabulary.check("here")


def test_ids_go_there_and_back_and_a_missing_one_is_told() -> None:
    vocabulary = DraftVocabulary.of_ids(torch.tensor([2, 5, 9]), 12)
    assert vocabulary.target_ids(torch.tensor([[2, 0], [1, 1]])).tolist() == [[9, 2], [5, 5]]
    assert vocabulary.draft_ids(torch.arange(12)).tolist() == [-1, -1, 0, -1, -1, 1, -1, -1, -1, 2, -1, -1]
    everything = DraftVocabulary.identity(12)
    assert everything.target_ids(torch.arange(12)).equal(everything.draft_ids(torch.arange(12)))
    assert everything.d2t.eq(0).all() and everything.t2d.all()


def test_a_vocabulary_as_large_as_the_targets_is_the_identity() -> None:
    vocabulary = DraftVocabulary.most_frequent(np.array([0, 4, 1]), 3)
    assert vocabulary.d2t.equal(DraftVocabulary.identity(3).d2t)


def test_coverage_is_the_share_of_counted_tokens() -> None:
    counts = np.array([10, 30, 0, 60])
    assert DraftVocabulary.most_frequent(counts, 2).coverage(counts) == 0.9
    assert DraftVocabulary.most_frequent(counts, 1, forced=[2]).coverage(counts) == 0.0
    assert DraftVocabulary.identity(4).coverage(np.zeros(4, dtype=np.int64)) == 1.0


@pytest.mark.parametrize(
    ("size", "forced", "message"),
    [
        (6, [], "draft_vocab_size: 6 is larger than the target's vocabulary of 5; set it to 5 or less"),
        (2, [0, 1, 2], "draft_vocab_size: 2 has no room for the 3 special"),
        (2, [7], "token id 7 is outside the target's 5"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(size: int, forced: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DraftVocabulary.most_frequent(np.arange(5), size, forced)


def test_an_index_table_in_the_place_of_offsets_is_found() -> None:
    good = DraftVocabulary.of_ids(torch.tensor([2, 5, 9]), 12)
    with pytest.raises(UserError, match="file: draft id 1 is the target's 6 by d2t and 5 by t2d; d2t holds offsets"):
        DraftVocabulary(good.ids, good.t2d).check("file")
    with pytest.raises(UserError, match="t2d marks 12 tokens and d2t has 3"):
        DraftVocabulary(good.d2t, torch.ones(12, dtype=torch.bool)).check("file")


def test_a_vocabulary_that_never_ends_a_turn_is_refused() -> None:
    vocabulary = DraftVocabulary.of_ids(torch.tensor([2, 5, 9]), 12)
    vocabulary.check_ends([1, 5], "head")
    vocabulary.check_ends([], "head")
    with pytest.raises(UserError, match=r"head: none of the target's end-of-turn tokens \[1, 3\]"):
        vocabulary.check_ends([3, 1], "head")


def test_32k_of_150k_tokens_are_chosen_in_a_second() -> None:
    counts = np.random.default_rng(0).zipf(1.3, 150_000).astype(np.int64)
    started = time.process_time()
    vocabulary = DraftVocabulary.most_frequent(counts, 32_000, forced=range(149_000, 149_300))
    assert time.process_time() - started < 1.0
    vocabulary.check("here")
    assert vocabulary.size == 32_000 and bool(vocabulary.t2d[149_000:149_300].all())
    kept = np.sort(counts)[::-1][:32_000].sum() / counts.sum()
    assert kept - 0.01 < vocabulary.coverage(counts) <= kept
