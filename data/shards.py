"""One shard of the feature cache: some rows' tokens, turns and states packed into one safetensors file.

Tensors: input_ids [S], turns [S], last_hidden [S, D], taps [S, L*D] (with taps only), scales [S, 1 + L] (of states that
are stored as fp8 or int8), offsets [rows + 1], checksums [rows]; row i is the slice offsets[i]:offsets[i + 1] and its
checksum is the CRC-32 of that slice of every tensor; error [3 + 2 * (1 + L)] is what the stored form has cost,
where it is not the used one. The file's metadata hold digests of its rows and of what made their states, and a
seal over both and the checksums: a shard tells from itself alone whether it is whole, and cannot disagree with its
record.
"""

import hashlib
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.chat import Row
from data.index import StorageError
from data.storage import Encoded, Storage
from model.errors import UserError
from model.files import write_atomically

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
