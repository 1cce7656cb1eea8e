"""The recipe's conversations as tokenised rows, train and held-out, or a refusal that shows what went wrong."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
from tqdm import tqdm

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.chat import Chat, Rendered, Row, common_start, from_token_row, whole_row
from aerie.data.conversations import Conversation, Tally, TokenRow, UnusableRow, load_conversations, split_by_hash
from aerie.model.storage import digest
from aerie.model.vocab import DEFAULT_SIZE, Counts, DraftVocabulary

BATCH = 256  # conversations of one tokenizer call


@dataclass(frozen=True)
class Statistics:
    """What rows hold, for printing; slots are the positions that training supervises."""

    num_rows: int
    num_tokens: int
    num_supervised: int
    num_slots: int
    num_turns: int
    longest: int

    @property
    def share(self) -> float:
        return self.num_supervised / max(self.num_tokens, 1)

    def line(self) -> str:
        return (
            f"{self.num_rows:,} rows | {self.num_tokens:,} tokens | {self.num_supervised:,} supervised "
            f"({self.share:.1%}) | {self.num_slots:,} slots | {self.num_turns:,} turns | longest {self.longest:,}"
        )


@dataclass(frozen=True)
class TokenisedData:
    """Rows in the order of the sources; held_out are the conversations that training never sees."""

    train: list[Row]
    held_out: list[Row]


@dataclass
class _Progress:
    """Counts of everything tokenised, the rows that nothing can be learnt from included."""

    num_tokens: int = 0
    num_supervised: int = 0
    first: Row | None = None
    train: list[Row] = field(default_factory=list)
    held_out: list[Row] = field(default_factory=list)


def statistics(rows: list[Row]) -> Statistics:
    """The totals of rows."""
    return Statistics(
        num_rows=len(rows),
        num_tokens=sum(len(row.input_ids) for row in rows),
        num_supervised=sum(row.num_supervised for row in rows),
        num_slots=sum(row.num_slots for row in rows),
        num_turns=sum(len(set(row.turns) - {0}) for row in rows),
        longest=max((len(row.input_ids) for row in rows), default=0),
    )


def tokenize(
    config: DataConfig, tokenizer: Any, end_ids: set[int], tally: Tally, disable_bar: bool | None = None
) -> TokenisedData:
    """The recipe's rows, cut at max_length, each with at least one supervised slot.

    disable_bar is tqdm's: True on ranks above 0, None hides the bar where there is no terminal. Raises UserError, with
    a decoded preview, when nothing is left or the supervised share is under the recipe's floor.
    """
    chat = Chat(tokenizer, end_ids, tally)
    num_ids = max(tokenizer.get_vocab().values()) + 1
    progress = _Progress()
    conversations = _limited(load_conversations(config, tally), config)
    with tqdm(desc="tokenise", unit=" conversations", disable=disable_bar) as bar:
        while batch := list(islice(conversations, BATCH)):
            for conversation, rows in zip(batch, _rows(batch, chat, config, num_ids), strict=True):
                _collect(conversation, rows, config, tally, progress)
            bar.update(len(batch))
    _check(config, tokenizer, tally, progress)
    return TokenisedData(progress.train, progress.held_out)


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
    owners: list[int] = []
    rows: list[list[Row]] = [[] for _ in batch]
    for position, conversation in enumerate(batch):
        if isinstance(conversation, TokenRow):
            rows[position].append(from_token_row(conversation, num_ids))
            continue
        try:
            rendered = chat.render(conversation, supervise_all)
        except UnusableRow as error:
            chat.tally.skip(error.reason, conversation.place, error.sentence)
            continue
        renders += rendered
        owners += [position] * len(rendered)
    for position, row in zip(owners, chat.encode(renders), strict=True):
        rows[position].append(row)
    return [[whole_row(row) for row in found] for found in rows] if supervise_all else rows


def _collect(
    conversation: Conversation | TokenRow, rows: list[Row], config: DataConfig, tally: Tally, progress: _Progress
) -> None:
    """Cuts the rows, drops those without a supervised slot, and puts the rest on their side of the split."""
    kept = []
    for row in rows:
        cut = _cut(row, config.max_length, tally)
        progress.num_tokens += len(cut.input_ids)
        progress.num_supervised += cut.num_supervised
        progress.first = progress.first or cut
        if cut.num_slots:
            kept.append(cut)
        elif len(rows) > 1:
            tally.leave_out(_why_empty(row, config.max_length), row.source)
    if rows and not kept:
        tally.skip(_why_empty(rows[0], config.max_length), conversation.place)
    side = progress.held_out if split_by_hash(conversation.digest, config.held_out) else progress.train
    side.extend(kept)


def _cut(row: Row, max_length: int, tally: Tally) -> Row:
    if len(row.input_ids) <= max_length:
        return row
    tally.leave_out("tokens behind max_length cut", row.source, f"has {len(row.input_ids):,} tokens")
    return Row(row.input_ids[:max_length], row.turns[:max_length], row.source)


def _why_empty(row: Row, max_length: int) -> str:
    if row.num_slots:
        return f"the answer begins after max_length ({max_length:,} tokens)"
    return "no answer of at least two tokens"


def _check(config: DataConfig, tokenizer: Any, tally: Tally, progress: _Progress) -> None:
    names = ", ".join(config.conversations)
    preview = f"; the first row reads: {excerpt(progress.first, tokenizer)}" if progress.first else ""
    if not progress.train:
        if progress.held_out and not tally.total("skipped"):
            raise UserError(f"{names}: all {tally.kept:,} conversations are held out; lower data.held_out")
        raise UserError(f"{names}: no conversation to train on: {tally.sentence()}{preview}")
    share = progress.num_supervised / max(progress.num_tokens, 1)
    if share < config.min_supervised_share:
        raise UserError(
            f"{names}: {share:.2%} of {progress.num_tokens:,} tokens are supervised, under data.min_supervised_share "
            f"{config.min_supervised_share:.2%}; check the chat template with the show command, or lower the "
            f"floor{preview}"
        )


GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a corpus must not steer the terminal


def show(rows: Sequence[Row], tokenizer: Any, limit: int, color: bool = True) -> str:
    """The first `limit` rows: a header line, then the text, learnt turns green (only in [turn:...] without color)."""
    return "\n\n".join(_row(row, tokenizer, color) for row in islice(rows, limit))


def excerpt(row: Row, tokenizer: Any, num_characters: int = 300) -> str:
    """One line out of the row around its first learnt token, learnt turns in [turn: ...], for an error message."""
    first = next((at for at, turn in enumerate(row.turns) if turn), 0)
    start, stop = max(0, first - 40), first + 120
    text = _marked(Row(row.input_ids[start:stop], row.turns[start:stop], row.source), tokenizer, color=False)
    line = repr(text)[1:-1]
    return f"'{line[:num_characters]}{'...' if len(line) > num_characters else ''}'"


def _row(row: Row, tokenizer: Any, color: bool) -> str:
    share = row.num_supervised / max(len(row.input_ids), 1)
    header = (
        f"{row.source} | {len(row.input_ids):,} tokens | {row.num_supervised:,} supervised ({share:.1%}) | "
        f"{len(set(row.turns) - {0})} turns"
    )
    return f"{header}\n{_marked(row, tokenizer, color)}"


def _marked(row: Row, tokenizer: Any, color: bool) -> str:
    parts = []
    for turn, text in _pieces(row, tokenizer):
        shown = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
        if turn == 0:
            parts.append(shown)
        elif color:
            parts.append(f"{DIM}[{turn}:{RESET}{GREEN}{shown}{RESET}{DIM}]{RESET}")
        else:
            parts.append(f"[{turn}:{shown}]")
    return "".join(parts)


def _pieces(row: Row, tokenizer: Any) -> Iterator[tuple[int, str]]:
    """(turn, text) of each run: what decoding grows by, since a run alone may lose a blank or half a character."""
    before, position = "", 0
    for turn, run in groupby(row.turns):
        position += sum(1 for _ in run)
        text = tokenizer.decode(row.input_ids[:position], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        yield turn, text[common_start(before, text) :]
        before = text


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


@dataclass(frozen=True)
class Share:
    """The index-th of count parts, counted from 1: every count-th item."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> "Share":
        """From 'i/n'; UserError for anything else."""
        first, separator, second = text.partition("/")
        if not separator or not first.isdecimal() or not second.isdecimal() or not 1 <= int(first) <= int(second):
            raise UserError(f"--shard: {text} is no share; write i/n with i from 1 to n (--shard 1/4)")
        return cls(int(first), int(second))

    def __contains__(self, position: int) -> bool:
        return position % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def part(self, count: int, rank: int = 0, world: int = 1) -> range:
        """The positions, out of `count`, of process `rank` of the `world` processes of this job."""
        return range(self.index - 1, count, self.count)[rank::world]
