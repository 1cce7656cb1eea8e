"""The recipe's conversations as token ids with a loss mask; their preview and draft vocabulary."""

import os
import re
import sys
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from itertools import chain, groupby, islice, pairwise, tee
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow  # type: ignore[import-untyped]
from pyarrow import parquet
from tokenizers.pre_tokenizers import ByteLevel

from aerie.configs.errors import UserError, rank
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DataConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.chat import Chat, Rendered, TokenRow, shared_start
from aerie.data.conversations import Conversation, Tally, load_conversations
from aerie.data.inputs import conversation_inputs, is_here
from aerie.data.progress import run_ahead, start_progress
from aerie.data.rendering import bound_to, recipe_tokenizer, writes_date
from aerie.data.rows import hub_commit
from aerie.data.values import UnusableRow
from aerie.model.heads.eagle import DEFAULT_SIZE, DraftVocabulary
from aerie.model.storage import (
    Manifest,
    Whole,
    digest,
    directory_atomically,
    file_digest,
    user_cache,
)
from aerie.model.target_files import target_end_ids

CONVERSATIONS_PER_CALL = 256  # of the tokenizer
SLOW_SECONDS = 5.0  # after this time several processes go on, and the rows are kept on disk
ROWS_FILE = "rows.parquet"
# The code that makes the rows. Once it has changed, kept rows are made again.
CODE = (
    "chat.py",
    "conversations.py",
    "forms.py",
    "inputs.py",
    "marks.py",
    "rendering.py",
    "rows.py",
    "said.py",
    "shapes.py",
    "shapes.yaml",
    "tokens.py",
    "tools.py",
    "turns.py",
    "values.py",
)
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a corpus must not steer the terminal


class TokenisedData(NamedTuple):
    train: list[TokenRow]
    held_out: list[TokenRow]  # training never sees them


def tokenize_for_target(
    target: TargetConfig, config: DataConfig
) -> tuple[TokenisedData, Any, Tally]:
    """The rows, the target's tokenizer and what was counted."""
    tokenizer = recipe_tokenizer(target, config)
    end_ids = target_end_ids(target, tokenizer)
    tally = Tally()
    return tokenize(config, tokenizer, end_ids, tally), tokenizer, tally


def tokenize(config: DataConfig, tokenizer: Any, end_ids: set[int], tally: Tally) -> TokenisedData:
    """The rows, cut at max_length; each has a supervised slot.

    Rows that took long to make are kept in the user's cache folder and read there the next time.
    UserError if no row is left to train on, or if too few tokens are supervised.
    """
    inputs = _inputs_of(config, tokenizer, end_ids)
    directory = user_cache() / digest(inputs)
    checked = Manifest.check(directory, inputs)
    if isinstance(checked, Whole):
        return _read_kept(directory, checked.manifest.facts, tally)
    started = time.monotonic()
    data = _make_rows(config, tokenizer, end_ids, tally)
    is_slow = time.monotonic() - started > SLOW_SECONDS
    if is_slow and rank() == 0 and None not in inputs["conversations"].values():
        with suppress(OSError, UserError):  # a full disk, or a folder without write permission
            _keep(directory, inputs, data, tally)
    return data


# --- rows kept in the user's cache folder -------------------------------------------------------


def _inputs_of(config: DataConfig, tokenizer: Any, end_ids: set[int]) -> dict[str, Any]:
    """What the rows depend on; a Hub data set's commit is None if the Hub does not answer."""
    commits = {name: hub_commit(name, None) for name in config.conversations if not is_here(name)}
    code = [file_digest(Path(__file__).parent / name) for name in CODE]
    is_dated = writes_date(tokenizer)
    return {
        **text_fingerprint(tokenizer, config),
        "special_tokens": [
            tokenizer.special_tokens_map,
            tokenizer.all_special_ids,
            sorted(end_ids),
        ],
        "today": bound_to(tokenizer).date.isoformat() if is_dated else "",
        "conversations": conversation_inputs(config.conversations) | commits,
        "code": [version("transformers"), version("tokenizers"), *code],
    }


def text_fingerprint(tokenizer: Any, data: DataConfig) -> dict[str, Any]:
    """What turns the recipe's conversations into tokens, JSON-ready."""
    return {
        "tokenizer": digest(tokenizer.backend_tokenizer.to_str()),
        "template": digest(tokenizer.chat_template),
        "data": as_dict(data),
    }


