"""Helpers of the distillation tests: answers without a target, prompts and tiny recipes."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from aerie.data import main
from aerie.data.distill.answer import Answer, Outcome, Thinking
from aerie.data.shapes import Message
from tests import tiny
from tests.tiny import call, read_rows

KEEP = dict.fromkeys(("cut", "empty", "loop", "language", "refusal", "repeated"), "keep")
OUTCOME = TypeAdapter(Outcome)


def thinking(chat_template: str | None = tiny.TEMPLATE) -> Thinking:
    tokenizer = tiny.tokenizer(chat_template=chat_template)
    return Thinking(tokenizer, {tokenizer.eos_token_id})


async def echo(messages: Sequence[Message], seed: int) -> Answer:
    """An answer that depends on the whole question and on the seed."""
    key = hashlib.sha256(repr((tuple(messages), seed)).encode()).hexdigest()[:8]
    return Answer(f"The answer to {messages[-1]['content']} is {key}.", "stop")


def local_recipe(place: Path, target: Path, section: dict[str, Any]) -> Path:
    """A recipe that trains on the answers of its section `distill`."""
    data = {"conversations": [str(place / "run/distilled/conversations.jsonl")], "held_out": 0.0}
    values = {
        "run": str(place / "run"),
        "threads": 1,
        "target": {"path": str(target)},
        "data": data,
    }
    return tiny.recipe(place / "recipe.yaml", {**values, "distill": section})


def outcomes(run: Path) -> list[Outcome]:
    """All rows of a run's journals, in the order of its prompts."""
    journals = (run / "distilled/journal").glob("shard-*.jsonl")
    rows = {row["id"]: OUTCOME.validate_python(row) for path in journals for row in read_rows(path)}
    return [rows[prompt["id"]] for prompt in read_rows(run / "distilled/prompts.jsonl")]


def distill(recipe: Path, *words: object) -> int:
    """Runs the command in this process; returns its exit code."""
    return call(main, "distill", "--config", recipe, *words)
