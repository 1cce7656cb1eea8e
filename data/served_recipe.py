"""What `aerie init --server` puts into a recipe: who answers, who gives states, what is measured.

The servers answer the data's questions, and a head is trained on these answers. The held-out rows
of training are then token ids, not questions. So `aerie init` first draws the questions to measure
with from the data, and `aerie distill` asks none that is like them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.recipe import Recipe
from aerie.data.inputs import hashed_number, is_here
from aerie.data.questions import read_question
from aerie.data.rows import read_rows
from aerie.data.servers import command_of_stage, urls_of_stage
from aerie.data.values import UnusableRow

TEMPERATURE = 0.8  # of the answers (SpecForge's regeneration script)
# vLLM's CPU build (0.32) stops when it samples with a seed and reads the prompt in two steps.
CPU_TEMPERATURE = 0.0
MOST_ANSWER_TOKENS = 2048
LEAST_QUESTIONS = 3  # one for bench, one for calibrate, one to learn from
QUESTIONS_SHARE = 0.05  # of the data's questions, at most, for each of bench and calibrate
TASKS_OF_THE_HUB = {"calibrate": "alpaca", "bench": "mt_bench"}  # if the data are on the Hub


class Servers(NamedTuple):
    """The servers that the command line names."""

    answers: list[str]  # URLs
    states: list[str]  # URLs; empty: the same servers, restarted after the answers
    folder: str | None  # to which the servers write states; None: RUN/states


def with_servers(
    requested: dict[str, Any], servers: Servers, run: str, context: int
) -> dict[str, Any]:
    """The requested sections, with who answers, what is trained on, and who gives the states.

    Requested values win over these. context: of the target, in tokens.
    """
    data = dict(requested["data"])
    source = {}
    if "system_prompt" in data:  # the answered rows will hold it
        source["system_prompt"] = data.pop("system_prompt")
    if "prompt_field" in data:
        source |= {"kind": "prompts", "field": data.pop("prompt_field")}
        data.pop("completion_field", None)
    if "limit" in data and len(data["conversations"]) == 1:  # it limits what is asked
        source["num_rows"] = data.pop("limit")
    answers = list(map(_of_api, servers.answers))
    distill = {
        "sources": [{"path": path, **source} for path in data["conversations"]],
        "server": {"urls": answers},
        "sampling": {
            "temperature": TEMPERATURE if torch.cuda.is_available() else CPU_TEMPERATURE,
            # Question and answer share the context.
            "max_tokens": min(MOST_ANSWER_TOKENS, context // 2),
        },
    }
    data["conversations"] = [f"{run}/distilled/conversations.jsonl"]
    states = {
        "urls": list(map(_of_api, servers.states)) or answers,
        "states": servers.folder or f"{run}/states",
    }
    features = requested.get("features", {})
    for section in (requested.get("distill", {}), features):
        if not isinstance(section, dict) or section.get("server", servers) is None:
            raise UserError(
                "--server: sets distill.server and features.server; do not set one of them to null"
            )
    return {
        **requested,
        "data": data,
        "distill": _deep_union(distill, requested.get("distill", {})),
        "features": {**features, "server": _deep_union(states, features.get("server") or {})},
    }


def _of_api(url: str) -> str:
    """A server's address; its API's path is added if the address has no path."""
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


def _deep_union(values: dict[str, Any], winning: dict[str, Any]) -> dict[str, Any]:
    """Both mappings, joined section by section; the values of `winning` win."""
    merged = values | winning
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(winning.get(name), dict):
            merged[name] = _deep_union(value, winning[name])
    return merged


# --- what is measured -----------------------------------------------------------------------------


def draw_questions(
    names: Sequence[str], field: str | None, most: int, longest: int
) -> tuple[list[Any], list[Any]]:
    """Two JSON-ready lists of questions, with none in common; UserError if there are too few.

    most: questions in each list. longest: characters of a question.
    """
    questions = dict[str, dict[str, Any]]()
    num_read = 0
    for row in (row for name in names for row in read_rows(name)):
        num_read += 1
        try:
            asked = read_question(row.value, field)
        except UnusableRow:
            continue
        messages = [*asked.before, {"role": "user", "content": asked.turns[0]}]
        text = json.dumps(messages, ensure_ascii=False)
        if asked.tools is None and len(text) <= longest:
            questions[text] = {"category": "own", "messages": messages}
    if len(questions) < LEAST_QUESTIONS:
        raise UserError(
            f"{', '.join(names)}: {len(questions)} of {num_read:,} rows ask a question of at most "
            f"{longest:,} characters without tools; --server needs {LEAST_QUESTIONS} or more"
        )
    drawn = sorted(questions, key=lambda text: hashed_number(text, bits=64))
    count = max(1, min(most, int(QUESTIONS_SHARE * len(drawn))))
    numbered = [
        {"question_id": number, **questions[text]}
        for number, text in enumerate(drawn[: 2 * count], start=1)
    ]
    return numbered[:count], numbered[count:]


def measuring_prompts(
    data: dict[str, Any], out: Path, most: int, longest: int
) -> tuple[dict[str, Any], dict[Path, str]]:
    """`prompts` of calibrate and of bench, and the texts of the files that they name.

    data: as the command line gives it. out: the recipe's path. most, longest: see draw_questions.
    """
    prompts = dict[str, Any]()
    files = dict[Path, str]()
    if not all(map(is_here, data["conversations"])):
        return {name: {"tasks": [task]} for name, task in TASKS_OF_THE_HUB.items()}, files
    drawn = draw_questions(data["conversations"], data.get("prompt_field"), most, longest)
    for name, questions in zip(TASKS_OF_THE_HUB, drawn, strict=True):
        path = out.with_suffix(f".{name}.jsonl")
        prompts[name] = {"path": str(path)}
        if data.get("system_prompt"):
            prompts[name]["system_prompt"] = data["system_prompt"]
        lines = [json.dumps(question, ensure_ascii=False) for question in questions]
        files[path] = "".join(f"{line}\n" for line in lines)
    return prompts, files


# --- how servers are started ----------------------------------------------------------------------


def start_lines(recipe: Recipe, has_gpu: bool) -> list[str]:
    """Lines that say which servers to start, by which commands, and when."""
    lines = []
    if not has_gpu:  # as on this machine
        lines.append(
            "servers without a GPU can run this recipe: answers are greedy, and vLLM's CPU build "
            "writes states by aerie's connector"
        )
    stages = [stage for stage in ("distill", "features", "train") if urls_of_stage(recipe, stage)]
    answers, states = (urls_of_stage(recipe, stage) for stage in stages)
    are_same = set(answers) == set(states)
    for stage, urls in zip(stages, (answers, states), strict=True):
        what = "answers" if stage == "distill" else "hidden states"
        when = " (start them now, or when aerie run asks for them)"
        if stage != "distill" and are_same:
            when = " (restart the same servers when all answers are there)"
        lines.append(f"{what} from {', '.join(urls)}{when}:")
        commands = [command_of_stage(recipe, stage, url) for url in urls]
        lines += [f"  {command}" for command in dict.fromkeys(commands)]
    return lines
