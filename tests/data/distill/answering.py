"""Answers without a target, prompts and tiny recipes, for the tests of distillation."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aerie.configs.schema.data import DistillConfig, SourceConfig
from aerie.data.chat import end_of_turn_ids
from aerie.data.distill.answer import Answer, Request
from aerie.data.distill.gate import Thinking
from aerie.data.distill.journal import Outcome, ended_rows, journals
from aerie.data.distill.prompts import Prompt, read_prompts
from tests import tiny


def thinking(chat_template: str | None = tiny.TEMPLATE) -> Thinking:
    tokenizer = tiny.tokenizer(chat_template=chat_template)
    return Thinking(tokenizer, end_of_turn_ids(tokenizer, None))


def config(**keys: Any) -> DistillConfig:
    return DistillConfig(sources=keys.pop("sources", (SourceConfig("unused.jsonl"),)), **keys)


def prompts(count: int, turns: int = 1) -> list[Prompt]:
    return [
        Prompt(f"0:{n}", f"rows: row {n}", tuple(f"Question {n}, {t}?" for t in range(turns))) for n in range(count)
    ]


def echo(request: Request) -> Answer:
    """An answer that depends on all that was asked and on the seed."""
    key = hashlib.sha256(repr((request.messages, request.seed)).encode()).hexdigest()[:8]
    return Answer(f"The answer to {request.messages[-1]['content']} is {key}.", "stop", 7)


def asking(answer: Callable[[Request], Answer] = echo) -> Any:
    async def ask(request: Request) -> Answer:
        return answer(request)

    return ask


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def outcomes(run: Path) -> list[Outcome]:
    """All rows of a run's journals, in the order of its prompts."""
    job = run / "distilled"
    header = json.loads(journals(job)[0].read_text(encoding="utf-8").splitlines()[0])
    places = {place.id: place for path in journals(job) for place in ended_rows(path, header["inputs"])}
    return [places[prompt.id].read() for prompt in read_prompts(job / "prompts.jsonl")]
