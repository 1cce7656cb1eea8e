"""Laws of conversations out of rows: every known shape is read, every change and every skipped row is counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.conversations import MAX_REASONS, Conversation, Tally, TokenRow, load_conversations, split_by_hash

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]


def turns(text: str) -> list[dict[str, str]]:
    """ShareGPT turns from 'human=hello|gpt=fine'."""
    return [dict(zip(("from", "value"), turn.split("="), strict=True)) for turn in text.split("|")]


def load(tmp_path: Path, *rows: Any, **options: Any) -> tuple[list[Any], Tally]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    tally = Tally()
    return list(load_conversations(DataConfig((str(path),), **options), tally)), tally


def messages(tmp_path: Path, row: Any, **options: Any) -> list[dict[str, Any]]:
    (conversation,), _ = load(tmp_path, row, **options)
    assert isinstance(conversation, Conversation)
    return list(conversation.messages)


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


def test_what_a_row_carries_besides_turns_is_kept(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            HELLO[0],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": ""},
            {"role": "assistant", "content": "one", "reasoning_content": "easy"},
        ],
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
    }
    (conversation,), tally = load(tmp_path, row)
    assert conversation.tools == [{"type": "function", "function": {"name": "add"}}] and not tally.counts
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert conversation.messages[4]["reasoning_content"] == "easy"
    row = {"instruction": "Sort.", "input": "3 1", "output": "1 3"}
    assert messages(tmp_path, row)[0]["content"] == "Sort.\n\n3 1"
    (tokens,), _ = load(tmp_path, {"input_ids": [1, 2, 3], "loss_mask": [0, True, 1]})
    assert isinstance(tokens, TokenRow) and (tokens.input_ids, tokens.loss_mask) == ((1, 2, 3), (0, 1, 1))


def test_the_system_prompt_goes_before_conversations_without_one(tmp_path: Path) -> None:
    own = {"system": "be short", "conversations": turns("human=hello|gpt=fine")}
    kept, _ = load(tmp_path, {"messages": HELLO}, own, system_prompt="ours")
    assert [row.messages[0] for row in kept] == [{"role": "system", "content": text} for text in ("ours", "be short")]


@pytest.mark.parametrize(
    ("text", "kept", "reason"),
    [
        ("gpt=welcome|human=hello|gpt=fine", "user assistant", "began with the assistant; that turn dropped"),
        ("system=|human=hello|gpt=fine", "user assistant", "empty system turn dropped"),
        ("human=hello|gpt=fine|human= |gpt=what", "user assistant", "cut before an empty turn"),
        ("human=hello|gpt=fine|human=more", "user assistant", "turns after the last answer cut"),
        ("human=hello|human=there|gpt=fine", "user assistant", "two turns of the user in a row joined"),
        ("system=a|human=b|gpt=c|gpt=d", "system user assistant", "two turns of the assistant in a row joined"),
    ],
)
def test_odd_conversations_are_mended_and_counted(tmp_path: Path, text: str, kept: str, reason: str) -> None:
    (conversation,), tally = load(tmp_path, {"conversations": turns(text)})
    assert " ".join(message["role"] for message in conversation.messages) == kept
    assert list(tally.counts) == [("mended", reason)]
    if "joined" in reason:
        assert "\n\n" in "".join(message["content"] for message in conversation.messages)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": turns("human=hello|gtp=fine")}, "unknown role"),
        ({"conversations": turns("human=hello|gpt=")}, "no answer to a user's turn"),
        ({"conversations": turns("gpt=fine")}, "no answer to a user's turn"),
        ({"conversations": []}, "no assistant turn"),
        ({"conversations": ["hello"]}, "turn is no object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, HELLO[1]]}, "turn is not text"),
        ({"messages": HELLO, "tools": "[oops"}, "tools are not JSON"),
        ({"prompt": 3, "completion": "three"}, "turn is not text"),
        ({"stranger": 1}, "keys of no known shape"),
        (["hello"], "row is no object"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "token ids and their mask do not fit"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "token ids and their mask do not fit"),
        ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "token ids and their mask do not fit"),
    ],
)
def test_unusable_rows_are_skipped_and_counted(tmp_path: Path, row: Any, reason: str) -> None:
    kept, tally = load(tmp_path, {"messages": HELLO}, row)
    assert len(kept) == tally.kept == 1 and tally.rows == 2
    ((key, example),) = tally.examples.items()
    assert key == ("skipped", reason) and "rows.jsonl: row 2: " in example


@pytest.mark.parametrize(
    ("row", "fields", "said"),
    [
        ({"question": "a", "anwser": "b"}, (), r"row 1 has keys question, anwser; .*did you mean 'answer'"),
        ({"a": "a", "b": "b"}, (), r"has keys a, b; expected conversations.*set data\.prompt_field"),
        ({"question": "a", "text": "b"}, ("questoin", "text"), r"did you mean 'questoin' instead of 'question'"),
        ({"messages": HELLO[:1]}, (), r"no usable conversation: 1 read, 0 kept; 1 x no assistant turn .*row 1"),
    ],
)
def test_a_file_without_usable_rows_is_an_error_with_a_suggestion(
    tmp_path: Path, row: Any, fields: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load(tmp_path, row, **dict(zip(("prompt_field", "completion_field"), fields, strict=False)))
    assert "\n" not in str(caught.value)


def test_the_tally_counts_each_reason_with_its_first_place_and_endless_reasons_together() -> None:
    tally = Tally(rows=5)
    tally.add("skipped", "unknown role", "a.json: row 2", "turn 1 is from 'gtp'")
    tally.add("skipped", "unknown role", "a.json: row 4", "turn 3 is from 'gtp'")
    tally.add("mended", "joined", "a.json: row 1")
    assert tally.table().splitlines() == [
        "conversations: 5 read, 3 kept, 2 skipped",
        "  skipped          2  unknown role (a.json: row 2: turn 1 is from 'gtp')",
        "  mended           1  joined (a.json: row 1)",
    ]
    for number in range(1000):
        tally.add("skipped", f"reason {number}", "a.json: row 1")
    assert len(tally.counts) == MAX_REASONS + 1 and tally.skipped == 1002


def test_a_conversation_is_held_out_by_its_content_alone(tmp_path: Path) -> None:
    rows = [{"conversations": turns(f"human=hello {number}|gpt=fine")} for number in range(400)]
    forward, _ = load(tmp_path, *rows)
    backward, _ = load(tmp_path, *reversed(rows), *rows, system_prompt="another")
    out = {row.messages[0]["content"] for row in forward if split_by_hash(row.digest, 0.1)}
    assert out == {row.messages[1]["content"] for row in backward if split_by_hash(row.digest, 0.1)}
    assert 20 <= len(out) <= 60  # 40 expected, standard deviation 6
    assert not any(split_by_hash(row.digest, 0.0) for row in forward)