def _read_kept(directory: Path, facts: dict[str, Any], tally: Tally) -> TokenisedData:
    if rank() == 0:
        print(f"tokenised rows are read from {directory}", file=sys.stderr, flush=True)
    tally.rows += facts["rows"]
    for kind, reason, count, example in facts["counts"]:
        tally.counts[kind, reason] += count
        tally.examples.setdefault((kind, reason), example)
    table = parquet.read_table(directory / ROWS_FILE)
    columns = (table[name] for name in ("input_ids", "turn_ids", "source"))
    rows = [
        TokenRow(_as_array(ids), _as_array(turn_ids), source.as_py())
        for ids, turn_ids, source in zip(*columns, strict=True)
    ]
    return TokenisedData(rows[: facts["num_train"]], rows[facts["num_train"] :])


def _as_array(numbers: Any) -> "array[int]":
    return array("i", numbers.values.to_numpy().tobytes())


def _keep(directory: Path, inputs: dict[str, Any], data: TokenisedData, tally: Tally) -> None:
    rows = [*data.train, *data.held_out]
    columns = {
        "input_ids": [np.asarray(row.input_ids, dtype=np.int32) for row in rows],
        "turn_ids": [np.asarray(row.turn_ids, dtype=np.int32) for row in rows],
        "source": [row.source for row in rows],
    }
    facts = {
        "num_train": len(data.train),
        "rows": tally.rows,
        "counts": [[*key, count, tally.examples[key]] for key, count in tally.counts.items()],
    }
    with directory_atomically(directory) as temporary:
        parquet.write_table(arrow.table(columns), temporary / ROWS_FILE)
        Manifest.of(temporary, inputs, facts).write(temporary)


# --- conversations -> rows ----------------------------------------------------------------------


def _make_rows(
    config: DataConfig, tokenizer: Any, end_ids: set[int], tally: Tally
) -> TokenisedData:
    maker = RowMaker(Chat(tokenizer, end_ids, tally), config)
    data = TokenisedData([], [])
    num_tokens = num_supervised = 0
    with start_progress(None, "conversations", "tokenise") as progress:
        for conversation, rows in _in_processes(load_conversations(config, tally), maker):
            cut = [maker.cut(row) for row in rows]
            num_tokens += sum(len(row.input_ids) for row in cut)
            num_supervised += sum(row.num_supervised for row in cut)
            side = data.held_out if conversation.is_held_out else data.train
            side += maker.learnable(conversation, rows, cut)
            progress.update()
    names = ", ".join(config.conversations)
    if not data.train:
        raise UserError(
            f"{names}: no conversation is left to train on "
            f"({len(data.held_out):,} rows are held out); {tally.line()}"
        )
    if num_supervised / num_tokens < config.min_supervised_share:
        raise UserError(
            f"{names}: only {num_supervised / num_tokens:.2%} of the tokens are supervised; "
            "look at the rows with aerie show, or lower data.min_supervised_share"
        )
    return data


class RowMaker:
    """Makes token rows of conversations, by a recipe's section `data`."""

    def __init__(self, chat: Chat, config: DataConfig) -> None:
        self.chat = chat
        self.supervises_all = config.supervise == "all"
        self.max_length = config.max_length
        self.num_ids = max(chat.tokenizer.get_vocab().values()) + 1

    def rows(self, batch: Sequence[Conversation]) -> list[list[TokenRow]]:
        """The rows of each conversation, before they are cut; one call of the tokenizer."""
        rendered = [self._rendered(conversation) for conversation in batch]
        encoded = iter(self.chat.encode([*chain.from_iterable(rendered)]))
        rows_of = []
        for conversation, parts in zip(batch, rendered, strict=True):
            rows = list(islice(encoded, len(parts)))
            if conversation.tokens is not None:
                rows = [self._pretokenised(conversation.source, *conversation.tokens)]
            if self.supervises_all:  # every token but the first is learnt, as one turn
                rows = [
                    replace(row, turn_ids=array("i", [0, *[1] * (len(row.turn_ids) - 1)]))
                    for row in rows
                ]
            rows_of.append(rows)
        return rows_of

    def cut(self, row: TokenRow) -> TokenRow:
        if len(row.input_ids) <= self.max_length:
            return row
        self.chat.tally.add("left out", "tokens after max_length", row.source)
        end = self.max_length
        return TokenRow(row.input_ids[:end], row.turn_ids[:end], row.source)

    def learnable(
        self, conversation: Conversation, rows: list[TokenRow], cut: list[TokenRow]
    ) -> list[TokenRow]:
        """The cut rows that have a supervised slot; the reasons of the others are counted."""
        learnable, reasons = list[TokenRow](), list[str]()
        for row, cut_row in zip(rows, cut, strict=True):
            if cut_row.num_slots:
                learnable.append(cut_row)
                continue
            is_late = f"the answer begins after max_length ({self.max_length:,} tokens)"
            reason = is_late if row.num_slots else "no answer of at least two tokens"
            reasons.append(reason)
            if len(rows) > 1:
                self.chat.tally.add("left out", reason, row.source)
        if rows and not learnable:
            self.chat.tally.add("skipped", reasons[0], conversation.source)
        return learnable

    def _rendered(self, conversation: Conversation) -> list[Rendered]:
        if conversation.tokens is not None:
            return []
        try:
            if self.supervises_all:
                return [self._whole(conversation)]
            return self.chat.render(conversation)
        except UnusableRow as error:
            self.chat.tally.add("skipped", error.reason, conversation.source, error.sentence)
            return []

    def _whole(self, conversation: Conversation) -> Rendered:
        """The conversation's whole text; every token of it is learnt."""
        if conversation.context_only:
            reason = "an answer is marked as not to be learnt, but data.supervise is all"
            raise UnusableRow(reason, "")
        *rewritten, last = self.chat.render(conversation)
        if rewritten:
            reason = "parts of earlier answers that the template drops (data.supervise is all)"
            self.chat.tally.add("left out", reason, conversation.source)
        return Rendered(last.text, [], conversation.source)

    def _pretokenised(self, source: str, ids: list[int], mask: list[int]) -> TokenRow:
        """A row of token ids; each run of ones in its mask is a turn."""
        if ids and not 0 <= min(ids) <= max(ids) < self.num_ids:
            raise UserError(
                f"{source}: has token ids from {min(ids):,} to {max(ids):,}, but the target's "
                f"tokenizer has {self.num_ids:,}; tokenise the rows with that tokenizer"
            )
        turn_ids = array("i")
        turn = 0
        for before, bit in pairwise([0, *mask]):
            turn += bit and not before
            turn_ids.append(turn * bit)
        return TokenRow(array("i", ids), turn_ids, source)


