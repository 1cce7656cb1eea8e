"""The shipped recipes through the real command line, with a scripted server in the target's place."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import exit_code
from aerie.data.main import main
from tests import tiny
from tests.data.distill.answering import outcomes, write_rows
from tests.data.distill.faults import Proxy, Script

pytest.importorskip("openai", reason="needs the extra 'distill' (pip install -e .[distill])")

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).resolve().parents[3] / "configs/distill"
Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    torch.set_num_threads(1)

    def run(recipe: str, url: str, *words: object) -> int:
        own = ("--run", tmp_path / "run", "--target", tmp_path / "target", "--distill.server.urls", f"[{url}]")
        given = ("distill", "--config", CONFIGS / recipe, *own, "--distill.exclude", "[]", *words)
        monkeypatch.setattr(sys, "argv", ["data/main.py", *(str(word) for word in given)])
        return exit_code(main)

    tiny.target(tmp_path / "target")
    return run


def reply(content: str, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 5, "completion_tokens": len(content.split()), "total_tokens": 9}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def test_personas_become_problems_and_these_conversations_with_their_thinking(command: Command, tmp_path: Path) -> None:
    people = ["A beekeeper in Crete", "A baker in Lyon", "A diver in Oslo"]
    problems = [{"input persona": people[0], "synthesized text": "Math problem: 3 hives hold 9 frames each."}]
    local = [
        {"path": str(write_rows(tmp_path / "math.jsonl", problems)), "kind": "personas", "ask": "solution"},
        {
            "path": str(write_rows(tmp_path / "persona.jsonl", [{"persona": person} for person in people])),
            "kind": "personas",
            "ask": "problem",
            "samples": 2,
        },
    ]

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        question = asked["messages"][-1]["content"]
        assert asked["temperature"] == 0.7 and asked["top_k"] == -1 and asked["repetition_penalty"] == 1.0
        if question.startswith("Invent"):
            person = next(person for person in people if person in question)
            number = 0 if "Lyon" in person else asked["seed"]  # the baker's problem is the same each time
            return reply(f"Problem: {person} has {number} crates.", reasoning_content="What fits this person?")
        return reply(f"It is {len(question)}.", reasoning_content="Let me count. Done.")

    with Proxy(0, Script(reply=answer)) as proxy:
        assert command("qwq-personas.yaml", proxy.url, "--distill.sources", json.dumps(local)) == 0
        assert proxy.script.count == 1 + 2 * 6
    summary = json.loads((tmp_path / "run/distilled/summary.json").read_text())
    assert summary["status"] == {"done": 7} and summary["flaws"] == {"repeated": 1} and summary["kept"] == 6
    rows = [json.loads(line) for line in (tmp_path / "run/distilled/conversations.jsonl").read_text().splitlines()]
    talks = [row["messages"] for row in rows]  # the tiny template prints contents as they are: tags in them
    assert all(talk[-1]["content"].startswith("<think>\nLet me count. Done.\n</think>\n\nIt is ") for talk in talks)
    assert talks[0][0]["content"].startswith("3 hives hold 9 frames each.\n\nSolve this")


def test_conversations_are_asked_anew_and_failed_rows_again_when_that_is_wished(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = [{"path": str(tiny.write_conversations(tmp_path / "rows.jsonl", 8))}]
    broken = {"yes": True}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if broken["yes"] and len(asked["messages"]) == 3:
            return {"choices": []}
        made = reply(f"Answer {len(asked['messages'])}.")
        made["choices"][0]["token_ids"] = [7, 8, 3]
        return {**made, "prompt_token_ids": list(range(10, 10 + 4 * len(asked["messages"])))}

    words = (
        "--distill.sources",
        json.dumps(local),
        "--distill.server.retries",
        "1",
        "--distill.server.backoff_s",
        "0.01",
    )
    with Proxy(0, Script(reply=answer)) as proxy:
        assert command("sharegpt.yaml", proxy.url, *words) == 0
        failed = [row for row in outcomes(tmp_path / "run") if row.status == "failed"]
        num_turns = [len(row["conversations"]) // 2 for row in tiny.conversations(8)]
        assert len(failed) == sum(count > 1 for count in num_turns) > 0
        assert {row.why for row in failed} == {"no usable answer (the reply has no choices), 2 times"}
        assert f"{len(failed)} failed), " in (said := capsys.readouterr().out) and "--retry-failed asks" in said
        broken["yes"], asked = False, proxy.script.count
        assert command("sharegpt.yaml", proxy.url, *words) == 0 and proxy.script.count == asked
        assert command("sharegpt.yaml", proxy.url, *words, "--retry-failed") == 0
        assert proxy.script.count - asked == sum(count for count in num_turns if count > 1)
    assert [len(row.answers) for row in outcomes(tmp_path / "run")] == num_turns
    rows = [json.loads(line) for line in (tmp_path / "run/distilled/conversations.jsonl").read_text().splitlines()]
    assert all(row["input_ids"][-3:] == [7, 8, 3] and row["loss_mask"][-4:] == [0, 1, 1, 1] for row in rows)
