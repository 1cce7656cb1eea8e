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


def values(name: str) -> list[Any]:
    return [row.value for row in read_rows(name)]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines = "\n".join(json.dumps(row) for row in ROWS)
    names = [
        str(tmp_path / "a.parquet"),
        written(tmp_path / "a.json", json.dumps(ROWS, indent=1)),
        written(tmp_path / "a.jsonl", lines + "\n"),
        written(tmp_path / "lines.json", lines),  # JSONL named .json, as data sets of the Hub often are
        written(tmp_path / "mark.jsonl", "\N{ZERO WIDTH NO-BREAK SPACE}" + lines),
    ]
    assert [values(name) for name in names] == [ROWS] * len(names)


def test_a_directory_gives_its_files_by_name_and_not_its_provenance(tmp_path: Path) -> None:
    written(tmp_path / "b.jsonl", json.dumps(ROWS[1]))
    written(tmp_path / "a.json", json.dumps(ROWS[:1]))
    written(tmp_path / "provenance.json", "{}")
    assert values(str(tmp_path)) == ROWS


def test_places_name_the_file_and_the_row_or_line(tmp_path: Path) -> None:
    name = written(tmp_path / "a.jsonl", json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]) + "\n")
    assert [row.place for row in read_rows(name)] == [f"{name}: row 1", f"{name}: row 3"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl:2: not JSON"),
        ("a.json", '[{"a": 1},\n{"a" 2}]', r"a\.json:2: not JSON"),
        ("a.json", '[{"a": 1},\n{"a": 2}', r"a\.json:2: not JSON \(Expecting ',' delimiter\); expected an array"),
        ("a.json", '[{"a": 1}\n{"a": 2}]', r"a\.json:2: not JSON"),
        ("a.json", '[{"a": 1}]\n\nx', r"a\.json:3: not JSON \(Extra data"),
        ("a.json", '{"a": 1}\n{"a"', r"a\.json:2: not JSON"),
        ("a.parquet", "no parquet at all", r"a\.parquet: not a Parquet file"),
        ("a.csv", "a,b", r"a\.csv: cannot read \.csv; expected \.json, \.jsonl, \.parquet"),
    ],
)
def test_broken_files_are_named_with_their_line(tmp_path: Path, file: str, text: str, message: str) -> None:
    name = written(tmp_path / file, text)
    with pytest.raises(UserError, match=message) as caught:
        values(name)
    assert "\n" not in str(caught.value)


def test_other_encodings_and_empty_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.json, \.jsonl, \.parquet file"):
        values(str(tmp_path))
    (tmp_path / "a.jsonl").write_bytes('{"a": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"a\.jsonl: not UTF-8 text"):
        values(str(tmp_path))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "some/deep/path", "nowhere.json", "nowhere.csv"])
def test_a_missing_file_is_no_hub_name(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: no such file or directory"):
        values(name)
