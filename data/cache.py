"""The feature cache: the target's states of every token, in memory-mapped files.

    shard-00000.safetensors  tensors of some rows, one row after the other: input_ids, turns, last_hidden, taps, scales
    shard-00000.json         its record, a Manifest: the file's sha256, what it was made of, its rows' checksums
    index.json               all records together, a Manifest too; written last, so it marks the cache as complete

A token has one last_hidden and L taps, its *states*. They lie as the target made them, rounded to bfloat16, or one byte
a value (int8, fp8) with a float32 scale per token and state. `encode` and `decode` alone know that form.
"""

import hashlib
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.data.chat import Row
from aerie.data.inputs import COMMAND, INDEX
from aerie.model.storage import Damaged, Manifest, differences, file_digest, write_atomically

Form = Literal["bf16", "fp8", "int8"]
Split = Literal["train", "held_out"]
VALUES: dict[Form, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
TOKENS, STATES = ("input_ids", "turns"), ("last_hidden", "taps", "scales")  # tensors of a shard
OPEN_SHARDS = 128  # mapped at once by one process


@dataclass(frozen=True)
class Storage:
    """dtype is that of the states in use, form that on the disk (None: the same)."""

    dtype: torch.dtype
    form: Form | None = None

    @property
    def values(self) -> torch.dtype:
        """The dtype of the stored values."""
        return self.dtype if self.form is None else VALUES[self.form]

    @property
    def is_scaled(self) -> bool:
        return self.values in LARGEST

    def token_bytes(self, hidden_size: int, num_taps: int) -> int:
        """Bytes of a token in a shard: its id and turn (int32 each), values and scales."""
        return 8 + (1 + num_taps) * (hidden_size * self.values.itemsize + 4 * self.is_scaled)

    def tensor_names(self, num_taps: int) -> tuple[str, ...]:
        """The names of a shard's tensors."""
        return (*TOKENS, "last_hidden", *(["taps"] if num_taps else []), *(["scales"] if self.is_scaled else []))

    def __str__(self) -> str:
        """'float32', 'int8 for bfloat16'."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.form is None else f"{self.form} for {dtype}"


@dataclass(frozen=True)
class Encoded:
    """Stored states: values [..., S * D], scales float32 [..., S] of scaled ones, and which tokens are finite [...]."""

    values: Tensor
    scales: Tensor | None
    finite: Tensor

    def __getitem__(self, index: Any) -> "Encoded":
        return Encoded(self.values[index], None if self.scales is None else self.scales[index], self.finite[index])

    def cpu(self) -> "Encoded":
        return Encoded(self.values.cpu(), None if self.scales is None else self.scales.cpu(), self.finite.cpu())


def encode(states: Tensor, num_states: int, storage: Storage) -> Encoded:
    """The states [..., S * D] as they are stored; on their own device, so that less goes over the bus."""
    scales = None
    if storage.is_scaled:
        split = states.float().unflatten(-1, (num_states, -1))  # [..., S, D]
        largest, smallest = LARGEST[storage.values], torch.finfo(torch.float32).tiny  # a state of zeros needs a scale
        scales = (split.abs().amax(-1) / largest).clamp_min(smallest)  # [..., S]
        split = split / scales[..., None]
        if storage.values == torch.int8:
            split = split.round_()
        states = split.clamp_(-largest, largest).flatten(-2)  # [..., S * D]
    values = states.to(storage.values)
    # What is read again must be finite: a float32 scale does not tell whether float16 can hold the value.
    return Encoded(values, scales, torch.isfinite(decode(values, scales, storage.dtype)).all(-1))


def decode(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The states [..., S * D] of stored values and their scales [..., S], as they are used."""
    if scales is None:
        return values.to(dtype)
    split = values.float().unflatten(-1, (scales.shape[-1], -1))  # [..., S, D]
    return (split * scales[..., None]).to(dtype).flatten(-2)


@dataclass(frozen=True)
class StorageError:
    """What a form other than the target's own costs, measured on some tokens.

    dimensions: for last_hidden and each tap the root mean square error of a dimension over that dimension's own, as the
    mean over dimensions (a few huge dimensions cannot hide the others). law: the mean total variation between the
    target's laws after both last states. choice: the share of tokens that keep their likeliest next token.
    """

    num_tokens: int
    dimensions: list[float]
    law: float
    choice: float

    @classmethod
    def measure(
        cls, last_hidden: Tensor, taps: Tensor | None, storage: Storage, logits: Callable[[Tensor], Tensor]
    ) -> "StorageError":
        """From last_hidden [T, D] and taps [T, L * D]; logits is the target's final transform."""
        dimensions, restored = [], {}
        for name, states in (("last_hidden", last_hidden), ("taps", taps)):
            if states is not None:
                num_states = states.shape[-1] // last_hidden.shape[-1]
                stored = encode(states, num_states, storage)
                restored[name] = decode(stored.values, stored.scales, storage.dtype).to(states.dtype)
                size = states.double().square().sum(0).clamp_min(1e-300)  # [S * D]
                error = (restored[name].double() - states.double()).square().sum(0)
                dimensions += (error / size).sqrt().unflatten(0, (num_states, -1)).mean(-1).tolist()
        p, q = (
            torch.softmax(logits(states).float(), -1) for states in (last_hidden, restored["last_hidden"])
        )  # [T, V]
        law, choice = (p - q).abs().sum(-1).mean() / 2, (p.argmax(-1) == q.argmax(-1)).float().mean()
        return cls(len(last_hidden), dimensions, float(law), float(choice))

    @classmethod
    def mean(cls, errors: "Sequence[StorageError]") -> "StorageError":
        """The errors together, each token counting once."""
        total = sum(error.num_tokens for error in errors)
        rows = [(error.num_tokens / total, [error.law, error.choice, *error.dimensions]) for error in errors]
        law, choice, *dimensions = (sum(weight * row[i] for weight, row in rows) for i in range(len(rows[0][1])))
        return cls(total, dimensions, law, choice)

    def __str__(self) -> str:
        last, *taps = (f"{value:.2%}" for value in self.dimensions)
        return (
            f"relative error of a dimension: last state {last}{', taps ' if taps else ''}{', '.join(taps)}; the "
            f"target's law moves by {self.law:.2%}, its likeliest token stays in {self.choice:.1%} "
            f"({self.num_tokens:,} tokens measured)"
        )


def rows_digest(rows: Sequence[Row]) -> str:
    """16 hex digits over the rows' lengths, token ids and turns."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(array("q", [len(row.input_ids), *row.input_ids, *row.turns]).tobytes())
    return hasher.hexdigest()[:16]


def checksum(tensors: Sequence[Tensor]) -> int:
    """CRC-32 of the dtypes, shapes and bytes of some tensors."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, value)
    return value


def record_name(shard: str) -> str:
    """'shard-00000.json' of 'shard-00000.safetensors'."""
    return shard.replace(".safetensors", ".json")


class ShardBuffer:
    """A shard in memory while its rows' states arrive, in any order."""

    def __init__(self, rows: Sequence[Row], hidden_size: int, num_taps: int, storage: Storage) -> None:
        self.rows, self.storage = rows, storage
        self.lengths = [len(row.input_ids) for row in rows]
        self.starts = [0, *accumulate(self.lengths)]
        count = self.starts[-1]
        tensors = {
            "input_ids": torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32),
            "turns": torch.tensor([turn for row in rows for turn in row.turns], dtype=torch.int32),
            "last_hidden": torch.empty(count, hidden_size, dtype=storage.values),
            "taps": torch.empty(count, num_taps * hidden_size, dtype=storage.values),
            "scales": torch.empty(count, 1 + num_taps),
        }
        self.tensors = {name: tensors[name] for name in storage.tensor_names(num_taps)}
        self.error: StorageError | None = None

    def put(self, position: int, last_hidden: Encoded, taps: Encoded | None) -> None:
        """Stores the states of one of the shard's rows, [T, ...] each; UserError when they are not finite."""
        span = slice(self.starts[position], self.starts[position + 1])
        for name, states in (("last_hidden", last_hidden), ("taps", taps)):
            if states is not None:
                if not bool(states.finite.all()):
                    raise UserError(
                        f"{self.rows[position].source}: the target's states are not finite in {self.storage}; "
                        f"try another features.dtype or target.dtype (bfloat16, float32)"
                    )
                self.tensors[name][span] = states.values
        scales = [states.scales for states in (last_hidden, taps) if states is not None and states.scales is not None]
        if scales:
            self.tensors["scales"][span] = torch.cat(scales, dim=-1)

    def save(self, path: Path, inputs: dict[str, Any]) -> None:
        """Writes the shard and then its record, atomically each; every row must have been put."""
        spans = [slice(start, end) for start, end in zip(self.starts, self.starts[1:], strict=False)]
        facts = {
            "lengths": self.lengths,
            "token_checksums": [checksum([self.tensors[name][span] for name in TOKENS]) for span in spans],
            "state_checksums": [
                checksum([self.tensors[name][span] for name in STATES if name in self.tensors]) for span in spans
            ],
            "error": None if self.error is None else vars(self.error),
        }
        write_atomically(path, lambda temporary: save_file(self.tensors, temporary))
        files = {path.name: (path.stat().st_size, file_digest(path))}
        Manifest(files, inputs, facts).write(path.parent, record_name(path.name))


