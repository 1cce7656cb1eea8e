"""The recipe's conversations as tokenised rows, train and held-out, or a refusal that shows what went wrong."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tqdm import tqdm

from data.chat import Chat, Rendered, Row, from_token_row, whole_row
from data.config import DataConfig
from data.conversations import Conversation, Tally, TokenRow, load_conversations, split_by_hash
from data.preview import excerpt
from data.shapes import UnusableRow
from model.errors import UserError

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
