"""How often the supervised tokens of the training rows occur, and the draft vocabulary that follows from it.

A new head's vocabulary is counted anew each time (seconds for a data set of any usual size), so none is ever picked up
stale; its key tells afterwards which data and tokenizer it belongs to.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.errors import UserError
from model.files import digest
from model.vocab import DEFAULT_SIZE, Counts, DraftVocabulary

CHUNK_TOKENS = 1 << 22  # tokens that are held for one bincount


@dataclass(frozen=True)
class CountedVocabulary:
    """A draft vocabulary and what it was counted on."""

    vocabulary: DraftVocabulary
    coverage: float  # share of the supervised tokens that are in it
    num_tokens: int  # supervised tokens
    key: str  # digest of data, tokenizer, size and forced ids

    def facts(self) -> dict[str, Any]:
        """What is stored beside the head."""
        return {
            "key": self.key,
            "size": self.vocabulary.size,
            "coverage": round(self.coverage, 6),
            "counted_tokens": self.num_tokens,
        }

    def line(self) -> str:
        """For printing."""
        return (
            f"draft vocabulary: {self.vocabulary.size:,} of {self.vocabulary.vocab_size:,} tokens cover "
            f"{self.coverage:.2%} of {self.num_tokens:,} supervised tokens (key {self.key})"
        )


def draft_vocabulary(
    rows: Iterable[tuple[Any, Any]],
    size: int | None,
    vocab_size: int,
    forced: Collection[int],
    origin: dict[str, Any],
) -> CountedVocabulary:
    """The `size` most frequent supervised tokens of rows, as (input_ids, turns) pairs, and the forced ids.

    size null is 32,000, or the target's whole vocabulary where that is smaller. origin names data and tokenizer (the
    fingerprint's "rows" and "tokenizer" of a feature cache). UserError for a size that cannot be.
    """
    size = min(DEFAULT_SIZE, vocab_size) if size is None else size
    counts = count_tokens(rows, vocab_size)
    vocabulary = DraftVocabulary.most_frequent(counts, size, forced)
    key = digest({"origin": origin, "size": size, "forced": sorted(forced)})
    return CountedVocabulary(vocabulary, vocabulary.coverage(counts), int(counts.sum()), key)


def given_vocabulary(
    vocabulary: DraftVocabulary, rows: Iterable[tuple[Any, Any]], origin: dict[str, Any]
) -> CountedVocabulary:
    """A vocabulary that was chosen elsewhere (a warm start's), with its coverage of these rows."""
    counts = count_tokens(rows, vocabulary.vocab_size)
    key = digest({"origin": origin, "ids": vocabulary.ids.tolist()})
    return CountedVocabulary(vocabulary, vocabulary.coverage(counts), int(counts.sum()), key)


def count_tokens(rows: Iterable[tuple[Any, Any]], vocab_size: int) -> Counts:
    """Counts [V] of the supervised tokens of rows, given as (input_ids, turns) pairs of any array type.

    UserError for a token id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)  # [V]
    held: list[Any] = []
    num_held = 0
    for input_ids, turns in rows:
        held.append(np.asarray(input_ids)[np.asarray(turns) != 0])
        num_held += len(held[-1])
        if num_held >= CHUNK_TOKENS:
            counts += _bincount(held, vocab_size)
            held, num_held = [], 0
    return counts + _bincount(held, vocab_size) if held else counts


def forced_ids(tokenizer: Any, end_ids: Collection[int], vocab_size: int) -> frozenset[int]:
    """The ids that are always drafted: the tokenizer's special tokens and the target's end-of-turn tokens.

    Special tokens that the target's LM head has no row for (a padding token added later) are left out.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(number for number in {*special, *tokenizer.all_special_ids, *end_ids} if number < vocab_size)


def _bincount(held: list[Any], vocab_size: int) -> Counts:
    tokens = np.concatenate(held).astype(np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise UserError(
            f"draft vocabulary: the data hold token id {int(tokens.max()):,}, the target's vocabulary has "
            f"{vocab_size:,}; tokenizer and weights do not belong together"
        )
    return np.bincount(tokens, minlength=vocab_size)