def write_index(directory: Path, shards: Sequence[str], fingerprint: dict[str, Any], facts: dict[str, Any]) -> Manifest:
    """Writes index.json from the shards' records, and returns it. fingerprint: what the cache was made from."""
    records = [Manifest.read(directory, record_name(shard)) for shard in shards]
    errors = [StorageError(**record.facts["error"]) for record in records if record.facts["error"]]
    files = {name: entry for record in records for name, entry in record.files.items()}
    for name in map(record_name, shards):
        files[name] = ((directory / name).stat().st_size, file_digest(directory / name))
    joined = {
        name: [value for record in records for value in record.facts[name]]
        for name in ("lengths", "token_checksums", "state_checksums")
    }
    rows = [[shard, len(record.facts["lengths"])] for shard, record in zip(shards, records, strict=True)]
    error = vars(StorageError.mean(errors)) if errors else None
    index = Manifest(files, fingerprint, {**facts, "shards": rows, **joined, "error": error})
    index.write(directory, INDEX)
    return index


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

    def __init__(self, directory: Path, manifest: Manifest, numbers: range) -> None:
        self.directory, self.manifest, self.numbers = directory, manifest, numbers
        facts = manifest.facts
        self.storage = Storage(getattr(torch, facts["dtype"]), facts["storage"])
        self.tensor_names = self.storage.tensor_names(len(facts["after_blocks"]))
        self._starts = [0, *accumulate(facts["lengths"])]  # of each row, in tokens
        self._first_rows = [0, *accumulate(count for _, count in facts["shards"])]
        self._open: dict[int, tuple[Any, set[tuple[int, str]]]] = {}  # mapped shards, and what was found sound in them

    @classmethod
    def open(cls, directory: Path, expected: dict[str, Any] | None = None) -> "FeatureCache":
        """The cache in directory.

        expected holds those keys of the fingerprint (target, tokenizer, template, after_blocks, dtype, data, rows)
        that must agree. UserError, with the command that helps, when the cache is absent, not whole or another's.
        """
        if not directory.is_dir():
            raise UserError(f"{directory}: no such feature cache; build it with: {COMMAND}")
        checked = Manifest.check(directory, content=False, name=INDEX)
        if isinstance(checked, Damaged):
            raise UserError(f"{directory}: not whole ({checked.path.name}: {checked.why}); complete it with: {COMMAND}")
        fingerprint = {key: checked.manifest.inputs.get(key) for key in expected or {}}
        if changed := differences(fingerprint, expected or {}):
            raise UserError(f"{directory}: built with {changed}; rebuild with: {COMMAND} --overwrite")
        return cls(directory, checked.manifest, range(len(checked.manifest.facts["lengths"])))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the cache was made from."""
        return self.manifest.inputs

    def split(self, name: Split) -> "FeatureCache":
        """The rows of one split, in order."""
        return FeatureCache(self.directory, self.manifest, range(*self.manifest.facts["splits"][name]))

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row of this view."""
        return [self.manifest.facts["lengths"][number] for number in self.numbers]

    @property
    def shards(self) -> list[range]:
        """The positions in this view, which must be a split or the whole, that lie in one file together."""
        first, last = self.numbers.start, self.numbers.stop
        pairs = zip(self._first_rows, self._first_rows[1:], strict=False)
        clipped = [(max(start, first), min(end, last)) for start, end in pairs]
        return [range(start - first, end - first) for start, end in clipped if start < end]

    def tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(input_ids, turns) of each row of this view, in order, without reading its states."""
        for number in self.numbers:
            ids, turns = self._read(number, TOKENS, "token_checksums")
            yield ids.long(), turns

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, position: int) -> CachedRow: ...

    @overload
    def __getitem__(self, position: slice) -> "FeatureCache": ...

    def __getitem__(self, position: int | slice) -> "CachedRow | FeatureCache":
        if isinstance(position, slice):
            return FeatureCache(self.directory, self.manifest, self.numbers[position])
        number = self.numbers[position]
        ids, turns = self._read(number, TOKENS, "token_checksums")
        names = self.tensor_names[len(TOKENS) :]
        states = dict(zip(names, self._read(number, names, "state_checksums"), strict=True))
        dtype = None if self.storage.form is None else self.storage.dtype
        hidden, taps, scales = (states.get(name) for name in STATES)
        assert hidden is not None
        return CachedRow(ids.long(), turns, hidden, taps, number, scales, dtype)

    def _read(self, number: int, names: Sequence[str], checksums: str) -> list[Tensor]:
        """A row's tensors, copied out of the file; UserError when they are not those that were written."""
        shard = bisect_right(self._first_rows, number) - 1
        first = self._starts[self._first_rows[shard]]
        span = slice(self._starts[number] - first, self._starts[number + 1] - first)
        path = self.directory / self.manifest.facts["shards"][shard][0]
        try:
            if shard not in self._open:
                if len(self._open) >= OPEN_SHARDS:
                    del self._open[next(iter(self._open))]
                self._open[shard] = safe_open(path, framework="pt"), set()
            file, sound = self._open[shard]
            tensors = [file.get_slice(name)[span].clone() for name in names]
            if (number, checksums) in sound:
                return tensors
            if checksum(tensors) == self.manifest.facts[checksums][number]:
                sound.add((number, checksums))
                return tensors
            why = "does not match its checksum"
        except (SafetensorError, OSError) as error:
            why = f"cannot be read ({error})"
        place = f"{path}: row {number - self._first_rows[shard] + 1} of the shard"
        raise UserError(f"{place} {why}; write what is broken anew, and nothing else, with: {COMMAND} --verify")
