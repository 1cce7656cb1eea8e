"""Speedup by task of the rules that end a chain, with the answers' lengths: SVIP (arXiv 2411.18462), table 3."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.aggregate import VANILLA
from infer.figures.policies import policy_tables, published_method

# QwQ 32B Preview with a draft of 1.5B; the last is the mean of the seven columns
PUBLISHED_TASKS = (*(f"math500-level{level}" for level in range(1, 6)), "gpqa_diamond", "aime")
PUBLISHED = {
    "sps": (1.45, 1.50, 1.52, 1.56, 1.56, 1.25, 1.58, 1.49),
    "sps-heuristic": (1.29, 1.26, 1.27, 1.30, 1.33, 1.18, 1.34, 1.28),
    "sps-svip": (1.65, 1.68, 1.75, 1.78, 1.82, 1.52, 1.77, 1.71),
}
PUBLISHED_LENGTHS = (1300, 1300, 1600, 2500, 3600, 3900, 6200)  # tokens of a mean answer


@dataclass(frozen=True)
class ByTask:
    """One rule's parts by task, null where a task failed; the mean is of the tasks' speedups."""

    name: str
    row: dict[str, Any]
    parts: tuple[dict[str, Any] | None, ...]
    mean: float | None
    published: tuple[float | None, ...]  # speedups of the tasks, behind them the mean


@dataclass(frozen=True)
class Reasoning:
    """The chains of one head at one sampling; lengths: new tokens of a mean answer of vanilla."""

    title: str
    tasks: tuple[str, ...]
    lengths: tuple[float | None, ...]
    published_lengths: tuple[int | None, ...]
    rules: tuple[ByTask, ...]


def reasoning_tables(rows: Sequence[dict[str, Any]], by_task: Sequence[dict[str, Any]]) -> list[Reasoning]:
    """A table for each comparison of chains whose answers are to several tasks; by_task names its row in `rows`."""
    tasks = tuple(dict.fromkeys(part["task"] for part in by_task))
    cells = {(part["row"], part["task"]): part for part in by_task if part["status"] == "ok"}
    places = {id(row): place for place, row in enumerate(rows)}
    found = []
    for table in policy_tables(rows) if tasks else []:
        if table.chain:
            sampling = _sampling(table.rules[0].row)
            vanilla = next(
                (place for place, row in enumerate(rows) if row["method"] == VANILLA and _sampling(row) == sampling), -1
            )
            rules = tuple(
                _by_task(policy.name, policy.row, [cells.get((places[id(policy.row)], task)) for task in tasks])
                for policy in table.rules
            )
            lengths = tuple(_length(cells.get((vanilla, task))) for task in tasks)
            known = dict(zip(PUBLISHED_TASKS, PUBLISHED_LENGTHS, strict=True))
            found.append(Reasoning(table.title, tasks, lengths, tuple(known.get(task) for task in tasks), rules))
    return found


def _by_task(name: str, row: dict[str, Any], parts: Sequence[dict[str, Any] | None]) -> ByTask:
    speedups = [part["speedup"] for part in parts if part is not None and part["speedup"] is not None]
    mean = sum(speedups) / len(speedups) if len(speedups) == len(parts) else None
    figures = PUBLISHED.get(published_method(row) or "", ())
    known = dict(zip((*PUBLISHED_TASKS, ""), figures, strict=False))
    tasks = [None if part is None else part["task"] for part in parts]
    published = tuple(None if task is None else known.get(task) for task in tasks)
    whole = set(PUBLISHED_TASKS) <= {task for task in tasks if task is not None}
    return ByTask(name, row, tuple(parts), mean, (*published, known.get("") if whole else None))


def _length(part: dict[str, Any] | None) -> float | None:
    return None if part is None else part["new_tokens"] / part["prompts"]


def _sampling(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["temperature"], row["top_k"], row["top_p"]
