"""The target's states, written to a feature cache by jobs that may die at any time."""

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from aerie.configs.errors import UserError, rank, warn
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data.batches import check_padding, collate, forward, group_by_length
from aerie.data.chat import TokenRow
from aerie.data.feature_cache import (
    CachePlan,
    Shard,
    Storage,
    decode,
    encode,
    rows_digest,
    shard_spans,
)
from aerie.data.inputs import CACHE_INDEX, FEATURES_COMMAND, state_inputs
from aerie.data.progress import WHOLE_JOB, JobShare, format_bytes, free_bytes, start_progress
from aerie.data.served_states import ServedStates
from aerie.data.servers import states_command
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
from aerie.model.target import Target
from aerie.model.target_files import context_of, load_config, only_trains, taps_of

WRITING = ".writing"  # the directory of locks


# --- the plan: which rows go to which shard -----------------------------------------------------


def plan_cache(
    directory: Path,
    data: TokenisedData,
    config: FeaturesConfig,
    target_path: str,
    hf_config: Any,
    origin: Any,
) -> CachePlan:
    """Which rows go to which shard, and in what form; UserError if the target lacks a token id.

    origin: what decides the states of given token ids (inputs.state_inputs).
    """
    text_config = hf_config.get_text_config()
    rows = [*data.train, *data.held_out]
    check_rows(rows, text_config, target_path)
    name = config.dtype or origin["target"]["dtype"]
    stored = getattr(hf_config, "dtype", None) or getattr(text_config, "dtype", None)
    dtype = stored if name == "auto" else getattr(torch, name)
    spans = shard_spans([len(row.input_ids) for row in rows], config.shard_tokens)
    return CachePlan(
        directory,
        [
            Shard(
                directory / f"shard-{number:05d}.safetensors",
                rows[span],
                {"rows": rows_digest(rows[span]), "origin": digest(origin)},
            )
            for number, span in enumerate(spans)
        ],
        num_train=len(data.train),
        hidden_size=text_config.hidden_size,
        after_blocks=config.after_blocks or (),
        storage=Storage(dtype or torch.float32, config.storage),
        batch_tokens=config.batch_tokens,
    )


def within_context(data: DataConfig, text_config: Any) -> DataConfig:
    """data, with max_length lowered to the target's context."""
    context = context_of(text_config) or data.max_length
    if context >= data.max_length:
        return data
    warn(
        f"data.max_length: {data.max_length:,} exceeds the target's context; "
        f"conversations are cut at {context:,}"
    )
    return replace(data, max_length=context)


def check_rows(rows: Sequence[TokenRow], text_config: Any, target_path: str) -> None:
    for row in rows:
        if max(row.input_ids) >= text_config.vocab_size:
            raise UserError(
                f"{row.source}: token id {max(row.input_ids):,} is outside the "
                f"{text_config.vocab_size:,} of {target_path}; use the target's own tokenizer"
            )


# --- writing ------------------------------------------------------------------------------------


class StateSource(Protocol):
    """What gives the states of rows: the target in this process, or its servers."""

    seconds: float  # that forwards in this process took

    @property
    def hidden_size(self) -> int: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What a shard's record says of the source."""

    def states(self, batches: Iterable[Sequence[TokenRow]]) -> Iterator[Tensor]:
        """States [N, S * D] of each batch's tokens, row by row: last_hidden, then the taps."""

    def logits(self, last_hidden: Tensor) -> Tensor: ...

    def fingerprint(self) -> str: ...


