"""Laws of what a row says: it is read as it says, or it is left out or counted with a reason."""

import datetime
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pyarrow as arrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.conversations import Tally, load_conversations
from aerie.data.questions import read_question
from aerie.data.values import UnusableRow, from_json
from tests.tiny import write_rows

ASK = {"role": "user", "content": "hello"}
FINE = {"role": "assistant", "content": "fine"}
HELLO = [ASK, FINE]
TOOL = {"name": "add", "parameters": {"a": 1}}
OPENAI_TOOL = {"type": "function", "function": TOOL}
FUNCTION = {"name": "add", "arguments": {"a": 1}}
CALL = {"type": "function", "function": FUNCTION}
DEEP = '{"a":' * 3000 + "1" + "}" * 3000


def load(tmp_path: Path, *rows: Any, **options: Any) -> tuple[list[Any], Tally]:
    path, tally = write_rows(tmp_path / "rows.jsonl", list(rows)), Tally()
    return list(load_conversations(DataConfig((str(path),), **options), tally)), tally


def answered(**keys: Any) -> dict[str, Any]:
    """A row whose answer has these keys, too."""
    return {"messages": [ASK, FINE | keys]}


def asked(**keys: Any) -> dict[str, Any]:
    """A row whose question has these keys, too."""
    return {"messages": [ASK | keys, FINE]}


def called(**keys: Any) -> dict[str, Any]:
    """A row whose answer calls a tool with a call of these keys."""
    return {"messages": [ASK, FINE | {"tool_calls": [keys]}]}


def spoken(text: str) -> dict[str, Any]:
    """A row of ShareGPT with a turn of calls."""
    turns = [("human", "hello"), ("function_call", text), ("observation", "1"), ("gpt", "fine")]
    return {"conversations": [{"from": name, "value": value} for name, value in turns]}


NO_OBJECT = "the arguments of a call are not a JSON object"
SEVERAL_TOOLS = "the row has several sets of tools"
ODD_THOUGHT = "a thought inside a content cannot be read"
TEXT_PART = {"type": "text", "text": "hello"}
THOUGHT_PART = {"type": "thinking", "thinking": "deep"}
TOKENS = {"input_ids": [1, 2], "loss_mask": [0, 1]}
LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    # calls
    (called(name="add", arguments='{"a": '), NO_OBJECT),
    (called(name="add", arguments='{"a": 1, "a": 2}'), NO_OBJECT),
    (called(name="add", arguments=DEEP), NO_OBJECT),
    (called(name="add", arguments=[1]), NO_OBJECT),
    (
        called(name="add", arguments={"a": 1}, parameters={"b": 2}),
        "a tool call has two names or arguments",
    ),
    (called(name="sub", function=FUNCTION), "a tool call has two names or arguments"),
    (called(function=FUNCTION, result="1"), 'call key "result" cannot be read'),
    (answered(tool_calls=[CALL], function_call={"name": "sub"}), "a turn has two sets of calls"),
    (asked(tool_calls=[CALL]), "a turn that is not an answer calls tools"),
    (asked(function_call=FUNCTION), "a turn that is not an answer calls tools"),
    (spoken("Let me add."), "a call is not JSON"),
    # tools
    ({"messages": HELLO, "tools": "[" * 3000}, "tools are not a list"),
    ({"messages": HELLO, "tools": [TOOL], "functions": [FUNCTION]}, SEVERAL_TOOLS),
    (asked(tools=[TOOL]) | {"tools": [FUNCTION]}, SEVERAL_TOOLS),
    ({"messages": [ASK | {"tools": [TOOL]}, FINE | {"tools": [FUNCTION]}]}, SEVERAL_TOOLS),
    ({"messages": HELLO, "tools": ['{"name": "add", "name": "sub"}']}, "a tool is not an object"),
    # contents
    (asked(content=[TEXT_PART | {"image_url": "a.png"}]), 'part key "image_url" cannot be read'),
    (asked(content=[TEXT_PART | {"weight": 0}]), 'part key "weight" cannot be read'),
    (asked(content=["A1", "A2"]), "a turn holds several texts"),
    (asked(content=[TEXT_PART | {"thinking": "deep"}]), ODD_THOUGHT),
    (answered(content=[THOUGHT_PART], reasoning_content="x"), ODD_THOUGHT),
    ({"prompt": "Q", "response": ["A1", "A2"]}, "a turn holds several texts"),
    ({"prompt": ["Q1", "Q2"], "response": "A1"}, "a turn holds several texts"),
    ({"prompt": "Q", "completion": []}, "an empty list of turns"),
    ({"prompt": HELLO[:1], "completion": "[]"}, "an empty list of turns"),
    ({"instruction": "Sort.", "input": {"k": 1}, "output": "fine"}, 'row key "input" is not text'),
    (
        {"instruction": "Sort.", "input": ["3", "1"], "output": "fine"},
        'row key "input" is not text',
    ),
    # marks
    ({"prompt": "Q", "completion": "A", "label": False}, "the answer is marked as not desired"),
    ({"messages": HELLO, "kto_tag": "false"}, "the answer is marked as not desired"),
    ({"messages": HELLO, "ignore": True}, "the row is marked as not to be learnt"),
    ({"messages": HELLO, "train": "no"}, "the row is marked as not to be learnt"),
    ({"messages": HELLO, "train": "never"}, 'the mark in row key "train" is unknown'),
    ({"messages": HELLO, "weight": -1}, 'the mark in row key "weight" is unknown'),
    ({"messages": HELLO, "ignore": 0.5}, 'the mark in row key "ignore" is unknown'),
    (TOKENS | {"weight": 0}, "the row is marked as not to be learnt"),
    (TOKENS | {"images": ["a"]}, 'row key "images" cannot be read'),
]


