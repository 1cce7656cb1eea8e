"""All commands read the questions of rows by one reader, as training reads conversations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig, DistillConfig, SourceConfig
from aerie.configs.schema.measure import HeldOutPrompts, PromptsConfig
from aerie.data.chat import Chat, encode_prompt
from aerie.data.conversations import Tally, load_conversations
from aerie.data.distill.prompts import make_prompts
from aerie.data.questions import read_prompts, read_question
from aerie.infer.measure.tasks import encode_turn, load_prompts
from tests.data.chat_targets import CHATML, build_tokenizer
from tests.tiny import write_rows

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
CALLED = {"function": {"name": "weather", "arguments": {}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
HUMAN = {"from": "human", "value": "Why?"}
RESULT = {"role": "tool", "content": "sunny"}
# A template with a system prompt of its own, which a system turn replaces.
WITH_TOOLS = (
    "{% if messages[0]['role'] != 'system' %}default {% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, USER], "tools": TOOLS},
        {"conversations": [HUMAN], "system": "Be brief.", "tools": TOOLS},
        {"prompt": "Why?", "system_prompt": "Be brief.", "functions": [TOOLS[0]["function"]]},
        {"turns": ["Why?"], "system": "Be brief.", "tools": TOOLS},
        {"prompt": [SYSTEM, USER], "completion": [ANSWER], "tools": TOOLS},
        {"question": "Why?", "answer": "Because.", "system": "Be brief.", "tools": TOOLS},
    ],
)  # fmt: skip
def test_all_commands_ask_the_same(row: dict[str, Any], tmp_path: Path) -> None:
    """System turn, tools and question reach every command, whatever columns hold them."""
    path = write_rows(tmp_path / "rows.jsonl", [row])
    [generated] = read_prompts(path, None)
    [benched] = load_prompts(PromptsConfig(path=str(path)))
    [distilled] = make_prompts(DistillConfig((SourceConfig(str(path), "prompts"),)), ())
    for asked in (generated, benched, distilled):
        assert (asked.turns, asked.tools) == (("Why?",), TOOLS)
    assert generated.before == benched.before == (SYSTEM,)
    assert distilled.system == "Be brief."


def test_questions_read_what_training_reads(tmp_path: Path) -> None:
    """A held-out question is rendered as training renders what stands before its answer."""
    tokenizer = build_tokenizer(WITH_TOOLS, "<|im_end|>")
    chat = Chat(tokenizer, {tokenizer.eos_token_id}, Tally())
    silent = {"role": "system", "content": ""}
    starts = ([SYSTEM, USER], [silent, USER], [USER])
    rows = [{"tools": TOOLS, "messages": [*start, ANSWER, USER, ANSWER]} for start in starts]
    for row in rows:
        path = str(write_rows(tmp_path / "rows.jsonl", [row]))
        data = DataConfig((path,), held_out=1.0)
        [conversation] = load_conversations(data, Tally())
        [prompt] = load_prompts(HeldOutPrompts(data=data, part=0, turns=2))
        answers = [message["role"] for message in conversation.messages].index("assistant")
        for number, answered in enumerate(([], ["Because."])):
            ids = encode_turn(prompt, answered, tokenizer, SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
            before = chat.text(conversation, answers + 2 * number, add_generation_prompt=True)
            assert tokenizer.decode(ids[0]) == before


def test_turns_that_follow_tools() -> None:
    """The last turn keeps all before it; each turn is asked up to a tool's result."""
    row = {"messages": [SYSTEM, USER, CALL, RESULT, ANSWER, USER, ANSWER]}
    last = read_question(row, last_only=True)
    assert [message["role"] for message in last.before][-3:] == ["assistant", "tool", "assistant"]
    each = read_question(row)
    assert (each.before, each.turns, each.calls_tools) == ((SYSTEM,), ("Why?",), True)
    alpaca = {"instruction": "Rate it.", "input": "A film", "output": "Good."}
    assert read_question(alpaca).turns == ("Rate it.\n\nA film",)
    ending = read_question({"messages": [USER, CALL, RESULT]}, last_only=True)
    assert ending.turns == () and ending.before[-1]["content"] == "sunny"


def test_what_is_not_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys that nobody reads and texts that a template leaves out are told; others are refused."""
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "mood": "glad", "answer": "b"}] * 2)
    load_prompts(PromptsConfig(path=str(path)))
    load_prompts(PromptsConfig(path=str(path)))
    told = capsys.readouterr().err
    assert (
        told.count('row key "mood" is not read (2 rows, first: question 1)') == 1
        and "answer" not in told
    )
    for row in ({"question": "a", "context": "b"}, {"prompt": "a", "images": ["b"]}):
        with pytest.raises(UserError, match="cannot be read"):
            read_prompts(write_rows(path, [row]), None)
    encode_prompt(build_tokenizer(CHATML, "<|im_end|>"), [USER], TOOLS)
    assert "the template leaves out the tools" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "turn"),
    [
        ({"instruction": "Do.", "input": "It", "output": "x", "prompt": "All"}, "Do.\n\nIt"),
        ({"prompt": "", "question": "Why?", "answer": "x"}, "Why?"),
        ({"prompt": "Why?", "completion": "x", "train": False}, "Why?"),
        ({"ask": "Why?", "reply": "x", "prompt": "No"}, "Why?"),
    ],
)
def test_the_column_of_training(row: dict[str, Any], turn: str, tmp_path: Path) -> None:
    """A question stands where training reads it; marks are nothing to whoever asks."""
    [asked] = read_prompts(write_rows(tmp_path / "rows.jsonl", [row]), None, False, "ask", "Hush.")
    assert asked.turns == (turn,) and asked.before[0]["content"] == "Hush."
