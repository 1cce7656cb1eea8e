"""What a bench asks: rows, samplings and prompts. A row that stands in several places is measured once."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.measure import BenchConfig, SamplingConfig, SweepConfig
from aerie.infer.measure.record import Asked, AskedCell, AskedPoint
from aerie.infer.measure.tasks import Prompt
from aerie.model.target import Target


@dataclass(frozen=True)
class Cell:
    """One row at one sampling, of the bench or for one value of a sweep."""

    row: int  # of Suite.rows
    sampling: SamplingConfig
    sweep: SweepConfig | None = None
    value: Any = None

    def prompts(self, prompts: Sequence[Prompt]) -> tuple[tuple[str, str], ...]:
        """(task, prompt_id) of the prompts that the cell asks."""
        counts, chosen = Counter[str](), []
        for prompt in prompts:
            counts[prompt.task] += 1
            tasks, most = (self.sweep.tasks, self.sweep.num_prompts) if self.sweep else ((), None)
            if (not tasks or prompt.task in tasks) and (most is None or counts[prompt.task] <= most):
                chosen.append((prompt.task, prompt.prompt_id))
        return tuple(chosen)


@dataclass(frozen=True)
class Suite:
    """The rows of the recipe, behind them those of its sweeps, and what is asked of them."""

    rows: tuple[MethodConfig, ...]
    places: tuple[str, ...]  # of each row in the recipe
    vanilla: int  # whose answers are the history of later turns
    main: tuple[Cell, ...]
    points: tuple[Cell, ...]

    def rows_for(self, prompts: Sequence[Prompt]) -> dict[SamplingConfig, dict[tuple[str, str], list[int]]]:
        """Per sampling, the rows that answer each prompt, vanilla among them."""
        asked: dict[SamplingConfig, dict[tuple[str, str], list[int]]] = {}
        for cell in (*self.main, *self.points):
            rows = asked.setdefault(cell.sampling, {})
            for key in cell.prompts(prompts):
                rows[key] = sorted({*rows.get(key, ()), cell.row, self.vanilla})
        return asked


def suite_of(bench: BenchConfig) -> Suite:
    rows = list(bench.rows)
    places = [f"bench.rows.{number}" for number in range(len(rows))]
    main = [Cell(row, sampling) for sampling in bench.sampling for row in range(len(rows))]
    points: list[Cell] = []
    for number, sweep in enumerate(bench.sweeps):
        for value in sweep.values:
            place = f"bench.sweeps.{number} ({sweep.vary} {value})"
            samplings, varied = sweep.sampling or bench.sampling, [copy.deepcopy(row) for row in sweep.rows]
            if sweep.vary == "temperature":  # of the sampling, not of a row
                warmer = [{**asdict(sampling), "temperature": value} for sampling in samplings]
                samplings = tuple(dict.fromkeys(validate(each, SamplingConfig, place, {}) for each in warmer))
            else:
                for row in varied:
                    *parents, leaf = sweep.vary.split(".")
                    for parent in parents:
                        row[parent] = {} if row.get(parent) is None else row[parent]
                        row = row[parent]
                        if not isinstance(row, dict):
                            raise UserError(f"{place}: {parent} is not a section of a row")
                    row[leaf] = value
            methods = [validate(row, MethodConfig, place, {}) for row in varied]
            for method in methods:
                if method not in rows:
                    rows.append(method)
                    places.append(place)
            points += [Cell(rows.index(each), sampling, sweep, value) for sampling in samplings for each in methods]
    vanilla = next(number for number, row in enumerate(rows) if row.method == "vanilla")
    return Suite(tuple(rows), tuple(places), vanilla, tuple(main), tuple(points))


def asked_of(bench: BenchConfig, prompts: Sequence[Prompt], target: Target) -> Asked:
    suite = suite_of(bench)
    main = tuple(AskedCell(cell.row, **asdict(cell.sampling)) for cell in suite.main)
    points = []
    for cell in suite.points:
        assert cell.sweep is not None
        named = {"sweep": cell.sweep.name, "key": cell.sweep.vary, "value": cell.value}
        points.append(AskedPoint(cell.row, **asdict(cell.sampling), **named, prompts=cell.prompts(prompts)))
    longest = getattr(target.config, "max_position_embeddings", None)
    return Asked(main, tuple(points), bench.by_task, bench.contexts, longest)
