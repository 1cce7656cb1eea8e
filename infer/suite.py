"""What a bench asks: which rows are decoded with which sampling on which prompts, sweeps expanded into rows.

A sweep's row that equals one of the bench's, or another sweep's, is measured once and shown in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.config import BenchConfig, MethodConfig, SamplingConfig, SweepConfig
from infer.tasks import Prompt
from model.errors import UserError
from model.recipe import STRICT, as_dict, validate

TEMPERATURE = "temperature"
PromptKey = tuple[str, str]


@dataclass(frozen=True)
class Cell:
    """One row at one sampling, on all prompts or on the first ones of some tasks."""

    row: int  # of Suite.rows
    sampling: SamplingConfig
    tasks: tuple[str, ...] = ()
    num_prompts: int | None = None

    def prompts(self, prompts: Sequence[Prompt]) -> list[PromptKey]:
        """(task, prompt_id) of the prompts that the cell asks."""
        counts: dict[str, int] = {}
        found = []
        for prompt in prompts:
            counts[prompt.task] = number = counts.get(prompt.task, 0) + 1
            in_time = self.num_prompts is None or number <= self.num_prompts
            if in_time and (not self.tasks or prompt.task in self.tasks):
                found.append((prompt.task, prompt.prompt_id))
        return found


@dataclass(frozen=True)
class Point:
    """One value of a sweep, for one row at one sampling."""

    sweep: str
    key: str
    value: Any
    cell: Cell


@dataclass(frozen=True)
class Suite:
    """The rows of the recipe and, behind them, those of its sweeps."""

    rows: tuple[MethodConfig, ...]
    places: tuple[str, ...]  # of each row in the recipe, for messages
    main: tuple[Cell, ...]
    points: tuple[Point, ...]
    baselines: tuple[Cell, ...]  # vanilla, where a sweep samples as the bench does not

    @property
    def vanilla(self) -> int:
        """The row that every speedup is against, and whose answers are the history of later turns."""
        return next(number for number, row in enumerate(self.rows) if row.method == "vanilla")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Everything that is measured; a cell may be part of another."""
        return (*self.main, *(point.cell for point in self.points), *self.baselines)

    @property
    def samplings(self) -> tuple[SamplingConfig, ...]:
        return tuple(dict.fromkeys(cell.sampling for cell in self.cells))

    def rows_for(self, sampling: SamplingConfig, prompts: Sequence[Prompt]) -> dict[PromptKey, list[int]]:
        """The rows that answer each prompt with this sampling, vanilla among them; none: the prompt is left out."""
        asked: dict[PromptKey, set[int]] = {(prompt.task, prompt.prompt_id): set() for prompt in prompts}
        for cell in self.cells:
            if cell.sampling == sampling:
                for key in cell.prompts(prompts):
                    asked[key].add(cell.row)
        return {key: sorted(rows) for key, rows in asked.items() if rows}


@dataclass(frozen=True)
class AskedCell:
    """A row at a sampling that stands among the rows of summary.json."""

    __pydantic_config__ = STRICT
    row: int
    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True)
class AskedPoint(AskedCell):
    """The same for a sweep, on these prompts alone."""

    sweep: str
    key: str
    value: Any
    prompts: tuple[PromptKey, ...]


@dataclass(frozen=True)
class Asked:
    """What a bench asked, for whoever reads its records (suite.json)."""

    __pydantic_config__ = STRICT
    main: tuple[AskedCell, ...]
    points: tuple[AskedPoint, ...] = ()
    by_task: bool = False
    contexts: tuple[int, ...] = ()
    max_context: int | None = None  # what the target was trained for


def asked_of(bench: BenchConfig, prompts: Sequence[Prompt], max_context: int | None) -> Asked:
    """What the bench asks of these prompts."""
    suite = suite_of(bench)
    main = tuple(AskedCell(cell.row, **as_dict(cell.sampling)) for cell in suite.main)
    points = tuple(
        AskedPoint(
            each.cell.row, **as_dict(each.cell.sampling),
            sweep=each.sweep, key=each.key, value=each.value, prompts=tuple(each.cell.prompts(prompts)),
        )
        for each in suite.points
    )  # fmt: skip
    return Asked(main, points, bench.by_task, bench.contexts, max_context)


def suite_of(bench: BenchConfig) -> Suite:
    """The suite of a recipe; UserError, which names the place, for a key or a value that no row has."""
    rows = list(bench.rows)
    places = [f"bench.rows.{number}" for number in range(len(rows))]
    main = tuple(Cell(row, sampling) for sampling in bench.sampling for row in range(len(rows)))
    vanilla = next(number for number, row in enumerate(rows) if row.method == "vanilla")
    points: list[Point] = []
    baselines: dict[Cell, None] = {}
    for number, sweep in enumerate(bench.sweeps):
        for value in sweep.values:
            place = f"bench.sweeps.{number} ({sweep.vary} {value})"
            for asked, sampling in _varied(sweep, value, bench.sampling, place):
                if asked not in rows:
                    rows.append(asked)
                    places.append(place)
                points.append(Point(sweep.name, sweep.vary, value, _cell(rows.index(asked), sampling, sweep)))
                if sampling not in bench.sampling:
                    baselines[_cell(vanilla, sampling, sweep)] = None
    return Suite(tuple(rows), tuple(places), main, tuple(points), tuple(baselines))


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


def check_tasks(bench: BenchConfig, prompts: Sequence[Prompt]) -> None:
    """UserError for a sweep over a task that no prompt is of."""
    known = list(dict.fromkeys(prompt.task for prompt in prompts))
    for number, sweep in enumerate(bench.sweeps):
        foreign = [task for task in sweep.tasks if task not in known]
        if foreign:
            raise UserError(f"bench.sweeps.{number}: no prompt is of task {foreign[0]!r}; tasks are {', '.join(known)}")


def _cell(row: int, sampling: SamplingConfig, sweep: SweepConfig) -> Cell:
    return Cell(row, sampling, sweep.tasks, sweep.num_prompts)


def _varied(
    sweep: SweepConfig, value: Any, samplings: Sequence[SamplingConfig], place: str
) -> list[tuple[MethodConfig, SamplingConfig]]:
    """The sweep's rows with the value, at each of its samplings."""
    used = list(sweep.sampling or samplings)
    if sweep.vary == TEMPERATURE:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UserError(f"{place}: a temperature is a number, 0 or more")
        used = list(dict.fromkeys(replace(sampling, temperature=float(value)) for sampling in used))
        return [(row, sampling) for sampling in used for row in sweep.rows]
    return [(with_value(row, sweep.vary, value, place), sampling) for sampling in used for row in sweep.rows]


def with_value(row: MethodConfig, key: str, value: Any, place: str) -> MethodConfig:
    """The row with one dotted key set; UserError, naming the place, for what a recipe could not say there either."""
    values = as_dict(row)
    *parents, leaf = key.split(".")
    section = values
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise UserError(f"{place}: {parent} is not a section of a row")
    section[leaf] = value
    return validate(values, MethodConfig, place, {})
