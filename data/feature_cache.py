"""The feature cache: the target's states of every token, in memory-mapped files.

    shard-00000.safetensors  some rows, one after the other (TOKEN_NAMES and STATE_NAMES below)
    shard-00000.json         its record, a Manifest
    index.json               all records together, a Manifest; written last

A token's *states* are one last_hidden and L taps.
"""

import hashlib
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.data.chat import TokenRow
from aerie.data.inputs import CACHE_INDEX, FEATURES_COMMAND
from aerie.data.progress import WHOLE_JOB, JobShare
from aerie.model.storage import (
    Damaged,
    Foreign,
    Manifest,
    Whole,
    differences,
    digest,
    file_digest,
    write_atomically,
)

StorageForm = Literal["bf16", "fp8", "int8"]
VALUES: dict[StorageForm, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# The tensors of a shard, in two groups: a row's tokens are also read without its states.
TOKEN_NAMES = ("input_ids", "turns")  # "turns" holds a row's turn_ids
STATE_NAMES = ("last_hidden", "taps", "scales")
# The two groups' checksums in a shard's record, 8 hex digits per row.
TOKEN_SUMS = "token_checksums"
STATE_SUMS = "state_checksums"
ROW_BYTES = 56  # per row, in its shard's record and in the index
SHARD_BYTES = 2048  # per shard, at most: its header and the rest of its record


@dataclass(frozen=True)
class Storage:
    """How states are stored."""

    dtype: torch.dtype  # of the states in use
    form: StorageForm | None = None  # of the states on disk; None: their dtype

    @property
    def values(self) -> torch.dtype:
        return self.dtype if self.form is None else VALUES[self.form]

    def token_bytes(self, hidden_size: int, num_states: int) -> int:
        """Bytes of a token in a shard: its id and turn id (int32), its states and their scales."""
        scale_bytes = 4 * (self.values in LARGEST)
        return 8 + num_states * (hidden_size * self.values.itemsize + scale_bytes)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.form is None else f"{self.form} for {dtype}"


def encode(states: Tensor, num_states: int, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """The stored values of states [..., S * D]; for fp8 and int8, also float32 scales [..., S]."""
    if storage.values not in LARGEST:
        return states.to(storage.values), None
    largest = LARGEST[storage.values]
    split = states.float().unflatten(-1, (num_states, -1))  # [..., S, D]
    smallest = torch.finfo(torch.float32).tiny  # a state of zeros needs a scale, too
    scales = (split.abs().amax(-1) / largest).clamp_min(smallest)  # [..., S]
    split = split / scales[..., None]  # [..., S, D]
    if storage.values == torch.int8:
        split = split.round_()
    return split.clamp_(-largest, largest).to(storage.values).flatten(-2), scales


def decode(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The states [..., S * D] of what `encode` returned."""
    if scales is None:
        return values.to(dtype)
    split = values.float().unflatten(-1, (scales.shape[-1], -1))  # [..., S, D]
    return (split * scales[..., None]).to(dtype).flatten(-2)


def rows_digest(rows: Sequence[TokenRow]) -> str:
    """16 hex digits over the rows' lengths, token ids and turn ids."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(array("q", [len(row.input_ids), *row.input_ids, *row.turn_ids]).tobytes())
    return hasher.hexdigest()[:16]


def checksum(tensors: Sequence[Tensor]) -> str:
    """CRC-32 of dtypes, shapes and bytes, as 8 hex digits."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def shard_spans(lengths: Sequence[int], shard_tokens: int) -> Iterator[slice]:
    """Each shard's rows: as many as fit into shard_tokens, at least one."""
    first, tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > first and tokens + length > shard_tokens:
            yield slice(first, row)
            first, tokens = row, 0
        tokens += length
    yield slice(first, len(lengths))


@dataclass(frozen=True)
class Shard:
    path: Path
    rows: Sequence[TokenRow]
    inputs: dict[str, Any]

    @property
    def record(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def lengths(self) -> list[int]:
        return [len(row.input_ids) for row in self.rows]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def is_whole(self, content: bool = False) -> bool:
        checked = Manifest.check(self.path.parent, self.inputs, content, self.record.name)
        return isinstance(checked, Whole)

    def save(self, tensors: dict[str, Tensor], source: dict[str, Any]) -> None:
        """Writes the shard and its record; source: facts on what gave the states."""
        facts: dict[str, Any] = {"lengths": self.lengths, **source}
        for sums, names in ((TOKEN_SUMS, TOKEN_NAMES), (STATE_SUMS, STATE_NAMES)):
            parts = [tensors[name].split(self.lengths) for name in names if name in tensors]
            facts[sums] = "".join(map(checksum, zip(*parts, strict=True)))
        write_atomically(self.path, lambda temporary: save_file(tensors, temporary))
        files = {self.path.name: (self.path.stat().st_size, file_digest(self.path))}
        Manifest(files, self.inputs, facts).write(self.path.parent, self.record.name)


@dataclass(frozen=True)
class CachePlan:
    directory: Path
    shards: Sequence[Shard]  # the train rows, then the held-out ones
    num_train: int
    hidden_size: int
    after_blocks: tuple[int, ...]
    storage: Storage
    batch_tokens: int

    @property
    def token_bytes(self) -> int:
        return self.storage.token_bytes(self.hidden_size, 1 + len(self.after_blocks))

    @property
    def num_rows(self) -> int:
        return sum(len(shard.rows) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    def bytes_of(self, shard: Shard) -> int:
        return shard.num_tokens * self.token_bytes + len(shard.rows) * ROW_BYTES + SHARD_BYTES

    def missing(self, share: JobShare = WHOLE_JOB) -> list[Shard]:
        return [shard for shard in share.part(self.shards) if not shard.is_whole()]

    def foreign(self) -> list[Path]:
        """The records in the directory of shards that do not belong to this plan."""
        inputs = {shard.record: shard.inputs for shard in self.shards}

        def is_foreign(path: Path) -> bool:
            checked = Manifest.check(self.directory, inputs.get(path, {}), False, path.name)
            return isinstance(checked, Foreign)

        return [*filter(is_foreign, sorted(self.directory.glob("shard-*.json")))]

    def require_own_directory(self, overwrite: bool) -> None:
        if not overwrite and (foreign := self.foreign()):
            raise UserError(
                f"{foreign[0]}: was made from other rows or by another target; "
                "choose another --run, or replace it with --overwrite"
            )

    def write_index(self, fingerprint: dict[str, Any]) -> Manifest:
        """Joins the shards' records in index.json; fingerprint: of the text and the target."""
        files = dict[str, tuple[int, str]]()
        lengths = list[int]()
        token_sums = ""
        state_sums = ""
        for shard in self.shards:
            record = Manifest.read(self.directory, shard.record.name)
            files |= record.files
            lengths += record.facts["lengths"]
            token_sums += record.facts[TOKEN_SUMS]
            state_sums += record.facts[STATE_SUMS]
        for shard in self.shards:  # after all shards, since older indexes have this order
            files[shard.record.name] = (shard.record.stat().st_size, file_digest(shard.record))
        shape = {
            "after_blocks": list(self.after_blocks),
            "dtype": str(self.storage.dtype).removeprefix("torch."),
            "storage": self.storage.form,
        }
        rows = digest([shard.inputs["rows"] for shard in self.shards])
        index = Manifest(
            files,
            {**fingerprint, **shape, "rows": rows},
            {
                **shape,
                "splits": {
                    "train": [0, self.num_train],
                    "held_out": [self.num_train, len(lengths)],
                },
                "shards": [[shard.path.name, len(shard.rows)] for shard in self.shards],
                "lengths": lengths,
                TOKEN_SUMS: token_sums,
                STATE_SUMS: state_sums,
            },
        )
        index.write(self.directory, CACHE_INDEX)
        return index


@dataclass(frozen=True)
class CachedRow:
    input_ids: Tensor  # int64 [T]
    turn_ids: Tensor  # int32 [T]
    last_hidden: Tensor  # [T, D]; states as stored
    taps: Tensor | None  # [T, L*D]
    scales: Tensor | None = None  # [T, 1 + L], for fp8 and int8
    dtype: torch.dtype | None = None  # to decode the states to; None: they are not encoded


class FeatureCache(Sequence[CachedRow]):
    """Rows of a complete cache; a split or a slice is a view of the same files."""

    def __init__(self, directory: Path, manifest: Manifest, numbers: range) -> None:
        self.directory = directory
        self.manifest = manifest
        self.numbers = numbers  # this view's rows, by their numbers in the whole cache
        self.fingerprint = manifest.inputs
        self.facts = manifest.facts
        self.lengths = [self.facts["lengths"][number] for number in numbers]  # in tokens
        self._starts = [0, *accumulate(self.facts["lengths"])]  # each row's first token
        self._first_rows = [0, *accumulate(count for _, count in self.facts["shards"])]
        self._open = lru_cache(128)(_OpenShard)  # limits the files that a process maps at once

    @classmethod
    def open(cls, directory: Path, expected: dict[str, Any] | None = None) -> "FeatureCache":
        """The cache; UserError if it is incomplete, or if a key of `expected` differs."""
        checked = Manifest.check(directory, content=False, name=CACHE_INDEX)
        if isinstance(checked, Damaged):
            verb = "complete" if directory.is_dir() else "build"
            raise UserError(
                f"{directory}: is not a whole feature cache ({checked.path.name}: {checked.why}); "
                f"{verb} it with: {FEATURES_COMMAND}"
            )
        manifest = checked.manifest
        fingerprint = {key: manifest.inputs.get(key) for key in expected or {}}
        if changed := differences(fingerprint, expected or {}):
            raise UserError(
                f"{directory}: was built with other inputs: {changed}; "
                f"rebuild with: {FEATURES_COMMAND} --overwrite"
            )
        return cls(directory, manifest, range(len(manifest.facts["lengths"])))

    def split(self, name: Literal["train", "held_out"]) -> "FeatureCache":
        return FeatureCache(self.directory, self.manifest, range(*self.facts["splits"][name]))

    @property
    def shards(self) -> list[range]:
        """The positions of each file's rows in this view (a split or all rows)."""
        ranges = []
        for start, end in pairwise(self._first_rows):
            first = max(start, self.numbers.start) - self.numbers.start
            last = min(end, self.numbers.stop) - self.numbers.start
            if first < last:
                ranges.append(range(first, last))
        return ranges

    def tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(input_ids, turn_ids) of each row."""
        for number in self.numbers:
            row = self._read(number, TOKEN_NAMES, TOKEN_SUMS)
            yield row["input_ids"].long(), row["turns"]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return FeatureCache(self.directory, self.manifest, self.numbers[position])
        number = self.numbers[position]
        row = self._read(number, TOKEN_NAMES, TOKEN_SUMS)
        row |= self._read(number, STATE_NAMES, STATE_SUMS)
        return CachedRow(
            input_ids=row["input_ids"].long(),
            turn_ids=row["turns"],
            last_hidden=row["last_hidden"],
            taps=row.get("taps"),
            scales=row.get("scales"),
            dtype=getattr(torch, self.facts["dtype"]) if self.facts["storage"] else None,
        )

    def _read(self, number: int, names: Sequence[str], sums: str) -> dict[str, Tensor]:
        """Tensors of a row; UserError if they cannot be read or do not match their checksum."""
        shard = bisect_right(self._first_rows, number) - 1
        first_row = self._first_rows[shard]
        first = self._starts[first_row]  # the shard's first token
        span = slice(self._starts[number] - first, self._starts[number + 1] - first)
        path = self.directory / self.facts["shards"][shard][0]
        try:
            file = self._open(path)
            tensors = file.read(names, span)
            if (number, sums) in file.sound:
                return tensors
            if checksum([*tensors.values()]) == self.facts[sums][8 * number : 8 * number + 8]:
                file.sound.add((number, sums))
                return tensors
            fault = "does not match its checksum"
        except (SafetensorError, OSError) as error:
            fault = f"cannot be read ({error})"
        raise UserError(
            f"{path}: row {number - first_row + 1} of the shard {fault}; "
            f"mend the cache with: {FEATURES_COMMAND} --verify"
        )


class _OpenShard:
    """A file that stays open, and which of its rows are known to be sound."""

    def __init__(self, path: Path) -> None:
        self.file = safe_open(path, framework="pt")
        self.names = set(self.file.keys())
        self.sound = set[tuple[int, str]]()  # rows, each with the kind of its checksum

    def read(self, names: Sequence[str], span: slice) -> dict[str, Tensor]:
        # Copy: a slice would keep the file's pages in memory.
        return {
            name: self.file.get_slice(name)[span].clone() for name in names if name in self.names
        }
