"""The recipe's conversations as tokenised rows; their preview and draft vocabulary."""

import os
import re
import sys
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from itertools import accumulate, groupby, islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as arrow  # type: ignore[import-untyped]
from pyarrow import parquet

from aerie.configs.errors import UserError, rank
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DataConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.chat import Chat, Rendered, TokenRow, shared_start
from aerie.data.conversations import (
    Conversation,
    Tally,
    UnusableRow,
    hub_commit,
    load_conversations,
)
from aerie.data.inputs import conversation_inputs, is_here
from aerie.data.progress import start_progress
from aerie.model.heads.eagle import DEFAULT_SIZE, DraftVocabulary
from aerie.model.storage import (
    Manifest,
    Whole,
    digest,
    directory_atomically,
    file_digest,
    user_cache,
)
from aerie.model.target import load_tokenizer, target_end_ids

CONVERSATIONS_PER_CALL = 256  # conversations of one tokenizer call
ROWS, SLOW_SECONDS = "rows.parquet", 5.0  # rows that took longer to make are cached
GREEN, RESET = "\x1b[32m", "\x1b[0m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a corpus must not steer the terminal


class TokenisedData(NamedTuple):
    train: list[TokenRow]
    held_out: list[TokenRow]  # training never sees them


def tokenize_for_target(
    target: TargetConfig, config: DataConfig
) -> tuple[TokenisedData, Any, Tally]:
    tokenizer, tally = load_tokenizer(target), Tally()
    return tokenize(config, tokenizer, target_end_ids(target, tokenizer), tally), tokenizer, tally


def tokenize(config: DataConfig, tokenizer: Any, end_ids: set[int], tally: Tally) -> TokenisedData:
    """Rows cut at max_length, each with a supervised slot; slow work is kept in the user's cache folder."""
    here, files = Path(__file__).parent, ("chat.py", "conversations.py", "tokens.py", "shapes.yaml")
    # None for a Hub data set whose commit the Hub does not tell
    commits = {name: hub_commit(name, None) for name in config.conversations if not is_here(name)}
    inputs = {  # all that decides the rows
        **text_fingerprint(tokenizer, config),
        "special_tokens": [
            tokenizer.special_tokens_map,
            tokenizer.all_special_ids,
            sorted(end_ids),
        ],
        "today": date.today().isoformat() if "strftime_now" in str(tokenizer.chat_template) else "",
        "conversations": conversation_inputs(config.conversations, file_digest) | commits,
        "code": [
            version("transformers"),
            version("tokenizers"),
            *(file_digest(here / name) for name in files),
        ],
    }
    directory, names, started = (
        user_cache() / digest(inputs),
        ("input_ids", "turn_ids"),
        time.monotonic(),
    )
    if isinstance(found := Manifest.check(directory, inputs), Whole):
        if rank() == 0:
            print(f"tokenised rows are read from {directory}", file=sys.stderr, flush=True)
        table, facts = parquet.read_table(directory / ROWS), found.manifest.facts
        ints = (
            [array("i", row.values.to_numpy().tobytes()) for row in table[name]] for name in names
        )
        rows = [TokenRow(*row) for row in zip(*ints, table["source"].to_pylist(), strict=True)]
        tally.rows += facts["rows"]
        for kind, reason, count, example in facts["counts"]:
            tally.counts[kind, reason] += count
            tally.examples.setdefault((kind, reason), example)
        return TokenisedData(rows[: facts["num_train"]], rows[facts["num_train"] :])
    data = _made(config, tokenizer, end_ids, tally)
    if (
        rank() == 0
        and None not in inputs["conversations"].values()
        and time.monotonic() - started > SLOW_SECONDS
    ):
        rows = [*data.train, *data.held_out]
        columns = {
            name: [np.asarray(getattr(row, name), dtype=np.int32) for row in rows] for name in names
        }
        counts = [[*key, count, tally.examples[key]] for key, count in tally.counts.items()]
        with (
            suppress(OSError, UserError),
            directory_atomically(directory) as temporary,
        ):  # no room, no permission
            parquet.write_table(
                arrow.table({**columns, "source": [row.source for row in rows]}), temporary / ROWS
            )
            facts = {"num_train": len(data.train), "rows": tally.rows, "counts": counts}
            Manifest.of(temporary, inputs, facts).write(temporary)
    return data


