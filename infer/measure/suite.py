"""What a bench asks: which rows are decoded with which sampling on which prompts, sweeps expanded into rows.

A sweep's row that equals one of the bench's, or another sweep's, is measured once and shown in both.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.measure import BenchConfig, SamplingConfig, SweepConfig
from aerie.infer.measure.record import (
    Asked,
    AskedCell,
    AskedPoint,
)
from aerie.infer.measure.tasks import Prompt
from aerie.model.target import Target

TEMPERATURE = "temperature"  # the one key of a sweep that is of the sampling, not of a row


@dataclass(frozen=True)
class Cell:
    """One row at one sampling, on all prompts or on the first ones of some tasks."""

    row: int  # of Suite.rows
    sampling: SamplingConfig
    tasks: tuple[str, ...] = ()
    num_prompts: int | None = None
    point: tuple[str, str, Any] | None = None  # sweep, key and value; null: no point of a sweep

    def prompts(self, prompts: Sequence[Prompt]) -> tuple[tuple[str, str], ...]:
        """(task, prompt_id) of the prompts that the cell asks."""
        counts: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            counts[prompt.task] = number = counts.get(prompt.task, 0) + 1
            is_asked = not self.tasks or prompt.task in self.tasks
            if is_asked and (self.num_prompts is None or number <= self.num_prompts):
                chosen.append((prompt.task, prompt.prompt_id))
        return tuple(chosen)


@dataclass(frozen=True)
class Suite:
    """The rows of the recipe and, behind them, those of its sweeps; and what is asked of them."""

    rows: tuple[MethodConfig, ...]
    places: tuple[str, ...]  # of each row in the recipe, for messages
    main: tuple[Cell, ...]
    points: tuple[Cell, ...]
    baselines: tuple[Cell, ...]  # vanilla, where a sweep samples as the bench does not

    @property
    def vanilla(self) -> int:
        """The row that every speedup is against, and whose answers are the history of later turns."""
        return next(number for number, row in enumerate(self.rows) if row.method == "vanilla")

    def rows_for(self, prompts: Sequence[Prompt]) -> dict[SamplingConfig, dict[tuple[str, str], list[int]]]:
        """Per sampling, the rows that answer each prompt; a prompt that no row is asked is left out."""
        asked: dict[SamplingConfig, dict[tuple[str, str], list[int]]] = {}
        for cell in (*self.main, *self.points, *self.baselines):
            rows = asked.setdefault(cell.sampling, {})
            for key in cell.prompts(prompts):
                rows[key] = sorted({*rows.get(key, ()), cell.row})
        return asked


def suite_of(bench: BenchConfig) -> Suite:
    """The suite of a recipe; UserError, which names the place, for a key or a value that no row has."""
    rows = list(bench.rows)
    places = [f"bench.rows.{number}" for number in range(len(rows))]
    main = tuple(Cell(row, sampling) for sampling in bench.sampling for row in range(len(rows)))
    vanilla = next(number for number, row in enumerate(rows) if row.method == "vanilla")
    points: list[Cell] = []
    baselines: dict[Cell, None] = {}
    for number, sweep in enumerate(bench.sweeps):
        for value in sweep.values:
            place = f"bench.sweeps.{number} ({sweep.vary} {value})"
            for row, sampling in _varied(sweep, value, bench.sampling, place):
                if row not in rows:
                    rows.append(row)
                    places.append(place)
                cell = Cell(rows.index(row), sampling, sweep.tasks, sweep.num_prompts)
                points.append(replace(cell, point=(sweep.name, sweep.vary, value)))
                if sampling not in bench.sampling:
                    baselines[replace(cell, row=vanilla)] = None
    return Suite(tuple(rows), tuple(places), main, tuple(points), tuple(baselines))


def _varied(
    sweep: SweepConfig, value: Any, samplings: Sequence[SamplingConfig], place: str
) -> list[tuple[MethodConfig, SamplingConfig]]:
    """The sweep's rows with the value, at each of its samplings."""
    used = list(sweep.sampling or samplings)
    if sweep.vary == TEMPERATURE:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UserError(f"{place}: a temperature is a number, 0 or more")
        used = list(dict.fromkeys(replace(sampling, temperature=float(value)) for sampling in used))
        rows = [validate(row, MethodConfig, place, {}) for row in sweep.rows]
    else:
        rows = [with_value(row, sweep.vary, value, place) for row in sweep.rows]
    return [(row, sampling) for sampling in used for row in rows]


def with_value(row: dict[str, Any], key: str, value: Any, place: str) -> MethodConfig:
    """A recipe's row with one dotted key set; UserError, naming the place, for what a recipe could not say there."""
    values = section = copy.deepcopy(row)
    *parents, leaf = key.split(".")
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise UserError(f"{place}: {parent} is not a section of a row")
    section[leaf] = value
    return validate(values, MethodConfig, place, {})


def asked_of(bench: BenchConfig, prompts: Sequence[Prompt], target: Target) -> Asked:
    """What the bench asks of these prompts."""
    suite = suite_of(bench)
    main = tuple(AskedCell(cell.row, **asdict(cell.sampling)) for cell in suite.main)
    points = tuple(
        AskedPoint(cell.row, **asdict(cell.sampling), sweep=sweep, key=key, value=value, prompts=cell.prompts(prompts))
        for cell in suite.points
        for sweep, key, value in [cell.point or ("", "", None)]
    )
    return Asked(main, points, bench.by_task, bench.contexts, getattr(target.config, "max_position_embeddings", None))


def plan_text(bench: BenchConfig) -> str:
    """What a bench would measure, on one line."""
    suite, prompts = suite_of(bench), bench.prompts
    counts = [prompts.num_prompts if task.num_prompts is None else task.num_prompts for task in prompts.tasks]
    counts = counts or [prompts.num_prompts]
    many = "all" if None in counts else str(sum(count or 0 for count in counts))
    named = f" of {', '.join(task.name for task in prompts.tasks)}" if prompts.tasks else ""
    sweeps = f", {len(bench.sweeps)} sweeps of {len(suite.points)} points" if bench.sweeps else ""
    return (
        f"bench: {len(bench.rows)} rows x {len(bench.sampling)} samplings x {many} prompts{named}, at most "
        f"{prompts.max_new_tokens} new tokens a turn{sweeps}"
    )
