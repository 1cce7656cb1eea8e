"""Loads prompts from published sets (tasks.yaml), files and held-out data."""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError, warn_once
from aerie.configs.read import read_text, read_yaml, require_regular
from aerie.configs.schema.measure import HeldOutPrompts, PromptsConfig, TaskConfig
from aerie.data.chat import encode_prompt
from aerie.data.conversations import Tally, load_conversations, system_turns
from aerie.data.inputs import ROW_SUFFIXES
from aerie.data.questions import RowQuestion, each_turn, read_question, tell_unread
from aerie.data.rows import hub_commit, read_rows
from aerie.data.shapes import Message
from aerie.data.values import UnusableRow, is_text
from aerie.infer.measure.statistics import grouped
from aerie.model.storage import digest, file_digest
from aerie.model.target import Target

Row = Mapping[str, Any]
TASKS: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("tasks.yaml"))[0]
GPQA_ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
ABSENT = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench ships this for a text it may not


def _multiple_choice(row: Row) -> Row:
    """The question, and its answers in an order that the question seeds."""
    answers = [row[name].strip() for name in GPQA_ANSWERS]
    random.Random(row["Question"]).shuffle(answers)
    listed = "\n".join(map("{}) {}".format, "ABCD", answers))
    return {"question": row["Question"].strip(), "listed": listed}


COLUMNS_OF: dict[str, Callable[[Row], Row]] = {  # a row -> the columns for its task's template
    "alpaca": lambda row: {**row, "given": f"\n\n{str(row.get('input') or '').strip()}".rstrip()},
    "gpqa_diamond": _multiple_choice,
    "mbpp": lambda row: {**row, "tests": "\n".join(row["test_list"])},
    "livecodebench": lambda row: {**row, "code": row.get("starter_code") or "# YOUR CODE HERE"},
}


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    task: str
    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()  # messages before the first turn
    tools: list[Any] | None = None
    unread: frozenset[str] = field(default=frozenset(), compare=False)  # columns left unread

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.prompt_id

    @property
    def is_absent(self) -> bool:
        return any(ABSENT in turn for turn in self.turns)


def prompt_of(task: str, row: Any, number: int, source: str, config: PromptsConfig) -> Prompt:
    """A row's prompt, or UserError. It takes `turns` (Spec-Bench) as they are.

    number: the row's. source: the row's place, for errors.
    """
    values: Row = row if isinstance(row, Mapping) else {}
    published = TASKS.get(task, {})
    if published and ABSENT in str(values.get("turns")):
        question, identity = RowQuestion((), (ABSENT,)), values.get("question_id")
    elif published and "turns" not in values:
        question, identity = _published_question(task, values, source)
    else:
        try:
            question = read_question(values)
        except UnusableRow as error:
            raise UserError(f"{source}: {error}") from error
        identity = values.get("question_id")
    with suppress(KeyError):  # a set without parts, or a row that does not name its part
        task = f"{task}-{published['part'].format_map(values)}"
    return Prompt(
        str(number if identity is None else identity),
        task,
        question.turns[: config.turns],
        question.before or tuple(system_turns(config.system_prompt)),
        question.tools,
        question.unread,
    )


def _published_question(task: str, row: Row, source: str) -> tuple[RowQuestion, Any]:
    """The question of a published set's row, and the row's id."""
    published = TASKS[task]
    try:
        columns = COLUMNS_OF.get(task, dict)(row)
        if "turns" in published:
            turns = columns[published["turns"]]
        else:
            turns = [published["text"].format_map(columns)]
        published.get("part", "").format_map(columns)
    except KeyError as error:
        raise UserError(
            f"{source}: a question of {task} needs the column {error}; "
            f"this row has {', '.join(row)}"
        ) from error
    if not isinstance(turns, list) or not turns or not all(map(is_text, turns)):
        raise UserError(f"{source}: a question must be a text or a list of texts, none empty")
    return RowQuestion((), tuple(turns)), row.get(published.get("identity", ""))


def set_of(task: str) -> str:
    """The published set that has the task as a part, or else the task."""
    name = task.partition("-")[0]
    return name if "part" in TASKS.get(name, {}) else task


