"""The frozen target's states of the recipe's conversations, written to a feature cache.

`plan_cache` cuts the rows into shards, `extract` makes those shards that are not whole (in one process, several under a
launcher, or several jobs with a share each), and who finds all shards whole writes the index. A shard depends on its
rows, the target and the taps alone, so jobs may be killed and started again at any time and in any number.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import NotWritable, UserError, warn
from aerie.configs.schema.data import FeaturesConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data.batches import grouped
from aerie.data.cache import CachePlan, ShardBuffer, Storage, decode, encode, pack, size, storage_error, write_index
from aerie.data.chat import Row
from aerie.data.stage import COMMAND, INDEX, Share, bar, state_inputs
from aerie.data.tokens import TokenisedData, statistics, text_fingerprint, tokenised
from aerie.model.storage import FILE, Lock, Manifest, Stage, digest, explained, remove_temporaries
from aerie.model.target import Target, TargetOutput, check_taps, load_config, taps_of
from aerie.model.vocab import check_size

WRITING = ".writing"  # the directory of locks while a cache is being made
SAMPLE_TOKENS = 256  # on which the error of the storage is measured


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
        paths = [plan.path_of(shard) for shard in range(len(plan.shards))]
        index = write_index(paths, made_from, {**shape, "splits": splits})
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
        for positions in grouped(buffer.lengths, plan.batch_tokens):
            batch = [rows[position] for position in positions]
            output, mask = self.forward(batch)
            last_hidden, scales = self._stored(output.last_hidden, 1, mask, batch)  # [B, T, D], [B, T, 1]
            taps = None
            if output.taps is not None:
                taps, more = self._stored(output.taps, num_taps, mask, batch)  # [B, T, L * D], [B, T, L]
                scales = None if scales is None or more is None else torch.cat([scales, more], dim=-1)
            for line, position in enumerate(positions):
                tokens = (line, slice(buffer.lengths[position]))  # without padding
                parts = {"last_hidden": last_hidden, "taps": taps, "scales": scales}
                buffer.put(position, {name: states[tokens] for name, states in parts.items() if states is not None})
            self.progress.update(sum(buffer.lengths[position] for position in positions))
        return buffer

    def _stored(
        self, states: Tensor, num_states: int, mask: Tensor, rows: Sequence[Row]
    ) -> tuple[Tensor, Tensor | None]:
        """States in their stored form, in the computer's memory; UserError when a row's are not finite."""
        storage = self.plan.storage
        values, scales = encode(states, num_states, storage)
        # Asked of what is read again: a float32 scale does not tell whether float16 can hold the value.
        broken = ~torch.isfinite(decode(values, scales, storage.dtype)).all(-1).cpu() & mask  # [B, T]
        if broken.any():
            raise UserError(
                f"{rows[int(broken.any(-1).int().argmax())].source}: the target's states are not finite in {storage}; "
                f"try another features.dtype or target.dtype (bfloat16, float32)"
            )
        return values.cpu(), None if scales is None else scales.cpu()

    def storage_error(self) -> str:
        """What the storage costs on some tokens, spread evenly over the first batch of the cache."""
        rows = self.plan.rows_of(0)
        first = grouped([len(row.input_ids) for row in rows], self.plan.batch_tokens)[0]
        output, mask = self.forward([rows[position] for position in first])
        tokens = mask.flatten().nonzero().flatten()
        tokens = tokens[:: -(-len(tokens) // SAMPLE_TOKENS)].to(output.last_hidden.device)
        taps = None if output.taps is None else output.taps.flatten(0, 1)[tokens]
        return storage_error(output.last_hidden.flatten(0, 1)[tokens], taps, self.plan.storage, self.target.logits)

    def _save(self, shard: int, buffer: ShardBuffer, lock: Lock) -> None:
        with lock:
            try:
                buffer.save(self.plan.path_of(shard), self.plan.inputs_of(shard))
            except NotWritable as error:
                left = self.plan.missing(self.part)
                needed = f"{sum(map(self.plan.bytes_of, left)):,} bytes in {len(left):,} shards are still to be written"
                raise NotWritable(f"{error}: {needed}; the same command then goes on", error.is_full) from error
            lock.forget()


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
        if plan.storage.form is not None:
            print(f"features: {writer.storage_error()}", flush=True)
    elif state.is_main_process:
        left = len(plan.missing(range(len(plan.shards))))
        print(f"features: share {share} is written{speed}; {left:,} shards are left", flush=True)
    state.destroy_process_group()
    return ("done" if share.count == 1 or index is not None else "share-done"), 0


def time_forwards(recipe: Recipe, plan: CachePlan, share: Share, device: str, seconds: float = 10.0) -> None:
    """Prints the hours that the missing shards take, from some seconds of the target's forwards."""
    part = plan.missing(share.part(len(plan.shards)))
    groups = (
        [rows[position] for position in positions]
        for rows in map(plan.rows_of, part)
        for positions in grouped([len(row.input_ids) for row in rows], plan.batch_tokens)
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
        others = sorted({path.name for path in directory.glob("shard-*")} - set(files))
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
