"""The feature cache's table of contents: `index.json`, which is written last and so marks the cache as complete.

Nothing here imports torch: whether a cache is whole is told in milliseconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from model.errors import UserError
from model.files import read_json, write_json
from model.recipe import STRICT

FILE = "index.json"
COMMAND = "python data/main.py features --config RECIPE"
Split = Literal["train", "held_out"]


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

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def read_index(directory: Path) -> CacheIndex:
    """The index of a complete cache; UserError with the command that makes one otherwise."""
    path = directory / FILE
    if not path.is_file():
        state = "not whole (no index.json)" if directory.is_dir() else "no such feature cache"
        raise UserError(f"{directory}: {state}; build it with: {COMMAND}")
    values = read_json(path)
    try:
        index = TypeAdapter(CacheIndex).validate_python(values)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        message = f"{path}: {place}: {problem['msg']}; rebuild with: {COMMAND} --overwrite"
        raise UserError(message) from error
    for shard in index.shards:
        found = _size(directory / shard.file)
        if found != shard.num_bytes:
            state = "missing" if found is None else f"{found:,} bytes long instead of {shard.num_bytes:,}"
            raise UserError(f"{directory}: not whole ({shard.file} is {state}); complete it with: {COMMAND}")
    return index


def write_index(directory: Path, index: CacheIndex) -> None:
    """Writes index.json atomically."""
    write_json(directory / FILE, TypeAdapter(CacheIndex).dump_python(index, mode="json"))


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


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
