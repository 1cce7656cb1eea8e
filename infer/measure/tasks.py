"""The published evaluation sets: where each is on the Hub, and the prompts that are made of its rows.

Sources: EAGLE-2 (arXiv 2406.16858), section 5, and SafeAILab/EAGLE's eagle/data for six tasks; SVIP (arXiv 2411.18462),
section 3.2, for MATH, AIME and GPQA.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aerie.configs.errors import UserError
from aerie.configs.schema.measure import PromptsConfig, TaskConfig
from aerie.data.sources import hub_commit, is_local, read_rows
from aerie.model.storage import file_digest

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


if TYPE_CHECKING:
    from torch import Tensor

    from aerie.model.target import Target

NO_TEMPLATE = (
    "its tokenizer has no chat template; pass one with --target.chat_template FILE.jinja "
    "(data/templates/vicuna.jinja ships with this repository)"
)


@dataclass(frozen=True)
class Prompt:
    """One measuring prompt: a question, and the turns that follow its answer."""

    prompt_id: str
    task: str
    text: str  # the first turn
    more: tuple[str, ...] = ()
    system: str | None = None

    @property
    def turns(self) -> tuple[str, ...]:
        return self.text, *self.more


def load_prompts(config: PromptsConfig) -> list[Prompt]:
    """The prompts of the file, or of every task in turn; UserError names the row that is wrong."""
    if config.path is not None:
        source, prompts = config.path, _of_file(Path(config.path), config)
    else:
        source = ", ".join(task.name for task in config.tasks)
        prompts = [prompt for task in config.tasks for prompt in _of_task(task, config)]
    if not prompts:
        raise UserError(f"{source}: holds no prompts")
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        if (prompt.task, prompt.prompt_id) in seen:
            raise UserError(
                f"{source}: question_id {prompt.prompt_id} of {prompt.task!r} stands there twice; ids must differ"
            )
        seen.add((prompt.task, prompt.prompt_id))
    return prompts


def source_of(task: TaskConfig) -> str:
    """The file, directory or Hub data set of a task; UserError for a name that is no published one and has no path."""
    if task.path is not None:
        return task.path
    if task.name not in TASKS:
        raise UserError(
            f"task {task.name!r}: is none of {', '.join(TASKS)}; give the path of its questions "
            f"({{name: {task.name}, path: question.jsonl}})"
        )
    return TASKS[task.name].source


def revision_of(task: TaskConfig) -> str | None:
    """The revision that a task's Hub data set is read at; null: as it is now."""
    if task.revision is None and task.path is None and task.name in TASKS:
        return TASKS[task.name].revision
    return task.revision


def check_sources(config: PromptsConfig) -> None:
    """UserError for a file that is not there, before anything is loaded; the Hub is not asked."""
    if config.path is not None and not Path(config.path).is_file():
        raise UserError(f"{config.path}: no such file of prompts")
    for task in config.tasks:
        if not is_local(source_of(task)) and Path(source_of(task)).suffix in (".jsonl", ".json", ".parquet"):
            raise UserError(f"{source_of(task)}: no such file of prompts for task {task.name!r}")


def prompt_inputs(config: PromptsConfig) -> str | list[dict[str, Any]]:
    """What the prompts are made of: a file's digest, or for each task its source with digest or asked revision."""
    if config.path is not None:
        return file_digest(Path(config.path))
    return [
        {"task": task.name, "source": source_of(task), **_identity(source_of(task), revision_of(task))}
        for task in config.tasks
    ]


def pinned(config: PromptsConfig) -> PromptsConfig:
    """The same with every Hub data set at the commit that its revision is now, so that a run can say what it read.

    Where the Hub cannot be asked the revision stays as it was.
    """
    tasks = [
        task if is_local(source_of(task)) else replace(task, revision=hub_commit(source_of(task), revision_of(task)))
        for task in config.tasks
    ]
    named = zip(tasks, config.tasks, strict=True)
    return replace(config, tasks=tuple(now if now.revision else before for now, before in named))


