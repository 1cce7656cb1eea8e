"""The feature cache: the target's states of every token, in memory-mapped files.

    shard-00000.safetensors  tensors of some rows, one row after the other: input_ids, turns, last_hidden, taps, scales
    shard-00000.json         its record, a Manifest: the file's sha256, what it was made of, its rows' checksums
    index.json               all records together, a Manifest too; written last, so it marks the cache as complete

A token has one last_hidden and L taps, its *states*. They lie as the target made them, rounded to bfloat16, or one byte
a value (int8, fp8) with a float32 scale per token and state. `encode` and `decode` alone know that form.
"""

import hashlib
import shutil
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.data.chat import Row
from aerie.data.stage import COMMAND, INDEX, Share
from aerie.model.storage import Damaged, Foreign, Manifest, Whole, differences, file_digest, write_atomically

Form = Literal["bf16", "fp8", "int8"]
Split = Literal["train", "held_out"]
VALUES: dict[Form, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
TOKENS, STATES = ("input_ids", "turns"), ("last_hidden", "taps", "scales")  # tensors of a shard
TOKEN_SUMS, STATE_SUMS = "token_checksums", "state_checksums"  # 8 hex digits a row, one row after the other
OPEN_SHARDS = 128  # mapped at once by one process
ROW_BYTES = 56  # of a row in its shard's record and in the index
SHARD_BYTES = 2048  # more than a shard's header and the rest of its record take


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


def encode(states: Tensor, num_states: int, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """States [..., S * D] as they are stored: values [..., S * D], and scales float32 [..., S] of scaled ones.

    On the states' own device, so that less goes over the bus.
    """
    if not storage.is_scaled:
        return states.to(storage.values), None
    split = states.float().unflatten(-1, (num_states, -1))  # [..., S, D]
    largest, smallest = LARGEST[storage.values], torch.finfo(torch.float32).tiny  # a state of zeros needs a scale, too
    scales = (split.abs().amax(-1) / largest).clamp_min(smallest)  # [..., S]
    split = split / scales[..., None]
    if storage.values == torch.int8:
        split = split.round_()
    return split.clamp_(-largest, largest).to(storage.values).flatten(-2), scales


def decode(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The states [..., S * D] of stored values and their scales [..., S], as they are used."""
    if scales is None:
        return values.to(dtype)
    split = values.float().unflatten(-1, (scales.shape[-1], -1))  # [..., S, D]
    return (split * scales[..., None]).to(dtype).flatten(-2)


def storage_error(
    last_hidden: Tensor, taps: Tensor | None, storage: Storage, logits: Callable[[Tensor], Tensor]
) -> str:
    """One line about what a form other than the target's own costs, measured on some tokens.

    From last_hidden [T, D] and taps [T, L * D]; logits is the target's final transform. The error of a dimension is
    relative to that dimension's own root mean square, so a few huge dimensions cannot hide the others.
    """
    errors, restored = [], {}
    for name, states in (("last_hidden", last_hidden), ("taps", taps)):
        if states is not None:
            num_states = states.shape[-1] // last_hidden.shape[-1]
            restored[name] = decode(*encode(states, num_states, storage), storage.dtype).to(states.dtype)
            squares = states.double().square().sum(0).clamp_min(1e-300)  # [S * D]
            error = (restored[name].double() - states.double()).square().sum(0)
            errors += (error / squares).sqrt().unflatten(0, (num_states, -1)).mean(-1).tolist()
    p, q = (torch.softmax(logits(states).float(), -1) for states in (last_hidden, restored["last_hidden"]))  # [T, V]
    distance, same = (p - q).abs().sum(-1).mean() / 2, (p.argmax(-1) == q.argmax(-1)).float().mean()
    last, *others = (f"{error:.2%}" for error in errors)
    return (
        f"{storage}: relative error of a dimension: last state {last}{', taps ' if others else ''}{', '.join(others)}; "
        f"the target's law moves by {distance:.2%}, its likeliest token stays in {same:.1%} ({len(p):,} tokens)"
    )


def rows_digest(rows: Sequence[Row]) -> str:
    """16 hex digits over the rows' lengths, token ids and turns."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(array("q", [len(row.input_ids), *row.input_ids, *row.turns]).tobytes())
    return hasher.hexdigest()[:16]


def checksum(tensors: Sequence[Tensor]) -> str:
    """CRC-32 of the dtypes, shapes and bytes of some tensors, as 8 hex digits."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def pack(lengths: Sequence[int], shard_tokens: int) -> Iterator[range]:
    """The rows of each shard, in order: as many as fit into shard_tokens, at least one."""
    first, tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > first and tokens + length > shard_tokens:
            yield range(first, row)
            first, tokens = row, 0
        tokens += length
    yield range(first, len(lengths))


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

    def put(self, position: int, states: dict[str, Tensor]) -> None:
        """Stores a row's encoded states: last_hidden [T, D], taps [T, L * D], scales [T, 1 + L]."""
        for name, values in states.items():
            self.tensors[name][self.starts[position] : self.starts[position + 1]] = values

    def save(self, path: Path, inputs: dict[str, Any]) -> None:
        """Writes the shard and then its record, atomically each; every row must have been put."""
        spans = [slice(start, end) for start, end in zip(self.starts, self.starts[1:], strict=False)]

        def checksums(names: Sequence[str]) -> str:
            tensors = [self.tensors[name] for name in names if name in self.tensors]
            return "".join(checksum([tensor[span] for tensor in tensors]) for span in spans)

        facts = {"lengths": self.lengths, TOKEN_SUMS: checksums(TOKENS), STATE_SUMS: checksums(STATES)}
        write_atomically(path, lambda temporary: save_file(self.tensors, temporary))
        files = {path.name: (path.stat().st_size, file_digest(path))}
        Manifest(files, inputs, facts).write(path.parent, path.with_suffix(".json").name)


def write_index(shards: Sequence[Path], fingerprint: dict[str, Any], facts: dict[str, Any]) -> Manifest:
    """Writes index.json from the shards' records, and returns it. fingerprint: what the cache was made from."""
    directory, paths = shards[0].parent, [path.with_suffix(".json") for path in shards]
    records = [Manifest.read(directory, path.name) for path in paths]
    files = {name: entry for record in records for name, entry in record.files.items()}
    files |= {path.name: (path.stat().st_size, file_digest(path)) for path in paths}
    lengths = [length for record in records for length in record.facts["lengths"]]
    sums = {name: "".join(record.facts[name] for record in records) for name in (TOKEN_SUMS, STATE_SUMS)}
    rows = [[path.name, len(record.facts["lengths"])] for path, record in zip(shards, records, strict=True)]
    index = Manifest(files, fingerprint, {**facts, "shards": rows, "lengths": lengths, **sums})
    index.write(directory, INDEX)
    return index


@dataclass(frozen=True)
class CachePlan:
    """What will be written where, known before the target's weights are read."""

    directory: Path
    rows: Sequence[Row]  # train, then held_out
    num_train: int
    shards: tuple[range, ...]  # of row numbers
    hidden_size: int
    after_blocks: tuple[int, ...]
    storage: Storage
    batch_tokens: int
    origin: str  # digest of what decides the states of given token ids (data.stage.state_inputs, taps)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def token_bytes(self) -> int:
        return self.storage.token_bytes(self.hidden_size, len(self.after_blocks))

    @cached_property
    def rows_digests(self) -> tuple[str, ...]:
        """One digest per shard."""
        return tuple(rows_digest(self.rows_of(shard)) for shard in range(len(self.shards)))

    def rows_of(self, shard: int) -> Sequence[Row]:
        return self.rows[self.shards[shard].start : self.shards[shard].stop]

    def tokens_of(self, shard: int) -> int:
        return sum(len(row.input_ids) for row in self.rows_of(shard))

    def bytes_of(self, shard: int) -> int:
        """Bytes of a shard, its record and its part of the index, rounded up by a few kilobytes."""
        return self.tokens_of(shard) * self.token_bytes + len(self.shards[shard]) * ROW_BYTES + SHARD_BYTES

    def path_of(self, shard: int) -> Path:
        return self.directory / f"shard-{shard:05d}.safetensors"

    def inputs_of(self, shard: int) -> dict[str, Any]:
        """What a shard is made from, for its record."""
        return {"rows": self.rows_digests[shard], "origin": self.origin}

    def is_whole(self, shard: int, content: bool = False) -> bool:
        """Whether a shard is there, by its record and size; content: by every byte."""
        name = self.path_of(shard).with_suffix(".json").name
        return isinstance(Manifest.check(self.directory, self.inputs_of(shard), content, name), Whole)

    def missing(self, shards: Sequence[int]) -> list[int]:
        return [shard for shard in shards if not self.is_whole(shard)]

    def foreign(self) -> list[Path]:
        """The records of shards that other rows or another target made, or that lie beyond this plan."""
        planned = {self.path_of(shard).stem: self.inputs_of(shard) for shard in range(len(self.shards))}

        def check(path: Path) -> Whole | Damaged | Foreign:
            return Manifest.check(self.directory, planned.get(path.stem, {}), content=False, name=path.name)

        return [path for path in sorted(self.directory.glob("shard-*.json")) if isinstance(check(path), Foreign)]

    def stale(self) -> list[Path]:
        """What a writer removes before it begins: another recipe's shards, and what killed ones left half written."""
        planned = {self.path_of(shard).stem for shard in range(len(self.shards))}
        kept = planned - {path.stem for path in self.foreign()}
        shards = [path for path in self.directory.glob("shard-*") if path.stem not in kept]
        return [*shards, *self.directory.glob(".tmp*")]  # the latter are those of safetensors

    def require_own_directory(self, overwrite: bool) -> None:
        """UserError when another recipe left shards and overwrite was not asked for."""
        if not overwrite and (foreign := self.foreign()):
            raise UserError(
                f"{foreign[0]}: was made from other rows or by another target; choose another --run, or replace it "
                f"with --overwrite"
            )

    def free_bytes(self) -> int:
        """On the disk, once the stale files are gone."""
        directory = self.directory.absolute()
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        stale = [path.stat().st_size for path in (*self.stale(), *directory.glob(".*.tmp")) if path.is_file()]
        return shutil.disk_usage(existing).free + sum(stale)

    def estimate(self, share: Share) -> tuple[str, int]:
        """The size of the cache and what is left to do of this share, in two lines; and the bytes of the latter."""
        part = share.part(len(self.shards))
        todo = self.missing(part)
        needed, largest = sum(map(self.bytes_of, todo)), max(map(self.bytes_of, range(len(self.shards))))
        whose = "them" if share.count == 1 else f"the {len(part):,} of share {share}"
        text = (
            f"features: {len(self.rows):,} rows, {self.num_tokens:,} tokens x {self.token_bytes:,} bytes "
            f"({self.storage}) = {size(self.num_tokens * self.token_bytes)}; shards: {len(self.shards):,} of at most "
            f"{size(largest)}, two at a time in memory\n"
            f"features: to write: {size(needed)} in {len(todo):,} of {whose}; free on the disk: "
            f"{size(self.free_bytes())}"
        )
        return text, needed


def size(num_bytes: float) -> str:
    """'12.3 MiB', '1.2 TiB'."""
    if num_bytes >= 2**40:
        return f"{num_bytes / 2**40:,.2f} TiB"
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


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
            ids, turns = self._read(number, TOKENS, TOKEN_SUMS)
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
        ids, turns = self._read(number, TOKENS, TOKEN_SUMS)
        names = self.tensor_names[len(TOKENS) :]
        states = dict(zip(names, self._read(number, names, STATE_SUMS), strict=True))
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
            if checksum(tensors) == self.manifest.facts[checksums][8 * number : 8 * number + 8]:
                sound.add((number, checksums))
                return tensors
            why = "does not match its checksum"
        except (SafetensorError, OSError) as error:
            why = f"cannot be read ({error})"
        place = f"{path}: row {number - self._first_rows[shard] + 1} of the shard"
        raise UserError(f"{place} {why}; write what is broken anew, and nothing else, with: {COMMAND} --verify")
