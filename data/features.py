"""Extracts the target's states of tokenised rows into the feature cache: one frozen forward per batch.

A shard is written, by a thread, while the next one is computed. Its content depends on its rows and the recipe alone,
not on which process makes it; so any number of processes and jobs, and after them any other number, fill one cache.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import index, provenance
from data.config import DataConfig
from data.index import CacheIndex, ShardEntry, StorageError
from data.locks import Lock
from data.plan import CachePlan, disk_full, require_own_shards
from data.progress import bar
from data.shards import ShardBuffer, ShardReader, name_of
from data.share import Share
from data.storage import SAMPLE_TOKENS, encode, measured_error
from model.errors import NotWritable, UserError, warn
from model.files import digest, explained, write_text
from model.recipe import as_dict
from model.target import Target, TargetOutput

WRITING = ".writing"  # the folder of locks, while a cache is being made
RECIPE = "recipe"  # in it, what is written there: changed by whoever holds the lock alone


@dataclass
class Clock:
    """Seconds of this process in all and in the target's forwards: the rest is the writer's."""

    seconds: float = 0.0
    forward_seconds: float = 0.0
    tokens: int = 0

    def line(self, num_processes: int = 1) -> str:
        """Says what the writer adds, or nothing where nothing was made; this process stands for so many."""
        if not self.forward_seconds:
            return ""
        added = self.seconds / self.forward_seconds - 1
        each = "" if num_processes == 1 else f" in each of {num_processes} processes"
        return f"{self.tokens / self.seconds:,.0f} tok/s{each}, {added:.1%} above the target's bare forwards"


def extract(
    target: Target,
    plan: CachePlan,
    state: Any,
    fingerprint: dict[str, Any],
    share: Share | None = None,
    clock: Clock | None = None,
    may_replace: Callable[[], bool] = lambda: False,
) -> CacheIndex | None:
    """The index, written by the main process once every shard exists (None on the others, and while some are missing).

    state is accelerate's PartialState; a process makes those shards of its part of the share that are not whole, byte
    for byte. fingerprint is stored, with the keys target, after_blocks, dtype, storage and rows added. may_replace
    says whether another recipe's shards are replaced (or raises): it is asked under the lock, as another job may have
    ended since the plan was made. UserError when a state is not
    finite, the disk is full, or another recipe's job is writing there or has written.
    """
    share = share or Share()
    rank, world = state.process_index, state.num_processes
    with explained(plan.directory):
        lock = Lock(plan.directory / WRITING / "cache")
    with lock:
        if rank == 0:
            _join(plan, lock, may_replace)
        state.wait_for_everyone()
        lock.acquire(shared=True)  # beside rank 0, which holds it: nobody can begin another cache in between
        part = share.part(len(plan.shards), rank, world)
        who = f"features (process 1 of {world})" if world > 1 else "features"
        with bar(sum(plan.tokens_of(shard) for shard in part), "tok", who, rank) as progress:
            Extraction(target, plan, progress, clock or Clock()).run(part)
        state.wait_for_everyone()
        if rank != 0:
            return None
        missing = set(plan.missing())
        if lost := sorted(missing.intersection(share.part(len(plan.shards)))):
            found = plan.state_of(lost[0])
            raise UserError(f"{plan.path_of(lost[0])}: {found} after the extraction; run the same command again")
        if missing:
            return None
        made = _index(plan, {**fingerprint, "target": target.fingerprint()})
        index.write_index(plan.directory, made)
        if lock.acquire(wait=False) is True:  # nobody else is at work
            _forget_locks(plan)
    return made


def text_fingerprint(tokenizer: Any, data: DataConfig) -> dict[str, Any]:
    """The part of the cache's fingerprint that decides its token ids: tokenizer, template and the section data."""
    return {
        "tokenizer": digest(tokenizer.backend_tokenizer.to_str()),
        "template": digest(tokenizer.chat_template),
        "data": as_dict(data),
    }


