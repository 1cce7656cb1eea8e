"""Laws of reading rows: every known shape is read; changes and skipped rows are counted."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as arrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from aerie.configs.schema.data import DataConfig
from aerie.data.conversations import Tally, load_conversations
from aerie.data.rows import read_rows
from tests import tiny

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]
PAIR = ("question", "answer")
ROWS: list[dict[str, Any]] = [
    {"question": "one", "answer": "eins"},
    {"question": "two", "answer": "zwei \N{OWL}"},
]


def turns(text: str) -> list[dict[str, str]]:
    """ShareGPT turns from 'human=hello|gpt=fine'."""
    return [dict(zip(("from", "value"), turn.split("="), strict=True)) for turn in text.split("|")]


def load(tmp_path: Path, *rows: Any, **options: Any) -> tuple[list[Any], Tally]:
    path, tally = tiny.write_rows(tmp_path / "rows.jsonl", list(rows)), Tally()
    return list(load_conversations(DataConfig((str(path),), **options), tally)), tally


def test_formats(tmp_path: Path) -> None:
    """Every format gives the same rows."""
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines = "\n".join(json.dumps(row) for row in ROWS)
    texts = {
        "a.json": json.dumps(ROWS, indent=1),
        "lines.json": lines,
        "gap.jsonl": lines.replace("\n", "\n\n"),
    }
    texts |= {
        "mark.jsonl": "\N{ZERO WIDTH NO-BREAK SPACE}" + lines + "\n",
        "folder/provenance.json": "{}",
    }
    texts |= {
        "folder/b.jsonl": json.dumps(ROWS[1]),
        "folder/a.json": json.dumps(ROWS[0], indent=1),
    }  # a single object
    (tmp_path / "folder").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, list(ROWS[0]))
        table.writeheader()
        table.writerows(ROWS)
    for name in ("a.parquet", "a.json", "lines.json", "mark.jsonl", "gap.jsonl", "folder", "a.csv"):
        assert [row.value for row in read_rows(str(tmp_path / name))] == ROWS


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": turns("human=hello|gpt=fine")},
        {
            "messages": [
                HELLO[0],
                {"role": "assistant", "content": [{"type": "text", "text": "fine"}]},
            ]
        },
        {"prompt": HELLO[:1], "completion": HELLO[1:]},
        {"messages": json.dumps(HELLO)},
        {"messages": str(HELLO)},
        {"instruction": "hello", "input": "", "output": "fine"},
        {"question": "no", "answer": "no", "ask": "hello", "say": "fine"},
    ],
)
def test_shapes(tmp_path: Path, row: dict[str, Any]) -> None:
    """Every shape gives the same conversation."""
    fields = {"prompt_field": "ask", "completion_field": "say"} if "ask" in row else {}
    (conversation,), tally = load(tmp_path, row, **fields)
    unread = [f'row key "{key}" is not read' for key in row if fields and key in PAIR]
    assert list(conversation.messages) == HELLO
    assert set(tally.counts) == {("left out", reason) for reason in unread}


def test_beside_turns(tmp_path: Path) -> None:
    """What a row carries besides turns is kept."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asking = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "assistant", "content": "one", "reasoning_content": "easy"}
    messages = [
        HELLO[0],
        asking,
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": ""},
        answer,
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    sort = {"instruction": "Sort.", "input": "3 1", "output": "1 3", "system": "be short"}
    tokens = {"input_ids": [1, 2, 3], "loss_mask": [0, True, 1]}
    rows, tally = load(
        tmp_path,
        {"messages": messages, "tools": json.dumps(tools)},
        sort,
        tokens,
        system_prompt="ours",
    )
    system, hello, calling, *rest = rows[0].messages
    assert (system, hello) == (
        {"role": "system", "content": "ours"},
        HELLO[0],
    ) and rest == messages[2:]
    assert calling["tool_calls"][0]["function"]["arguments"] == {"a": 1} and rows[0].tools == tools
    assert [message["content"] for message in rows[1].messages] == [
        "be short",
        "Sort.\n\n3 1",
        "1 3",
    ]
    assert rows[2].tokens == ([1, 2, 3], [0, 1, 1]) and not tally.counts


@pytest.mark.parametrize(
    ("text", "kept", "reason"),
    [
        (
            "gpt=welcome|human=hello|gpt=fine",
            ["hello", "fine"],
            "began with the assistant; that turn dropped",
        ),
        ("human=hello|gpt=fine|human= |gpt=what", ["hello", "fine"], "cut before an empty turn"),
        ("human=hello|gpt=fine|human=more", ["hello", "fine"], "turns after the last answer cut"),
        (
            "human=hello|human=there|gpt=fine",
            ["hello\n\nthere", "fine"],
            "two turns of the user in a row joined",
        ),
    ],
)
def test_mended(tmp_path: Path, text: str, kept: list[str], reason: str) -> None:
    """Odd conversations are mended and counted."""
    (conversation,), tally = load(tmp_path, {"conversations": turns(text)})
    assert [message["content"] for message in conversation.messages] == kept
    assert list(tally.counts) == [("mended", reason)]


def test_unusable(tmp_path: Path) -> None:
    """Unusable rows are skipped and counted."""
    reasons: dict[str, Any] = {
        "unknown role": {"conversations": turns("human=hello|gtp=fine")},
        "no answer to a user's turn": {"conversations": turns("human=hello|gpt=")},
        "turn is not text": {
            "messages": [{"role": "user", "content": [{"type": "image"}]}, HELLO[1]]
        },
        "tools are no list": {"messages": HELLO, "tools": {"name": "add"}},
        "keys of no known shape": {"stranger": 1},
        "row is no object": ["hello"],
        "token ids and their mask do not fit": {"input_ids": [1, 2], "loss_mask": [1, 2]},
    }
    kept, tally = load(tmp_path, {"messages": HELLO}, *reasons.values())
    assert len(kept) == tally.kept == 1 and list(tally.counts) == [
        ("skipped", reason) for reason in reasons
    ]
    for number, example in enumerate(tally.examples.values(), start=2):
        assert f"rows.jsonl: row {number}: " in example


def test_held_out(tmp_path: Path) -> None:
    """A conversation is held out by its content alone."""
    rows = [{"conversations": turns(f"human=hello {number}|gpt=fine")} for number in range(400)]
    forward, _ = load(tmp_path, *rows, held_out=0.1)
    backward, _ = load(tmp_path, *reversed(rows), *rows, system_prompt="another", held_out=0.1)
    out = {row.messages[0]["content"] for row in forward if row.is_held_out}
    assert out == {row.messages[1]["content"] for row in backward if row.is_held_out}
    assert 20 <= len(out) <= 60  # 40 expected, standard deviation 6
