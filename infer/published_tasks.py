"""The published evaluation sets: where each is on the Hub, and the prompts that are made of its rows.

Sources: EAGLE-2 (arXiv 2406.16858), section 5, and SafeAILab/EAGLE's eagle/data for six tasks; SVIP (arXiv 2411.18462),
section 3.2, for MATH, AIME and GPQA.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import UserError

Row = Mapping[str, Any]
REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CHOICES = (
    "Answer the following multiple choice question. Think step by step, and end with a line of the form "
    "'Answer: $LETTER', where $LETTER is one of ABCD."
)
GPQA_ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@dataclass(frozen=True)
class PublishedTask:
    """source: its data set as data/sources.py names it, read at this commit; needs: the columns that `turns` reads."""

    source: str
    revision: str
    needs: tuple[str, ...]
    turns: Callable[[Row], list[str]]
    identity: str | None = None  # the column that names a row; null: its number
    part: Callable[[Row], str] | None = None  # what splits the task into tasks of their own, asked evenly


@dataclass(frozen=True)
class Question:
    """The turns of one conversation; part: which part of its task it belongs to, null: the task has none."""

    identity: str
    turns: tuple[str, ...]
    part: str | None = None


def _instruction(row: Row) -> list[str]:
    """Alpaca: the instruction, and its input after a blank line where there is one, as EAGLE's file has them."""
    given = str(row.get("input") or "").strip()
    return [f"{row['instruction']}\n\n{given}" if given else str(row["instruction"])]


def _multiple_choice(row: Row) -> list[str]:
    """GPQA: the four answers in an order that the question's own text seeds."""
    answers = [str(row[name]).strip() for name in GPQA_ANSWERS]
    random.Random(str(row["Question"])).shuffle(answers)
    listed = "\n".join(f"{letter}) {answer}" for letter, answer in zip("ABCD", answers, strict=True))
    return [f"{CHOICES}\n\n{str(row['Question']).strip()}\n\n{listed}"]


def _reasoned(row: Row) -> list[str]:
    return [f"{row['problem']}{REASONING}"]


def _level(row: Row) -> str:
    """MATH-500's level as 'level3', from 3 or 'Level 3'."""
    return f"level{str(row['level']).split()[-1]}"


def _both_turns(row: Row) -> list[str]:
    turns = row["prompt"]
    return [str(turn) for turn in turns] if isinstance(turns, list | tuple) else [str(turns)]


TASKS: dict[str, PublishedTask] = {
    "mt_bench": PublishedTask(
        "HuggingFaceH4/mt_bench_prompts:train",
        "e3a795c5e9a82ee40611c416b8a7786c73198991",
        ("prompt",),
        _both_turns,
        "prompt_id",
    ),
    "humaneval": PublishedTask(
        "openai/openai_humaneval:test",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        ("prompt",),
        lambda row: [f"Complete the code I provided.\n\n{row['prompt']}"],
        "task_id",
    ),
    "gsm8k": PublishedTask(
        "openai/gsm8k:main:test",
        "740312add88f781978c0658806c59bc2815b9866",
        ("question",),
        lambda row: [str(row["question"])],
    ),
    "alpaca": PublishedTask(
        "tatsu-lab/alpaca:train", "dce01c9b08f87459cf36a430d809084718273017", ("instruction",), _instruction
    ),
    "cnn_dm": PublishedTask(
        "abisee/cnn_dailymail:3.0.0:test",
        "96df5e686bee6baa90b8bee7c28b81fa3fa6223d",
        ("article",),
        lambda row: [f"Summarize: {row['article']}"],
        "id",
    ),
    "natural_questions": PublishedTask(
        "google-research-datasets/nq_open:validation",
        "5dd9790a83002ad084ddeb7c420dc716852c6f28",
        ("question",),
        lambda row: [str(row["question"])],
    ),
    "math500": PublishedTask(
        "HuggingFaceH4/MATH-500:test",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        ("problem", "level"),
        _reasoned,
        "unique_id",
        _level,
    ),
    "aime": PublishedTask(
        "AI-MO/aimo-validation-aime:train", "13f9e12f613e720c2a2b2f345dd04b998a29494d", ("problem",), _reasoned, "id"
    ),
    "gpqa_diamond": PublishedTask(
        "Idavidrein/gpqa:gpqa_diamond:train",
        "633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        ("Question", *GPQA_ANSWERS),
        _multiple_choice,
        "Record ID",
    ),
}


def question(name: str, row: Any, number: int, place: str) -> Question:
    """One row of a task as a conversation; UserError, naming the place, for a row of something else.

    A row that has `turns` is taken as it is, whatever the task: its prompts are made already.
    """
    if isinstance(row, Mapping) and "turns" in row:
        return Question(str(row.get("question_id", number)), _checked(row["turns"], row, place), _part(name, row))
    task = TASKS.get(name)
    needs = ("turns",) if task is None else task.needs
    missing = [key for key in needs if not isinstance(row, Mapping) or row.get(key) is None]
    if task is None or missing:
        wanted = "'turns', a list of texts" if task is None else f"{missing[0]!r} to be one of {name}"
        raise UserError(f"{place}: a question needs {wanted}; this row has {_shape(row)}")
    identity = row.get(task.identity) if task.identity else None
    turns = _checked(task.turns(row), row, place)
    return Question(str(number if identity is None else identity), turns, _part(name, row))


def _part(name: str, row: Row) -> str | None:
    task = TASKS.get(name)
    if task is None or task.part is None or row.get("level") is None:
        return None
    return task.part(row)


def _checked(turns: Any, row: Row, place: str) -> tuple[str, ...]:
    found = turns if isinstance(turns, list | tuple) else []
    if not found or not all(isinstance(turn, str) and turn.strip() for turn in found):
        raise UserError(f"{place}: a question needs 'turns', a list of texts; this row has {_shape(row)}")
    return tuple(found)


def _shape(row: Any) -> str:
    return ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
