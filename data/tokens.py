"""The recipe's conversations as tokenised rows, train and held-out; their preview, and the draft vocabulary of them."""

import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
from tqdm import tqdm

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DataConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.chat import Chat, Rendered, Row, shared_start, target_end_ids
from aerie.data.conversations import Conversation, Tally, TokenRow, UnusableRow, load_conversations, split_by_hash
from aerie.model.storage import digest
from aerie.model.target import load_tokenizer
from aerie.model.vocab import DEFAULT_SIZE, Counts, DraftVocabulary

BATCH = 256  # conversations of one tokenizer call
GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a corpus must not steer the terminal


@dataclass(frozen=True)
class TokenisedData:
    """Rows in the order of the sources; held_out are the conversations that training never sees."""

    train: list[Row]
    held_out: list[Row]


def tokenised(target: TargetConfig, config: DataConfig, speaks: bool = True) -> tuple[TokenisedData, Any, Tally]:
    """The recipe's conversations as the target reads them, its tokenizer, and what was left out."""
    tokenizer, tally = load_tokenizer(target), Tally()
    return tokenize(config, tokenizer, target_end_ids(target, tokenizer), tally, speaks), tokenizer, tally


def tokenize(config: DataConfig, tokenizer: Any, end_ids: set[int], tally: Tally, speaks: bool = True) -> TokenisedData:
    """The recipe's rows, cut at max_length, each with at least one supervised slot.

    speaks: a terminal sees a progress bar. Raises UserError, with a decoded preview, when nothing is left or the
    supervised share is under the recipe's floor.
    """
    chat = Chat(tokenizer, end_ids, tally)
    num_ids = max(tokenizer.get_vocab().values()) + 1
    data, first = TokenisedData([], []), None
    num_tokens = num_supervised = 0  # rows without a supervised slot count too
    conversations = _limited(load_conversations(config, tally), config)
    with tqdm(desc="tokenise", unit=" conversations", disable=None if speaks else True) as progress:
        while batch := list(islice(conversations, BATCH)):
            for conversation, rows in zip(batch, _rows(batch, chat, config, num_ids), strict=True):
                cut = [_cut(row, config.max_length, tally) for row in rows]
                first = first or next(iter(cut), None)
                num_tokens += sum(len(row.input_ids) for row in cut)
                num_supervised += sum(row.num_supervised for row in cut)
                side = data.held_out if split_by_hash(conversation.digest, config.held_out) else data.train
                side += _learnable(rows, cut, conversation.place, config.max_length, tally)
            progress.update(len(batch))
    names = ", ".join(config.conversations)
    preview = f"; the first row reads: {excerpt(first, tokenizer)}" if first else ""
    if not data.train:
        if data.held_out and not tally.skipped:
            raise UserError(f"{names}: all {tally.kept:,} conversations are held out; lower data.held_out")
        raise UserError(f"{names}: no conversation to train on: {tally.sentence()}{preview}")
    if num_supervised / num_tokens < config.min_supervised_share:
        raise UserError(
            f"{names}: {num_supervised / num_tokens:.2%} of {num_tokens:,} tokens are supervised, under "
            f"data.min_supervised_share {config.min_supervised_share:.2%}; check the chat template with the show "
            f"command, or lower the floor{preview}"
        )
    return data


def text_fingerprint(tokenizer: Any, data: DataConfig) -> dict[str, Any]:
    """The part of the cache's fingerprint that decides its token ids: tokenizer, template and the section data."""
    return {
        "tokenizer": digest(tokenizer.backend_tokenizer.to_str()),
        "template": digest(tokenizer.chat_template),
        "data": as_dict(data),
    }


