"""Laws of reading rows: every format gives the same ones, and what cannot be read is named with its line."""

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from aerie.configs.errors import UserError
from aerie.data.sources import read_rows

ROWS: list[dict[str, Any]] = [{"question": "one", "answer": "eins"}, {"question": "two", "answer": "zwei \N{OWL}"}]


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines = "\n".join(json.dumps(row) for row in ROWS)
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder / "b.jsonl", json.dumps(ROWS[1]))
    written(folder / "a.json", json.dumps(ROWS[:1]))
    written(folder / "provenance.json", "{}")
    names = [
        str(tmp_path / "a.parquet"),
        written(tmp_path / "a.json", json.dumps(ROWS, indent=1)),
        written(tmp_path / "lines.json", lines),  # JSONL named .json, as data sets of the Hub often are
        written(tmp_path / "mark.jsonl", "\N{ZERO WIDTH NO-BREAK SPACE}" + lines + "\n"),
        str(folder),  # its files by name, without the provenance
    ]
    assert [[row.value for row in read_rows(name)] for name in names] == [ROWS] * len(names)
    name = written(tmp_path / "gap.jsonl", json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]))
    assert [row.place for row in read_rows(name)] == [f"{name}: row 1", f"{name}: row 3"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl:2: not JSON"),
        ("a.json", '[{"a": 1},\n{"a" 2}]', r"a\.json:2: not JSON"),
        ("a.json", '[{"a": 1},\n{"a": 2}', r"a\.json:2: not JSON \(Expecting ',' delimiter\); expected an array"),
        ("a.json", '[{"a": 1}]\n\nx', r"a\.json:3: not JSON \(Extra data"),
        ("a.json", '{"a": 1}\n{"a"', r"a\.json:2: not JSON"),
        ("a.parquet", "no parquet at all", r"a\.parquet: cannot be read \(Parquet"),
        ("a.jsonl", b'{"a": "\xe9"}', r"a\.jsonl: cannot be read \('utf-8' codec"),
        ("a.csv", "a,b", r"a\.csv: cannot read \.csv; expected \.json, \.jsonl, \.parquet"),
        ("", None, r"holds no \.json, \.jsonl, \.parquet file"),
        ("nowhere.jsonl", None, "nowhere.jsonl: no such file or directory"),  # and no name of the Hub
        ("some/deep/path", None, "some/deep/path: no such file or directory"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | bytes | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as caught:
        list(read_rows(str(tmp_path / name)))
    assert "\n" not in str(caught.value)