class LocalStates:
    """The target in this process, with one forward for each batch."""

    def __init__(self, target: Target, after_blocks: tuple[int, ...]) -> None:
        self.target = target
        self.after_blocks = after_blocks
        self.hidden_size = target.hidden_size
        self.facts = dict[str, Any]()
        self.seconds = 0.0

    def states(self, batches: Iterable[Sequence[TokenRow]]) -> Iterator[Tensor]:
        return map(self._forward, batches)

    def _forward(self, rows: Sequence[TokenRow]) -> Tensor:
        batch = collate(rows, range(len(rows)))
        device = self.target.device
        started = time.perf_counter()
        output, mask = forward(self.target, batch.input_ids, batch.lengths, self.after_blocks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.perf_counter() - started
        mask = mask.to(device)
        parts = filter(torch.is_tensor, (output.last_hidden, output.taps))
        return torch.cat([part[mask] for part in parts], dim=-1)

    def logits(self, last_hidden: Tensor) -> Tensor:
        return self.target.logits(last_hidden)

    def fingerprint(self) -> str:
        return self.target.fingerprint()


def extract(
    source: StateSource,
    plan: CachePlan,
    state: Any,
    fingerprint: Any,
    share: JobShare = WHOLE_JOB,
    overwrite: bool = False,
) -> tuple[Manifest | None, "Writer"]:
    """Makes this process's shards; returns the index and the writer.

    The index is None if this process did not write it. state: accelerate's PartialState.
    """
    world = state.num_processes
    shards = share.part(plan.shards)[state.process_index :: world]
    num_tokens = sum(shard.num_tokens for shard in shards)
    writer = Writer(source, plan)
    with explained(plan.directory), ExitStack() as stack:
        lock = stack.enter_context(_announced(plan, overwrite)) if state.is_main_process else None
        state.wait_for_everyone()
        with start_progress(num_tokens, "tok", f"features (process 1 of {world})") as progress:
            writer.run(shards, progress)
        state.wait_for_everyone()
        if lock is None or plan.missing():  # not the first process, or other shares are missing
            return None, writer
        index = plan.write_index({**fingerprint, "target": source.fingerprint()})
        if lock.acquire(wait=False) is True:  # nobody else is at work
            remove_tree(plan.directory / WRITING)
    return index, writer


@contextmanager
def _announced(plan: CachePlan, overwrite: bool) -> Iterator[Lock]:
    """Holds the lock that tells other jobs which cache is being written here.

    Jobs of the same plan share it. The first of them removes what does not belong to the plan.
    """
    locks = plan.directory / WRITING
    plan_digest = digest([shard.inputs for shard in plan.shards])
    with Lock(locks / f"cache-{plan_digest}") as lock:
        with Lock(locks / "begin") as begin:
            begin.acquire()  # one job at a time looks at the others
            for path in locks.glob("cache-*"):
                with Lock(path) as theirs:
                    if path != lock.path and not theirs.acquire(wait=False):
                        raise UserError(
                            f"{plan.directory}: another process is writing another cache here; "
                            "wait until it ends, or choose another --run"
                        )
            is_first = lock.acquire(wait=False)
            if is_first:
                plan.require_own_directory(overwrite)
                _remove_stale(plan)
            if is_first is True:  # certain, because the file system has locks
                remove_temporaries(plan.directory)
            lock.acquire(shared=True)
        yield lock


def _remove_stale(plan: CachePlan) -> None:
    directory = plan.directory
    kept = {shard.path.stem for shard in plan.shards} - {path.stem for path in plan.foreign()}
    stale = [path for path in directory.glob("shard-*") if path.stem not in kept]
    safetensors_own = directory.glob(".tmp*")
    for path in (*stale, *safetensors_own, directory / CACHE_INDEX, directory / FILE):
        path.unlink(missing_ok=True)


class Writer:
    """Makes shards; a thread writes each one while the next is made."""

    def __init__(self, source: StateSource, plan: CachePlan) -> None:
        self.source = source
        self.plan = plan
        self.num_tokens = 0  # whose states were made
        self.seconds = 0.0

    def run(self, shards: Sequence[Shard], progress: Any) -> None:
        """Makes the shards that are not whole; at the end, waits for those that other jobs make."""
        started = time.perf_counter()
        pending: Future[None] | None = None
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer") as pool:
            for waits in (False, True):
                left = list[Shard]()
                for shard in shards:
                    with ExitStack() as stack:
                        path = self.plan.directory / WRITING / shard.path.stem
                        lock = stack.enter_context(Lock(path))
                        if not lock.acquire(wait=waits):
                            left.append(shard)  # another job is making it
                        elif shard.is_whole(content=True):
                            progress.update(shard.num_tokens)
                        else:
                            tensors = self._tensors(shard, progress)
                            if pending is not None:
                                pending.result()  # at most two shards are in memory
                            pending = pool.submit(self._save, shard, tensors, lock)
                            stack.pop_all()  # the thread frees the lock
                shards = left
            if pending is not None:
                pending.result()
        self.seconds += time.perf_counter() - started

    def _tensors(self, shard: Shard, progress: Any) -> dict[str, Tensor]:
        """The tensors of a shard, filled batch by batch, longest rows first."""
        tensors = {
            "input_ids": _concatenated([row.input_ids for row in shard.rows]),
            "turns": _concatenated([row.turn_ids for row in shard.rows]),
        }
        starts = [0, *accumulate(shard.lengths)]  # each row's first token in the shard
        groups = group_by_length(shard.lengths, self.plan.batch_tokens)
        batches = ([shard.rows[position] for position in positions] for positions in groups)
        for positions, states in zip(groups, self.source.states(batches), strict=True):
            token_numbers = torch.cat(  # [N], in the shard
                [torch.arange(starts[at], starts[at + 1]) for at in positions]
            )
            encoded, is_finite = self._encoded(states)
            if not is_finite.all():
                row = bisect_right(starts, int(token_numbers[~is_finite][0])) - 1
                raise UserError(
                    f"{shard.rows[row].source}: the target's states are not finite in "
                    f"{self.plan.storage}; try another features.dtype or target.dtype"
                )
            for name, part in encoded.items():
                if name not in tensors:
                    tensors[name] = torch.empty(starts[-1], part.shape[-1], dtype=part.dtype)
                tensors[name][token_numbers] = part
            self.num_tokens += len(states)
            progress.update(len(token_numbers))
        return tensors

    def _encoded(self, states: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """States [N, S * D] as the tensors of a shard, and which of them are finite [N]."""
        # Encode on the states' device, so that fewer bytes are copied to the host.
        values, scales = encode(states, 1 + len(self.plan.after_blocks), self.plan.storage)
        # Check the decoded values: a finite scale may still be too large for float16.
        decoded = decode(values, scales, self.plan.storage.dtype)
        last_hidden, taps = values.tensor_split([self.source.hidden_size], dim=-1)
        parts = {"last_hidden": last_hidden.cpu()}
        if self.plan.after_blocks:
            parts["taps"] = taps.cpu()
        if scales is not None:
            parts["scales"] = scales.cpu()
        return parts, torch.isfinite(decoded).all(-1).cpu()

    def _save(self, shard: Shard, tensors: dict[str, Tensor], lock: Lock) -> None:
        with lock:
            shard.save(tensors, self.source.facts)
            lock.path.unlink(missing_ok=True)


def _concatenated(parts: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([*chain.from_iterable(parts)], dtype=torch.int32)


# --- the stage ----------------------------------------------------------------------------------


def prepare(
    recipe: Recipe, stage: Stage, share: JobShare, overwrite: bool
) -> tuple[CachePlan, Any, Any]:
    """The plan, the tokenizer and facts for the record, after all checks that need no weights.

    Prints what will be written; UserError if the disk has too little room.
    """
    hf_config = load_config(recipe.target)
    text_config = hf_config.get_text_config()
    if reason := only_trains(hf_config):
        warn(f"{recipe.target.path}: {reason}")
    taps = taps_of(recipe, text_config.num_hidden_layers)
    check_size(getattr(recipe.head, "draft_vocab_size", None), text_config.vocab_size)
    features = replace(recipe.features, after_blocks=taps)
    if features.server is not None:
        features = replace(features, batch_tokens=1)  # one row a request; servers batch them
    data, tokenizer, tally = tokenize_for_target(
        recipe.target, within_context(recipe.data, text_config)
    )
    plan = plan_cache(
        stage.output,
        data,
        features,
        recipe.target.path,
        hf_config,
        {**state_inputs(stage.inputs), "after_blocks": list(taps)},
    )
    facts = {"train": statistics(data.train), "held_out": statistics(data.held_out)}

    missing = plan.missing(share)
    needed = sum(map(plan.bytes_of, missing))
    free = free_bytes(stage.output)
    if rank() == 0:
        print(
            f"{tally.table()}\ntrain: {facts['train']}\nheld_out: {facts['held_out']}\n"
            f"features: {plan.num_rows:,} rows, {plan.num_tokens:,} tokens x "
            f"{plan.token_bytes:,} bytes ({plan.storage}); shards: {len(plan.shards):,} of at most "
            f"{format_bytes(max(map(plan.bytes_of, plan.shards)))}, two at a time in memory\n"
            f"features: share {share} has {len(missing):,} shards to write, which take "
            f"{format_bytes(needed)}; {format_bytes(free)} are free",
            flush=True,
        )
        if features.server is not None:
            longest = max(len(row.input_ids) for shard in plan.shards for row in shard.rows)
            urls = features.server.urls
            states = features.server.states
            command = states_command(recipe.target, taps, states, longest, url=urls[0])
            print(
                f"features: states come from {', '.join(urls)}; start a server with: {command}",
                flush=True,
            )
    plan.require_own_directory(overwrite)
    if needed > free:
        raise UserError(
            f"{plan.directory}: needs {format_bytes(needed)}, but {format_bytes(free)} are free; "
            "lower data.limit, set features.storage to fp8 or int8, or choose another --run"
        )
    return plan, tokenizer, facts


def write(recipe: Recipe, stage: Stage, share: JobShare, overwrite: bool, state: Any) -> str:
    """Makes the cache, or a share of it; returns the state for status.json."""
    plan, tokenizer, facts = prepare(recipe, stage, share, overwrite)
    fingerprint = text_fingerprint(tokenizer, recipe.data)
    with open_source(recipe, plan, state.device) as source:
        if plan.storage.form is not None and state.is_main_process:
            print(f"features: {storage_error(source, plan)}", flush=True)
        index, writer = extract(source, plan, state, fingerprint, share, overwrite)
        facts |= source.facts
    speed = ""
    if writer.num_tokens:
        speed = f"; {writer.num_tokens / writer.seconds:,.0f} tok/s a process"
        if source.seconds:
            speed += f", {writer.seconds / source.seconds - 1:.1%} above bare forwards"
    if index is not None:
        num_bytes = sum(num_bytes for num_bytes, _ in index.files.values())
        seconds = stage.finish(
            **facts,
            rows=plan.num_rows,
            tokens=plan.num_tokens,
            bytes=num_bytes,
            batch_tokens=plan.batch_tokens,
        )["seconds"]
        print(
            f"features: {plan.num_tokens:,} tokens, {format_bytes(num_bytes)} "
            f"in {seconds:,.1f} s{speed}: {stage.output}",
            flush=True,
        )
    elif state.is_main_process:
        print(
            f"features: share {share} is written{speed}; shards left: {len(plan.missing()):,}",
            flush=True,
        )
    state.destroy_process_group()
    return "done" if share.count == 1 or index is not None else "share-done"


@contextmanager
def open_source(recipe: Recipe, plan: CachePlan, device: Any) -> Iterator[StateSource]:
    """The recipe's source of the plan's states; UserError if it does not give its target's."""
    server = recipe.features.server
    if server is None:
        target = Target.load(recipe.target, device)
        check_padding(target)
        yield LocalStates(target, plan.after_blocks)
        return
    rows = [row for shard in plan.shards for row in shard.rows]
    with ServedStates(server, recipe.target, plan.after_blocks, rows, plan.directory) as source:
        yield source


def storage_error(source: StateSource, plan: CachePlan) -> str:
    """A line to print: what storing the target's states changes, measured on some tokens."""
    storage = plan.storage
    width = source.hidden_size
    # One batch, because servers would be asked for further ones ahead.
    states = next(source.states(islice(_batches(plan, plan.shards), 1)))
    states = states[:: -(-len(states) // 256)]  # [T, S * D], at most 256 tokens
    values, scales = encode(states, states.shape[-1] // width, storage)
    restored = decode(values, scales, storage.dtype).to(states.dtype)  # [T, S * D]
    # Relative to each dimension's root mean square, so that a few huge dimensions hide no others.
    squares = states.double().square().sum(0).clamp_min(1e-300)  # [S * D]
    errors = (restored.double() - states.double()).square().sum(0)  # [S * D]
    relative = (errors / squares).sqrt().unflatten(0, (-1, width)).mean(-1)  # [S]
    p = torch.softmax(source.logits(states[:, :width]).float(), -1)  # [T, V]
    q = torch.softmax(source.logits(restored[:, :width]).float(), -1)  # [T, V]
    shown = ", ".join(f"{error:.2%}" for error in relative.tolist())
    return (
        f"{storage}: relative error of a dimension of the last state and the taps: {shown}; "
        f"the target's law moves by {(p - q).abs().sum(-1).mean() / 2:.2%} ({len(p):,} tokens)"
    )


def _batches(plan: CachePlan, shards: Sequence[Shard]) -> Iterator[list[TokenRow]]:
    for shard in shards:
        for positions in group_by_length(shard.lengths, plan.batch_tokens):
            yield [shard.rows[position] for position in positions]


def time_forwards(recipe: Recipe, plan: CachePlan, share: JobShare, device: str) -> None:
    """Times some forwards; prints the hours for the missing shards, or for all if none is."""
    shards = plan.missing(share) or plan.shards
    num_timed = 0
    with open_source(recipe, plan, device) as source:
        parts = source.states(_batches(plan, shards))
        next(parts)  # warms up
        started = time.perf_counter()
        seconds = 0.0
        while seconds < 10.0 and (states := next(parts, None)) is not None:
            num_timed += len(states)
            seconds = time.perf_counter() - started
    if not num_timed:
        raise UserError(f"{plan.directory}: has too few rows to time forwards")
    num_tokens = sum(shard.num_tokens for shard in shards)
    speed = num_timed / seconds
    print(
        f"features: {num_tokens:,} tokens at {speed:,.0f} tok/s (measured now) take "
        f"{num_tokens / speed / 3600:,.2f} h; each of n jobs (--shard i/n) takes 1/n of it",
        flush=True,
    )


def check_cache(directory: Path) -> int:
    """Prints every difference between a cache and its index; returns 1 if there is any."""
    files = dict[str, tuple[int, str]]()
    try:
        files = Manifest.read(directory, CACHE_INDEX).files
        surplus = {path.name for path in directory.glob("shard-*")} - set(files)
        problems = [f"{directory / name}: is not in {CACHE_INDEX}" for name in sorted(surplus)]
    except UserError as error:  # no index, or the extraction has not ended
        problems = [str(error)]
        for record in directory.glob("shard-*.json"):
            with suppress(UserError):
                files |= Manifest.read(directory, record.name).files
    sound_bytes = 0
    with start_progress(sum(length for length, _ in files.values()), "B", "check") as progress:
        for name, entry in files.items():
            if damaged := Manifest({name: entry}).damage(directory):
                problems.append(str(damaged))
            else:
                sound_bytes += entry[0]
            progress.update(entry[0])
    print("\n".join([*problems, f"{directory}: {sound_bytes:,} bytes are as they were written"]))
    if problems:
        print(f"problems: {len(problems):,}; mend them with: {FEATURES_COMMAND} --verify")
    return 1 if problems else 0
