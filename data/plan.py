"""What a feature cache will hold and take, known from tokens and configuration before the target's weights are read."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from data.chat import Row
from data.config import FeaturesConfig
from data.index import pack
from data.shards import State, name_of, rows_digest, state_of
from data.tokens import TokenisedData
from model.errors import UserError
from model.files import digest
from model.target import check_taps

TOKEN_BYTES = 8  # its id and turn, int32 each
PATTERN = "shard-{:05d}.safetensors"


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
    dtype: torch.dtype
    batch_tokens: int
    origin: str

    @property
    def num_tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache per token."""
        return TOKEN_BYTES + (1 + len(self.after_blocks)) * self.hidden_size * self.dtype.itemsize

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

    def state_of(self, shard: int) -> State:
        return state_of(self.path_of(shard), self.rows_digests[shard], self.origin)


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
        dtype=_dtype(config, origin["target"]["dtype"], hf_config),
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


def estimate(plan: CachePlan) -> str:
    """The size of the cache and what is left to do, in two lines."""
    todo = _missing(plan)
    missing = sum(plan.tokens_of(shard) for shard in todo)
    largest = max(plan.tokens_of(shard) for shard in range(len(plan.shards)))
    tokens = f"{len(plan.rows):,} rows, {plan.num_tokens:,} tokens x {plan.token_bytes:,} bytes ({name_of(plan.dtype)})"
    return (
        f"features: {tokens} = {_mib(plan.num_tokens * plan.token_bytes)}; "
        f"shards: {len(plan.shards):,} of at most {_mib(largest * plan.token_bytes)}, one at a time in memory\n"
        f"features: to write: {_mib(missing * plan.token_bytes)} in {len(todo):,} of them; "
        f"free on the disk: {_mib(_free_bytes(plan.directory))}"
    )


def require_space(plan: CachePlan) -> None:
    """UserError when the missing shards do not fit on the disk."""
    needed = sum(plan.tokens_of(shard) for shard in _missing(plan)) * plan.token_bytes
    free = _free_bytes(plan.directory)
    if needed > free:
        raise UserError(
            f"{plan.directory}: the cache needs {_mib(needed)} more and the disk has {_mib(free)} free; lower "
            f"data.limit or data.max_length, set features.dtype to bfloat16, or choose another --run"
        )


def require_own_shards(plan: CachePlan, overwrite: bool) -> None:
    """UserError when an interrupted run of another recipe left shards and overwrite was not asked for."""
    foreign = [plan.path_of(shard).name for shard in range(len(plan.shards)) if plan.state_of(shard) == "foreign"]
    if foreign and not overwrite:
        raise UserError(
            f"{plan.directory}: {foreign[0]} was made from other rows or by another target; choose another --run, or "
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


def _missing(plan: CachePlan) -> list[int]:
    return [shard for shard in range(len(plan.shards)) if plan.state_of(shard) != "whole"]


def _free_bytes(directory: Path) -> int:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
