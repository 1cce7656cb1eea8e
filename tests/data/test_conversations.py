"""Laws of reading rows: every known shape is read; changes and skipped rows are counted."""

import csv
import json
from pathlib import Path
from typing import Any

import datasets
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
        {"prompt": json.dumps(HELLO[:1]), "response": "fine"},
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
            "dropped the turns before the first question",
        ),
        ("human=hello|gpt=fine|human= |gpt=what", ["hello", "fine"], "cut before an empty turn"),
        (
            "human=hello|gpt=fine|human=more",
            ["hello", "fine"],
            "cut after the last answer that is learnt",
        ),
        (
            "human=hello|human=there|gpt=fine",
            ["hello\n\nthere", "fine"],
            "joined two turns of the user in a row",
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
        "a turn has an unknown role": {"conversations": turns("human=hello|gtp=fine")},
        "a turn names no speaker": {"conversations": [{"human": "hello", "assistant": "fine"}]},
        "a turn is not an object": {"conversations": [["hello", "fine"]]},
        "a turn has no text": {"messages": [HELLO[0], {"role": "assistant", "message": "fine"}]},
        "the turns are not a list": {"messages": "hello"},
        "no answer to a user's turn": {"conversations": turns("human=hello|gpt=")},
        "a turn is not text": {
            "messages": [{"role": "user", "content": [{"type": "image"}]}, HELLO[1]]
        },
        "tools are not a list": {"messages": HELLO, "tools": "add"},
        "the row has no column that is known": {"stranger": 1},
        "the row is not an object": ["hello"],
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


CALLS = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "exact": True}}},
    {"type": "function", "function": {"name": "find", "arguments": {"where": {"city": "Köln"}}}},
]
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}},
    {"type": "function", "function": {"name": "find", "description": "a city"}},
]
SHAPES_OF_ROWS: dict[str, list[dict[str, Any]]] = {
    "calls": [
        {"messages": HELLO, "id": 1},
        {
            "messages": [
                HELLO[0],
                {"role": "assistant", "content": None, "tool_calls": CALLS, "weight": 1},
                {"role": "tool", "content": "1", "name": "add"},
                {"role": "tool", "content": "Köln", "name": "find"},
                {"role": "assistant", "content": "bad", "reasoning_content": "hm", "weight": 0},
                {"role": "user", "content": "again"},
                HELLO[1],
            ],
            "tools": TOOLS,
        },
    ],
    "sharegpt": [
        {"conversations": turns("system=|human=hello|gpt=fine"), "system": "be short"},
        {"conversations": turns("human=hello|gpt=no|human=again|gpt=fine"), "train": [0, 0, 0, 1]},
    ],
    "function_call": [
        {
            "conversations": turns('human=hello|function_call={"name": "add", "arguments": {}}')
            + turns("observation=1|gpt=fine"),
            "tools": json.dumps(TOOLS[0]["function"] | {"extra": None}).join("[]"),
        }
    ],
    "pairs": [
        {"instruction": "Sort.", "input": "3 1", "output": "1 3"},
        {"instruction": "hello", "input": "", "output": "fine"},
    ],
    "parts": [
        {"prompt": [HELLO[0]], "completion": [HELLO[1]]},
        {"prompt": [{"role": "system", "content": "be short"}, HELLO[0]], "completion": [HELLO[1]]},
    ],
}


@pytest.mark.parametrize("shape", SHAPES_OF_ROWS)
def test_containers(tmp_path: Path, shape: str) -> None:
    """Parquet and Arrow, which fill in nulls, and CSV give the messages that JSONL gives."""
    rows = SHAPES_OF_ROWS[shape]
    expected, told = load(tmp_path, *rows)
    assert len(expected) == len(rows) and all(row.messages for row in expected)
    names = sorted({name for row in rows for name in row})
    filled = [{name: row.get(name) for name in names} for row in rows]
    parquet.write_table(arrow.Table.from_pylist(filled), tmp_path / "a.parquet")
    datasets.Dataset.from_list(filled).save_to_disk(str(tmp_path / "saved"))
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        for row in rows:
            cells = {name: value for name, value in row.items() if isinstance(value, str | int)}
            table.writerow({name: json.dumps(value) for name, value in row.items()} | cells)
    for name in ("a.parquet", "saved", "a.csv"):
        tally = Tally()
        read = load_conversations(DataConfig((str(tmp_path / name),)), tally)
        for row, same in zip(read, expected, strict=True):
            assert row._replace(source=name) == same._replace(source=name)
        assert set(tally.counts) == set(told.counts)


