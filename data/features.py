"""What a feature cache will hold and take, known from tokens and configuration before the target's weights are read."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from aerie.configs.errors import NotWritable, UserError, warn
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.target_and_head import HeadConfig, TargetConfig
from aerie.data import cache as index
from aerie.data.batches import Batch, Order, collate, prefetched
from aerie.data.cache import (
    COMMAND,
    SAMPLE_TOKENS,
    TOKEN_BYTES,
    CacheIndex,
    FeatureCache,
    ShardBuffer,
    ShardEntry,
    ShardReader,
    State,
    Storage,
    StorageError,
    decode,
    encode,
    measured_error,
    name_of,
    pack,
    read_index,
    rows_digest,
    state_of,
)
from aerie.data.chat import Row, end_of_turn_ids
from aerie.data.conversations import Tally
from aerie.data.inputs import state_inputs
from aerie.data.progress import bar
from aerie.data.tokens import Share, TokenisedData, statistics, tokenize
from aerie.model import storage as provenance
from aerie.model.storage import Lock, Stage, digest, explained, write_text
from aerie.model.target import Target, TargetOutput, check_taps, load_config, load_tokenizer, taps_of
from aerie.model.vocab import check_size

PATTERN = "shard-{:05d}.safetensors"
ROW_BYTES = 16  # its border and its checksum, int64 each
HEADER_BYTES = 1024  # of a shard, and more than its header, first border and error take


@dataclass(frozen=True)
class CachePlan:
    """What will be written where, known before the target's weights are read.

    origin is what decides the states of given token ids (see data.inputs.state_inputs).
    """

    directory: Path
    rows: Sequence[Row]  # train, then held_out
    num_train: int
    shards: tuple[range, ...]  # of row numbers
    hidden_size: int
    after_blocks: tuple[int, ...]
    storage: Storage
    batch_tokens: int
    origin: str

    @property
    def num_tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache per token."""
        return TOKEN_BYTES + (1 + len(self.after_blocks)) * self.storage.state_bytes(self.hidden_size)

    @cached_property
    def rows_digests(self) -> tuple[str, ...]:
        """One digest per shard."""
        return tuple(rows_digest(self.rows_of(shard)) for shard in range(len(self.shards)))

    def rows_of(self, shard: int) -> Sequence[Row]:
        return self.rows[self.shards[shard].start : self.shards[shard].stop]

    def tokens_of(self, shard: int) -> int:
        return sum(len(row.input_ids) for row in self.rows_of(shard))

    def path_of(self, shard: int) -> Path:
        return self.directory / PATTERN.format(shard)

    def bytes_of(self, shard: int) -> int:
        """Bytes of the file, rounded up by less than a kilobyte."""
        return self.tokens_of(shard) * self.token_bytes + len(self.shards[shard]) * ROW_BYTES + HEADER_BYTES

    def state_of(self, shard: int, thorough: bool = False) -> State:
        return state_of(self.path_of(shard), self.rows_digests[shard], self.origin, thorough)

    def missing(self, among: Iterable[int] | None = None) -> list[int]:
        """The shards, of those asked for (None: of all), that are not whole by their headers."""
        numbers = range(len(self.shards)) if among is None else among
        return [shard for shard in numbers if self.state_of(shard) != "whole"]

    def stale(self) -> list[Path]:
        """The shards that a writer removes before it begins: another recipe's, and those beyond the plan."""
        kept = {self.path_of(shard) for shard in range(len(self.shards)) if self.state_of(shard) != "foreign"}
        return [path for path in self.directory.glob(PATTERN.replace("{:05d}", "*")) if path not in kept]

    def temporaries(self) -> list[Path]:
        """Shards half written, by a writer that was killed or is at work: ours, and those of safetensors."""
        return [*self.directory.glob(".*.tmp"), *self.directory.glob(".tmp*")]


