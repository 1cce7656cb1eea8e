"""The target's states, written to a feature cache by jobs that may die at any time."""

import shutil
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError, rank, warn
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data.batches import check_padding, collate, forward, group_by_length
from aerie.data.cache import (
    STATES,
    TOKENS,
    CachePlan,
    Shard,
    Storage,
    decode,
    encode,
    rows_digest,
    shard_spans,
)
from aerie.data.chat import TokenRow
from aerie.data.inputs import CACHE_INDEX, FEATURES_COMMAND, state_inputs
from aerie.data.progress import WHOLE_JOB, JobShare, format_bytes, start_progress
from aerie.data.tokens import TokenisedData, statistics, text_fingerprint, tokenize_for_target
from aerie.model.heads.eagle import check_size
from aerie.model.storage import (
    FILE,
    Lock,
    Manifest,
    Stage,
    digest,
    explained,
    remove_temporaries,
    remove_tree,
)
from aerie.model.target import Target, context_of, load_config, only_trains, taps_of

WRITING = ".writing"  # the directory of locks
SAMPLE_TOKENS = 256  # on which the storage's error is measured


def plan_cache(
    directory: Path,
    data: TokenisedData,
    config: FeaturesConfig,
    target_path: str,
    hf_config: Any,
    origin: Any,
) -> CachePlan:
    """The plan for these rows; origin: what decides the states of given token ids (stage.state_inputs)."""
    text, after_blocks, rows = (
        hf_config.get_text_config(),
        config.after_blocks or (),
        [*data.train, *data.held_out],
    )
    check_rows(rows, text, target_path)
    name = config.dtype or origin["target"]["dtype"]
    dtype = getattr(hf_config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    dtype = dtype if name == "auto" else getattr(torch, name)
    shards = []
    for number, span in enumerate(
        shard_spans([len(row.input_ids) for row in rows], config.shard_tokens)
    ):
        inputs = {"rows": rows_digest(rows[span]), "origin": digest(origin)}
        shards.append(Shard(directory / f"shard-{number:05d}.safetensors", rows[span], inputs))
    storage = Storage(dtype, config.storage)
    return CachePlan(
        directory,
        shards,
        len(data.train),
        text.hidden_size,
        after_blocks,
        storage,
        config.batch_tokens,
    )


def within_context(data: DataConfig, text_config: Any) -> DataConfig:
    """data, with max_length lowered to the target's context."""
    context = context_of(text_config) or data.max_length
    if context < data.max_length:
        warn(
            f"data.max_length: {data.max_length:,} is beyond the target's context; conversations end at {context:,}"
        )
    return replace(data, max_length=min(data.max_length, context))


def check_rows(rows: Sequence[TokenRow], text_config: Any, target_path: str) -> None:
    size = text_config.vocab_size
    for row in rows:
        if max(row.input_ids) >= size:
            raise UserError(
                f"{row.source}: token id {max(row.input_ids):,} is outside {target_path}'s {size:,} rows"
            )


def storage_error(states: Tensor, storage: Storage, target: Target) -> str:
    """A line to print: the error of storing the target's states [T, S * D]."""
    width = target.hidden_size
    restored = decode(*encode(states, states.shape[-1] // width, storage), storage.dtype).to(
        states.dtype
    )
    # Relative to each dimension's root mean square, so that a few huge ones hide no others.
    squares = states.double().square().sum(0).clamp_min(1e-300)  # [S * D]
    errors = (
        ((restored.double() - states.double()).square().sum(0) / squares)
        .sqrt()
        .unflatten(0, (-1, width))
    )
    p, q = (
        torch.softmax(target.logits(some[:, :width]).float(), -1) for some in (states, restored)
    )  # [T, V]
    distance, each = (
        (p - q).abs().sum(-1).mean() / 2,
        ", ".join(f"{error:.2%}" for error in errors.mean(-1).tolist()),
    )
    cost = f"relative error of a dimension of the last state and the taps: {each}"
    return f"{storage}: {cost}; the target's law moves by {distance:.2%} ({len(p):,} tokens)"


def extract(
    target: Target,
    plan: CachePlan,
    state: Any,
    fingerprint: Any,
    share: JobShare = WHOLE_JOB,
    overwrite: bool = False,
) -> tuple[Manifest | None, "Writer"]:
    """The index (None if this process wrote none) and the writer; state: accelerate's PartialState."""
    number, world = state.process_index, state.num_processes
    part = share.part(plan.shards)[number::world]
    with explained(plan.directory), ExitStack() as stack:
        lock = stack.enter_context(_announced(plan, overwrite)) if number == 0 else None
        state.wait_for_everyone()
        with start_progress(
            sum(shard.num_tokens for shard in part), "tok", f"features (process 1 of {world})"
        ) as progress:
            writer = Writer(target, plan)
            writer.run(part, progress)
        state.wait_for_everyone()
        if lock is None:
            return None, writer
        if lost := plan.missing(share):
            raise UserError(
                f"{lost[0].path}: not whole after the extraction; run the same command again"
            )
        if plan.missing():
            return None, writer
        index = plan.write_index({**fingerprint, "target": target.fingerprint()})
        if lock.acquire(wait=False) is True:  # nobody else is at work
            remove_tree(plan.directory / WRITING)
    return index, writer


@contextmanager
def _announced(plan: CachePlan, overwrite: bool) -> Iterator[Lock]:
    locks = plan.directory / WRITING
    with Lock(locks / f"cache-{digest([shard.inputs for shard in plan.shards])}") as lock:
        with Lock(locks / "begin") as begin:
            begin.acquire()
            for path in locks.glob("cache-*"):
                with Lock(path) as other:
                    if path != lock.path and not other.acquire(wait=False):
                        fix = "wait for its end, or choose another --run"
                        raise UserError(
                            f"{plan.directory}: another process writes another cache there; {fix}"
                        )
            is_alone = lock.acquire(wait=False)
            if is_alone:  # otherwise another job is writing this cache: remove nothing
                plan.require_own_directory(overwrite)
                # .tmp is safetensors' own.
                kept = {shard.path.stem for shard in plan.shards} - {
                    path.stem for path in plan.foreign()
                }
                stale = [path for path in plan.directory.glob("shard-*") if path.stem not in kept]
                for path in (
                    *stale,
                    *plan.directory.glob(".tmp*"),
                    plan.directory / CACHE_INDEX,
                    plan.directory / FILE,
                ):
                    path.unlink(missing_ok=True)
                if is_alone is True:  # known: the file system has locks
                    remove_temporaries(plan.directory)
            lock.acquire(shared=True)
        yield lock


class Writer:
    def __init__(self, target: Target, plan: CachePlan) -> None:
        self.target, self.plan = target, plan
        self.num_tokens, self.seconds, self.forward_seconds = 0, 0.0, 0.0

    def run(self, part: Sequence[Shard], progress: Any) -> None:
        """Makes the shards that are not whole; at the end waits for those that another job is making."""
        pending: Future[None] | None = None
        left = [shard for shard in part if not shard.is_whole(content=True)]
        progress.update(
            sum(shard.num_tokens for shard in part) - sum(shard.num_tokens for shard in left)
        )
        started = time.perf_counter()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer") as pool:
            for wait in (False, True):
                waiting, left = left, []
                for shard in waiting:
                    with ExitStack() as stack:
                        lock = stack.enter_context(
                            Lock(self.plan.directory / WRITING / shard.path.stem)
                        )
                        if not lock.acquire(wait=wait):
                            left.append(shard)
                        elif shard.is_whole(content=True):  # another job has made it meanwhile
                            progress.update(shard.num_tokens)
                        else:
                            tensors = self._tensors(shard, progress)
                            if pending is not None:
                                pending.result()  # at most two shards are in memory
                            pending = pool.submit(_save, shard, tensors, lock)
                            stack.pop_all()  # the thread frees the lock
                if pending is not None:
                    pending.result()
        self.seconds += time.perf_counter() - started

    def forward(self, rows: Sequence[TokenRow]) -> Tensor:
        """States [N, S * D] of the rows' tokens, row by row; a token's: last_hidden, then the taps."""
        batch, device = collate(rows, range(len(rows))), self.target.device
        started = time.perf_counter()
        output, mask = forward(self.target, batch.input_ids, batch.lengths, self.plan.after_blocks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.forward_seconds += time.perf_counter() - started
        self.num_tokens += batch.num_tokens
        mask = mask.to(device)
        return torch.cat(
            [part[mask] for part in (output.last_hidden, output.taps) if part is not None], dim=-1
        )

    def _tensors(self, shard: Shard, progress: Any) -> dict[str, Tensor]:
        rows, storage, lengths, width = (
            shard.rows,
            self.plan.storage,
            shard.lengths,
            self.target.hidden_size,
        )
        starts = [0, *accumulate(lengths)]
        tensors: dict[str, Tensor] = {}
        for name, attribute in zip(TOKENS, ("input_ids", "turn_ids"), strict=True):
            tensors[name] = torch.tensor(
                [number for row in rows for number in getattr(row, attribute)], dtype=torch.int32
            )
        for positions in group_by_length(lengths, self.plan.batch_tokens):
            states = self.forward([rows[position] for position in positions])
            places = torch.cat(
                [torch.arange(starts[at], starts[at + 1]) for at in positions]
            )  # [N], in the shard
            # On the target's device, so that fewer bytes are copied.
            values, scales = encode(states, 1 + len(self.plan.after_blocks), storage)
            # Checks decoded values: a finite scale may still be too large for float16.
            broken = ~torch.isfinite(decode(values, scales, storage.dtype)).all(-1).cpu()  # [N]
            if broken.any():
                row = rows[bisect_right(starts, int(places[broken][0])) - 1]
                fix = "try another features.dtype or target.dtype"
                raise UserError(
                    f"{row.source}: the target's states are not finite in {storage}; {fix}"
                )
            taps = values[:, width:] if self.plan.after_blocks else None
            for name, part in zip(STATES, (values[:, :width], taps, scales), strict=True):
                if part is not None:
                    if name not in tensors:
                        tensors[name] = torch.empty(starts[-1], part.shape[-1], dtype=part.dtype)
                    tensors[name][places] = part.cpu()
            progress.update(len(places))
        return tensors


def _save(shard: Shard, tensors: dict[str, Tensor], lock: Lock) -> None:
    with lock:
        shard.save(tensors)
        lock.path.unlink(missing_ok=True)


def prepare(
    recipe: Recipe, stage: Stage, share: JobShare, overwrite: bool
) -> tuple[CachePlan, Any, Any]:
    """(plan, tokenizer, facts), after all checks that need no weights."""
    hf_config = load_config(recipe.target)
    text, path = hf_config.get_text_config(), recipe.target.path
    if why := only_trains(hf_config):
        warn(f"{path}: {why}")
    taps = taps_of(recipe, text.num_hidden_layers)
    check_size(getattr(recipe.head, "draft_vocab_size", None), text.vocab_size)
    data, tokenizer, tally = tokenize_for_target(recipe.target, within_context(recipe.data, text))
    origin = {**state_inputs(stage.inputs), "after_blocks": list(taps)}
    plan = plan_cache(
        stage.output, data, replace(recipe.features, after_blocks=taps), path, hf_config, origin
    )
    facts = {"train": statistics(data.train), "held_out": statistics(data.held_out)}
    todo, output = plan.missing(share), stage.output.absolute()
    free = shutil.disk_usage(next(path for path in (output, *output.parents) if path.exists())).free
    needed, tokens = sum(map(plan.bytes_of, todo)), sum(shard.num_tokens for shard in plan.shards)
    if rank() == 0:
        rows, largest = len(data.train) + len(data.held_out), max(map(plan.bytes_of, plan.shards))
        print(
            f"{tally.table()}\ntrain: {facts['train']}\nheld_out: {facts['held_out']}\n"
            f"features: {rows:,} rows, {tokens:,} tokens x {plan.token_bytes:,} bytes ({plan.storage}); "
            f"shards: {len(plan.shards):,} of at most {format_bytes(largest)}, two at a time in memory\n"
            f"features: to write: {format_bytes(needed)} (shards: {len(todo):,} of share {share}); free: {format_bytes(free)}",
            flush=True,
        )
    plan.require_own_directory(overwrite)
    if needed > free:
        fix = "lower data.limit, set features.storage to fp8 or int8, or choose another --run"
        raise UserError(
            f"{plan.directory}: needs {format_bytes(needed)}, and {format_bytes(free)} are free; {fix}"
        )
    return plan, tokenizer, facts


def write(recipe: Recipe, stage: Stage, share: JobShare, overwrite: bool, state: Any) -> str:
    plan, tokenizer, facts = prepare(recipe, stage, share, overwrite)
    target = Target.load(recipe.target, state.device)
    check_padding(target)
    index, writer = extract(
        target, plan, state, text_fingerprint(tokenizer, recipe.data), share, overwrite
    )
    speed = ""
    if writer.num_tokens:
        added = writer.seconds / writer.forward_seconds - 1
        speed = f"; {writer.num_tokens / writer.seconds:,.0f} tok/s a process, {added:.1%} above bare forwards"
    if index is not None:
        tokens = sum(shard.num_tokens for shard in plan.shards)
        num_bytes = sum(num_bytes for num_bytes, _ in index.files.values())
        facts |= {
            "rows": sum(len(shard.rows) for shard in plan.shards),
            "tokens": tokens,
            "bytes": num_bytes,
        }
        seconds = stage.finish(**facts, batch_tokens=plan.batch_tokens)["seconds"]
        print(
            f"features: {tokens:,} tokens, {format_bytes(num_bytes)} in {seconds:,.1f} s{speed}: {stage.output}",
            flush=True,
        )
        if plan.storage.form is not None:
            states = writer.forward(next(_batches(plan, plan.shards)))
            some = states[:: -(-len(states) // SAMPLE_TOKENS)]
            print(f"features: {storage_error(some, plan.storage, target)}", flush=True)
    elif state.is_main_process:
        print(
            f"features: share {share} is written{speed}; shards left: {len(plan.missing()):,}",
            flush=True,
        )
    state.destroy_process_group()
    return "done" if share.count == 1 or index is not None else "share-done"


def _batches(plan: CachePlan, shards: Sequence[Shard]) -> Iterator[list[TokenRow]]:
    for shard in shards:
        for positions in group_by_length(shard.lengths, plan.batch_tokens):
            yield [shard.rows[position] for position in positions]


def time_forwards(recipe: Recipe, plan: CachePlan, share: JobShare, device: str) -> None:
    """Times forwards for some seconds; prints the hours for the missing shards (if none: for all)."""
    part = plan.missing(share) or plan.shards
    batches, writer = _batches(plan, part), Writer(Target.load(recipe.target, device), plan)
    writer.forward(next(batches))  # warms up
    writer.num_tokens, writer.forward_seconds = 0, 0.0
    while writer.forward_seconds < 10.0 and (rows := next(batches, None)):
        writer.forward(rows)
    if not writer.num_tokens:
        raise UserError(f"{plan.directory}: too few rows to time")
    tokens, speed = (
        sum(shard.num_tokens for shard in part),
        writer.num_tokens / writer.forward_seconds,
    )
    hours = f"{tokens / speed / 3600:,.2f} h; each of n jobs (--shard i/n) takes 1/n of it"
    print(
        f"features: {tokens:,} tokens at {speed:,.0f} tok/s (measured now) take {hours}", flush=True
    )


def check_cache(directory: Path) -> int:
    """Prints every difference between a cache and its index; returns 1 if there is any."""
    files, problems, num_bytes = dict[str, tuple[int, str]](), list[str](), 0
    try:
        files = Manifest.read(directory, CACHE_INDEX).files
        others = {path.name for path in directory.glob("shard-*")} - set(files)
        problems = [f"{directory / name}: not in {CACHE_INDEX}" for name in sorted(others)]
    except UserError as error:  # no index, or the extraction has not ended
        problems = [str(error)]
        for record in directory.glob("shard-*.json"):
            with suppress(UserError):
                files |= Manifest.read(directory, record.name).files
    with start_progress(sum(length for length, _ in files.values()), "B", "check") as progress:
        for name, entry in files.items():
            damaged = Manifest({name: entry}).damage(directory)
            problems += [str(damaged)] if damaged else []
            num_bytes += 0 if damaged else entry[0]
            progress.update(entry[0])
    print("\n".join([*problems, f"{directory}: {num_bytes:,} bytes are as they were written"]))
    if problems:
        print(f"problems: {len(problems):,}; mend them with: {FEATURES_COMMAND} --verify")
    return 1 if problems else 0
