"""The frozen target's states of the recipe's conversations: written to a feature cache, or made in the training step.

`plan_cache` cuts the rows into shards, `extract` makes those shards that are not whole (in one process, several under a
launcher, or several jobs with a share each), and who finds all shards whole writes the index. A shard depends on its
rows, the target and the taps alone, so jobs may be killed and started again at any time and in any number.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import NotWritable, UserError, warn
from aerie.configs.read import as_dict
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data.batches import Batch
from aerie.data.cache import ShardBuffer, Storage, StorageError, encode, record_name, rows_digest, write_index
from aerie.data.chat import Row
from aerie.data.inputs import COMMAND, INDEX, state_inputs
from aerie.data.progress import Share, bar
from aerie.data.tokens import TokenisedData, statistics, tokenised
from aerie.model.storage import (
    FILE,
    Foreign,
    Lock,
    Manifest,
    Stage,
    Whole,
    digest,
    explained,
    remove_temporaries,
)
from aerie.model.target import Target, TargetOutput, check_taps, load_config, taps_of
from aerie.model.vocab import check_size

SHARDS = "shard-*"
WRITING = ".writing"  # the directory of locks while a cache is being made
ROW_BYTES = 80  # of a row in its shard's record and in the index
SHARD_BYTES = 2048  # more than a shard's header and the rest of its record take
SAMPLE_TOKENS = 256  # of a shard, on which the error of its storage is measured


# ------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class CachePlan:
    """What will be written where, known before the target's weights are read."""

    directory: Path
    rows: Sequence[Row]  # train, then held_out
    num_train: int
    shards: tuple[range, ...]  # of row numbers
    hidden_size: int
    after_blocks: tuple[int, ...]
    storage: Storage
    batch_tokens: int
    origin: str  # digest of what decides the states of given token ids (data.inputs.state_inputs, taps)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def token_bytes(self) -> int:
        return self.storage.token_bytes(self.hidden_size, len(self.after_blocks))

    @cached_property
    def rows_digests(self) -> tuple[str, ...]:
        """One digest per shard."""
        return tuple(rows_digest(self.rows_of(shard)) for shard in range(len(self.shards)))

    def rows_of(self, shard: int) -> Sequence[Row]:
        return self.rows[self.shards[shard].start : self.shards[shard].stop]

    def tokens_of(self, shard: int) -> int:
        return sum(len(row.input_ids) for row in self.rows_of(shard))

    def bytes_of(self, shard: int) -> int:
        """Bytes of a shard, its record and its part of the index, rounded up by a few kilobytes."""
        return self.tokens_of(shard) * self.token_bytes + len(self.shards[shard]) * ROW_BYTES + SHARD_BYTES

    def path_of(self, shard: int) -> Path:
        return self.directory / f"shard-{shard:05d}.safetensors"

    def inputs_of(self, shard: int) -> dict[str, Any]:
        """What a shard is made from, for its record."""
        return {"rows": self.rows_digests[shard], "origin": self.origin}

    def is_whole(self, shard: int, content: bool = False) -> bool:
        """Whether a shard is there, by its record and size; content: by every byte."""
        name = record_name(self.path_of(shard).name)
        return isinstance(Manifest.check(self.directory, self.inputs_of(shard), content, name), Whole)

    def missing(self, shards: Sequence[int]) -> list[int]:
        return [shard for shard in shards if not self.is_whole(shard)]

    def foreign(self) -> list[Path]:
        """The records of shards that other rows or another target made, or that lie beyond this plan."""
        planned = {record_name(self.path_of(shard).name): self.inputs_of(shard) for shard in range(len(self.shards))}
        records = sorted(self.directory.glob(record_name(f"{SHARDS}.safetensors")))
        checked = [
            (path, Manifest.check(self.directory, planned.get(path.name, {}), False, path.name)) for path in records
        ]
        return [path for path, answer in checked if isinstance(answer, Foreign)]

    def stale(self) -> list[Path]:
        """What a writer removes before it begins: another recipe's shards, and what killed ones left half written."""
        planned = {self.path_of(shard).stem for shard in range(len(self.shards))}
        kept = planned - {path.stem for path in self.foreign()}
        shards = [path for path in self.directory.glob(SHARDS) if path.stem not in kept]
        return [*shards, *self.directory.glob(".tmp*")]  # the latter are those of safetensors

    def require_own_directory(self, overwrite: bool) -> None:
        """UserError when another recipe left shards and overwrite was not asked for."""
        if not overwrite and (foreign := self.foreign()):
            raise UserError(
                f"{foreign[0]}: was made from other rows or by another target; choose another --run, or replace it "
                f"with --overwrite"
            )

    def free_bytes(self) -> int:
        """On the disk, once the stale files are gone."""
        directory = self.directory.absolute()
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        stale = [path.stat().st_size for path in (*self.stale(), *directory.glob(".*.tmp")) if path.is_file()]
        return shutil.disk_usage(existing).free + sum(stale)

    def estimate(self, share: Share) -> tuple[str, int]:
        """The size of the cache and what is left to do of this share, in two lines; and the bytes of the latter."""
        part = share.part(len(self.shards))
        todo = self.missing(part)
        needed, largest = sum(map(self.bytes_of, todo)), max(map(self.bytes_of, range(len(self.shards))))
        whose = "them" if share.count == 1 else f"the {len(part):,} of share {share}"
        text = (
            f"features: {len(self.rows):,} rows, {self.num_tokens:,} tokens x {self.token_bytes:,} bytes "
            f"({self.storage}) = {size(self.num_tokens * self.token_bytes)}; shards: {len(self.shards):,} of at most "
            f"{size(largest)}, two at a time in memory\n"
            f"features: to write: {size(needed)} in {len(todo):,} of {whose}; free on the disk: "
            f"{size(self.free_bytes())}"
        )
        return text, needed


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
    name = config.dtype or origin["target"]["dtype"]
    dtypes = [getattr(hf_config, "dtype", None), getattr(text, "dtype", None), torch.float32]
    dtype = next(found for found in dtypes if found is not None) if name == "auto" else getattr(torch, name)
    return CachePlan(
        directory=directory,
        rows=rows,
        num_train=len(data.train),
        shards=tuple(pack([len(row.input_ids) for row in rows], config.shard_tokens)),
        hidden_size=text.hidden_size,
        after_blocks=after_blocks,
        storage=Storage(dtype, config.storage),
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


def pack(lengths: Sequence[int], shard_tokens: int) -> Iterator[range]:
    """The rows of each shard, in order: as many as fit into shard_tokens, at least one."""
    first, tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > first and tokens + length > shard_tokens:
            yield range(first, row)
            first, tokens = row, 0
        tokens += length
    yield range(first, len(lengths))


def batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Positions grouped by similar length, longest first, so that rows x longest stays within batch_tokens."""
    groups: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda position: (-lengths[position], position)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= batch_tokens:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def size(num_bytes: float) -> str:
    """'12.3 MiB', '1.2 TiB'."""
    if num_bytes >= 2**40:
        return f"{num_bytes / 2**40:,.2f} TiB"
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


# ------------------------------------------------------------------------------------------------------- extraction


def extract(
    target: Target,
    plan: CachePlan,
    state: Any,
    fingerprint: dict[str, Any],
    share: Share | None = None,
    overwrite: bool = False,
) -> tuple[Manifest | None, "Writer"]:
    """Makes those shards of this process's part of the share that are not whole, byte for byte.

    Returns the index, which the first process writes once every shard exists (None on the others, and while some are
    missing), and the writer with its times. state is accelerate's PartialState. fingerprint is stored, with the keys
    target, after_blocks, dtype, storage and rows added. UserError when a state is not finite, the disk is full, or
    another recipe's job is writing there or has written (with overwrite, what it has written is replaced).
    """
    share = share or Share()
    rank, world = state.process_index, state.num_processes
    part = share.part(len(plan.shards), rank, world)
    with explained(plan.directory), ExitStack() as stack:
        lock = stack.enter_context(_announced(plan, overwrite)) if rank == 0 else None
        state.wait_for_everyone()
        who = f"features (process 1 of {world})" if world > 1 else "features"
        with bar(sum(map(plan.tokens_of, part)), "tok", who, rank) as progress:
            writer = Writer(target, plan, part, progress)
            writer.run()
        state.wait_for_everyone()
        if lock is None:
            return None, writer
        missing = plan.missing(range(len(plan.shards)))
        if lost := sorted(set(missing).intersection(share.part(len(plan.shards)))):
            raise UserError(f"{plan.path_of(lost[0])}: not whole after the extraction; run the same command again")
        if missing:
            return None, writer
        dtype = str(plan.storage.dtype).removeprefix("torch.")
        shape = {"after_blocks": list(plan.after_blocks), "dtype": dtype, "storage": plan.storage.form}
        made_from = {**fingerprint, "target": target.fingerprint(), **shape, "rows": digest(plan.rows_digests)}
        splits = {"train": [0, plan.num_train], "held_out": [plan.num_train, len(plan.rows)]}
        names = [plan.path_of(shard).name for shard in range(len(plan.shards))]
        index = write_index(plan.directory, names, made_from, {**shape, "splits": splits})
        if lock.acquire(wait=False) is True:  # nobody else is at work
            shutil.rmtree(plan.directory / WRITING, ignore_errors=True)
    return index, writer


@contextmanager
def _announced(plan: CachePlan, overwrite: bool) -> Iterator[Lock]:
    """Holds a lock that tells other jobs which cache is being written, and removes what must go before.

    Jobs of one cache hold the lock named after it together. UserError while a job of another cache is at work.
    """
    own = digest([plan.origin, plan.rows_digests])
    locks = plan.directory / WRITING
    with Lock(locks / f"cache-{own}") as lock:
        with Lock(locks / "begin") as begin:
            begin.acquire()
            for path in locks.glob("cache-*"):
                with Lock(path) as other:
                    if path != lock.path and not other.acquire(wait=False):
                        raise UserError(
                            f"{plan.directory}: another process is writing another cache there; wait for its end, or "
                            f"choose another --run"
                        )
            is_alone = lock.acquire(wait=False)
            if is_alone:  # beside another writer of this cache nothing is removed
                plan.require_own_directory(overwrite)
                for path in [*plan.stale(), plan.directory / INDEX, plan.directory / FILE]:
                    path.unlink(missing_ok=True)
            if is_alone == "unknown":
                warn(
                    f"{plan.directory}: this file system knows no locks: another writer is not noticed, and temporary "
                    f"files stay; write from one job at a time"
                )
            elif is_alone:
                remove_temporaries(plan.directory)
            lock.acquire(shared=True)
        yield lock


class Writer:
    """One process's part of an extraction: the target computes a shard while a thread writes the one before."""

    def __init__(self, target: Target, plan: CachePlan, part: Sequence[int], progress: Any) -> None:
        self.target, self.plan, self.part, self.progress = target, plan, part, progress
        self.pending: Future[None] | None = None
        self.num_tokens, self.seconds, self.forward_seconds = 0, 0.0, 0.0

    def run(self) -> None:
        """Makes the shards that are not whole; those that another job is making are waited for at the end."""
        left = [shard for shard in self.part if not self._is_whole(shard)]
        started = time.perf_counter()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer") as pool:
            for wait in (False, True):
                left = [shard for shard in left if not self._make(shard, pool, wait)]
                self._finish_writing()
        self.seconds += time.perf_counter() - started

    def speed(self, num_processes: int = 1) -> str:
        """Tokens a second, and what the writer adds to the target's forwards; nothing where nothing was made."""
        if not self.num_tokens:
            return ""
        each = "" if num_processes == 1 else f" in each of {num_processes} processes"
        added = self.seconds / self.forward_seconds - 1
        return f"; {self.num_tokens / self.seconds:,.0f} tok/s{each}, {added:.1%} above the target's bare forwards"

    def forward(self, rows: Sequence[Row]) -> tuple[TargetOutput, Tensor]:
        """The target's states of some rows, and the mask [B, T] of their tokens."""
        lengths = torch.tensor([len(row.input_ids) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, T]
        ids = torch.zeros_like(mask, dtype=torch.long)  # [B, T], right-padded with 0
        ids[mask] = torch.tensor([token for row in rows for token in row.input_ids])
        started, device = time.perf_counter(), self.target.device
        attention_mask = None if bool(mask.all()) else mask.long().to(device)
        output = self.target.features(ids.to(device), attention_mask, self.plan.after_blocks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.forward_seconds += time.perf_counter() - started
        self.num_tokens += int(lengths.sum())
        return output, mask

    def _is_whole(self, shard: int) -> bool:
        whole = self.plan.is_whole(shard, content=True)
        self.progress.update(self.plan.tokens_of(shard) if whole else 0)
        return whole

    def _make(self, shard: int, pool: ThreadPoolExecutor, wait: bool) -> bool:
        """Makes a shard and hands it to the writing thread; False when another job is at it (wait: until it is not)."""
        with ExitStack() as stack:
            lock = stack.enter_context(Lock(self.plan.directory / WRITING / f"{shard:05d}"))
            if not lock.acquire(wait=wait):
                return False
            if not self._is_whole(shard):  # another job may have made it meanwhile
                buffer = self._filled(shard)
                self._finish_writing()  # at most two shards are in memory
                self.pending = pool.submit(self._save, shard, buffer, lock)
                stack.pop_all()  # the thread frees the lock
        return True

    def _finish_writing(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _filled(self, shard: int) -> ShardBuffer:
        """The shard with every row's states."""
        plan, rows = self.plan, self.plan.rows_of(shard)
        num_taps = len(plan.after_blocks)
        buffer = ShardBuffer(rows, plan.hidden_size, num_taps, plan.storage)
        for positions in batches(buffer.lengths, plan.batch_tokens):
            output, mask = self.forward([rows[position] for position in positions])
            if plan.storage.form is not None and buffer.error is None:
                buffer.error = self._storage_error(output, mask)
            last_hidden = encode(output.last_hidden, 1, plan.storage).cpu()
            taps = None if output.taps is None else encode(output.taps, num_taps, plan.storage).cpu()
            for line, position in enumerate(positions):
                tokens = (line, slice(buffer.lengths[position]))  # without padding
                buffer.put(position, last_hidden[tokens], None if taps is None else taps[tokens])
            self.progress.update(sum(buffer.lengths[position] for position in positions))
        return buffer

    def _storage_error(self, output: TargetOutput, mask: Tensor) -> StorageError:
        """The storage's error on some tokens, spread evenly over a batch."""
        tokens = mask.flatten().nonzero().flatten()
        chosen = tokens[:: -(-len(tokens) // SAMPLE_TOKENS)].to(output.last_hidden.device)
        taps = None if output.taps is None else output.taps.flatten(0, 1)[chosen]
        last_hidden = output.last_hidden.flatten(0, 1)[chosen]
        return StorageError.measure(last_hidden, taps, self.plan.storage, self.target.logits)

    def _save(self, shard: int, buffer: ShardBuffer, lock: Lock) -> None:
        with lock:
            try:
                buffer.save(self.plan.path_of(shard), self.plan.inputs_of(shard))
            except NotWritable as error:
                left = self.plan.missing(self.part)
                needed = f"{sum(map(self.plan.bytes_of, left)):,} bytes in {len(left):,} shards are still to be written"
                raise NotWritable(f"{error}: {needed}; the same command then goes on", error.is_full) from error
            lock.forget()


def text_fingerprint(tokenizer: Any, data: DataConfig) -> dict[str, Any]:
    """The part of the cache's fingerprint that decides its token ids: tokenizer, template and the section data."""
    return {
        "tokenizer": digest(tokenizer.backend_tokenizer.to_str()),
        "template": digest(tokenizer.chat_template),
        "data": as_dict(data),
    }


# --------------------------------------------------------------------------------------------------------- commands


def prepare(recipe: Recipe, stage: Stage, share: Share, overwrite: bool, rank: int = 0) -> tuple[CachePlan, Any, Any]:
    """(plan, tokenizer, facts) after every check that needs no weights; rank 0 prints the estimate."""
    hf_config = load_config(recipe.target)
    text, path = hf_config.get_text_config(), recipe.target.path
    taps = taps_of(recipe.head.kind, recipe.features.after_blocks, text.num_hidden_layers, path)
    check_size(getattr(recipe.head, "draft_vocab_size", None), text.vocab_size)
    data, tokenizer, tally = tokenised(recipe.target, recipe.data, speaks=rank == 0)
    origin = {**state_inputs(stage.inputs), "after_blocks": list(taps)}
    plan = plan_cache(stage.output, data, replace(recipe.features, after_blocks=taps), path, hf_config, origin)
    facts = {"train": statistics(data.train), "held_out": statistics(data.held_out)}
    estimate, needed = plan.estimate(share)
    if rank == 0:
        lines = [tally.table(), *(f"{name}: {line}" for name, line in facts.items()), estimate]
        print("\n".join(lines), flush=True)
    plan.require_own_directory(overwrite)
    if needed > (free := plan.free_bytes()):
        raise UserError(
            f"{plan.directory}: the cache needs {size(needed)} more ({needed:,} bytes) and the disk has {size(free)} "
            f"free; lower data.limit or data.max_length, set features.storage to fp8 or int8, or choose another --run"
        )
    return plan, tokenizer, facts


def write(recipe: Recipe, stage: Stage, share: Share, overwrite: bool, state: Any) -> tuple[str, int]:
    """(state for status.json, exit code) of writing a share of the cache; state is accelerate's PartialState."""
    plan, tokenizer, facts = prepare(recipe, stage, share, overwrite, state.process_index)
    target = Target.load(recipe.target, state.device)
    index, writer = extract(target, plan, state, text_fingerprint(tokenizer, recipe.data), share, overwrite)
    speed = writer.speed(state.num_processes)
    if index is not None:
        num_bytes = sum(num_bytes for num_bytes, _ in index.files.values())
        facts |= {"tokens": plan.num_tokens, "bytes": num_bytes, "batch_tokens": plan.batch_tokens}
        seconds = stage.finish(**facts)["seconds"]
        amount = f"{plan.num_tokens:,} tokens, {size(num_bytes)} in {seconds:,.1f} s with the loading"
        print(f"features: {amount}{speed}: {stage.output}", flush=True)
        if index.facts["error"] is not None:
            print(f"features: {plan.storage}: {StorageError(**index.facts['error'])}", flush=True)
    elif state.is_main_process:
        left = len(plan.missing(range(len(plan.shards))))
        print(f"features: share {share} is written{speed}; {left:,} shards are left", flush=True)
    return ("done" if share.count == 1 or index is not None else "share-done"), 0


def time_forwards(recipe: Recipe, plan: CachePlan, share: Share, device: str, seconds: float = 10.0) -> None:
    """Prints the hours that the missing shards take, from some seconds of the target's forwards."""
    part = plan.missing(share.part(len(plan.shards)))
    groups = (
        [rows[position] for position in positions]
        for rows in map(plan.rows_of, part)
        for positions in batches([len(row.input_ids) for row in rows], plan.batch_tokens)
    )
    writer = Writer(Target.load(recipe.target, device), plan, part, None)
    writer.forward(next(groups))  # warms up
    writer.num_tokens, writer.forward_seconds = 0, 0.0
    while writer.forward_seconds < seconds and (rows := next(groups, None)):
        writer.forward(rows)
    if not writer.num_tokens:
        raise UserError(f"{plan.directory}: one forward takes all rows: too few to time; give the command itself")
    tokens, speed = sum(map(plan.tokens_of, part)), writer.num_tokens / writer.forward_seconds
    print(
        f"features: {tokens:,} tokens at {speed:,.0f} tok/s (measured now, one process) take "
        f"{tokens / speed / 3600:,.2f} h; n equal processes or jobs (--shard i/n) take an n-th of it",
        flush=True,
    )


def check(directory: Path) -> int:
    """Compares every byte of a cache with its index, prints what is wrong where, and returns 1 if anything is."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such feature cache; build it with: {COMMAND}")
    files, problems, num_bytes = dict[str, tuple[int, str]](), list[str](), 0
    try:
        files = Manifest.read(directory, INDEX).files
        others = sorted({path.name for path in directory.glob(SHARDS)} - set(files))
        problems = [f"{directory / name}: not in {INDEX}" for name in others]
    except UserError as error:  # the extraction has not ended, or not all of its shares have
        problems = [str(error)]
    with bar(sum(length for length, _ in files.values()), "B", "check") as progress:
        for name, entry in files.items():
            damaged = Manifest({name: entry}).damage(directory)
            problems += [str(damaged)] if damaged else []
            num_bytes += 0 if damaged else entry[0]
            progress.update(entry[0])
    print("\n".join([*problems, f"{directory}: {size(num_bytes)} are as they were written"]))
    if problems:
        print(f"{len(problems):,} problems; write anew what is broken, and nothing else, with: {COMMAND} --verify")
    return 1 if problems else 0


# ----------------------------------------------------------------------------------------------------------- online


class OnlineFeatures:
    """Fills the features and taps that a cache would have held; what uses the batch cannot tell."""

    def __init__(self, target: Target, after_blocks: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        """dtype is that of the states (None: the target's)."""
        self.target, self.after_blocks, self.dtype = target, after_blocks, dtype or target.dtype

    def __call__(self, batch: Batch) -> Batch:
        """The batch with states, on its own device; one that has them already (of a process without rows) as it is."""
        if batch.features is not None:
            return batch
        # Packed conversations go through the target one a row, and are packed again afterwards.
        longest = batch.input_ids.shape[1] if batch.documents is None else max(batch.documents)
        mask = torch.arange(longest, device=batch.input_ids.device) < batch.lengths[:, None]  # [N, T]
        ids = batch.input_ids
        if batch.documents is not None:
            ids = torch.zeros_like(mask, dtype=torch.long)  # [N, T]
            ids[mask] = batch.input_ids[0]
        device = self.target.device
        attention_mask = None if bool(mask.all()) else mask.long().to(device)
        output = self.target.features(ids.to(device), attention_mask, self.after_blocks)

        def used(states: Tensor) -> Tensor:
            """[B, T, D] as a cache yields them, zero in padding. A copy: autograd cannot keep inference tensors."""
            states = states.to(batch.input_ids.device, self.dtype, copy=True)
            return states * mask[..., None] if batch.documents is None else states[mask][None]

        taps = None if output.taps is None else used(output.taps)
        return replace(batch, features=used(output.last_hidden), taps=taps)