def plan_cache(
    directory: Path,
    data: TokenisedData,
    config: FeaturesConfig,
    target_path: str,
    hf_config: Any,
    origin: dict[str, Any],
) -> CachePlan:
    """The plan for these rows; UserError for taps, token ids or lengths that the target does not have."""
    text = hf_config.get_text_config()
    after_blocks = config.after_blocks or ()
    check_taps(after_blocks, text.num_hidden_layers, target_path)
    rows = [*data.train, *data.held_out]
    check_rows(rows, text, target_path)
    return CachePlan(
        directory=directory,
        rows=rows,
        num_train=len(data.train),
        shards=tuple(pack([len(row.input_ids) for row in rows], config.shard_tokens)),
        hidden_size=text.hidden_size,
        after_blocks=after_blocks,
        storage=Storage(_dtype(config, origin["target"]["dtype"], hf_config), config.storage),
        batch_tokens=config.batch_tokens,
        origin=digest(origin),
    )


def check_rows(rows: Sequence[Row], text_config: Any, target_path: str) -> None:
    """UserError for a row that is longer than the target's context, or has a token that it has not."""
    context = getattr(text_config, "max_position_embeddings", None)
    for row in rows:
        if context is not None and len(row.input_ids) > context:
            raise UserError(
                f"{row.source}: {len(row.input_ids):,} tokens, but the context of {target_path} is {context:,}; "
                f"set data.max_length to {context} or less"
            )
        if max(row.input_ids) >= text_config.vocab_size:
            raise UserError(
                f"{row.source}: token id {max(row.input_ids):,} is outside the vocabulary of {target_path} "
                f"({text_config.vocab_size:,} rows); its tokenizer and weights do not belong together"
            )


def estimate(plan: CachePlan, share: Share) -> str:
    """The size of the cache and what is left to do of this share, in two lines."""
    own = share.part(len(plan.shards))
    todo = plan.missing(own)
    largest = max(plan.bytes_of(shard) for shard in range(len(plan.shards)))
    tokens = f"{len(plan.rows):,} rows, {plan.num_tokens:,} tokens x {plan.token_bytes:,} bytes ({plan.storage.name})"
    mine = "them" if share.count == 1 else f"the {len(own):,} of share {share}"
    return (
        f"features: {tokens} = {size(plan.num_tokens * plan.token_bytes)}; "
        f"shards: {len(plan.shards):,} of at most {size(largest)}, two at a time in memory\n"
        f"features: to write: {size(sum(map(plan.bytes_of, todo)))} in {len(todo):,} of {mine}; "
        f"free on the disk: {size(_free_bytes(plan.directory))}"
    )


def require_space(plan: CachePlan, share: Share) -> None:
    """UserError when the missing shards of this share do not fit on the disk, even once the stale files are gone.

    Whether those may go is asked before (require_own_shards).
    """
    needed = sum(map(plan.bytes_of, plan.missing(share.part(len(plan.shards)))))
    if needed <= _free_bytes(plan.directory):
        return
    freed = sum(map(_bytes_on_disk, [*plan.stale(), *plan.temporaries()]))
    free = _free_bytes(plan.directory) + freed
    if needed > free:
        raise UserError(
            f"{plan.directory}: the cache needs {size(needed)} more ({needed:,} bytes) and the disk has {size(free)} "
            f"free; lower data.limit or data.max_length, set features.storage to fp8 or int8, or choose another --run"
        )


def disk_full(plan: CachePlan, shard: int, todo: Sequence[int]) -> UserError:
    """What to say when the disk ran full under a shard while `todo` was still to be written."""
    needed = sum(map(plan.bytes_of, todo))
    return UserError(
        f"{plan.path_of(shard)}: the disk is full: this shard takes {plan.bytes_of(shard):,} bytes and "
        f"{_free_bytes(plan.directory):,} are free; what is left of this process's part takes {needed:,} bytes in "
        f"{len(todo):,} shards: free that much, and the same command goes on from there (what is written is kept)"
    )


