"""One shard of the feature cache: some rows' tokens, turns and states packed into one safetensors file.

Tensors: input_ids [S], turns [S], last_hidden [S, D], taps [S, L*D] (with taps only), offsets [rows + 1]; row i is the
slice offsets[i]:offsets[i + 1]. The file's metadata hold two digests, of its rows and of what made their states.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.chat import Row
from model.errors import UserError
from model.files import write_atomically

State = Literal["absent", "damaged", "foreign", "whole"]
MADE_OF = "made_of"  # the only metadata key: safetensors writes several in a random order


def encode(states: Tensor, dtype: torch.dtype) -> Tensor:
    """States as they are stored. With `decode` the only place that knows the stored form."""
    return states.to(dtype)


def decode(stored: Tensor) -> Tensor:
    """States as they are used: a copy, because slices of a shard alias the file's mapping."""
    return stored.clone()


def rows_digest(rows: Sequence[Row]) -> str:
    """16 hex digits over the rows' lengths, token ids and turns."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(array("q", [len(row.input_ids), *row.input_ids, *row.turns]).tobytes())
    return hasher.hexdigest()[:16]


def state_of(path: Path, rows: str, origin: str) -> State:
    """What lies at path, by its header and metadata; foreign: a sound shard of other rows or of another recipe."""
    if not path.is_file():
        return "absent"
    try:
        with safe_open(path, framework="pt") as handle:
            found = (handle.metadata() or {}).get(MADE_OF)
    except (SafetensorError, OSError):  # safetensors compares the file's length with its header
        return "damaged"
    return "whole" if found == _made_of(rows, origin) else "foreign"


class ShardBuffer:
    """A shard in memory while its rows' states arrive, in any order."""

    def __init__(self, rows: Sequence[Row], hidden_size: int, num_taps: int, dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        lengths = torch.tensor([0, *(len(row.input_ids) for row in rows)])
        self.offsets = lengths.cumsum(0)
        num_tokens = int(self.offsets[-1])
        self.last_hidden = encode(torch.empty(num_tokens, hidden_size), dtype)
        self.taps = encode(torch.empty(num_tokens, num_taps * hidden_size), dtype) if num_taps else None
        self.filled = [False] * len(rows)

    def put(self, place: int, last_hidden: Tensor, taps: Tensor | None) -> None:
        """Stores the states [T, D] and [T, L*D] of the shard's row `place`; UserError when they are not finite."""
        span = slice(int(self.offsets[place]), int(self.offsets[place + 1]))
        for stored, states in ((self.last_hidden, last_hidden), (self.taps, taps)):
            if stored is None or states is None:
                continue
            encoded = encode(states, self.dtype)
            if not torch.isfinite(encoded).all():
                raise UserError(
                    f"{self.rows[place].source}: the target's states are not finite in {name_of(self.dtype)}; "
                    f"try another features.dtype or target.dtype (bfloat16, float32)"
                )
            stored[span] = encoded
        self.filled[place] = True

    def save(self, path: Path, origin: str) -> None:
        """Writes the shard atomically; every row must have been put."""
        assert all(self.filled), "a row of the shard has no states"
        tensors = {
            "input_ids": torch.tensor([token for row in self.rows for token in row.input_ids], dtype=torch.int32),
            "turns": torch.tensor([turn for row in self.rows for turn in row.turns], dtype=torch.int32),
            "last_hidden": self.last_hidden,
            "offsets": self.offsets,
        }
        if self.taps is not None:
            tensors["taps"] = self.taps
        metadata = {MADE_OF: _made_of(rows_digest(self.rows), origin)}
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))


@dataclass(frozen=True)
class StoredRow:
    """One row as read from a shard: input_ids int64 [T], turns int32 [T], last_hidden [T, D], taps [T, L*D] or None."""

    input_ids: Tensor
    turns: Tensor
    last_hidden: Tensor
    taps: Tensor | None


class ShardReader:
    """A shard opened for reading rows: one slice per tensor, memory-mapped."""

    def __init__(self, path: Path, has_taps: bool) -> None:
        self.handle = safe_open(path, framework="pt")
        self.offsets = self.handle.get_tensor("offsets").tolist()
        self.has_taps = has_taps

    def tokens(self, place: int) -> tuple[Tensor, Tensor]:
        """input_ids and turns of row `place`, without its states."""
        span = slice(self.offsets[place], self.offsets[place + 1])
        return self._slice("input_ids", span).long(), self._slice("turns", span).clone()

    def row(self, place: int) -> StoredRow:
        """Row `place` of this shard; nothing in it shares memory with the file."""
        span = slice(self.offsets[place], self.offsets[place + 1])
        input_ids, turns = self.tokens(place)
        return StoredRow(
            input_ids=input_ids,
            turns=turns,
            last_hidden=decode(self._slice("last_hidden", span)),
            taps=decode(self._slice("taps", span)) if self.has_taps else None,
        )

    def _slice(self, name: str, span: slice) -> Tensor:
        found = self.handle.get_slice(name)[span]
        assert isinstance(found, Tensor)
        return found


def name_of(dtype: torch.dtype) -> str:
    """'float32' of torch.float32."""
    return str(dtype).removeprefix("torch.")


def _made_of(rows: str, origin: str) -> str:
    return f"rows {rows}, origin {origin}"