@pytest.mark.parametrize(("row", "reason"), LEFT_OUT)
def test_left_out(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    """A row that cannot be read as it says is left out, with the reason."""
    read, tally = load(tmp_path, {"messages": HELLO}, row)
    assert len(read) == 1 and tally.counts == {("skipped", reason): 1}


COUNTED: list[tuple[dict[str, Any], str]] = [
    (answered(weight=0.5), 'the mark "weight" is neither 0 nor 1, so its whole answer is learnt'),
    (answered(weight="2"), 'the mark "weight" is neither 0 nor 1, so its whole answer is learnt'),
    (asked(reasoning_content="deep"), 'message key "reasoning_content" is not read'),
    (asked(name="Ann"), 'message key "name" is not read'),
    (answered(name="Ann"), 'message key "name" is not read'),
    (answered(**{"\ud800": 1}), 'message key "?" is not read'),
    (asked(tool_call_id="1"), 'message key "tool_call_id" is not read'),
    (asked(content=[TEXT_PART | {"mood": "x"}]), 'part key "mood" is not read'),
    ({"messages": HELLO, "weight": 0.5}, 'row key "weight" is not read'),
    (TOKENS | {"mood": 1}, 'row key "mood" is not read'),
]


@pytest.mark.parametrize(("row", "reason"), COUNTED)
def test_counted(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    """What changes no text and is not read is counted."""
    [read], tally = load(tmp_path, row)
    assert list(read.messages) in (HELLO, []) and not read.context_only
    assert tally.counts == {("left out", reason): 1}


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("weight", -1),
        ("weight", float("nan")),
        ("loss_mask", [0, 1]),
        ("train", "never"),
        ("train", {"a": 1}),
        ("ignore", 0.5),
        ("mask_loss", "some"),
    ],
)
def test_marks_that_are_not_known(tmp_path: Path, key: str, flag: Any) -> None:
    """An answer whose mark has no known meaning is not learnt, and is counted."""
    [read], tally = load(tmp_path, {"messages": [ASK, FINE | {key: flag}, *HELLO]})
    assert read.context_only == {1}
    assert [kind for kind, _ in tally.counts] == ["left out"]


@pytest.mark.parametrize(
    ("key", "flags"),
    [
        ("mask_loss", [True, False]),
        ("ignore", [0, "yes", 0, "no"]),
        ("train", ["off", 1]),
        ("weights", "[0, 1]"),
    ],
)
def test_marks_beside_the_turns(tmp_path: Path, key: str, flags: Any) -> None:
    """A list of marks of any kind tells which answers are learnt."""
    [read], tally = load(tmp_path, {"messages": HELLO * 2, key: flags})
    assert read.context_only == {1} and not tally.counts