def require_own_shards(plan: CachePlan, overwrite: bool) -> None:
    """UserError when another recipe left sound shards, also beyond this plan's, and overwrite was not asked for."""
    if overwrite:
        return
    planned = {plan.path_of(shard): digest for shard, digest in enumerate(plan.rows_digests)}
    found = sorted(plan.directory.glob(PATTERN.replace("{:05d}", "*")))
    foreign = (path.name for path in found if state_of(path, planned.get(path, ""), plan.origin) == "foreign")
    if first := next(foreign, None):
        raise UserError(
            f"{plan.directory}: {first} was made from other rows or by another target; choose another --run, or "
            f"replace it with --overwrite"
        )


def _dtype(config: FeaturesConfig, target_dtype: str, hf_config: Any) -> torch.dtype:
    """The stored dtype: features.dtype, else target.dtype, else what the checkpoint's configuration says."""
    name = config.dtype or (None if target_dtype == "auto" else target_dtype)
    if name is not None:
        found = getattr(torch, name)
    else:
        found = (
            getattr(hf_config, "dtype", None) or getattr(hf_config.get_text_config(), "dtype", None) or torch.float32
        )
    assert isinstance(found, torch.dtype)
    return found


def _bytes_on_disk(path: Path) -> int:
    """What removing the file frees: nothing where it has another name, or another process has removed it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_blocks * 512 if found.st_nlink == 1 else 0


def _free_bytes(directory: Path) -> int:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def size(num_bytes: int) -> str:
    """'12.3 MiB', '1.2 TiB'."""
    if num_bytes >= 2**40:
        return f"{num_bytes / 2**40:,.2f} TiB"
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


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


@dataclass(frozen=True)
class Findings:
    """problems: a line each, with the place; sound shards and bytes are counted."""

    problems: tuple[str, ...]
    num_shards: int
    num_rows: int
    num_tokens: int
    num_bytes: int
    unsealed: int  # shards of before there were checksums

    def text(self, directory: Path) -> str:
        """The problems, the sum, and the command that mends them."""
        whole = (
            f"{self.num_shards:,} shards, {self.num_rows:,} rows, {self.num_tokens:,} tokens, {size(self.num_bytes)}"
        )
        lines = [*self.problems, f"{directory}: {whole} are whole"]
        if self.unsealed:
            lines.append(f"{directory}: {self.unsealed:,} shards have no checksums: their values were not looked at")
        if self.problems:
            count = f"{len(self.problems):,} problem{'s' if len(self.problems) > 1 else ''}"
            lines.append(f"{count}; write what is broken or missing anew, and nothing else, with: {COMMAND} --verify")
        return "\n".join(lines)


def check(directory: Path) -> Findings:
    """What holds and what does not; UserError when there is no cache at all.

    With an index each shard must be the one that it lists; without one (an extraction under way) each must be whole.
    """
    files = sorted(directory.glob(PATTERN.replace("{:05d}", "*")))
    if not files and not (directory / "index.json").is_file():
        read_index(directory)  # says what is missing, and how to build it
    contents, problems = _index_check(directory)
    entries = {} if contents is None else {shard.file: shard for shard in contents.shards}
    listed = list(entries) if contents is not None else [path.name for path in files]
    problems += [
        f"{path.name}: not in index.json" for path in files if contents is not None and path.name not in entries
    ]
    sound: list[ShardReader] = []
    sizes = {name: (directory / name).stat().st_size for name in listed if (directory / name).is_file()}
    with bar(sum(sizes.values()), "B", "check") as progress:
        for name in listed:
            if name not in sizes:
                problems.append(f"{name}: missing")
                continue
            try:
                reader = ShardReader(directory / name)
                found = list(_wrong(reader, entries.get(name), contents))
            except UserError as error:
                found = [str(error).removeprefix(f"{directory}/")]
            problems += found
            sound += [] if found else [reader]
            progress.update(sizes[name])
    return Findings(
        problems=tuple(problems),
        num_shards=len(sound),
        num_rows=sum(len(reader.offsets) - 1 for reader in sound),
        num_tokens=sum(reader.offsets[-1] for reader in sound),
        num_bytes=sum(sizes[reader.path.name] for reader in sound),
        unsealed=sum(reader.checksums is None for reader in sound),
    )


def _index_check(directory: Path) -> tuple[CacheIndex | None, list[str]]:
    """The index, and what is wrong with it; sizes are left to the shards' own check."""
    if not (directory / "index.json").is_file():
        return None, ["index.json: missing: the extraction has not ended, or not all of its shares have"]
    try:
        return read_index(directory, sizes=False), []
    except UserError as error:
        return None, [str(error).removeprefix(f"{directory}/")]


