"""How states lie on the disk: as they are, rounded to bfloat16, or a byte a value with a scale per token and state.

With `encode` and `decode` the only place that knows the stored form. A state is one of the vectors that a token has:
last_hidden, or one tap.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.read import STRICT
from aerie.data.chat import Row
from aerie.model.storage import digest, read_json, write_atomically, write_json

VALUES: dict[Form, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALE_BYTES = 4
TOKEN_BYTES = 8  # its id and turn, int32 each
SAMPLE_TOKENS = 256  # of a shard, on which its error is measured


@dataclass(frozen=True)
class Storage:
    """dtype is that of the states as they are used, form that on the disk (None: the same)."""

    dtype: torch.dtype
    form: Form | None = None

    @property
    def values(self) -> torch.dtype:
        """The dtype of the stored values."""
        return self.dtype if self.form is None else VALUES[self.form]

    @property
    def is_scaled(self) -> bool:
        return self.values in LARGEST

    def state_bytes(self, hidden_size: int) -> int:
        """Bytes of one state of one token."""
        return hidden_size * self.values.itemsize + (SCALE_BYTES if self.is_scaled else 0)

    @property
    def name(self) -> str:
        """'float32', 'int8 for bfloat16'."""
        used = str(self.dtype).removeprefix("torch.")
        return used if self.form is None else f"{self.form} for {used}"


@dataclass(frozen=True)
class Encoded:
    """Stored states: values [..., S * D], scales float32 [..., S] of scaled ones, and which tokens are finite."""

    values: Tensor
    scales: Tensor | None
    finite: Tensor  # [...] bool

    def __getitem__(self, place: Any) -> Encoded:
        return Encoded(self.values[place], None if self.scales is None else self.scales[place], self.finite[place])

    def cpu(self) -> Encoded:
        return Encoded(self.values.cpu(), None if self.scales is None else self.scales.cpu(), self.finite.cpu())


def encode(states: Tensor, num_states: int, storage: Storage) -> Encoded:
    """The states [..., S * D] as they are stored; on their own device, so that less goes over the bus."""
    if not storage.is_scaled:
        values = states.to(storage.values)
        return Encoded(values, None, _finite(values, None, storage))
    apart = states.float().unflatten(-1, (num_states, -1))  # [..., S, D]
    largest = LARGEST[storage.values]
    smallest = torch.finfo(torch.float32).tiny  # of a state of zeros
    scales = (apart.abs().amax(-1) / largest).clamp_min(smallest)  # [..., S]
    values = apart / scales[..., None]
    if storage.values == torch.int8:
        values = values.round_()
    values = values.clamp_(-largest, largest).to(storage.values)
    values = values.flatten(-2)
    return Encoded(values, scales, _finite(values, scales, storage))


def decode(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The states [..., S * D] of stored values and their scales [..., S], as they are used."""
    if scales is None:
        return values.to(dtype)
    apart = values.float().unflatten(-1, (scales.shape[-1], -1))  # [..., S, D]
    return (apart * scales[..., None]).to(dtype).flatten(-2)


def _finite(values: Tensor, scales: Tensor | None, storage: Storage) -> Tensor:
    """[...] bool: what is read again is finite, which a float32 scale alone does not tell of float16."""
    return torch.isfinite(decode(values, scales, storage.dtype)).all(-1)