def load_prompts(config: PromptsConfig) -> list[Prompt]:
    """The prompts; raises UserError if there are none, or if two have the same id."""
    if isinstance(config, HeldOutPrompts):
        return _held_out(config)
    if config.path is not None:
        source = config.path
        prompts = _of_file(Path(config.path), config)
    else:
        source = ", ".join(task.name for task in config.tasks)
        prompts = [prompt for task in config.tasks for prompt in _of_task(task, config)]
    if not prompts:
        raise UserError(f"{source}: holds no prompts")
    tell_unread(source, ((f"question {prompt.prompt_id}", prompt.unread) for prompt in prompts))
    (task, prompt_id), count = Counter(prompt.key for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise UserError(f"{source}: {count} questions of {task!r} have question_id {prompt_id}")
    return prompts


def _held_out(config: HeldOutPrompts) -> list[Prompt]:
    """Questions that training never sees, each short enough to leave room for an answer."""
    # The questions' system prompt overrides the data's, and a row's own overrides both.
    data = replace(config.data, system_prompt=None)
    system = config.system_prompt or config.data.system_prompt
    prompts: dict[tuple[str, ...], Prompt] = {}
    too_long = []  # the places of rows
    for number, row in enumerate(load_conversations(data, Tally()), start=1):
        if row.is_held_out and row.messages:
            question = each_turn(row.messages)
            turns = question.turns[: config.turns or 1]
            before = question.before or tuple(system_turns(system))
            texts = [*turns, *(message["content"] for message in question.before)]
            length = sum(map(len, texts)) + len(json.dumps(row.tools or ""))
            if length > data.max_length:
                too_long.append(f"conversation {number}")
                continue
            prompt = Prompt(str(number), "held_out", turns, before, row.tools)
            prompts.setdefault(turns, prompt)
        if config.num_prompts is not None and len(prompts) == 2 * config.num_prompts:
            break
    source = ", ".join(data.conversations)
    why = "a held-out question has more characters than data.max_length, so it is not asked"
    tell_unread(source, ((place, [why]) for place in too_long))
    if len(prompts) <= config.part:
        raise UserError(
            f"{source}: too few held-out conversations to measure with; "
            "raise data.held_out, or name prompts: path, or tasks such as [{name: mt_bench}]"
        )
    return list(prompts.values())[config.part :: 2]


def _of_file(path: Path, config: PromptsConfig) -> list[Prompt]:
    if path.suffix not in ROW_SUFFIXES:  # a text file with one question a line
        lines = enumerate(read_text(path).split("\n"), start=1)  # splitlines() splits at U+2028
        before = tuple(system_turns(config.system_prompt))
        prompts = [
            Prompt(str(number), config.task or path.stem, (line,), before)
            for number, line in lines
            if line.strip()
        ]
        return prompts[: config.num_prompts]
    prompts = []
    for row in read_rows(str(path)):
        prompt = prompt_of("", row.value, row.number, f"{path}:{row.number}", config)
        task = config.task or str(row.value.get("category") or path.stem)
        prompts.append(replace(prompt, task=task))
    prompts = _with_texts(prompts, str(path))
    chosen = {id(prompt) for prompt in _taking_turns(prompts)[: config.num_prompts]}
    return [prompt for prompt in prompts if id(prompt) in chosen]  # in the file's order


def _of_task(task: TaskConfig, config: PromptsConfig) -> list[Prompt]:
    count = task.num_prompts or config.num_prompts
    is_in_order = task.seed is None and "part" not in TASKS.get(task.name, {})
    prompts = []
    num_texts = 0
    for row in read_rows(*source_of(task)):
        prompt = prompt_of(task.name, row.value, row.number, row.source, config)
        prompts.append(prompt)
        num_texts += not prompt.is_absent
        if is_in_order and num_texts == count:
            break
    prompts = _with_texts(prompts, source_of(task)[0])
    if is_in_order:
        return prompts
    if task.seed is not None:
        random.Random(task.seed).shuffle(prompts)
    prompts.sort(key=lambda prompt: prompt.task)
    return _taking_turns(prompts)[:count]


def _with_texts(prompts: Sequence[Prompt], source: str) -> list[Prompt]:
    """The prompts that hold their text; a warning counts the others."""
    texts = [prompt for prompt in prompts if not prompt.is_absent]
    if len(texts) < len(prompts):
        absent = Counter(prompt.task for prompt in prompts if prompt.is_absent)
        by_task = ", ".join(f"{count} of {task}" for task, count in absent.items())
        warn_once(
            f"{source}: {len(prompts) - len(texts)} of {len(prompts)} questions ({by_task}) name a "
            "source instead of their text and are left out; NVIDIA's "
            "prepare_data.py (Model-Optimizer, examples/specdec_bench) fetches them: "
            "give its file as path of the task"
        )
    return texts


def _taking_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of each task, the second of each, and so on."""
    tasks = grouped(prompts, lambda prompt: prompt.task)
    return list(filter(None, chain(*zip_longest(*tasks.values()))))


def source_of(task: TaskConfig) -> tuple[str, str | None]:
    """A task's file, directory or Hub data set, and the revision (None: the latest)."""
    if task.path is not None:
        return task.path, task.revision
    if task.name not in TASKS:
        raise UserError(
            f"task {task.name!r} is none of {', '.join(TASKS)}; give the path of its questions"
        )
    return TASKS[task.name]["source"], task.revision or TASKS[task.name]["revision"]


def check_sources(config: PromptsConfig) -> None:
    """Raises UserError if a file is missing or a task is unknown; does not ask the Hub."""
    sources = [config.path] if config.path else [source_of(task)[0] for task in config.tasks]
    for path in map(Path, sources):
        require_regular(path)
        if (config.path or path.suffix in ROW_SUFFIXES) and not path.exists():
            raise UserError(f"{path}: no such file of prompts")


def prompt_inputs(config: PromptsConfig) -> str | list[dict[str, Any]]:
    if config.path is not None:
        return file_digest(Path(config.path))
    if isinstance(config, HeldOutPrompts):
        content = []
        for prompt in load_prompts(config):
            has_more = prompt.before or prompt.tools
            content.append(
                [prompt.turns, prompt.before, prompt.tools] if has_more else prompt.turns
            )
        return digest(content)
    inputs = []
    for task in config.tasks:
        source, revision = source_of(task)
        is_file = Path(source).is_file()
        version = {"digest": file_digest(Path(source))} if is_file else {"revision": revision}
        inputs.append({"task": task.name, "source": source, **version})
    return inputs


def pinned(config: PromptsConfig) -> PromptsConfig:
    """The config, with the commits of the Hub's data sets as revisions if the Hub answers."""
    tasks = []
    for task in config.tasks:
        source, revision = source_of(task)
        commit = None if Path(source).exists() else hub_commit(source, revision)
        tasks.append(replace(task, revision=commit) if commit else task)
    return replace(config, tasks=tuple(tasks))


def encode_turn(prompt: Prompt, answers: Sequence[str], tokenizer: Any, target: Target) -> Tensor:
    """Token ids [1, T] of the conversation up to the turn after these answers."""
    messages = list(prompt.before)
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": prompt.turns[len(answers)]})
    ids = encode_prompt(tokenizer, messages, prompt.tools)
    return torch.tensor([ids], device=target.device)