def _in_processes(
    conversations: Iterator[Conversation], maker: RowMaker
) -> Iterator[tuple[Conversation, list[TokenRow]]]:
    """Each conversation with its rows, in order.

    This process makes the rows of the first SLOW_SECONDS; then one process per core goes on.
    """
    started = time.monotonic()
    workers = num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    batches = iter(lambda: list(islice(conversations, CONVERSATIONS_PER_CALL)), [])
    for batch in batches:
        yield from zip(batch, maker.rows(batch), strict=True)
        if workers > 1 and time.monotonic() - started > SLOW_SECONDS:
            break
    else:
        return
    _inherited[:] = [maker]  # forks inherit the maker, since pickling its tokenizer takes long
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        # At most two batches a worker wait, so that memory never holds the whole corpus.
        batches, sent = tee(batches)
        results = run_ahead(pool, _forked_rows, sent, 2 * workers)
        for (rows, tally), batch in zip(results, batches, strict=True):
            maker.chat.tally.merge(tally)
            yield from zip(batch, rows, strict=True)


_inherited: list[RowMaker] = []


def _forked_rows(batch: list[Conversation]) -> tuple[list[list[TokenRow]], Tally]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    (maker,) = _inherited
    maker.chat.tally = Tally()
    return maker.rows(batch), maker.chat.tally


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- for people ---------------------------------------------------------------------------------


def statistics(rows: Sequence[TokenRow]) -> str:
    lengths = [len(row.input_ids) for row in rows]
    num_tokens = sum(lengths)
    num_supervised = sum(row.num_supervised for row in rows)
    return " | ".join(
        (
            f"{len(rows):,} rows",
            f"{num_tokens:,} tokens",
            f"{num_supervised:,} supervised ({num_supervised / max(num_tokens, 1):.1%})",
            f"{sum(row.num_slots for row in rows):,} slots",
            f"{sum(len(set(row.turn_ids) - {0}) for row in rows):,} turns",
            f"longest {max(lengths, default=0):,}",
        )
    )


def preview(row: TokenRow, tokenizer: Any, color: bool) -> str:
    """A line about the row, then its text; learnt turns are green, or stand in [turn:...]."""
    shown = f"{row.source}{statistics([row]).removeprefix('1 rows')}\n"
    before = ""
    position = 0
    for turn, run in groupby(row.turn_ids):
        position += len(list(run))
        # Decode from the row's start: a run alone may lose a blank or half a character.
        text = tokenizer.decode(row.input_ids[:position], clean_up_tokenization_spaces=False)
        part = CONTROL.sub(
            lambda match: f"\\x{ord(match[0]):02x}", text[shared_start(before, text) :]
        )
        before = text
        if turn:
            part = f"\x1b[32m{part}\x1b[0m" if color else f"[{turn}:{part}]"
        shown += part
    return shown


# --- the draft vocabulary and the mask token ----------------------------------------------------