def statistics(rows: Sequence[Row]) -> str:
    """One line for printing; slots are the positions that training supervises."""
    lengths = [len(row.input_ids) for row in rows]
    num_supervised, num_slots = sum(row.num_supervised for row in rows), sum(row.num_slots for row in rows)
    num_turns = sum(len(set(row.turns) - {0}) for row in rows)
    return (
        f"{len(rows):,} rows | {sum(lengths):,} tokens | {num_supervised:,} supervised "
        f"({num_supervised / max(sum(lengths), 1):.1%}) | {num_slots:,} slots | {num_turns:,} turns | "
        f"longest {max(lengths, default=0):,}"
    )


def _limited(conversations: Iterator[Conversation | TokenRow], config: DataConfig) -> Iterator[Conversation | TokenRow]:
    """Up to config.limit conversations for training, and the held-out ones met on the way."""
    num_train = 0
    for conversation in conversations:
        yield conversation
        num_train += not split_by_hash(conversation.digest, config.held_out)
        if config.limit is not None and num_train >= config.limit:
            return


def _rows(batch: list[Conversation | TokenRow], chat: Chat, config: DataConfig, num_ids: int) -> list[list[Row]]:
    """For each conversation its rows; an empty list where the template refused it (counted)."""
    supervise_all = config.supervise == "all"
    renders: list[Rendered] = []
    owners: list[int] = []  # the conversation of each render
    rows: list[list[Row]] = [[] for _ in batch]
    for position, conversation in enumerate(batch):
        if isinstance(conversation, TokenRow):
            rows[position].append(from_token_row(conversation, num_ids))
            continue
        try:
            rendered = chat.render(conversation, supervise_all)
        except UnusableRow as error:
            chat.tally.add("skipped", error.reason, conversation.place, error.sentence)
            continue
        renders += rendered
        owners += [position] * len(rendered)
    for position, row in zip(owners, chat.encode(renders), strict=True):
        rows[position].append(row)
    if supervise_all:  # every token but the first, as one turn: how a target is trained from scratch
        rows = [[replace(row, turns=array("i", [0] + [1] * (len(row.turns) - 1))) for row in own] for own in rows]
    return rows


def from_token_row(row: TokenRow, num_ids: int) -> Row:
    """A pretokenised row, each run of ones in its mask a turn; UserError for an id the target's vocabulary lacks."""
    largest = max(row.input_ids, default=0)
    if largest >= num_ids or min(row.input_ids, default=0) < 0:
        raise UserError(
            f"{row.place}: token id {largest:,} is outside the target's vocabulary ({num_ids:,}); "
            f"these rows were made with another tokenizer"
        )
    turns, number = array("i"), 0
    for value, run in groupby(row.loss_mask):
        number += value
        turns.extend([number * value] * len(list(run)))
    return Row(array("i", row.input_ids), turns, row.place)


def _cut(row: Row, max_length: int, tally: Tally) -> Row:
    if len(row.input_ids) <= max_length:
        return row
    tally.add("left out", "tokens behind max_length cut", row.source, f"has {len(row.input_ids):,} tokens")
    return Row(row.input_ids[:max_length], row.turns[:max_length], row.source)


def _learnable(rows: list[Row], cut: list[Row], place: str, max_length: int, tally: Tally) -> list[Row]:
    """The cut rows of one conversation that have a supervised slot; the others are counted."""

    def why(row: Row) -> str:
        beyond = f"the answer begins after max_length ({max_length:,} tokens)"
        return beyond if row.num_slots else "no answer of at least two tokens"

    kept = [row for row in cut if row.num_slots]
    for row, short in zip(rows, cut, strict=True):
        if len(rows) > 1 and not short.num_slots:
            tally.add("left out", why(row), row.source)
    if rows and not kept:
        tally.add("skipped", why(rows[0]), place)
    return kept


# ---------------------------------------------------------------------------------------------------------- preview


