"""Measuring prompts: Spec-Bench style questions, or plain text, one prompt a line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.config import PromptsConfig
from model.errors import UserError
from model.target import Target

NO_TEMPLATE = (
    "its tokenizer has no chat template; pass one with --target.chat_template FILE.jinja "
    "(data/templates/vicuna.jinja ships with this repository)"
)


@dataclass(frozen=True)
class Prompt:
    """One measuring prompt: the first turn of a question."""

    prompt_id: str
    task: str
    text: str


def load_prompts(config: PromptsConfig) -> list[Prompt]:
    """The first num_prompts prompts of a file; UserError names the line that is wrong."""
    path = Path(config.path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot read the prompts: {reason}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if config.num_prompts is not None:
        numbered = numbered[: config.num_prompts]
    if path.suffix == ".jsonl":
        prompts = [_question(line, f"{path}:{number}", number, config.task or path.stem) for number, line in numbered]
    else:
        prompts = [Prompt(str(number), config.task or path.stem, line) for number, line in numbered]
    if config.task is not None:
        prompts = [Prompt(prompt.prompt_id, config.task, prompt.text) for prompt in prompts]
    if not prompts:
        raise UserError(f"{path}: holds no prompts")
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        if (prompt.task, prompt.prompt_id) in seen:
            raise UserError(
                f"{path}: question_id {prompt.prompt_id} of {prompt.task!r} stands there twice; ids must differ"
            )
        seen.add((prompt.task, prompt.prompt_id))
    return prompts


def encode(prompt: str, tokenizer: Any, target: Target) -> Tensor:
    """Token ids [1, T] of one user turn in the target's chat template, the assistant's turn opened."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(f"{target.recipe.path}: {NO_TEMPLATE}")
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return torch.tensor([ids], device=target.device)


def _question(line: str, place: str, number: int, task: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error.msg})") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{place}: a question needs 'turns', a list of texts; this row has {keys}")
    return Prompt(str(row.get("question_id", number)), str(row.get("category") or task), turns[0])