def draft_vocabulary(
    rows: Iterable[tuple[Any, Any]],
    vocab_size: int,
    size: int | None = None,
    forced: Collection[int] = (),
    warm_start: DraftVocabulary | None = None,
    held_out: Iterable[tuple[Any, Any]] = (),
    tokenizer: Any = None,
) -> tuple[DraftVocabulary, dict[str, Any], str]:
    """The draft vocabulary, facts about it and a line to print.

    The vocabulary has `size` tokens (None: at most 32,000): the forced ids, then the tokens that
    `rows` of (input_ids, turn_ids) supervise most often. A warm start keeps its own vocabulary.
    The coverage is measured on the held-out rows, since `rows` chose the vocabulary; it is measured
    on `rows` if no row is held out.
    """
    counts = _supervised_counts(rows, vocab_size)  # [V]
    vocabulary = warm_start or DraftVocabulary.most_frequent(
        counts, size or min(DEFAULT_SIZE, vocab_size), forced
    )
    measured = _supervised_counts(held_out, vocab_size)  # [V]
    of_rows = "held-out" if measured.any() else "training"
    measured = measured if measured.any() else counts
    coverage = vocabulary.coverage(measured)
    num_tokens = int(measured.sum())
    line = (
        f"draft vocabulary: {vocabulary.size:,} of {vocab_size:,} tokens cover {coverage:.2%} of "
        f"{num_tokens:,} supervised tokens of the {of_rows} rows"
    )
    missing = np.where(vocabulary.t2d.cpu().numpy(), 0, measured)  # [V]
    if tokenizer is not None and vocabulary.size < vocab_size:
        line += f"\n{_never_drafted(missing, vocabulary, tokenizer)}"
    facts = {"size": vocabulary.size, "coverage": round(coverage, 6), "counted_tokens": num_tokens}
    return vocabulary, {**facts, "coverage_of": of_rows}, line


def _supervised_counts(rows: Iterable[tuple[Any, Any]], vocab_size: int) -> Any:
    counts = np.zeros(vocab_size, dtype=np.int64)  # [V]
    for input_ids, turn_ids in rows:
        np.add.at(counts, np.asarray(input_ids)[np.asarray(turn_ids) != 0], 1)
    return counts


def _never_drafted(missing: Any, vocabulary: DraftVocabulary, tokenizer: Any) -> str:
    """A line on what a head never drafts; missing: counts [V] of the tokens it does not have."""
    words = [
        f"{tokenizer.decode([number])!r} ({missing[number]:,})"
        for number in np.argsort(-missing, kind="stable")[:5].tolist()
        if missing[number]
    ]
    text = f"never drafted: {', '.join(words) or 'no token of these rows'}"
    known = {*vocabulary.ids.tolist()}
    lost = [number for number in alphabet_ids(tokenizer) if number not in known]
    if lost:
        text += (
            f"; nor are {len(lost):,} of the bytes that spell other scripts (accents, CJK, emoji); "
            "raise head.draft_vocab_size to include them"
        )
    return text


def mask_token(tokenizer: Any, end_ids: Collection[int], embedding: Any) -> int:
    """A token id that no text has; UserError if there is none.

    It is the tokenizer's mask token, else a row of the embedding [V, D] that belongs to no token,
    else the padding token. A row of zeros is not taken: its queries are zero, so all masks of a
    block would be alike.
    """
    known = {*tokenizer.get_vocab().values()}
    rows = range(len(embedding))
    unnamed = (number for number in rows if number not in known and embedding[number].any())
    for number in (tokenizer.mask_token_id, next(unnamed, None), tokenizer.pad_token_id):
        if number is not None and number in rows and number not in end_ids:
            return int(number)
    raise UserError(
        f"head.mask_token_id: each of the {len(embedding):,} rows of the target's embedding "
        "may occur in a text; set the key to a token that no conversation has"
    )


def forced_ids(
    tokenizer: Any, end_ids: Collection[int], vocab_size: int, size: int | None = None
) -> frozenset[int]:
    """The ids that every draft vocabulary has.

    They are the special tokens, the target's end-of-turn tokens, and the bytes that spell every
    text. The bytes are left out if a vocabulary of this size has no room for them.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    # The LM head has no row for special tokens that were added later.
    rows = {*range(vocab_size)}
    needed = {*special, *tokenizer.all_special_ids, *end_ids} & rows
    complete = needed | (alphabet_ids(tokenizer) & rows)
    has_room = size is None or len(complete) <= size
    return frozenset(complete if has_room else needed)


def alphabet_ids(tokenizer: Any) -> set[int]:
    """The ids of single bytes in a byte-level or byte-fallback vocabulary; else none."""
    token_ids = tokenizer.get_vocab()
    fallback = {number for token, number in token_ids.items() if BYTE.fullmatch(token)}
    alphabet = set(ByteLevel.alphabet())
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    is_byte_level = alphabet <= token_ids.keys() or "ByteLevel" in repr(decoder)
    letters = alphabet & token_ids.keys() if is_byte_level else set()
    return fallback | {token_ids[letter] for letter in letters}