def _wrong(reader: ShardReader, entry: ShardEntry | None, contents: CacheIndex | None) -> Iterator[str]:
    """What is wrong with one shard: as a file, against its entry in the index, and in its values."""
    name = reader.path.name
    if entry is not None and contents is not None:
        if entry.checksum is not None and reader.seal != entry.checksum:
            yield f"{name}: is not the shard that index.json lists: the index is stale"
            return
        lengths = [second - first for first, second in zip(reader.offsets, reader.offsets[1:], strict=False)]
        if lengths != list(contents.lengths[entry.first_row : entry.first_row + entry.num_rows]):
            yield f"{name}: its rows are not as long as index.json says: the index is stale"
            return
        if entry.rows != reader.rows:
            yield f"{name}: holds other rows than index.json says: the index is stale"
            return
    for place in range(len(reader.offsets) - 1):
        problem = _wrong_row(reader, place, torch.float32 if contents is None else getattr(torch, contents.dtype))
        if problem is not None:
            number = "" if entry is None else f" (row {entry.first_row + place:,} of the cache, counted from 0)"
            yield f"{problem}{number}"
            return


def _wrong_row(reader: ShardReader, place: int, dtype: torch.dtype) -> str | None:
    try:
        row = reader.row(place)
    except UserError as error:
        return str(error).removeprefix(f"{reader.path.parent}/")
    parts = [(row.last_hidden, slice(0, 1)), *([] if row.taps is None else [(row.taps, slice(1, None))])]
    for states, columns in parts:
        scales = None if row.scales is None else row.scales[:, columns]
        if not torch.isfinite(decode(states, scales, dtype)).all():
            return f"{reader.path.name}: row {place + 1} of the shard has states that are not finite"
    return None


@dataclass(frozen=True)
class Reading:
    """Some steps' reading: bytes as stored, and seconds with nothing else to do, cold (first read) and warm."""

    num_steps: int
    num_tokens: int
    num_bytes: int
    cold_seconds: float
    warm_seconds: float
    step_seconds: float | None = None  # of the training step that was imitated by sleeping
    waited_seconds: float = 0.0  # of all those steps, for their batches
    is_cold: bool = True  # whether the system could be asked to forget the pages before

    def text(self) -> str:
        """One line to three."""
        rates = [
            f"{name} {self.num_bytes / seconds / 1e9:.2f} GB/s ({self.num_tokens / seconds:,.0f} tok/s)"
            for name, seconds in (("first read", self.cold_seconds), ("again", self.warm_seconds))
        ]
        read = f"{self.num_steps:,} steps, {self.num_tokens:,} tokens, {size(self.num_bytes)}"
        lines = [f"read: {read}: {', '.join(rates)}; one thread, checksums compared"]
        if not self.is_cold:
            lines.append("read: this system cannot be asked to forget files: the first read may come from memory")
        if self.step_seconds is not None:
            total = self.num_steps * self.step_seconds + self.waited_seconds
            lines.append(
                f"read: beside steps of {1000 * self.step_seconds:,.0f} ms, {self.waited_seconds / total:.1%} of the "
                f"time is spent waiting for batches"
            )
        return "\n".join(lines)