def _made(config: DataConfig, tokenizer: Any, end_ids: set[int], tally: Tally) -> TokenisedData:
    chat, data = Chat(tokenizer, end_ids, tally), TokenisedData([], [])
    num_ids, max_length = max(tokenizer.get_vocab().values()) + 1, config.max_length
    num_tokens = num_supervised = 0  # rows without a supervised slot count too
    with start_progress(None, "conversations", "tokenise") as progress:
        for conversation, rows in _in_processes(
            load_conversations(config, tally), chat, config, num_ids
        ):
            reasons, kept = list[str](), list[TokenRow]()
            for row in rows:
                if len(row.input_ids) > max_length:
                    tally.add("left out", "tokens behind max_length cut", row.source)
                cut = TokenRow(row.input_ids[:max_length], row.turn_ids[:max_length], row.source)
                num_tokens += len(cut.input_ids)
                num_supervised += cut.num_supervised
                if cut.num_slots:
                    kept.append(cut)
                    continue
                beyond = f"the answer begins after max_length ({max_length:,} tokens)"
                reasons.append(beyond if row.num_slots else "no answer of at least two tokens")
                if len(rows) > 1:
                    tally.add("left out", reasons[-1], row.source)
            if rows and not kept:
                tally.add("skipped", reasons[0], conversation.place)
            (data.held_out if conversation.is_held_out else data.train).extend(kept)
            progress.update()
    names = ", ".join(config.conversations)
    if not data.train:
        held_out = f"{len(data.held_out):,} rows are held out"
        raise UserError(f"{names}: no conversation to train on; {held_out}; {tally.line()}")
    if num_supervised / num_tokens < config.min_supervised_share:
        fix = "see them with the show command, or lower data.min_supervised_share"
        raise UserError(
            f"{names}: only {num_supervised / num_tokens:.2%} of the tokens are supervised; {fix}"
        )
    return data


def _in_processes(
    conversations: Iterator[Conversation], chat: Chat, config: DataConfig, num_ids: int
) -> Iterator[tuple[Conversation, list[TokenRow]]]:
    """Each conversation with its rows, in order; after SLOW_SECONDS in a process per core of this job."""
    started, batches = (
        time.monotonic(),
        iter(lambda: list(islice(conversations, CONVERSATIONS_PER_CALL)), []),
    )
    workers = num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for batch in batches:
        yield from zip(batch, tokenize_batch(batch, chat, config, num_ids), strict=True)
        if workers > 1 and time.monotonic() - started > SLOW_SECONDS:
            break
    _forked[:] = [chat, config, num_ids]  # forks inherit it: pickling a tokenizer takes long
    with (
        ProcessPoolExecutor(workers, get_context("fork")) if workers > 1 else nullcontext() as pool
    ):
        pending = deque[tuple[list[Conversation], Future[tuple[list[list[TokenRow]], Tally]]]]()
        while pool is not None:
            for batch in islice(batches, 2 * workers - len(pending)):
                pending.append((batch, pool.submit(_forked_rows, batch)))
            if not pending:
                return
            batch, future = pending.popleft()
            rows, tally = future.result()
            chat.tally.merge(tally)
            yield from zip(batch, rows, strict=True)


_forked: list[Any] = []


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forked_rows(batch: list[Conversation]) -> tuple[list[list[TokenRow]], Tally]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chat, config, num_ids = _forked
    chat.tally = Tally()
    return [*tokenize_batch(batch, chat, config, num_ids)], chat.tally


def tokenize_batch(
    batch: list[Conversation], chat: Chat, config: DataConfig, num_ids: int
) -> Iterator[list[TokenRow]]:
    is_all = config.supervise == "all"
    renders: list[list[Rendered]] = []
    for conversation in batch:
        try:
            renders.append(chat.render(conversation, is_all) if conversation.tokens is None else [])
        except UnusableRow as error:
            renders.append([])
            chat.tally.add("skipped", error.reason, conversation.place, error.sentence)
    encoded = iter(chat.encode([rendered for parts in renders for rendered in parts]))
    for conversation, parts in zip(batch, renders, strict=True):
        rows = list(islice(encoded, len(parts)))
        if conversation.tokens is not None:  # each run of ones in the mask is a turn
            ids, mask = conversation.tokens
            if max(ids, default=0) >= num_ids or min(ids, default=0) < 0:
                fix = f"outside the {num_ids:,} of the target's tokenizer; use that one"
                raise UserError(
                    f"{conversation.place}: token ids {min(ids):,} to {max(ids):,} are {fix}"
                )
            runs = list(accumulate(int(bit and not before) for before, bit in pairwise([0, *mask])))
            turn_ids = array("i", [run * bit for run, bit in zip(runs, mask, strict=True)])
            rows = [TokenRow(array("i", ids), turn_ids, conversation.place)]
        if is_all:  # every token but the first, as one turn
            rows = [
                replace(row, turn_ids=array("i", [0] + [1] * (len(row.turn_ids) - 1)))
                for row in rows
            ]
        yield rows


