"""The feature cache as a sequence of rows: token ids, turns and the target's states, read from mapped files."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from data.index import COMMAND, CacheIndex, Split, read_index
from data.shards import ShardReader
from data.storage import TOKEN_BYTES, Storage
from model.errors import UserError
from model.files import digest

OPEN_SHARDS = 128  # mapped at once by one process


@dataclass(frozen=True)
class CachedRow:
    """One row: input_ids int64 [T], turns int32 [T], last_hidden [T, D], taps [T, L*D] (None without).

    States are as they are stored, with scales [T, 1 + L] where they are fp8 or int8, and dtype to decode them to (None:
    they are stored as they are used); a Batch decodes them on the device that it moves to. number counts over the whole
    cache, so it is the same whichever split or process reads the row.
    """

    input_ids: Tensor
    turns: Tensor
    last_hidden: Tensor
    taps: Tensor | None
    number: int
    scales: Tensor | None = None
    dtype: torch.dtype | None = None


class FeatureCache(Sequence[CachedRow]):
    """Rows of a complete cache; a split or a slice is a view of the same files."""

    def __init__(self, directory: Path, contents: CacheIndex, numbers: range) -> None:
        self.directory = directory
        self.contents = contents
        self.numbers = numbers
        self._first_rows = [shard.first_row for shard in contents.shards]
        self._readers: dict[int, ShardReader] = {}

    @classmethod
    def open(cls, directory: Path, expected: dict[str, Any] | None = None) -> "FeatureCache":
        """The cache in directory.

        expected holds those keys of the fingerprint (target, tokenizer, template, after_blocks, dtype, data, rows)
        that must agree. UserError, with the command that helps, when the cache is absent, not whole or another's.
        """
        contents = read_index(directory)
        for key, asked in (expected or {}).items():
            difference = _difference(key, contents.fingerprint.get(key), asked)
            if difference:
                raise UserError(f"{directory}: built with {difference}; rebuild with: {COMMAND} --overwrite")
        return cls(directory, contents, range(len(contents.lengths)))

    def split(self, name: Split) -> "FeatureCache":
        """The rows of one split, in order."""
        return FeatureCache(self.directory, self.contents, range(*self.contents.splits[name]))

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row of this view."""
        return [self.contents.lengths[number] for number in self.numbers]

    @property
    def shards(self) -> list[range]:
        """The positions in this view, which must be a split or the whole, that lie in one file together."""
        ends = [*self._first_rows[1:], len(self.contents.lengths)]
        first, last = self.numbers.start, self.numbers.stop
        spans = [(max(start, first), min(end, last)) for start, end in zip(self._first_rows, ends, strict=True)]
        return [range(start - first, end - first) for start, end in spans if start < end]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the cache was made from."""
        return self.contents.fingerprint

    def tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(input_ids, turns) of each row of this view, in order, without reading its states."""
        sound = -1
        for number in self.numbers:
            shard = self._shard_of(number)
            with _mending():
                reader = self._reader(shard)
                if shard != sound:
                    reader.require_sound_tokens()
                    sound = shard
            yield reader.tokens(number - self._first_rows[shard])

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the files."""
        contents = self.contents
        dtype, form = getattr(torch, contents.dtype), contents.storage
        state_bytes = Storage(dtype, form).state_bytes(contents.hidden_size)
        return TOKEN_BYTES + (1 + len(contents.after_blocks)) * state_bytes

    def file_of(self, position: int) -> str:
        """The name of the shard that holds a row of this view."""
        return self.contents.shards[self._shard_of(self.numbers[position])].file

    def close(self) -> None:
        """Unmaps this view's files: read again, they are mapped and compared with their checksums anew."""
        self._readers.clear()

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, position: int) -> CachedRow: ...

    @overload
    def __getitem__(self, position: slice) -> "FeatureCache": ...

    def __getitem__(self, position: int | slice) -> "CachedRow | FeatureCache":
        if isinstance(position, slice):
            return FeatureCache(self.directory, self.contents, self.numbers[position])
        number = self.numbers[position]
        shard = self._shard_of(number)
        with _mending():
            row = self._reader(shard).row(number - self._first_rows[shard])
        dtype = None if self.contents.storage is None else getattr(torch, self.contents.dtype)
        return CachedRow(row.input_ids, row.turns, row.last_hidden, row.taps, number, row.scales, dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}  # a worker process maps the files itself

    def _shard_of(self, number: int) -> int:
        return bisect_right(self._first_rows, number) - 1

    def _reader(self, shard: int) -> ShardReader:
        if shard not in self._readers:
            if len(self._readers) >= OPEN_SHARDS:
                del self._readers[next(iter(self._readers))]
            entry = self.contents.shards[shard]
            self._readers[shard] = ShardReader(self.directory / entry.file, entry.checksum)
        return self._readers[shard]


@contextmanager
def _mending() -> Iterator[None]:
    """Adds to what is wrong with a shard the command that mends it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; write what is broken anew with: {COMMAND} --verify") from error


def _difference(key: str, found: Any, asked: Any) -> str | None:
    """'after_blocks [2, 16, 29], this recipe asks [1, 15, 28]' for the first leaf that differs, or None."""
    if digest(found) == digest(asked):
        return None
    if isinstance(found, dict) and isinstance(asked, dict):
        inner = (_difference(f"{key}.{name}", found.get(name), asked.get(name)) for name in sorted({*found, *asked}))
        return next(difference for difference in inner if difference)
    return f"{key} {_short(found)}, this recipe asks {_short(asked)}"


def _short(value: Any) -> str:
    text = str(tuple(value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