def measure(cache: FeatureCache, order: Order, num_steps: int, step_seconds: float | None) -> Reading:
    """The reading of the order's first steps.

    The cache's files are unmapped and their pages dropped before, as far as the system allows it: those that another
    process maps stay.
    """
    steps = range(min(num_steps, order.steps_per_epoch))
    numbers = [number for step in steps for number in order.rows(step)]
    is_cold = _drop_pages(cache, numbers)
    seconds = []
    tokens = 0
    for _ in ("first read", "again"):
        before = time.perf_counter()
        tokens = sum(_batch(cache, order, step).num_tokens for step in steps)
        seconds.append(time.perf_counter() - before)
        cache.close()  # so that checksums are compared the second time, too
    waited = 0.0
    if step_seconds is not None:
        _drop_pages(cache, numbers)
        waited = _waited(cache, order, steps, step_seconds)
    return Reading(
        num_steps=len(steps),
        num_tokens=tokens,
        num_bytes=tokens * cache.token_bytes,
        cold_seconds=seconds[0],
        warm_seconds=seconds[1],
        step_seconds=step_seconds,
        waited_seconds=waited,
        is_cold=is_cold,
    )


def last_step(metrics: Path, kind: str) -> tuple[float, float] | None:
    """(milliseconds without waiting, share of the whole that was waited) of a training's last record, or None."""
    found = None
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:  # a training that was killed, or is writing now, leaves a torn line
            continue
        if record.get("kind") == kind and "step_ms" in record:
            waited = float(record["data_wait_share"])
            found = (float(record["step_ms"]) * (1.0 - waited), waited)
    return found


def _batch(cache: FeatureCache, order: Order, step: int) -> Batch:
    rows = order.rows(step)
    return collate([cache[row] for row in rows], rows)


def _waited(cache: FeatureCache, order: Order, steps: Sequence[int], step_seconds: float) -> float:
    """Seconds for which steps that sleep instead of computing wait for their batches."""
    waited, before = 0.0, time.perf_counter()
    for _ in prefetched(lambda step: _batch(cache, order, step), steps):
        waited += time.perf_counter() - before
        time.sleep(step_seconds)
        before = time.perf_counter()
    return waited


