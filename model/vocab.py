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
        are_lists = d2t.ndim == t2d.ndim == 1
        if not are_lists or (d2t.long() != d2t).any() or (t2d.bool() != t2d).any():
            raise UserError(f"{place}: d2t must be a list of whole token offsets, and t2d a list of marks")
        vocabulary, marked = cls(d2t.long(), t2d.bool()), t2d.nonzero().flatten()
        if not marked.equal(vocabulary.ids):
            raise UserError(
                f"{place}: d2t and t2d name other tokens ({len(d2t):,} and {len(marked):,} of them); d2t holds offsets "
                f"(target id - draft id), not target ids"
            )
        return vocabulary

    @classmethod
    def most_frequent(cls, counts: Counts, size: int, forced: Collection[int] = ()) -> "DraftVocabulary":
        """The `size` most frequent ids by counts [V], the smaller id first where counts tie; forced ids always in."""
        vocab_size = len(counts)
        check_size(size, vocab_size)
        if len(set(forced)) > size:
            raise UserError(f"head.draft_vocab_size: {size:,} has no room for {len(set(forced)):,} special tokens")
        rank = counts.astype(np.int64, copy=True)
        rank[list(forced)] = np.iinfo(np.int64).max
        chosen = np.argsort(-rank, kind="stable")[:size]
        return cls.of_ids(torch.from_numpy(chosen), vocab_size)

    @property
    def size(self) -> int:
        return self.d2t.shape[0]

    @property
    def vocab_size(self) -> int:
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
                f"{place}: none of the target's end-of-turn tokens {sorted(known)} is in the draft vocabulary"
            )


def check_size(size: int | None, vocab_size: int) -> None:
    """UserError for a draft vocabulary (None: the default one) that is larger than the target's."""
    if size is not None and size > vocab_size:
        raise UserError(f"head.draft_vocab_size: {size:,} is larger than the target's vocabulary of {vocab_size:,}")
