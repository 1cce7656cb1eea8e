"""Extracts the target's states of tokenised rows into the feature cache: one frozen forward per batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data import index, provenance
from data.config import DataConfig
from data.index import CacheIndex, ShardEntry
from data.plan import PATTERN, CachePlan
from data.progress import bar
from data.shards import ShardBuffer, name_of
from model.errors import UserError
from model.files import digest
from model.recipe import as_dict
from model.target import Target


def extract(target: Target, plan: CachePlan, state: Any, fingerprint: dict[str, Any]) -> CacheIndex | None:
    """The index, written by the main process once every shard exists (None on the others).

    state is accelerate's PartialState: process r of n makes the shards r, r + n, ... that are not whole yet. What a
    shard holds depends on its rows and the recipe alone. fingerprint is stored, with the keys target, after_blocks,
    dtype and rows added. UserError when a state is not finite.
    """
    rank, world = state.process_index, state.num_processes
    if rank == 0:
        _clear(plan)
    state.wait_for_everyone()
    mine = [shard for shard in range(rank, len(plan.shards), world) if plan.state_of(shard) != "whole"]
    who = f"features (process 1 of {world})" if world > 1 else "features"
    with bar(sum(plan.tokens_of(shard) for shard in mine), "tok", who, rank) as progress:
        for shard in mine:
            _shard(target, plan, shard, progress).save(plan.path_of(shard), plan.origin)
    state.wait_for_everyone()
    if rank != 0:
        return None
    made = _index(plan, {**fingerprint, "target": target.fingerprint()})
    index.write_index(plan.directory, made)
    return made


def text_fingerprint(tokenizer: Any, data: DataConfig) -> dict[str, Any]:
    """The part of the cache's fingerprint that decides its token ids: tokenizer, template and the section data."""
    return {
        "tokenizer": digest(tokenizer.backend_tokenizer.to_str()),
        "template": digest(tokenizer.chat_template),
        "data": as_dict(data),
    }


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


def _shard(target: Target, plan: CachePlan, shard: int, progress: Any) -> ShardBuffer:
    """The shard with every row's states."""
    rows = plan.rows_of(shard)
    lengths = [len(row.input_ids) for row in rows]
    buffer = ShardBuffer(rows, plan.hidden_size, len(plan.after_blocks), plan.dtype)
    for places in batches(lengths, plan.batch_tokens):
        ids, mask = _pad([rows[place].input_ids for place in places])
        padded = not bool(mask.all())
        output = target.features(ids.to(target.device), mask.to(target.device) if padded else None, plan.after_blocks)
        last_hidden = output.last_hidden.cpu()
        taps = None if output.taps is None else output.taps.cpu()
        for line, place in enumerate(places):
            length = lengths[place]
            buffer.put(place, last_hidden[line, :length], None if taps is None else taps[line, :length])
        progress.update(sum(lengths[place] for place in places))
    return buffer


def _pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], right-padded with 0, and the mask [B, T] with 1 for tokens."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)  # [B, T]
    mask = torch.zeros(len(rows), longest, dtype=torch.long)  # [B, T]
    for line, row in enumerate(rows):
        ids[line, : len(row)] = torch.tensor(row)
        mask[line, : len(row)] = 1
    return ids, mask


def _clear(plan: CachePlan) -> None:
    """Removes what an interrupted or a larger run left: temporary files, surplus shards, the index."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    planned = {plan.path_of(shard).name for shard in range(len(plan.shards))}
    stale = [plan.directory / index.FILE, plan.directory / provenance.FILE]
    stale += plan.directory.glob(".*.tmp")
    stale += [path for path in plan.directory.glob(PATTERN.replace("{:05d}", "*")) if path.name not in planned]
    for path in stale:
        path.unlink(missing_ok=True)


def _index(plan: CachePlan, fingerprint: dict[str, Any]) -> CacheIndex:
    entries = []
    for shard, numbers in enumerate(plan.shards):
        path, state = plan.path_of(shard), plan.state_of(shard)
        if state != "whole":
            raise UserError(f"{path}: {state} after the extraction; run the same command again")
        entries.append(
            ShardEntry(
                file=path.name,
                first_row=numbers.start,
                num_rows=len(numbers),
                num_tokens=plan.tokens_of(shard),
                num_bytes=path.stat().st_size,
                rows=plan.rows_digests[shard],
            )
        )
    made_of = {
        "after_blocks": list(plan.after_blocks),
        "dtype": name_of(plan.dtype),
        "rows": digest(plan.rows_digests),
    }
    return CacheIndex(
        schema=1,
        fingerprint={**fingerprint, **made_of},
        dtype=name_of(plan.dtype),
        hidden_size=plan.hidden_size,
        after_blocks=plan.after_blocks,
        splits={"train": (0, plan.num_train), "held_out": (plan.num_train, len(plan.rows))},
        lengths=tuple(len(row.input_ids) for row in plan.rows),
        shards=tuple(entries),
    )