def sources_facts(config: PromptsConfig) -> list[dict[str, Any]]:
    """For each task where its prompts came from, for the record; revision null: the Hub did not name it."""
    return [
        {
            "task": task.name,
            "source": source_of(task),
            **({} if is_local(source_of(task)) else {"revision": revision_of(task)}),
        }
        for task in config.tasks
    ]


def encode(prompt: str, tokenizer: Any, target: "Target") -> "Tensor":
    """Token ids [1, T] of one user turn in the target's chat template, the assistant's turn opened."""
    return _encoded([{"role": "user", "content": prompt}], tokenizer, target)


def encode_turn(prompt: Prompt, answers: Sequence[str], tokenizer: Any, target: "Target") -> "Tensor":
    """Token ids [1, T] of the turn that follows these answers, with the conversation before it."""
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    messages = system + [
        {"role": role, "content": text}
        for turn, answer in zip_longest(prompt.turns[: len(answers) + 1], answers)
        for role, text in (("user", turn), ("assistant", answer))
        if text is not None
    ]
    return _encoded(messages, tokenizer, target)


def _encoded(messages: list[dict[str, str]], tokenizer: Any, target: "Target") -> "Tensor":
    import torch

    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(f"{target.recipe.path}: {NO_TEMPLATE}")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return torch.tensor([ids], device=target.device)


def _of_file(path: Path, config: PromptsConfig) -> list[Prompt]:
    try:
        lines = [line.rstrip("\r") for line in path.read_text(encoding="utf-8").split("\n")]  # not at U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot read the prompts: {reason}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix != ".jsonl":
        name = config.task or path.stem
        return [
            Prompt(str(number), name, line, (), config.system_prompt) for number, line in numbered[: config.num_prompts]
        ]
    found = []
    for number, line in numbered:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error.msg})") from error
        asked = question("", row, number, f"{path}:{number}")
        found.append(_prompt(asked, config.task or str(row.get("category") or path.stem), config))
    return _of_each(found, config.num_prompts)


def _of_each(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """So many of the prompts in their order, as many of each task as there are: files often have one behind another."""
    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    turns = [prompt for turn in zip_longest(*tasks.values()) for prompt in turn if prompt is not None]
    chosen = {id(prompt) for prompt in turns[:count]}
    return [prompt for prompt in prompts if id(prompt) in chosen]


def _of_task(task: TaskConfig, config: PromptsConfig) -> list[Prompt]:
    """The first questions of a task, or drawn with its seed; of one with parts as many of each."""
    source = source_of(task)
    count = config.num_prompts if task.num_prompts is None else task.num_prompts
    rows = read_rows(source, revision_of(task))
    asked: Iterator[Question] = (question(task.name, row.value, row.number, row.place) for row in rows)
    has_parts = task.name in TASKS and TASKS[task.name].part is not None
    if task.seed is None and not has_parts:
        chosen = list(islice(asked, count))
    else:
        chosen = list(asked)
        if task.seed is not None:
            random.Random(task.seed).shuffle(chosen)
        chosen = _evenly(chosen)[:count]
    if not chosen:
        raise UserError(f"{source}: holds no prompts for task {task.name!r}")
    return [_prompt(each, f"{task.name}-{each.part}" if each.part else task.name, config) for each in chosen]


def _evenly(questions: Sequence[Question]) -> list[Question]:
    """The questions with their parts taking turns."""
    parts: dict[str | None, list[Question]] = {}
    for each in sorted(questions, key=lambda each: each.part or ""):
        parts.setdefault(each.part, []).append(each)
    return [each for turn in zip_longest(*parts.values()) for each in turn if each is not None]


def _prompt(asked: Question, task: str, config: PromptsConfig) -> Prompt:
    first, *more = asked.turns[: config.turns]
    return Prompt(asked.identity, task, first, tuple(more), config.system_prompt)


def _identity(source: str, revision: str | None) -> dict[str, Any]:
    path = Path(source)
    return {"digest": file_digest(path)} if path.is_file() else {"revision": revision}