def measured_error(
    last_hidden: Tensor, taps: Tensor | None, num_taps: int, storage: Storage, logits: Callable[[Tensor], Tensor]
) -> StorageError:
    """What storing costs on some tokens: last_hidden [T, D], taps [T, L * D]; logits: the target's final transform."""
    parts = [(last_hidden, 1), *([(taps, num_taps)] if taps is not None else [])]
    values, dimensions = [], []
    restored = last_hidden
    for states, count in parts:
        stored = encode(states, count, storage)
        read = decode(stored.values, stored.scales, storage.dtype).to(states.dtype)
        restored = read if states is last_hidden else restored
        size = states.double().unflatten(-1, (count, -1)).square()  # [T, S, D]
        error = (read.double() - states.double()).unflatten(-1, (count, -1)).square()
        values += (error.sum((0, 2)) / size.sum((0, 2)).clamp_min(1e-300)).sqrt().tolist()
        dimensions += (error.sum(0) / size.sum(0).clamp_min(1e-300)).sqrt().mean(-1).tolist()
    p, q = (torch.softmax(logits(states).float(), -1) for states in (last_hidden, restored))  # [T, V]
    return StorageError(
        num_tokens=len(last_hidden),
        values=tuple(values),
        dimensions=tuple(dimensions),
        law=float((p - q).abs().sum(-1).mean() / 2),
        choice=float((p.argmax(-1) == q.argmax(-1)).float().mean()),
    )


State = Literal["absent", "damaged", "foreign", "whole"]
MADE_OF = "made_of"  # the only metadata key: safetensors writes several in a random order
SMALL_TENSORS = ("offsets", "checksums", "error")  # of which every byte is under the seal
ROW_TENSORS = ("input_ids", "turns", "last_hidden", "taps", "scales")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def rows_digest(rows: Sequence[Row]) -> str:
    """16 hex digits over the rows' lengths, token ids and turns."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(array("q", [len(row.input_ids), *row.input_ids, *row.turns]).tobytes())
    return hasher.hexdigest()[:16]


def state_of(path: Path, rows: str, origin: str, thorough: bool = False) -> State:
    """What lies at path; foreign: a sound shard of other rows or of another recipe.

    By its header and its length; where that is not what is asked for, and with `thorough`, by every byte.
    """
    if not path.is_file():
        return "absent"
    try:
        reader = ShardReader(path)
        agrees = (reader.rows, reader.origin) == (rows, origin)
        if (thorough or not agrees) and reader.broken_row() is not None:
            return "damaged"
    except UserError:
        return "damaged"
    return "whole" if agrees else "foreign"


class ShardBuffer:
    """A shard in memory while its rows' states arrive, in any order."""

    def __init__(self, rows: Sequence[Row], hidden_size: int, num_taps: int, storage: Storage) -> None:
        self.rows = rows
        self.storage = storage
        lengths = torch.tensor([0, *(len(row.input_ids) for row in rows)])
        self.offsets = lengths.cumsum(0)
        num_tokens = int(self.offsets[-1])
        self.tensors: dict[str, Tensor] = {
            "input_ids": torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32),
            "turns": torch.tensor([turn for row in rows for turn in row.turns], dtype=torch.int32),
            "last_hidden": torch.empty(num_tokens, hidden_size, dtype=storage.values),
        }
        if num_taps:
            self.tensors["taps"] = torch.empty(num_tokens, num_taps * hidden_size, dtype=storage.values)
        if storage.is_scaled:
            self.tensors["scales"] = torch.empty(num_tokens, 1 + num_taps)
        self.checksums: list[int | None] = [None] * len(rows)
        self.error: StorageError | None = None

    def put(self, place: int, last_hidden: Encoded, taps: Encoded | None) -> None:
        """Stores the states of the shard's row `place`, [T, ...] each; UserError when they are not finite."""
        span = slice(int(self.offsets[place]), int(self.offsets[place + 1]))
        states = [last_hidden, *([] if taps is None else [taps])]
        if not all(bool(stored.finite.all()) for stored in states):
            raise UserError(
                f"{self.rows[place].source}: the target's states are not finite in {self.storage.name}; "
                f"try another features.dtype or target.dtype (bfloat16, float32)"
            )
        for name, stored in zip(("last_hidden", "taps"), states, strict=False):
            self.tensors[name][span] = stored.values
        if self.storage.is_scaled:
            self.tensors["scales"][span] = torch.cat([_scales(stored) for stored in states], dim=-1)
        self.checksums[place] = _checksum({name: tensor[span] for name, tensor in self.tensors.items()})

    def save(self, path: Path, origin: str) -> str:
        """Writes the shard atomically and returns its seal; every row must have been put."""
        checksums = [value for value in self.checksums if value is not None]
        assert len(checksums) == len(self.rows), "a row of the shard has no states"
        tensors = {**self.tensors, "offsets": self.offsets, "checksums": torch.tensor(checksums)}
        if self.error is not None:
            tensors["error"] = _error_tensor(self.error)
        rows = rows_digest(self.rows)
        seal = _seal(rows, origin, tensors)
        metadata = {MADE_OF: f"rows {rows}, origin {origin}, seal {seal}"}
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
        return seal


