"""Laws of rows and the conversations in them: every format and shape is read, every change and skip is counted."""

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.conversations import Tally, load_conversations, read_rows, split_by_hash

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]
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
        ("a.parquet", "no parquet at all", r"a\.parquet: cannot be read \(Parquet"),
        ("a.jsonl", b'{"a": "\xe9"}', r"a\.jsonl: cannot be read \('utf-8' codec"),
        ("a.csv", "a,b", r"a\.csv: cannot read \.csv; expected "),
        ("", None, r"holds no \.json, \.jsonl, \.parquet file"),
        ("nowhere.jsonl", None, "nowhere.jsonl: no such file or directory"),  # and no name of the Hub
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | bytes | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as caught:
        list(read_rows(str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def turns(text: str) -> list[dict[str, str]]:
    """ShareGPT turns from 'human=hello|gpt=fine'."""
    return [dict(zip(("from", "value"), turn.split("="), strict=True)) for turn in text.split("|")]


def load(tmp_path: Path, *rows: Any, **options: Any) -> tuple[list[Any], Tally]:
    path = written(tmp_path / "rows.jsonl", "\n".join(json.dumps(row) for row in rows))
    tally = Tally()
    return list(load_conversations(DataConfig((path,), **options), tally)), tally


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": turns("human=hello|gpt=fine")},
        {"conversations": turns("user=hello|chatgpt=fine")},
        {"conversations": HELLO},
        {"messages": [HELLO[0], {"role": "assistant", "content": [{"type": "text", "text": "fine"}]}]},
        {"prompt": "hello", "completion": "fine"},
        {"prompt": HELLO[:1], "completion": HELLO[1:]},
        {"question": "hello", "answer": "fine"},
        {"instruction": "hello", "input": "", "output": "fine"},
        {"problem": "hello", "solution": "fine", "id": 7},
        {"question": "no", "answer": "no", "ask": "hello", "say": "fine"},
    ],
)
def test_every_shape_gives_the_same_conversation(tmp_path: Path, row: dict[str, Any]) -> None:
    fields = {"prompt_field": "ask", "completion_field": "say"} if "ask" in row else {}
    (conversation,), tally = load(tmp_path, row, **fields)
    (same,), _ = load(tmp_path, {"messages": HELLO})
    assert list(conversation.messages) == HELLO and conversation.digest == same.digest and not tally.counts


def test_thinking_context_tokens_and_system_prompts_are_kept(tmp_path: Path) -> None:
    thinking = {"role": "assistant", "content": "one", "reasoning_content": "easy"}
    rows = [
        {"messages": [HELLO[0], thinking]},
        {"instruction": "Sort.", "input": "3 1", "output": "1 3"},
        {"system": "be short", "conversations": turns("human=hello|gpt=fine")},
        {"input_ids": [1, 2, 3], "loss_mask": [0, True, 1]},
    ]
    (first, second, third, tokens), _ = load(tmp_path, *rows, system_prompt="ours")
    assert first.messages[0] == {"role": "system", "content": "ours"} and first.messages[2] == thinking
    assert second.messages[1]["content"] == "Sort.\n\n3 1"
    assert third.messages[0] == {"role": "system", "content": "be short"}
    assert tokens.tokens == ([1, 2, 3], [0, 1, 1]) and not tokens.messages


@pytest.mark.parametrize(
    ("text", "kept", "reason"),
    [
        ("gpt=welcome|human=hello|gpt=fine", "user assistant", "began with the assistant; that turn dropped"),
        ("system=|human=hello|gpt=fine", "user assistant", "empty system turn dropped"),
        ("human=hello|gpt=fine|human= |gpt=what", "user assistant", "cut before an empty turn"),
        ("human=hello|gpt=fine|human=more", "user assistant", "turns after the last answer cut"),
        ("human=hello|human=there|gpt=fine", "user assistant", "two turns of the user in a row joined"),
    ],
)
def test_odd_conversations_are_mended_and_counted(tmp_path: Path, text: str, kept: str, reason: str) -> None:
    (conversation,), tally = load(tmp_path, {"conversations": turns(text)})
    assert " ".join(message["role"] for message in conversation.messages) == kept
    assert list(tally.counts) == [("mended", reason)]
    assert ("\n\n" in conversation.messages[0]["content"]) == ("joined" in reason)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": turns("human=hello|gtp=fine")}, "unknown role"),
        ({"conversations": turns("human=hello|gpt=")}, "no answer to a user's turn"),
        ({"conversations": []}, "no answer to a user's turn"),
        ({"conversations": ["hello"]}, "turn is no object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, HELLO[1]]}, "turn is not text"),
        ({"stranger": 1}, "keys of no known shape"),
        (["hello"], "row is no object"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "token ids and their mask do not fit"),
        ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "token ids and their mask do not fit"),
    ],
)
def test_unusable_rows_are_skipped_and_counted_with_their_place(tmp_path: Path, row: Any, reason: str) -> None:
    kept, tally = load(tmp_path, {"messages": HELLO}, row, row)
    assert len(kept) == tally.kept == 1 and tally.rows == 3
    total, line = tally.lines()
    assert total == "conversations: 3 read, 1 kept" and line.startswith(f"skipped 2: {reason} (")
    assert "rows.jsonl: row 2: " in line


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"a": "a", "b": "b"}, r"row 1 has keys a, b; expected conversations.*set data\.prompt_field"),
        ({"messages": HELLO[:1]}, r"no usable conversations: 1 read, 0 kept; skipped 1: no answer .*row 1"),
    ],
)
def test_a_file_without_usable_rows_is_an_error(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load(tmp_path, row)
    assert "\n" not in str(caught.value)


def test_a_conversation_is_held_out_by_its_content_alone(tmp_path: Path) -> None:
    rows = [{"conversations": turns(f"human=hello {number}|gpt=fine")} for number in range(400)]
    forward, _ = load(tmp_path, *rows)
    backward, _ = load(tmp_path, *reversed(rows), *rows, system_prompt="another")
    out = {row.messages[0]["content"] for row in forward if split_by_hash(row.digest, 0.1)}
    assert out == {row.messages[1]["content"] for row in backward if split_by_hash(row.digest, 0.1)}
    assert 20 <= len(out) <= 60  # 40 expected, standard deviation 6
    assert not any(split_by_hash(row.digest, 0.0) for row in forward)
