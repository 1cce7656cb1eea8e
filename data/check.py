"""What is wrong with a feature cache, shard by shard: every byte is read and compared with what was written."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.index import COMMAND, CacheIndex, ShardEntry, read_index
from data.plan import PATTERN, size
from data.progress import bar
from data.shards import ShardReader
from data.storage import decode
from model.errors import UserError


@dataclass(frozen=True)
class Findings:
    """problems: a line each, with the place; sound shards and bytes are counted."""

    problems: tuple[str, ...]
    num_shards: int
    num_rows: int
    num_tokens: int
    num_bytes: int
    unsealed: int  # shards of before there were checksums

    def text(self, directory: Path) -> str:
        """The problems, the sum, and the command that mends them."""
        whole = (
            f"{self.num_shards:,} shards, {self.num_rows:,} rows, {self.num_tokens:,} tokens, {size(self.num_bytes)}"
        )
        lines = [*self.problems, f"{directory}: {whole} are whole"]
        if self.unsealed:
            lines.append(f"{directory}: {self.unsealed:,} shards have no checksums: their values were not looked at")
        if self.problems:
            count = f"{len(self.problems):,} problem{'s' if len(self.problems) > 1 else ''}"
            lines.append(f"{count}; write what is broken or missing anew, and nothing else, with: {COMMAND} --verify")
        return "\n".join(lines)


def check(directory: Path) -> Findings:
    """What holds and what does not; UserError when there is no cache at all.

    With an index each shard must be the one that it lists; without one (an extraction under way) each must be whole.
    """
    files = sorted(directory.glob(PATTERN.replace("{:05d}", "*")))
    if not files and not (directory / "index.json").is_file():
        read_index(directory)  # says what is missing, and how to build it
    contents, problems = _index(directory)
    entries = {} if contents is None else {shard.file: shard for shard in contents.shards}
    listed = list(entries) if contents is not None else [path.name for path in files]
    problems += [
        f"{path.name}: not in index.json" for path in files if contents is not None and path.name not in entries
    ]
    sound: list[ShardReader] = []
    sizes = {name: (directory / name).stat().st_size for name in listed if (directory / name).is_file()}
    with bar(sum(sizes.values()), "B", "check") as progress:
        for name in listed:
            if name not in sizes:
                problems.append(f"{name}: missing")
                continue
            try:
                reader = ShardReader(directory / name)
                found = list(_wrong(reader, entries.get(name), contents))
            except UserError as error:
                found = [str(error).removeprefix(f"{directory}/")]
            problems += found
            sound += [] if found else [reader]
            progress.update(sizes[name])
    return Findings(
        problems=tuple(problems),
        num_shards=len(sound),
        num_rows=sum(len(reader.offsets) - 1 for reader in sound),
        num_tokens=sum(reader.offsets[-1] for reader in sound),
        num_bytes=sum(sizes[reader.path.name] for reader in sound),
        unsealed=sum(reader.checksums is None for reader in sound),
    )


def _index(directory: Path) -> tuple[CacheIndex | None, list[str]]:
    """The index, and what is wrong with it; sizes are left to the shards' own check."""
    if not (directory / "index.json").is_file():
        return None, ["index.json: missing: the extraction has not ended, or not all of its shares have"]
    try:
        return read_index(directory, sizes=False), []
    except UserError as error:
        return None, [str(error).removeprefix(f"{directory}/")]


def _wrong(reader: ShardReader, entry: ShardEntry | None, contents: CacheIndex | None) -> Iterator[str]:
    """What is wrong with one shard: as a file, against its entry in the index, and in its values."""
    name = reader.path.name
    if entry is not None and contents is not None:
        if entry.checksum is not None and reader.seal != entry.checksum:
            yield f"{name}: is not the shard that index.json lists: the index is stale"
            return
        lengths = [second - first for first, second in zip(reader.offsets, reader.offsets[1:], strict=False)]
        if lengths != list(contents.lengths[entry.first_row : entry.first_row + entry.num_rows]):
            yield f"{name}: its rows are not as long as index.json says: the index is stale"
            return
        if entry.rows != reader.rows:
            yield f"{name}: holds other rows than index.json says: the index is stale"
            return
    for place in range(len(reader.offsets) - 1):
        problem = _wrong_row(reader, place, torch.float32 if contents is None else getattr(torch, contents.dtype))
        if problem is not None:
            number = "" if entry is None else f" (row {entry.first_row + place:,} of the cache, counted from 0)"
            yield f"{problem}{number}"
            return


def _wrong_row(reader: ShardReader, place: int, dtype: torch.dtype) -> str | None:
    try:
        row = reader.row(place)
    except UserError as error:
        return str(error).removeprefix(f"{reader.path.parent}/")
    parts = [(row.last_hidden, slice(0, 1)), *([] if row.taps is None else [(row.taps, slice(1, None))])]
    for states, columns in parts:
        scales = None if row.scales is None else row.scales[:, columns]
        if not torch.isfinite(decode(states, scales, dtype)).all():
            return f"{reader.path.name}: row {place + 1} of the shard has states that are not finite"
    return None