def forward_speed(target: Target, plan: CachePlan, seconds: float = 10.0) -> float:
    """Tokens a second of the target's forwards on the first shards' batches, for about so many seconds."""
    clock = Clock()
    first = True
    for shard in range(len(plan.shards)):
        rows = plan.rows_of(shard)
        for places in batches([len(row.input_ids) for row in rows], plan.batch_tokens):
            tokens = sum(len(rows[place].input_ids) for place in places)
            _forward(
                target, [rows[place].input_ids for place in places], plan.after_blocks, Clock() if first else clock
            )
            clock.tokens += 0 if first else tokens
            first = False
            if clock.forward_seconds > seconds:
                return clock.tokens / clock.forward_seconds
    if not clock.tokens:
        raise UserError(f"{plan.directory}: one forward takes all rows: too few to time; give the command itself")
    return clock.tokens / clock.forward_seconds


def batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Places grouped by similar length, longest first, so that rows x longest stays within batch_tokens."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    groups: list[list[int]] = []
    for place in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= batch_tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


class Extraction:
    """One process's work on a cache."""

    def __init__(self, target: Target, plan: CachePlan, progress: Any, clock: Clock) -> None:
        self.target, self.plan, self.progress, self.clock = target, plan, progress, clock
        self.left: list[int] = []

    def run(self, part: Sequence[int]) -> None:
        """Makes the shards of `part` that are not whole; those that another writer is at work on are waited for."""
        self.left = [shard for shard in part if not self._is_whole(shard)]
        started = time.perf_counter()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer") as pool:
            others = self._pass(self.left, pool, wait=False)
            self._pass(others, pool, wait=True)
        self.clock.seconds += time.perf_counter() - started

    def _is_whole(self, shard: int) -> bool:
        whole = self.plan.state_of(shard, thorough=True) == "whole"
        if whole:
            self.progress.update(self.plan.tokens_of(shard))
        return whole

    def _pass(self, shards: Sequence[int], pool: ThreadPoolExecutor, wait: bool) -> list[int]:
        """The shards that another process holds; the others are made."""
        busy: list[int] = []
        written: Future[None] | None = None
        for shard in shards:
            with explained(self.plan.directory), ExitStack() as stack:
                lock = stack.enter_context(Lock(self.plan.directory / WRITING / f"{shard:05d}"))
                if not lock.acquire(wait=wait):
                    busy.append(shard)
                elif not self._is_whole(shard):  # another process may have made it meanwhile
                    save = self._filled(shard)
                    if written is not None:
                        written.result()
                    stack.pop_all()  # the writer frees it
                    written = pool.submit(self._save, shard, save, lock)
        if written is not None:
            written.result()
        return busy

    def _save(self, shard: int, save: Callable[[], Any], lock: Lock) -> None:
        with lock:
            try:
                save()
            except NotWritable as error:
                if not error.is_full:
                    raise
                raise disk_full(self.plan, shard, self.plan.missing(self.left)) from error
            lock.forget()

    def _filled(self, shard: int) -> Callable[[], Any]:
        """Puts together the shard with every row's states, and returns what writes it."""
        plan, target = self.plan, self.target
        rows, num_taps = plan.rows_of(shard), len(plan.after_blocks)
        lengths = [len(row.input_ids) for row in rows]
        buffer = ShardBuffer(rows, plan.hidden_size, num_taps, plan.storage)
        for places in batches(lengths, plan.batch_tokens):
            output, mask = _forward(target, [rows[place].input_ids for place in places], plan.after_blocks, self.clock)
            if plan.storage.form is not None and buffer.error is None:
                buffer.error = self._error(output, mask)
            last_hidden = encode(output.last_hidden, 1, plan.storage).cpu()
            taps = None if output.taps is None else encode(output.taps, num_taps, plan.storage).cpu()
            for line, place in enumerate(places):
                here = (line, slice(lengths[place]))
                buffer.put(place, last_hidden[here], None if taps is None else taps[here])
            self.progress.update(sum(lengths[place] for place in places))
            self.clock.tokens += sum(lengths[place] for place in places)
        return lambda: buffer.save(plan.path_of(shard), plan.origin)

    def _error(self, output: TargetOutput, mask: Tensor) -> StorageError:
        """The storage's error on some tokens, spread evenly over the first batch of a shard."""
        tokens = mask.flatten().nonzero().flatten()
        chosen = tokens[:: -(-len(tokens) // SAMPLE_TOKENS)].to(output.last_hidden.device)
        last_hidden = output.last_hidden.flatten(0, 1)[chosen]
        taps = None if output.taps is None else output.taps.flatten(0, 1)[chosen]
        return measured_error(last_hidden, taps, len(self.plan.after_blocks), self.plan.storage, self.target.logits)


def _forward(
    target: Target, ids: Sequence[Sequence[int]], after_blocks: tuple[int, ...], clock: Clock
) -> tuple[TargetOutput, Tensor]:
    """The target's states of some rows, and the mask [B, T] of their tokens."""
    padded, mask = _pad(ids)
    before = time.perf_counter()
    attention_mask = None if bool(mask.all()) else mask.to(target.device)
    output = target.features(padded.to(target.device), attention_mask, after_blocks)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    clock.forward_seconds += time.perf_counter() - before
    return output, mask


def _pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], right-padded with 0, and the mask [B, T] with 1 for tokens."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)  # [B, T]
    mask = torch.zeros(len(rows), longest, dtype=torch.long)  # [B, T]
    for line, row in enumerate(rows):
        ids[line, : len(row)] = torch.tensor(row)
        mask[line, : len(row)] = 1
    return ids, mask


def _join(plan: CachePlan, lock: Lock, may_replace: Callable[[], bool]) -> None:
    """Leaves the lock shared, and the recipe file saying that this cache is written; errors are those of _begin.

    The kernel makes a lock shared by freeing it first, so another writer may begin, and even end, just then.
    """
    own, said = digest([plan.origin, plan.rows_digests]), ""
    while said != own:
        _begin(plan, lock, may_replace, own)
        lock.acquire(shared=True)
        said = _text(plan.directory / WRITING / RECIPE)


def _begin(plan: CachePlan, lock: Lock, may_replace: Callable[[], bool], own: str) -> None:
    """Removes what an interrupted, a larger or another run left: temporary files, surplus shards, the index.

    Beside another writer nothing is removed: UserError when it is writing another cache there. UserError, too, when
    there is another recipe's cache that may not be replaced. own is what the recipe file is to say.
    """
    recipe = plan.directory / WRITING / RECIPE
    while not (held := lock.acquire(wait=False)):
        lock.acquire(shared=True)
        theirs = _text(recipe)
        if theirs == own:
            return
        if theirs:
            raise UserError(
                f"{plan.directory}: another process is writing another cache there; wait for its end, or choose "
                f"another --run"
            )
        time.sleep(random.uniform(0.01, 0.1))  # it has just ended, or was killed before it said what it writes
    require_own_shards(plan, may_replace())
    stale = [*plan.stale(), plan.directory / index.FILE, plan.directory / provenance.FILE]
    if held == "unknown":
        warn(
            f"{plan.directory}: this file system knows no locks: another writer is not noticed, and temporary files "
            f"stay; write from one job at a time"
        )
    else:
        stale += plan.temporaries()
    with explained(plan.directory):
        for path in stale:
            path.unlink(missing_ok=True)
    write_text(recipe, own)


def _text(path: Path) -> str:
    """What a file holds; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _forget_locks(plan: CachePlan) -> None:
    for path in (plan.directory / WRITING).glob("*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # somebody else has just begun
        (plan.directory / WRITING).rmdir()


def _index(plan: CachePlan, fingerprint: dict[str, Any]) -> CacheIndex:
    entries = []
    for shard, numbers in enumerate(plan.shards):
        path = plan.path_of(shard)
        reader = ShardReader(path)
        entries.append(
            ShardEntry(
                file=path.name,
                first_row=numbers.start,
                num_rows=len(numbers),
                num_tokens=plan.tokens_of(shard),
                num_bytes=path.stat().st_size,
                rows=plan.rows_digests[shard],
                checksum=reader.seal,
                error=reader.error,
            )
        )
    made_of = {
        "after_blocks": list(plan.after_blocks),
        "dtype": name_of(plan.storage.dtype),
        "storage": plan.storage.form,
        "rows": digest(plan.rows_digests),
    }
    return CacheIndex(
        schema=1,
        fingerprint={**fingerprint, **made_of},
        dtype=name_of(plan.storage.dtype),
        hidden_size=plan.hidden_size,
        after_blocks=plan.after_blocks,
        splits={"train": (0, plan.num_train), "held_out": (plan.num_train, len(plan.rows))},
        lengths=tuple(len(row.input_ids) for row in plan.rows),
        shards=tuple(entries),
        storage=plan.storage.form,
    )
