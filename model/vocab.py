"""The draft vocabulary: the few target tokens that an EAGLE-3 head can draft, with its own smaller LM head.

The published form is kept: `d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` is a mask over the
target's ids. Draft ids ascend with target ids.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.errors import UserError

Counts = NDArray[np.int64]
DEFAULT_SIZE = 32_000  # EAGLE-3's published heads


@dataclass(frozen=True)
class DraftVocabulary:
    """Vd of the V target tokens."""

    d2t: Tensor  # [Vd] int64
    t2d: Tensor  # [V] bool

    @classmethod
    def identity(cls, vocab_size: int) -> "DraftVocabulary":
        """The whole target vocabulary."""
        return cls(torch.zeros(vocab_size, dtype=torch.long), torch.ones(vocab_size, dtype=torch.bool))

    @classmethod
    def of_ids(cls, ids: Tensor, vocab_size: int) -> "DraftVocabulary":
        """The vocabulary of these distinct target ids [Vd], in any order."""
        ordered = ids.long().sort().values
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ordered] = True
        return cls(ordered - torch.arange(len(ordered)), t2d)

    @classmethod
    def of_tables(cls, d2t: Tensor, t2d: Tensor, place: str) -> "DraftVocabulary":
        """The vocabulary in the two tables of a file, checked; UserError, naming place, for what are no such tables."""
        if d2t.ndim != 1 or t2d.ndim != 1:
            raise UserError(f"{place}: d2t has shape {list(d2t.shape)} and t2d {list(t2d.shape)}; they must be lists")
        if d2t.is_complex() or d2t.dtype == torch.bool or not torch.equal(d2t.long().to(d2t.dtype), d2t):
            raise UserError(f"{place}: d2t holds {d2t.dtype} that are no whole numbers; it must be token offsets")
        if not torch.equal(t2d.bool().to(t2d.dtype), t2d):
            raise UserError(f"{place}: t2d holds other values than 0 and 1; it must mark the draft tokens")
        vocabulary, marked = cls(d2t.long(), t2d.bool()), t2d.nonzero().flatten()
        if len(marked) != len(d2t):
            raise UserError(f"{place}: t2d marks {len(marked):,} tokens and d2t has {len(d2t):,}; the file is damaged")
        wrong = (vocabulary.ids != marked).nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            raise UserError(
                f"{place}: draft id {first:,} is the target's {int(vocabulary.ids[first]):,} by d2t and "
                f"{int(marked[first]):,} by t2d; d2t holds offsets (target id - draft id), not target ids"
            )
        return vocabulary

    @classmethod
    def most_frequent(cls, counts: Counts, size: int, forced: Collection[int] = ()) -> "DraftVocabulary":
        """The `size` most frequent ids by counts [V], the smaller id first where counts tie; forced ids always in."""
        vocab_size = len(counts)
        check_size(size, vocab_size)
        outside = [number for number in forced if not 0 <= number < vocab_size]
        if outside:
            raise UserError(f"draft vocabulary: token id {outside[0]:,} is outside the target's {vocab_size:,}")
        if len(set(forced)) > size:
            raise UserError(
                f"head.draft_vocab_size: {size:,} has no room for the {len(set(forced)):,} special and end-of-turn "
                f"tokens that must be in it; set it higher"
            )
        rank = counts.astype(np.int64, copy=True)
        rank[list(forced)] = np.iinfo(np.int64).max
        chosen = np.argsort(-rank, kind="stable")[:size]
        return cls.of_ids(torch.from_numpy(chosen), vocab_size)

    @property
    def size(self) -> int:
        return self.d2t.shape[0]

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.t2d.shape[0]

    @property
    def ids(self) -> Tensor:
        """The target ids [Vd], ascending: the rows of the target's LM head that the draft laws are about."""
        return self.target_ids(torch.arange(self.size, device=self.d2t.device))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target ids of draft ids, of the same shape."""
        return draft_ids + self.d2t[draft_ids]

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """The draft ids of target ids, of the same shape; -1 where the draft vocabulary lacks one."""
        numbers = torch.where(self.t2d, self.t2d.long().cumsum(0) - 1, -1)  # [V]
        return numbers[target_ids]

    def coverage(self, counts: Counts) -> float:
        """The share of the counted tokens [V] that the draft vocabulary has; 1 where nothing was counted."""
        total = int(counts.sum())
        return int(counts[self.t2d.cpu().numpy()].sum()) / total if total else 1.0

    def check_ends(self, end_ids: Collection[int], place: str) -> None:
        """UserError when the head could never draft the end of a turn: none of these target ids is in."""
        known = [number for number in end_ids if 0 <= number < self.vocab_size]
        if known and not bool(self.t2d[known].any()):
            raise UserError(
                f"{place}: none of the target's end-of-turn tokens {sorted(known)} is in the draft vocabulary; "
                f"train a head whose vocabulary is counted on this target's conversations"
            )


def check_size(size: int | None, vocab_size: int) -> None:
    """UserError for a draft vocabulary (None: the default one) that is larger than the target's."""
    if size is not None and size > vocab_size:
        raise UserError(
            f"head.draft_vocab_size: {size:,} is larger than the target's vocabulary of {vocab_size:,}; "
            f"set it to {vocab_size:,} or less"
        )
