"""Raw rows out of local JSON, JSONL and Parquet files, directories of them, and data sets of the Hub.

JSON is read with the standard library: rows of conversations differ in their keys, which Arrow tables cannot hold, and
an error can then name its line.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.model.hub import readable_errors
from aerie.model.storage import FILE

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class RawRow:
    """One row of a source as it stands; number counts from 1 (in a JSONL file it is the line)."""

    source: str
    number: int
    value: Any

    @property
    def place(self) -> str:
        return f"{self.source}: row {self.number:,}"


def read_rows(name: str, revision: str | None = None) -> Iterator[RawRow]:
    """The rows of a file, of every file below a directory (by name), or of a Hub data set, in their order.

    A Hub name is 'owner/name', 'owner/name:split' or 'owner/name:subset:split'; the split is 'train' unless given. Its
    revision is a branch, tag or commit; files have none.
    Raises UserError for what is missing, unreadable or not the format that its suffix promises.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.suffix in READERS and file.is_file()]
        files = [file for file in files if file.name != FILE and not file.name.startswith(".")]
        if not files:
            raise UserError(f"{path}: holds no {', '.join(READERS)} file")
        for file in files:
            yield from _read_file(file)
    elif path.exists():
        yield from _read_file(path)
    elif not HUB_NAME.fullmatch(name) or name.startswith(".") or path.suffix in (*READERS, ".csv", ".txt", ".gz"):
        raise UserError(f"{name}: no such file or directory; name local files or Hub data sets (owner/name:split)")
    else:
        for number, value in enumerate(_hub_rows(name, revision), start=1):
            yield RawRow(name, number, value)


def is_local(name: str) -> bool:
    """Whether a name of rows is a file or directory that is there."""
    return Path(name).expanduser().exists()


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """The commit that a Hub data set's revision (null: its main branch) is now; null where the Hub cannot be asked."""
    from huggingface_hub import HfApi

    repo = name.split(":")[0]
    try:
        with readable_errors(repo):
            commit = HfApi().dataset_info(repo, revision=revision).sha
    except UserError:
        return None
    return None if commit is None else str(commit)


def _read_file(path: Path) -> Iterator[RawRow]:
    reader = READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; expected {', '.join(READERS)}")
    try:
        for number, value in reader(path):
            yield RawRow(str(path), number, value)
    except (OSError, ValueError) as error:  # no permission, no UTF-8, no Parquet
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from error


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """The items of an array, or the lines of JSONL that is named .json, as data sets of the Hub often are."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}); expected an array of rows") from error
        yield from _read_jsonl(path)
    else:
        yield from enumerate(values if isinstance(values, list) else [values], start=1)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _hub_rows(name: str, revision: str | None) -> Any:
    import datasets

    identifier, *parts = name.split(":")
    subset, split = parts[0] if len(parts) == 2 else None, parts[-1] if parts else "train"
    try:
        return datasets.load_dataset(identifier, subset, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name}: no such file, and the Hub data set cannot be loaded: {reason} "
            f"(write owner/name, owner/name:split or owner/name:subset:split; of a gated one: hf auth login)"
        ) from error


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
