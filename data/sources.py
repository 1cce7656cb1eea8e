"""Raw rows out of local JSON, JSONL and Parquet files, directories of them, and data sets of the Hub."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.model import storage as provenance
from aerie.model.hub import readable_errors

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")
BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class RawRow:
    """One row of a source, not yet looked at; number counts from 1 (in a JSONL file it is the line)."""

    source: str
    number: int
    value: Any

    @property
    def place(self) -> str:
        return f"{self.source}: row {self.number:,}"


def read_rows(name: str, revision: str | None = None) -> Iterator[RawRow]:
    """The rows of a file, of every file below a directory (by name), or of a Hub data set, in their order.

    A Hub name is 'owner/name', 'owner/name:split' or 'owner/name:subset:split'; the split is 'train' unless given. Its
    revision is a branch, tag or commit; a file has none.
    Raises UserError for what is missing, unreadable or not the format that its suffix promises.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        for file in _files_below(path):
            yield from _read_file(file)
    elif path.exists():
        yield from _read_file(path)
    elif _looks_like_a_file(name):
        raise UserError(f"{name}: no such file or directory; name local files or Hub data sets (owner/name:split)")
    else:
        yield from _read_hub(name, revision)


def is_local(name: str) -> bool:
    """Whether a name of rows is a file or directory that is there."""
    return Path(name).expanduser().exists()


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """The commit that a Hub data set's revision (null: its main branch) is now; null where the Hub cannot be asked."""
    from huggingface_hub import HfApi

    repo = name.split(":")[0]
    try:
        with readable_errors(repo):
            found = HfApi().dataset_info(repo, revision=revision).sha
    except UserError:
        return None
    return None if found is None else str(found)


def _looks_like_a_file(name: str) -> bool:
    suffixes = {*READERS, ".csv", ".txt", ".gz", ".zst", ".arrow", ".yaml"}
    return Path(name).suffix in suffixes or not HUB_NAME.fullmatch(name) or name.startswith((".", "~"))


def _files_below(directory: Path) -> list[Path]:
    files = [
        path
        for path in sorted(directory.rglob("*"))
        if path.suffix in READERS and path.is_file() and path.name != provenance.FILE and not path.name.startswith(".")
    ]
    if not files:
        raise UserError(f"{directory}: holds no {', '.join(READERS)} file")
    return files


def _read_file(path: Path) -> Iterator[RawRow]:
    reader = READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; expected {', '.join(READERS)}")
    try:
        for number, value in reader(path):
            yield RawRow(str(path), number, value)
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text (byte {error.start:,}); convert it, or give it its own suffix"
        ) from error


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); mend or delete the line"
                ) from error
            yield number, value


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """The items of an array one after the other, or of values that follow each other (JSONL named .json)."""
    text = path.read_text(encoding="utf-8-sig")
    decoder = json.JSONDecoder()
    position = _skip_blank(text, 0)
    is_array = text.startswith("[", position)
    if is_array:
        position = _skip_blank(text, position + 1)
    number = 0
    while position < len(text) and not (is_array and text[position] == "]"):
        if is_array and number:
            if text[position] != ",":
                raise _not_json(path, text, position, "expected ',' or ']'")
            position = _skip_blank(text, position + 1)
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _not_json(path, text, error.pos, error.msg) from error
        number += 1
        yield number, value
        position = _skip_blank(text, position)
    if is_array and position >= len(text):
        raise _not_json(path, text, len(text), "the array does not end")
    if is_array and _skip_blank(text, position + 1) < len(text):
        raise _not_json(path, text, position + 1, "text after the array")


def _skip_blank(text: str, position: int) -> int:
    match = BLANK.match(text, position)
    return match.end() if match else position


def _not_json(path: Path, text: str, position: int, reason: str) -> UserError:
    line = text.count("\n", 0, position) + 1
    return UserError(f"{path}:{line}: not JSON ({reason[0].lower()}{reason[1:]}); expected an array of rows")


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as arrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                number += 1
                yield number, value
    except arrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from error


def _read_hub(name: str, revision: str | None) -> Iterator[RawRow]:
    identifier, *parts = name.split(":")
    subset = parts[0] if len(parts) == 2 else None
    split = parts[-1] if parts else "train"
    import datasets

    try:
        rows = datasets.load_dataset(identifier, subset, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name}: no such file, and the Hub data set cannot be loaded: {reason} "
            f"(write owner/name, owner/name:split or owner/name:subset:split; of a gated one: hf auth login)"
        ) from error
    for number, value in enumerate(rows, start=1):
        yield RawRow(name, number, value)


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