@dataclass(frozen=True)
class StoredRow:
    """One row as it lies in a shard: input_ids int64 [T], turns int32 [T], last_hidden [T, D], taps [T, L*D] or None.

    scales [T, 1 + L] are of fp8 and int8 states alone.
    """

    input_ids: Tensor
    turns: Tensor
    last_hidden: Tensor
    taps: Tensor | None
    scales: Tensor | None


class ShardReader:
    """A shard opened for reading rows: one slice per tensor, memory-mapped."""

    def __init__(self, path: Path, checksum: str | None = None) -> None:
        """UserError when the file cannot be read, its seal is broken, or checksum is given and is not its seal."""
        self.path = path
        try:
            self.handle = safe_open(path, framework="pt")
            self.names = set(self.handle.keys())
            made_of = (self.handle.metadata() or {}).get(MADE_OF, "")
            small = {name: self.handle.get_tensor(name).clone() for name in SMALL_TENSORS if name in self.names}
            self.offsets: list[int] = small["offsets"].tolist()
        except KeyError as error:
            raise UserError(f"{path}: has no tensor 'offsets': it is no shard of a feature cache") from error
        except (SafetensorError, OSError) as error:  # safetensors compares the file's length with its header
            raise UserError(f"{path}: cannot be read ({error})") from error
        facts = dict(part.split(" ", 1) for part in made_of.split(", ") if " " in part)
        self.rows, self.origin, self.seal = (facts.get(name) for name in ("rows", "origin", "seal"))
        self.checksums = small.get("checksums")  # None in shards of before there were any
        self.error = _error_of(small["error"]) if "error" in small else None
        layout = {name: self.handle.get_slice(name) for name in self.names}
        is_sealed = self.checksums is not None or self.seal is not None
        if is_sealed and self.seal != _seal(str(self.rows), str(self.origin), {**layout, **small}):
            raise UserError(f"{path}: its seal does not match its header and checksums: the file is damaged")
        if checksum is not None and self.seal != checksum:
            raise UserError(f"{path}: is not the shard that index.json lists (seal {self.seal}, there {checksum})")
        self._sound: set[int] = set()

    def tokens(self, place: int) -> tuple[Tensor, Tensor]:
        """input_ids and turns of row `place`, without its states."""
        span = slice(self.offsets[place], self.offsets[place + 1])
        return self._slice("input_ids", span).long(), self._slice("turns", span).clone()

    def require_sound_tokens(self) -> None:
        """UserError when token ids and turns are not those that the shard was made of; reads no state."""
        hasher = hashlib.sha256()
        ids, turns = (self._slice(name, slice(0, self.offsets[-1])).long() for name in ("input_ids", "turns"))
        for first, last in zip(self.offsets, self.offsets[1:], strict=False):
            length = torch.tensor([last - first])
            hasher.update(torch.cat([length, ids[first:last], turns[first:last]]).numpy().tobytes())
        if hasher.hexdigest()[:16] != self.rows:
            raise UserError(f"{self.path}: its token ids do not match their digest")

    def row(self, place: int) -> StoredRow:
        """Row `place` of this shard; nothing in it shares memory with the file.

        UserError when it does not match its checksum, which is looked at once.
        """
        span = slice(self.offsets[place], self.offsets[place + 1])
        found = {name: self._slice(name, span).clone() for name in ROW_TENSORS if name in self.names}
        if self.checksums is not None and place not in self._sound:
            if _checksum(found) != int(self.checksums[place]):
                raise UserError(f"{self.path}: row {place + 1} of the shard does not match its checksum")
            self._sound.add(place)
        return StoredRow(
            input_ids=found["input_ids"].long(),
            turns=found["turns"],
            last_hidden=found["last_hidden"],
            taps=found.get("taps"),
            scales=found.get("scales"),
        )

    def broken_row(self, progress: Callable[[int], Any] = lambda tokens: None) -> int | None:
        """The first row that does not match its checksum, or None; progress is told the tokens that were read."""
        for place in range(len(self.offsets) - 1):
            span = slice(self.offsets[place], self.offsets[place + 1])
            found = {name: self._slice(name, span) for name in ROW_TENSORS if name in self.names}
            if self.checksums is not None and _checksum(found) != int(self.checksums[place]):
                return place
            progress(span.stop - span.start)
        return None

    def _slice(self, name: str, span: slice) -> Tensor:
        try:
            found = self.handle.get_slice(name)[span]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.path}: {name} cannot be read ({error})") from error
        assert isinstance(found, Tensor)
        return found