THOUGHT = FINE | {"reasoning_content": "deep"}
READ: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"messages": list(map(json.dumps, HELLO))}, HELLO),
    ({"prompt": [json.dumps(ASK)], "completion": [json.dumps(FINE)]}, HELLO),
    ({"prompt": "[{[]: 1}]", "completion": "fine"}, [ASK | {"content": "[{[]: 1}]"}, FINE]),
    ({"prompt": "[" * 3000, "completion": "fine"}, [ASK | {"content": "[" * 3000}, FINE]),
    ({"prompt": "hello", "completion": "[]"}, [ASK, FINE | {"content": "[]"}]),
    ({"prompt": "hello", "completion": ["fine"]}, HELLO),
    ({"prompt": "hello", "completion": "fine", "label": True}, HELLO),
    ({"prompt": "hello", "completion": "fine", "weight": "yes", "ignore": 0}, HELLO),
    ({"prompt": "hello", "completion": "fine", "input": {}}, HELLO),
    ({"prompt": "hello", "completion": "fine", "system": "", "label": 0}, HELLO),
    (answered(reasoning=[]), HELLO),
    (answered(thinking={}, tool_calls=[], function_call={}, weight=[], ignore=None), HELLO),
    (answered(content=[{"type": "text", "text": "fine", "thinking": "deep"}]), [ASK, THOUGHT]),
    (
        answered(
            content=[{"type": "reasoning", "reasoning": "deep"}, {"text": "fine", "weight": 1}]
        ),
        [ASK, THOUGHT],
    ),
    (
        called(name="add", arguments='{"a": 1}', parameters={"a": 1}),
        [ASK, FINE | {"tool_calls": [CALL]}],
    ),
    (
        answered(tool_calls=[json.dumps(CALL)], function_call=FUNCTION),
        [ASK, FINE | {"tool_calls": [CALL]}],
    ),
    (called(type="function", function=json.dumps(FUNCTION)), [ASK, FINE | {"tool_calls": [CALL]}]),
]


@pytest.mark.parametrize(("row", "messages"), READ)
def test_read(tmp_path: Path, row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """A row is read as it says, and nothing is counted."""
    [read], tally = load(tmp_path, row)
    assert list(read.messages) == messages and not tally.counts


@pytest.mark.parametrize(
    "tools", [[TOOL], [OPENAI_TOOL], TOOL, [json.dumps(TOOL)], json.dumps(TOOL), str([OPENAI_TOOL])]
)
@pytest.mark.parametrize(
    "place", [{"functions": [TOOL]}, {"messages": [ASK | {"tools": [TOOL]}, FINE]}, {}]
)
def test_tools(tmp_path: Path, tools: Any, place: dict[str, Any]) -> None:
    """The tools of a row are read from each form, also where another place has the same."""
    [read], tally = load(tmp_path, {"messages": HELLO, "tools": tools} | place)
    assert read.tools == [OPENAI_TOOL] and not tally.counts


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "add", "arguments": "{\\"a\\": 1}"}',
        """{"name": "add", "arguments": '{"a": 1}'}""",
    ],
)
@pytest.mark.parametrize("thought", ["", "<think>deep</think>"])
def test_spoken_calls(tmp_path: Path, text: str, thought: str) -> None:
    """ShareGPT's calls are read, also with glaive's quotes and behind a thought."""
    [read], tally = load(tmp_path, spoken(thought + text))
    assert read.messages[1] == {"role": "assistant", "content": thought, "tool_calls": [CALL]}
    assert not tally.counts


@pytest.mark.parametrize("text", [DEEP, "[" * 5000, "[" * 500 + "]" * 500, "9" * 5000])
def test_texts_that_no_parser_reads(text: str) -> None:
    """A text that nests too deeply is a text."""
    assert from_json(text) == text


@pytest.mark.parametrize("key", ["mood", "weight", "content", "tool_calls"])
def test_values_of_many_levels(tmp_path: Path, key: str) -> None:
    """Lists in each other, hundreds of them, end no command."""
    levels = json.loads("[" * 900 + "1" + "]" * 900)
    _, tally = load(tmp_path, {"messages": HELLO}, answered(**{key: levels}))
    assert sum(tally.counts.values()) == 1
    with suppress(UnusableRow):
        read_question(asked(**{key: levels}))