def show(rows: Sequence[Row], tokenizer: Any, limit: int, color: bool = True) -> str:
    """The first `limit` rows: a header line, then the text, learnt turns green (only in [turn:...] without color)."""
    shown = []
    for row in rows[:limit]:
        count, share = len(row.input_ids), row.num_supervised / max(len(row.input_ids), 1)
        supervised = f"{row.num_supervised:,} supervised ({share:.1%})"
        header = f"{row.source} | {count:,} tokens | {supervised} | {len(set(row.turns) - {0})} turns"
        shown.append(f"{header}\n{_marked(row, tokenizer, color)}")
    return "\n\n".join(shown)


def excerpt(row: Row, tokenizer: Any, num_characters: int = 300) -> str:
    """One line out of the row around its first learnt token, learnt turns in [turn: ...], for an error message."""
    first = next((at for at, turn in enumerate(row.turns) if turn), 0)
    span = slice(max(0, first - 40), first + 120)
    line = repr(_marked(Row(row.input_ids[span], row.turns[span], row.source), tokenizer, color=False))[1:-1]
    return f"'{line[:num_characters]}{'...' if len(line) > num_characters else ''}'"


def _marked(row: Row, tokenizer: Any, color: bool) -> str:
    """The row's text with its turns marked.

    A run's text is what decoding grows by: a run decoded alone may lose a blank or half a character.
    """
    parts, before, position = [], "", 0
    for turn, run in groupby(row.turns):
        position += len(list(run))
        text = tokenizer.decode(row.input_ids[:position], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        part = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text[shared_start(before, text) :])
        before = text
        if turn:
            part = f"{DIM}[{turn}:{RESET}{GREEN}{part}{RESET}{DIM}]{RESET}" if color else f"[{turn}:{part}]"
        parts.append(part)
    return "".join(parts)


# -------------------------------------------------------------------------------------------------- draft vocabulary


@dataclass(frozen=True)
class CountedVocabulary:
    """A draft vocabulary and what it was counted on."""

    vocabulary: DraftVocabulary
    coverage: float  # share of the supervised tokens that are in it
    num_tokens: int  # supervised tokens
    key: str  # digest of data, tokenizer, size and forced ids

    @classmethod
    def of(cls, vocabulary: DraftVocabulary, counts: Counts, chosen: dict[str, Any]) -> "CountedVocabulary":
        """chosen is what decided its tokens."""
        return cls(vocabulary, vocabulary.coverage(counts), int(counts.sum()), digest(chosen))

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
    chosen = {"origin": origin, "size": size, "forced": sorted(forced)}
    return CountedVocabulary.of(DraftVocabulary.most_frequent(counts, size, forced), counts, chosen)


def given_vocabulary(
    vocabulary: DraftVocabulary, rows: Iterable[tuple[Any, Any]], origin: dict[str, Any]
) -> CountedVocabulary:
    """A vocabulary that was chosen elsewhere (a warm start's), with its coverage of these rows."""
    counts = count_tokens(rows, vocabulary.vocab_size)
    return CountedVocabulary.of(vocabulary, counts, {"origin": origin, "ids": vocabulary.ids.tolist()})


def count_tokens(rows: Iterable[tuple[Any, Any]], vocab_size: int) -> Counts:
    """Counts [V] of the supervised tokens of rows, given as (input_ids, turns) pairs of any array type.

    UserError for a token id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)  # [V]
    for input_ids, turns in rows:
        tokens = np.asarray(input_ids)[np.asarray(turns) != 0]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise UserError(
                f"draft vocabulary: the data hold token id {int(tokens.max()):,}, the target's vocabulary has "
                f"{vocab_size:,}; tokenizer and weights do not belong together"
            )
        np.add.at(counts, tokens, 1)
    return counts


def forced_ids(tokenizer: Any, end_ids: Collection[int], vocab_size: int) -> frozenset[int]:
    """The ids that are always drafted: the tokenizer's special tokens and the target's end-of-turn tokens.

    Special tokens that the target's LM head has no row for (a padding token added later) are left out.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(number for number in {*special, *tokenizer.all_special_ids, *end_ids} if number < vocab_size)
