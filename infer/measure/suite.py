"""Settles the rows, samplings and prompts of a bench, which measures equal rows only once."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from aerie.configs.errors import UserError
from aerie.configs.read import set_key, validate
from aerie.configs.schema.decode import METHODS, BenchRow, MethodConfig, ServedConfig
from aerie.configs.schema.measure import BenchConfig, SamplingConfig, SweepConfig
from aerie.data.rendering import trained_length
from aerie.infer.decode.find_head import check_levels, find_head, kind_at
from aerie.infer.measure.bench_files import Cell, Sampling, SuiteFile, SweepPoint
from aerie.infer.measure.statistics import grouped
from aerie.infer.measure.tasks import Prompt
from aerie.model.hub import is_on_hub

ROW: Any = BenchRow  # mypy does not take this union for a type


@dataclass(frozen=True)
class SettledRow:
    """A row with its final tree and head."""

    # A method has its published values, and a tree no deeper than the head drafts.
    method: MethodConfig | ServedConfig
    head: str | None = None  # its directory or Hub id: the row's, --head, or the run's
    kind: str | None = None  # the head's


@dataclass(frozen=True)
class RunHeads:
    """The heads that a row without a head of its own can use."""

    directory: Path  # of the run's heads, a folder for each kind
    kind: str  # the recipe's kind, which comes first
    trained: Path  # the head that the recipe trains
    option: Path | None = None  # --head
    is_plan: bool = False  # True: download nothing

    def settle(self, row: MethodConfig | ServedConfig, location: str) -> SettledRow:
        """The row with a head that fits its method and a tree that fits the head, or UserError."""
        if isinstance(row, ServedConfig):
            return SettledRow(row)
        kinds = METHODS[row.method].heads
        if self.is_plan and kinds and row.head is not None and is_on_hub(row.head):
            return SettledRow(row, row.head)
        first = self.option or (self.trained if self.kind in kinds else None)
        head = find_head(row, self.directory, self.kind, first, location)
        return fit_to_head(row, head, location)


def fit_to_head(row: MethodConfig, head: str | None, location: str) -> SettledRow:
    return SettledRow(check_levels(row, head, location), head, kind_at(head) if head else None)


class SweptRow(NamedTuple):
    """A row of the suite at one value of a sweep."""

    sweep: int  # its number in bench.sweeps
    value: Any
    row: int  # its number in Suite.rows
    sampling: SamplingConfig


class Suite(NamedTuple):
    config: BenchConfig
    rows: tuple[SettledRow, ...]  # the bench's own, then those of its sweeps
    swept: tuple[SweptRow, ...] = ()

    @property
    def vanilla(self) -> int:
        """The row whose answers later turns of a conversation go on from."""
        return next(n for n, row in enumerate(self.rows) if row.method.method == "vanilla")

    @property
    def trained_lengths(self) -> dict[int, int]:
        """By row: the tokens of the longest text that its head was trained on, if known."""
        lengths = {n: trained_length(row.head) for n, row in enumerate(self.rows) if row.head}
        return {number: length for number, length in lengths.items() if length is not None}


def read_suite(
    bench: BenchConfig, settle: Callable[[MethodConfig | ServedConfig, str], SettledRow]
) -> Suite:
    """The bench's rows and its sweeps' rows, each settled by `settle`."""
    rows = [settle(row, f"bench.rows.{number}") for number, row in enumerate(bench.rows)]
    bench = replace(bench, rows=tuple(row.method for row in rows))
    swept = []
    for number, sweep in enumerate(bench.sweeps):
        for value in sweep.values:
            location = f"bench.sweeps.{number} ({sweep.vary} {value})"
            samplings = sweep.sampling or bench.sampling
            values = copy.deepcopy(sweep.rows)
            if sweep.vary == "temperature":  # a key of the sampling, not of a row
                heated = (
                    validate(
                        asdict(sampling) | {"temperature": value}, SamplingConfig, location, {}
                    )
                    for sampling in samplings
                )
                samplings = tuple(dict.fromkeys(heated))  # without repeats
            else:
                for row_values in values:
                    set_key(row_values, sweep.vary, value, location)
            numbers = []
            for row_values in values:
                row = settle(validate(row_values, ROW, location, {}), location)
                if row not in rows:
                    rows.append(row)
                numbers.append(rows.index(row))
            for sampling, row_number in product(samplings, numbers):
                swept.append(SweptRow(number, value, row_number, sampling))
    return Suite(bench, tuple(rows), tuple(swept))


def suite_file(suite: Suite, prompts: Sequence[Prompt], max_context: int | None) -> SuiteFile:
    """The content of suite.json: each row's samplings and prompts."""
    bench = suite.config
    main = [
        Cell(row, **asdict(sampling))
        for sampling, row in product(bench.sampling, range(len(bench.rows)))
    ]
    prompts_of = [
        sweep_prompts(sweep, number, prompts) for number, sweep in enumerate(bench.sweeps)
    ]
    points = [
        SweepPoint(
            swept.row,
            **asdict(swept.sampling),
            sweep=bench.sweeps[swept.sweep].name,
            key=bench.sweeps[swept.sweep].vary,
            value=swept.value,
            prompts=prompts_of[swept.sweep],
        )
        for swept in suite.swept
    ]
    return SuiteFile(tuple(main), tuple(points), bench.by_task, bench.contexts, max_context)


def sweep_prompts(
    sweep: SweepConfig, number: int, prompts: Sequence[Prompt]
) -> tuple[tuple[str, str], ...]:
    """(task, prompt_id) of the first prompts of each of the sweep's tasks, in order."""
    tasks = grouped([prompt.key for prompt in prompts], lambda key: key[0])
    for task in sweep.tasks:
        if task not in tasks:
            raise UserError(
                f"bench.sweeps.{number}: bench.prompts has no task {task!r}; "
                f"its tasks are {', '.join(tasks)}"
            )
    chosen = {key for task in sweep.tasks or tasks for key in tasks[task][: sweep.num_prompts]}
    return tuple(prompt.key for prompt in prompts if prompt.key in chosen)


def rows_by_prompt(
    file: SuiteFile, vanilla: int, prompts: Sequence[Prompt]
) -> dict[Sampling, dict[tuple[str, str], list[int]]]:
    """For each sampling, the rows that answer each (task, prompt_id), vanilla's included."""
    rows_of: dict[Sampling, dict[tuple[str, str], list[int]]] = {}
    for cell in (*file.main, *file.points):
        rows = rows_of.setdefault(cell.sampling, {})
        keys = cell.prompts if isinstance(cell, SweepPoint) else [prompt.key for prompt in prompts]
        for key in keys:
            rows[key] = sorted({*rows.get(key, ()), cell.row, vanilla})
    return rows_of