@pytest.mark.parametrize(
    ("key", "mark"),
    [
        ("step_loss_mask", 0),
        ("weight", 0),
        ("loss", 0.0),
        ("train", False),
        ("trainable", False),
        ("loss_mask", "0"),
    ],
)
def test_marked_turns(tmp_path: Path, key: str, mark: Any) -> None:
    """An answer that its data set marks, in the turn or beside the turns, is only context."""
    talk = turns("human=hello|gpt=no|human=again|gpt=fine")
    marked = [turn | ({key: mark} if turn["value"] == "no" else {}) for turn in talk]
    rows = [{"conversations": marked}]
    rows += [{"conversations": talk, key: marks} for marks in ([1, mark, 1, 1], [mark, 1])]
    read, tally = load(tmp_path, *rows, {"conversations": talk, key: mark})
    assert [row.context_only for row in read] == [frozenset({1})] * 3
    assert {key for row in read for turn in row.messages for key in turn} == {"role", "content"}
    assert [reason for _, reason in tally.counts] == ["the row is marked as not to be learnt"]


def test_unread_keys(tmp_path: Path) -> None:
    """Keys that are not read are counted once a row; without some a row means something else."""
    odd = [HELLO[0] | {"mood": "good"}, HELLO[1] | {"mood": "bad", "id": 3}]
    rows: list[dict[str, Any]] = [
        {"messages": odd, "rejected": "so-so", "source": "here", "empty": [None]},
        {"messages": HELLO, "images": ["cat.png"]},
        {"messages": [HELLO[0] | {"audio": {"id": 1}}, HELLO[1]]},
        {"instruction": "more", "output": "fine", "history": [["hello", "hi"]]},
        {"question": "who", "context": "She said", "answer": "she"},
        {"messages": HELLO, "images": []},
    ]
    read, tally = load(tmp_path, *rows)
    assert len(read) == 2
    assert tally.counts == {
        ("left out", 'message key "mood" is not read'): 1,
        ("left out", 'row key "rejected" is not read'): 1,
        ("skipped", 'row key "images" cannot be read'): 1,
        ("skipped", 'message key "audio" cannot be read'): 1,
        ("skipped", 'row key "history" cannot be read'): 1,
        ("skipped", 'row key "context" cannot be read'): 1,
    }


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HELLO[0], HELLO[1] | {"tool_calls": 5}]},
        {"messages": [HELLO[0], HELLO[1] | {"tool_calls": [{"name": "add", "blob": 1}]}]},
        {"messages": HELLO, "tools": [{"function": "add"}]},
        {"messages": [{"role": "user", "content": [{"type": ["a"], "text": "x"}]}, HELLO[1]]},
        {"messages": {"role": ["user"], "content": ["hello", "fine"]}},
        {"messages": [HELLO[0], HELLO[1] | {"weight": 0}]},
        {"messages": HELLO, "weights": [0]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1.0]},
        {"question": "hello", "answer": "a", "choices": ["a", "b"]},
    ],
)
def test_odd_rows(tmp_path: Path, row: dict[str, Any]) -> None:
    """A row of an odd form is skipped and counted, and the others are kept."""
    read, tally = load(tmp_path, {"messages": HELLO}, row)
    assert len(read) == 1 and [kind for kind, _ in tally.counts] == ["skipped"]


def test_second_texts(tmp_path: Path) -> None:
    """Of two keys for one thing the first is read, and the other is counted."""
    row = {"messages": [HELLO[0] | {"text": "hi"}, HELLO[1]], "system": "a", "system_prompt": "b"}
    (conversation,), tally = load(tmp_path, row)
    assert [turn["content"] for turn in conversation.messages] == ["a", "hello", "fine"]
    assert {reason for _, reason in tally.counts} == {
        'message key "text" is not read, since "content" is',
        'row key "system_prompt" is not read, since "system" is',
    }


def test_context_behind_the_last_answer(tmp_path: Path) -> None:
    """A conversation ends with an answer that is learnt."""
    talk = turns("human=hello|gpt=fine|human=again|gpt=no")
    (conversation,), tally = load(tmp_path, {"conversations": talk, "weight": [1, 1, 1, 0]})
    assert list(conversation.messages) == HELLO and not conversation.context_only
    assert [kind for kind, _ in tally.counts] == ["mended"]
