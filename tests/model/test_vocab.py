"""The draft vocabulary: most frequent tokens, ties by id, forced ones always in, and the published form of it."""

import numpy as np
import pytest
import torch

from aerie.configs.errors import UserError
from aerie.model.heads.eagle import DraftVocabulary

COUNTS = np.array([0, 5, 2, 9, 2, 2, 0])
SOME = DraftVocabulary.of_ids(torch.tensor([9, 2, 5]), 12)


@pytest.mark.parametrize(
    ("size", "forced", "ids"),
    [
        (3, (), [1, 2, 3]),  # ties go to the smaller id
        (6, (), [0, 1, 2, 3, 4, 5]),
        (7, (), [0, 1, 2, 3, 4, 5, 6]),
        (3, {6, 0}, [0, 3, 6]),
        (2, [3], [1, 3]),
    ],
)
def test_the_most_frequent_tokens_and_forced_ones_are_in(size: int, forced: tuple[int, ...], ids: list[int]) -> None:
    vocabulary = DraftVocabulary.most_frequent(COUNTS, size, forced)
    assert vocabulary.ids.tolist() == ids
    assert vocabulary.coverage(COUNTS) == COUNTS[ids].sum() / COUNTS.sum()


def test_d2t_holds_offsets_t2d_marks_the_same_tokens_and_ids_go_there_and_back() -> None:
    assert SOME.d2t.tolist() == [2, 4, 7] and SOME.t2d.nonzero().flatten().tolist() == [2, 5, 9]
    assert (SOME.size, SOME.vocab_size, SOME.d2t.dtype, SOME.t2d.dtype) == (3, 12, torch.int64, torch.bool)
    assert SOME.target_ids(torch.tensor([[2, 0], [1, 1]])).tolist() == [[9, 2], [5, 5]]
    assert DraftVocabulary.of_tables(SOME.d2t, SOME.t2d, "file").ids.equal(SOME.ids)


@pytest.mark.parametrize(
    ("size", "forced", "said"),
    [
        (8, [], "draft_vocab_size: 8 is larger than the target's vocabulary of 7"),
        (2, [0, 1, 2], "draft_vocab_size: 2 has no room for 3 special"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(size: int, forced: list[int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DraftVocabulary.most_frequent(COUNTS, size, forced)


def test_tables_that_are_none_and_a_vocabulary_that_never_ends_a_turn_are_refused() -> None:
    with pytest.raises(UserError, match=r"file: d2t and t2d name other tokens .* d2t holds offsets"):
        DraftVocabulary.of_tables(SOME.ids, SOME.t2d, "file")
    with pytest.raises(UserError, match="3 and 12 of them"):
        DraftVocabulary.of_tables(SOME.d2t, torch.ones(12, dtype=torch.bool), "file")
    SOME.check_ends([1, 5], "head")
    SOME.check_ends([], "head")
    with pytest.raises(UserError, match=r"head: none of the target's end-of-turn tokens \[1, 3\]"):
        SOME.check_ends([3, 1], "head")