def text_fingerprint(tokenizer: Any, data: DataConfig) -> dict[str, Any]:
    backend, template = (
        digest(tokenizer.backend_tokenizer.to_str()),
        digest(tokenizer.chat_template),
    )
    return {"tokenizer": backend, "template": template, "data": as_dict(data)}


def statistics(rows: Sequence[TokenRow]) -> str:
    lengths = [len(row.input_ids) for row in rows]
    num_supervised, num_slots = (
        sum(row.num_supervised for row in rows),
        sum(row.num_slots for row in rows),
    )
    num_turns = sum(len(set(row.turn_ids) - {0}) for row in rows)
    num_tokens, longest = sum(lengths), max(lengths, default=0)
    learnt = f"{num_supervised:,} supervised ({num_supervised / max(num_tokens, 1):.1%}) | {num_slots:,} slots"
    return f"{len(rows):,} rows | {num_tokens:,} tokens | {learnt} | {num_turns:,} turns | longest {longest:,}"


def preview(rows: Sequence[TokenRow], tokenizer: Any, color: bool = True) -> str:
    """For each row a line, then its text with learnt turns in green (or in [turn:...])."""
    shown = []
    for row in rows:
        parts, before, position = (
            [f"{row.source}{statistics([row]).removeprefix('1 rows')}\n"],
            "",
            0,
        )
        for turn, run in groupby(row.turn_ids):
            position += len(list(run))
            # A run alone may lose a blank or half a character.
            text = tokenizer.decode(row.input_ids[:position], clean_up_tokenization_spaces=False)
            new = text[shared_start(before, text) :]
            part, before = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", new), text
            marked = f"{GREEN}{part}{RESET}" if color else f"[{turn}:{part}]"
            parts.append(marked if turn else part)
        shown.append("".join(parts))
    return "\n\n".join(shown)


def draft_vocabulary(
    rows: Iterable[tuple[Any, Any]],
    vocab_size: int,
    size: int | None = None,
    forced: Collection[int] = (),
    given: DraftVocabulary | None = None,
) -> tuple[DraftVocabulary, dict[str, Any], str]:
    """The draft vocabulary, facts about it and a line to print.

    It has `size` tokens (None: at most 32,000): the forced ids and the most frequent supervised tokens of rows
    (input_ids, turn_ids). given: a warm start's vocabulary, whose coverage alone is counted."""
    counts = np.zeros(vocab_size, dtype=np.int64)  # [V], of the supervised tokens
    for input_ids, turn_ids in rows:
        np.add.at(counts, np.asarray(input_ids)[np.asarray(turn_ids) != 0], 1)
    if given is None:
        size = min(DEFAULT_SIZE, vocab_size) if size is None else size
        given = DraftVocabulary.most_frequent(counts, size, forced)
    coverage, num_tokens = given.coverage(counts), int(counts.sum())
    facts = {"size": given.size, "coverage": round(coverage, 6), "counted_tokens": num_tokens}
    share = f"{coverage:.2%} of {num_tokens:,} supervised tokens"
    return given, facts, f"draft vocabulary: {given.size:,} of {vocab_size:,} tokens cover {share}"


def mask_token(tokenizer: Any, end_ids: Collection[int], embedding: Any) -> int:
    """A token id that no text has: the tokenizer's mask, else an embedding row [V, D] without a token, else padding.

    UserError if there is none. A row of zeros is not taken: its queries are zero, so a block's masks would be alike.
    """
    known = {*tokenizer.get_vocab().values()}
    unnamed = (
        number
        for number in range(len(embedding))
        if number not in known and embedding[number].any()
    )
    for number in (tokenizer.mask_token_id, next(unnamed, None), tokenizer.pad_token_id):
        if number is not None and number < len(embedding) and number not in end_ids:
            return int(number)
    what = f"each of the {len(embedding):,} rows of the target's embedding may occur in a text"
    raise UserError(f"head.mask_token_id: {what}; name a token that no conversation has")


def forced_ids(tokenizer: Any, end_ids: Collection[int], vocab_size: int) -> frozenset[int]:
    """Ids in every draft vocabulary: special tokens and the target's end-of-turn tokens."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    # The LM head has no row for special tokens that were added later.
    return frozenset(
        number for number in {*special, *tokenizer.all_special_ids, *end_ids} if number < vocab_size
    )