def test_keys_that_stand_twice(tmp_path: Path) -> None:
    """Of a key that an object has twice no value is taken."""
    twice = json.dumps({"messages": HELLO}).replace('"fine"', '"fine", "content": "bad"')
    path, tally = tmp_path / "rows.jsonl", Tally()
    path.write_text(f"{json.dumps({'messages': HELLO})}\n{twice}\n")
    assert len(list(load_conversations(DataConfig((str(path),)), tally))) == 1
    assert tally.counts == {("skipped", "a turn is not text"): 1}


def test_lines_that_nest_too_deeply(tmp_path: Path) -> None:
    """A line that no parser reads is named."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"messages": {DEEP}}}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:1"):
        list(load_conversations(DataConfig((str(path),)), Tally()))


MIXED = [
    {"messages": [ASK, THOUGHT], "tools": [TOOL]},
    {
        "messages": [
            ASK,
            FINE | {"tool_calls": [{"name": "add", "arguments": {"day": "2024-03-01", "n": None}}]},
            {"role": "tool", "content": [{"type": "text", "text": "1"}]},
            FINE,
        ],
        "tools": [{"name": "sub", "parameters": {"b": {"c": 1}}}],
    },
    {"messages": HELLO, "note": "text"},
    {"messages": HELLO, "note": {"k": 1}},
]


def test_containers_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that `datasets` reads from JSONL and writes give the conversations of the JSONL."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    expected, told = load(tmp_path, *MIXED)
    source = str(tmp_path / "rows.jsonl")
    data = datasets.load_dataset(
        "json", data_files=source, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert "Json" in str(data.features)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    for name in (str(tmp_path / "a.parquet"), str(tmp_path / "saved"), "owner/name"):
        tally = Tally()
        read = load_conversations(DataConfig((name,)), tally)
        for row, same in zip(read, expected, strict=True):
            assert row._replace(source="") == same._replace(source="")
        assert set(tally.counts) == set(told.counts)


def test_values_that_json_has_not(tmp_path: Path) -> None:
    """Dates, decimals and bytes of Arrow are read as the texts and numbers of JSON."""
    day = datetime.datetime(2024, 3, 1)
    arguments = {"day": day, "at": day.replace(hour=9), "date": day.date(), "bytes": b"x"}
    expected = {
        "day": "2024-03-01",
        "at": "2024-03-01T09:00:00",
        "date": "2024-03-01",
        "bytes": "x",
    }
    row = called(name="add", arguments=arguments)
    binary = called(name="add", arguments=arguments | {"bytes": b"\xff"})
    table = arrow.Table.from_pylist([row | {"tools": [TOOL]}, binary])
    parquet.write_table(table, tmp_path / "a.parquet")
    tally = Tally()
    [read] = load_conversations(DataConfig((str(tmp_path / "a.parquet"),)), tally)
    assert read.messages[1]["tool_calls"][0]["function"]["arguments"] == expected
    assert tally.counts == {("skipped", NO_OBJECT): 1}


def test_maps_with_a_key_twice(tmp_path: Path) -> None:
    """A row with such a map in a call is left out; the others are kept."""
    function = arrow.struct(
        {"name": arrow.string(), "arguments": arrow.map_(arrow.string(), arrow.int64())}
    )
    message = arrow.struct(
        {"role": arrow.string(), "content": arrow.string(), "tool_calls": arrow.list_(function)}
    )
    rows = [called(name="add", arguments=pairs) for pairs in ([("a", 1)], [("a", 1), ("a", 2)])]
    schema = arrow.schema({"messages": arrow.list_(message)})
    parquet.write_table(arrow.Table.from_pylist(rows, schema), tmp_path / "a.parquet")
    tally = Tally()
    [read] = load_conversations(DataConfig((str(tmp_path / "a.parquet"),)), tally)
    assert read.messages[1]["tool_calls"] == [CALL]
    assert tally.counts == {("skipped", NO_OBJECT): 1}
