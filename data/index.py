"""The feature cache's table of contents: `index.json`, which is written last and so marks the cache as complete.

Nothing here imports torch: whether a cache is whole is told in milliseconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from model.errors import UserError
from model.files import digest, read_json, write_json
from model.recipe import STRICT

FILE = "index.json"
COMMAND = "python data/main.py features --config RECIPE"
Split = Literal["train", "held_out"]
Form = Literal["bf16", "fp8", "int8"]  # of states on the disk


@dataclass(frozen=True)
class StorageError:
    """What storing states otherwise than the target made them has cost, measured on some tokens of a shard.

    values and dimensions hold one number a state, last_hidden first, then the taps: the root mean square of the error
    over that of the state, of all values together and as the mean over dimensions (which a few huge dimensions cannot
    hide). law is the mean total variation between the target's laws after both last states, choice the share of tokens
    with the same likeliest token.
    """

    __pydantic_config__ = STRICT
    num_tokens: int
    values: tuple[float, ...]
    dimensions: tuple[float, ...]
    law: float
    choice: float

    def line(self) -> str:
        """One line for people."""
        last, *taps = (f"{value:.2%}" for value in self.dimensions)
        states = f"last state {last}" + (f", taps {', '.join(taps)}" if taps else "")
        return (
            f"relative error of a dimension: {states}; the target's law moves by {self.law:.2%}, its likeliest token "
            f"stays in {self.choice:.1%} ({self.num_tokens:,} tokens measured)"
        )


@dataclass(frozen=True)
class ShardEntry:
    """One file of the cache: rows first_row to first_row + num_rows - 1."""

    __pydantic_config__ = STRICT
    file: str
    first_row: int
    num_rows: int
    num_tokens: int
    num_bytes: int
    rows: str  # digest of its token ids and turns
    checksum: str | None = None  # of everything in it; None in caches of before there was one
    error: StorageError | None = None  # None where states are stored as they are used


@dataclass(frozen=True)
class CacheIndex:
    """What a feature cache holds and what it was made from. Rows are numbered over both splits."""

    __pydantic_config__ = STRICT
    schema: Literal[1]
    fingerprint: dict[str, Any]
    dtype: str
    hidden_size: int
    after_blocks: tuple[int, ...]
    splits: dict[Split, tuple[int, int]]  # first row, and the row after the last
    lengths: tuple[int, ...]  # tokens of each row
    shards: tuple[ShardEntry, ...]
    storage: Form | None = None  # bf16, fp8 or int8; None: dtype, which is that of the states as they are used
    seal: str | None = None  # digest of everything else, which write_index adds; None in caches of before there was one

    @property
    def error(self) -> StorageError | None:
        """The shards' errors together, each token counting once."""
        return mean_error([shard.error for shard in self.shards if shard.error is not None])

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def mean_error(errors: Sequence[StorageError]) -> StorageError | None:
    """The errors together, each token counting once; None of none."""
    total = sum(error.num_tokens for error in errors)
    if not total:
        return None

    def mean(numbers: Sequence[float]) -> float:
        return sum(number * error.num_tokens for number, error in zip(numbers, errors, strict=True)) / total

    return StorageError(
        num_tokens=total,
        values=tuple(mean(column) for column in zip(*(error.values for error in errors), strict=True)),
        dimensions=tuple(mean(column) for column in zip(*(error.dimensions for error in errors), strict=True)),
        law=mean([error.law for error in errors]),
        choice=mean([error.choice for error in errors]),
    )


def read_index(directory: Path, sizes: bool = True) -> CacheIndex:
    """The index of a complete cache; UserError with the command that makes one otherwise.

    sizes: that every shard is there and as long as it was is a condition.
    """
    path = directory / FILE
    if not path.is_file():
        state = "not whole (no index.json)" if directory.is_dir() else "no such feature cache"
        raise UserError(f"{directory}: {state}; build it with: {COMMAND}")
    try:
        values = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; write it anew, and nothing else, with: {COMMAND} --verify") from error
    try:
        index = TypeAdapter(CacheIndex).validate_python(values)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        message = f"{path}: {place}: {problem['msg']}; rebuild with: {COMMAND} --overwrite"
        raise UserError(message) from error
    if index.seal is not None and index.seal != _seal(index):
        raise UserError(
            f"{path}: its seal does not match what it says: the file is damaged; write it anew, and nothing else, "
            f"with: {COMMAND} --verify"
        )
    for shard in index.shards if sizes else ():
        found = _size(directory / shard.file)
        if found != shard.num_bytes:
            state = "missing" if found is None else f"{found:,} bytes long instead of {shard.num_bytes:,}"
            raise UserError(f"{directory}: not whole ({shard.file} is {state}); complete it with: {COMMAND}")
    return index


def write_index(directory: Path, index: CacheIndex) -> None:
    """Writes index.json atomically, sealed."""
    write_json(directory / FILE, _values(replace(index, seal=_seal(index))))


def is_complete(directory: Path) -> bool:
    """True when the index can be read and every shard that it lists has its size."""
    try:
        read_index(directory)
    except UserError:
        return False
    return True


def pack(lengths: list[int], shard_tokens: int) -> Iterator[range]:
    """The rows of each shard, in order: as many as fit into shard_tokens, at least one."""
    first, tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > first and tokens + length > shard_tokens:
            yield range(first, row)
            first, tokens = row, 0
        tokens += length
    if lengths:
        yield range(first, len(lengths))


def _seal(index: CacheIndex) -> str:
    return digest(_values(replace(index, seal=None)))


def _values(index: CacheIndex) -> dict[str, Any]:
    values: dict[str, Any] = TypeAdapter(CacheIndex).dump_python(index, mode="json")
    return values


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
