"""What a feature cache will hold and take, known from tokens and configuration before the target's weights are read."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from data.chat import Row
from data.config import FeaturesConfig
from data.index import pack
from data.shards import State, rows_digest, state_of
from data.share import Share
from data.storage import TOKEN_BYTES, Storage
from data.tokens import TokenisedData
from model.errors import UserError
from model.files import digest
from model.target import check_taps

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
