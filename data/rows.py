"""The rows of files, directories and Hub data sets, each with its source."""

import csv
import datetime
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from aerie.configs.errors import UserError
from aerie.data.inputs import ROW_SUFFIXES, is_here, row_files
from aerie.data.values import JSON, object_of
from aerie.model.hub import readable_errors
from aerie.model.storage import first_line


class RawRow(NamedTuple):
    source: str  # 'file: row n'
    number: int  # from 1; in JSONL the line's number
    value: Any


def read_rows(name: str, revision: str | None = None) -> Iterator[RawRow]:
    """The rows of a file, a directory's files, or a Hub data set 'owner/name[:[subset:]split]'.

    The split is 'train' if the name has none. 'owner/name:folder/*' names a folder's Parquet files.
    UserError if a file or a line cannot be read.
    """
    if not is_here(name):
        batches = _hub_rows(name, revision).with_format("arrow").iter(batch_size=1024)
        rows = enumerate(chain.from_iterable(map(_arrow_rows, batches)), start=1)
        yield from (RawRow(f"{name}: row {number:,}", number, value) for number, value in rows)
        return
    path = Path(name).expanduser()
    files = row_files(path) if path.is_dir() else [path]
    if not files or files[0].suffix not in ROW_SUFFIXES:
        raise UserError(f"{path}: holds no rows; expected {', '.join(ROW_SUFFIXES)} files")
    for file in files:
        try:
            for number, value in READERS[file.suffix](file):
                yield RawRow(f"{file}: row {number:,}", number, value)
        except (OSError, ValueError, csv.Error) as error:  # no permission, no UTF-8, no Parquet
            raise UserError(f"{file}: cannot be read ({first_line(error)})") from error


def hub_commit(name: str, revision: str | None) -> str | None:
    """The commit of a Hub data set's revision (None: main); None if the Hub does not answer."""
    from huggingface_hub import HfApi

    repo = name.split(":")[0]
    with suppress(UserError), readable_errors(repo):
        return HfApi().dataset_info(repo, revision=revision).sha
    return None


def _hub_rows(name: str, revision: str | None) -> Any:
    import datasets

    identifier, *parts = name.split(":")
    *subset, split = parts or ["train"]
    try:
        if split.endswith("*"):  # a repository whose script `datasets` no longer runs
            files = f"hf://datasets/{identifier}@{revision or 'main'}/{split}.parquet"
            return datasets.load_dataset("parquet", data_files=files, split="train")
        return datasets.load_dataset(identifier, *subset, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{name}: the data set cannot be loaded ({first_line(error)}); "
            "write owner/name:subset:split, and if it is gated, log in with: hf auth login"
        ) from error


# --- readers of files: each yields a row's number, from 1, and its value --------------------------


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
    yield from enumerate(chain.from_iterable(map(_arrow_rows, batches)), start=1)


def _arrow_file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file by datasets' save_to_disk, in Arrow's stream or file format."""
    from pyarrow import ArrowInvalid, ipc

    with path.open("rb") as file:
        try:
            batches: Any = ipc.open_stream(file)
        except ArrowInvalid:
            opened = ipc.open_file(file)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        yield from enumerate(chain.from_iterable(map(_arrow_rows, batches)), start=1)


def _arrow_rows(batch: Any) -> Iterator[Any]:
    """The rows of a batch or a table, as JSON would have had them."""
    rows = _python_rows(batch)
    if "arrow.json" not in str(batch.schema):
        return map(_columns, rows)
    kinds = {field.name: field.type for field in batch.schema}
    return ({name: _decoded(value, kinds[name]) for name, value in row.items()} for row in rows)


def _python_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch. If a map has a key twice, all maps of its row are lists of pairs."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except (KeyError, ValueError):  # a ValueError for a map inside a structure
        if batch.num_rows == 1:
            return list(batch.to_pylist())
        rows = []
        for number in range(batch.num_rows):
            rows += _python_rows(batch.slice(number, 1))
    return rows


def _decoded(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, with its JSON texts decoded; nulls in these texts are kept.

    `datasets` writes such texts for values whose keys or types differ from row to row.
    """
    from pyarrow import JsonType, types

    if isinstance(kind, JsonType) and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return JSON.decode(value)
    if isinstance(value, dict) and types.is_struct(kind):
        parts = {field.name: field.type for field in kind}
        kept = {name: part for name, part in value.items() if part is not None}
        return {name: _decoded(part, parts[name]) for name, part in kept.items()}
    item_kind = getattr(kind, "value_type", None)
    if isinstance(value, list) and item_kind is not None:
        return [_decoded(part, item_kind) for part in value]
    return as_json(value)


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    return {name: as_json(value) for name, value in row.items()}


def as_json(value: Any) -> Any:
    """A value of Arrow, as JSON would have had it.

    The nulls that Arrow fills in for keys of other rows are left out. Dates and times become ISO
    texts, without a time of midnight, because readers of JSON make dates of such texts.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: as_json(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):  # a map
            return object_of((key, as_json(part)) for key, part in value)
        return [as_json(part) for part in value]
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    return value


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB, and a conversation may be longer
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from enumerate(csv.DictReader(file), start=1)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """An array's items, or one object. On the Hub, many .json files hold JSONL."""
    text = path.read_text(encoding="utf-8-sig").strip()
    if not text:
        return
    try:
        value, end = JSON.raw_decode(text)
    except json.JSONDecodeError as error:
        raise _not_json(path, error.lineno, error) from error
    except RecursionError as error:
        raise UserError(f"{path}: nests too deeply to be read") from error
    if end < len(text):
        yield from _jsonl_rows(path)
    else:
        yield from enumerate(value if isinstance(value, list) else [value], start=1)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    # Not Arrow's reader of JSONL, which cannot name the line of an error.
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, JSON.decode(line.strip())
            except json.JSONDecodeError as error:
                raise _not_json(path, number, error) from error
            except (ValueError, RecursionError) as error:  # thousands of digits or of brackets
                raise UserError(f"{path}:{number}: {first_line(error)}; delete the line") from error


def _not_json(path: Path, line: int, error: json.JSONDecodeError) -> UserError:
    return UserError(
        f"{path}:{line}: not JSON ({error.msg} at column {error.colno}); mend or delete the line"
    )


READERS = {
    ".parquet": _parquet_rows,
    ".arrow": _arrow_file_rows,
    ".csv": _csv_rows,
    ".json": _json_rows,
    ".jsonl": _jsonl_rows,
}