def name_of(dtype: torch.dtype) -> str:
    """'float32' of torch.float32."""
    return str(dtype).removeprefix("torch.")


def _scales(stored: Encoded) -> Tensor:
    assert stored.scales is not None
    return stored.scales


def _error_tensor(error: StorageError) -> Tensor:
    numbers = (error.num_tokens, error.law, error.choice, *error.values, *error.dimensions)
    return torch.tensor(numbers, dtype=torch.float64)


def _error_of(stored: Tensor) -> StorageError:
    num_tokens, law, choice, *rest = stored.tolist()
    half = len(rest) // 2
    return StorageError(int(num_tokens), tuple(rest[:half]), tuple(rest[half:]), law, choice)


def _checksum(row: Mapping[str, Tensor]) -> int:
    """CRC-32 of one row's slices, in the order of ROW_TENSORS."""
    value = 0
    for name in ROW_TENSORS:
        if name in row:
            value = zlib.crc32(row[name].contiguous().view(torch.uint8).numpy().data, value)
    return value


def _seal(rows: str, origin: str, tensors: Mapping[str, Any]) -> str:
    """16 hex digits over what the shard says of itself: digests, borders, checksums, names, dtypes and shapes.

    tensors may hold slices of a file for those that only their layout is taken of.
    """
    hasher = hashlib.sha256(f"{rows} {origin}".encode())
    for name in SMALL_TENSORS:
        if name in tensors:
            hasher.update(tensors[name].numpy().tobytes())
    for name in sorted(tensors):
        hasher.update(f" {name} {_dtype_name(tensors[name])} {_shape(tensors[name])}".encode())
    return hasher.hexdigest()[:16]


def _dtype_name(found: Any) -> str:
    return name_of(found.dtype) if isinstance(found, Tensor) else name_of(DTYPES.get(found.get_dtype(), torch.bool))


def _shape(found: Any) -> list[int]:
    return list(found.shape if isinstance(found, Tensor) else found.get_shape())


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
    if index.seal is not None and index.seal != _seal_index(index):
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
    write_json(directory / FILE, _values(replace(index, seal=_seal_index(index))))


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


def _seal_index(index: CacheIndex) -> str:
    return digest(_values(replace(index, seal=None)))


def _values(index: CacheIndex) -> dict[str, Any]:
    values: dict[str, Any] = TypeAdapter(CacheIndex).dump_python(index, mode="json")
    return values


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


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
    def open(cls, directory: Path, expected: dict[str, Any] | None = None) -> FeatureCache:
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

    def split(self, name: Split) -> FeatureCache:
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
    def __getitem__(self, position: slice) -> FeatureCache: ...

    def __getitem__(self, position: int | slice) -> CachedRow | FeatureCache:
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