def _drop_pages(cache: FeatureCache, numbers: Sequence[int]) -> bool:
    """Asks the system to forget the shards of these rows, so that they come from the disk; False where it cannot."""
    cache.close()  # pages of a mapped file stay
    if not hasattr(os, "posix_fadvise"):  # macOS
        return False
    for name in {cache.file_of(number) for number in numbers}:
        descriptor = os.open(cache.directory / name, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


@dataclass(frozen=True)
class Sitting:
    """What one call is asked for."""

    target: TargetConfig
    data: DataConfig
    features: FeaturesConfig
    head: HeadConfig
    stage: Stage
    share: Share
    overwrite: bool

    def may_replace(self) -> bool:
        """Whether another recipe's shards may be replaced; UserError when the directory is another run's."""
        self.stage.require_own_directory(self.overwrite)
        return self.overwrite or self.stage.is_whole()  # in a cache of this recipe another's is damage


def write(sitting: Sitting, state: Any) -> tuple[str, int]:
    """(state, exit code) of writing a share of the cache; state is accelerate's PartialState."""
    share, clock = sitting.share, Clock()
    plan, tokenizer, facts = planned(sitting, state.process_index)
    target = Target.load(sitting.target, state.device)
    fingerprint = text_fingerprint(tokenizer, sitting.data)
    index = extract(target, plan, state, fingerprint, share, clock, sitting.may_replace)
    speed = f"; {clock.line(state.num_processes)}" if clock.tokens else ""
    if index is not None:
        record = sitting.stage.finish(
            **facts, tokens=index.num_tokens, bytes=index.num_bytes, batch_tokens=sitting.features.batch_tokens
        )
        amount = f"{index.num_tokens:,} tokens, {index.num_bytes / 2**20:,.1f} MiB"
        where = sitting.stage.output
        print(f"features: {amount} in {record['seconds']:,.1f} s with the loading{speed}: {where}", flush=True)
        if index.error is not None:
            print(f"features: {plan.storage.name}: {index.error.line()}", flush=True)
    elif state.is_main_process:
        print(f"features: share {share} is written{speed}; {len(plan.missing()):,} shards are left", flush=True)
    return ("done" if share.count == 1 or index is not None else "share-done"), 0


def timed(sitting: Sitting, plan: CachePlan, device: str) -> None:
    """Prints the hours that the missing shards take, from some forwards of the target."""
    tokens = sum(map(plan.tokens_of, plan.missing(sitting.share.part(len(plan.shards)))))
    speed = forward_speed(Target.load(sitting.target, device), plan)
    print(
        f"features: {tokens:,} tokens at {speed:,.0f} tok/s (measured now, one process) take "
        f"{tokens / speed / 3600:,.2f} h; n equal processes or jobs (--shard i/n) take an n-th of it",
        flush=True,
    )


def planned(sitting: Sitting, rank: int) -> tuple[CachePlan, Any, dict[str, Any]]:
    """(plan, tokenizer, facts) after every check that needs no weights; rank 0 prints the estimate."""
    hf_config = load_config(sitting.target)
    text = hf_config.get_text_config()
    path, stage = sitting.target.path, sitting.stage
    taps = taps_of(sitting.head.kind, sitting.features.after_blocks, text.num_hidden_layers, path)
    check_size(getattr(sitting.head, "draft_vocab_size", None), text.vocab_size)
    data, tokenizer, tally = tokenised(sitting.target, sitting.data, rank)
    origin = {**state_inputs(stage.inputs), "after_blocks": list(taps)}
    plan = plan_cache(stage.output, data, replace(sitting.features, after_blocks=taps), path, hf_config, origin)
    facts = {"train": statistics(data.train).line(), "held_out": statistics(data.held_out).line()}
    if rank == 0:
        lines = [tally.table(), *(f"{name}: {line}" for name, line in facts.items()), estimate(plan, sitting.share)]
        print("\n".join(lines), flush=True)
    require_own_shards(plan, sitting.may_replace())
    require_space(plan, sitting.share)
    return plan, tokenizer, facts


def tokenised(target: TargetConfig, config: DataConfig, rank: int) -> tuple[TokenisedData, Any, Tally]:
    """The recipe's conversations, the tokenizer that made their tokens, and what was left out."""
    tokenizer = load_tokenizer(target)
    try:
        stops = GenerationConfig.from_pretrained(target.path, revision=target.revision).eos_token_id
    except OSError:  # the file is optional
        stops = None
    tally = Tally()
    data = tokenize(
        config, tokenizer, end_of_turn_ids(tokenizer, stops), tally, disable_bar=None if rank == 0 else True
    )
    return data, tokenizer, tally


class OnlineFeatures:
    """Fills the features and taps that a cache would have held; what uses the batch cannot tell."""

    def __init__(self, target: Target, after_blocks: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        """dtype is that of the states (None: the target's)."""
        self.target = target
        self.after_blocks = after_blocks
        self.dtype = dtype or target.dtype

    def __call__(self, batch: Batch) -> Batch:
        """The batch with states, on its own device; one that has them already (of a process without rows) as it is."""
        if batch.features is not None:
            return batch
        ids, mask = _rows(batch)
        padded = not bool(mask.all())
        device = self.target.device
        output = self.target.features(ids.to(device), mask.long().to(device) if padded else None, self.after_blocks)
        taps = None if output.taps is None else self._states(output.taps, mask, batch)
        return replace(batch, features=self._states(output.last_hidden, mask, batch), taps=taps)

    def _states(self, states: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        """[B, T, D] of the batch's own shape, zero in padding, as a cache yields them.

        A copy: autograd may not keep what inference mode has made.
        """
        states = states.to(batch.input_ids.device, self.dtype, copy=True)
        if batch.documents is not None:
            return states[mask][None]
        return states * mask[..., None]


def _rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Token ids [N, T] of the conversations, one a row, and the mask [N, T] of what is no padding."""
    longest = batch.input_ids.shape[1] if batch.documents is None else max(batch.documents)
    mask = torch.arange(longest, device=batch.input_ids.device) < batch.lengths[:, None]  # [N, T]
    if batch.documents is None:
        return batch.input_ids, mask
    ids = torch.zeros_like(mask, dtype=torch.long)
    ids[mask] = batch.input_ids[0]
    return ids, mask
