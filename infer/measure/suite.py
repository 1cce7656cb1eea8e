"""What a bench asks: which rows are decoded with which sampling on which prompts, sweeps expanded into rows.

A sweep's row that equals one of the bench's, or another sweep's, is measured once and shown in both.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.measure import BenchConfig, SamplingConfig
from aerie.infer.measure.record import Asked, AskedCell, AskedPoint
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
        counts, chosen = Counter[str](), []
        for prompt in prompts:
            counts[prompt.task] += 1
            is_asked = not self.tasks or prompt.task in self.tasks
            if is_asked and (self.num_prompts is None or counts[prompt.task] <= self.num_prompts):
                chosen.append((prompt.task, prompt.prompt_id))
        return tuple(chosen)


@dataclass(frozen=True)
class Suite:
    """The rows of the recipe and, behind them, those of its sweeps; and what is asked of them."""

    rows: tuple[MethodConfig, ...]
    places: tuple[str, ...]  # of each row in the recipe, for messages
    vanilla: int  # the row that every speedup is against, and whose answers are the history of later turns
    main: tuple[Cell, ...]
    points: tuple[Cell, ...]
    baselines: tuple[Cell, ...]  # vanilla, where a sweep samples as the bench does not

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
    vanilla = next(number for number, row in enumerate(rows) if row.method == "vanilla")
    main = tuple(Cell(row, sampling) for sampling in bench.sampling for row in range(len(rows)))
    points: list[Cell] = []
    baselines: dict[Cell, None] = {}
    for number, sweep in enumerate(bench.sweeps):
        for value in sweep.values:
            place = f"bench.sweeps.{number} ({sweep.vary} {value})"
            samplings, varied = sweep.sampling or bench.sampling, [copy.deepcopy(row) for row in sweep.rows]
            if sweep.vary == TEMPERATURE:
                warmer = [{**asdict(sampling), TEMPERATURE: value} for sampling in samplings]
                samplings = tuple(dict.fromkeys(validate(each, SamplingConfig, place, {}) for each in warmer))
            else:
                for row in varied:
                    _set(row, sweep.vary, value, place)
            methods = [validate(row, MethodConfig, place, {}) for row in varied]
            for sampling in samplings:
                for method in methods:
                    if method not in rows:
                        rows.append(method)
                        places.append(place)
                    cell = Cell(rows.index(method), sampling, sweep.tasks, sweep.num_prompts)
                    points.append(replace(cell, point=(sweep.name, sweep.vary, value)))
                    if sampling not in bench.sampling:
                        baselines[replace(cell, row=vanilla)] = None
    return Suite(tuple(rows), tuple(places), vanilla, main, tuple(points), tuple(baselines))


def _set(row: dict[str, Any], key: str, value: Any, place: str) -> None:
    """Sets one dotted key of a recipe's row."""
    *parents, leaf = key.split(".")
    for parent in parents:
        row[parent] = {} if row.get(parent) is None else row[parent]
        row = row[parent]
        if not isinstance(row, dict):
            raise UserError(f"{place}: {parent} is not a section of a row")
    row[leaf] = value


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
