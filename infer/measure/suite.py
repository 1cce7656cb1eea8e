"""What a bench asks: rows, samplings and prompts. A row that stands in several places is measured once."""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.measure import BenchConfig, SamplingConfig
from aerie.infer.measure.bench_files import Cell, Sampling, SweepPoint
from aerie.infer.measure.statistics import grouped
from aerie.infer.measure.tasks import Prompt


class Suite(NamedTuple):
    """The rows of the recipe, then those of its sweeps, and what is asked of them."""

    rows: tuple[MethodConfig, ...]
    places: tuple[str, ...]  # of each row in the recipe
    vanilla: int  # the row whose answers are the history of later turns
    main: tuple[Cell, ...]
    points: tuple[SweepPoint, ...]

    def rows_for(
        self, prompts: Sequence[Prompt]
    ) -> dict[Sampling, dict[tuple[str, str], list[int]]]:
        """Per sampling, the rows that answer each prompt, vanilla among them."""
        asked: dict[Sampling, dict[tuple[str, str], list[int]]] = {}
        every = tuple((prompt.task, prompt.prompt_id) for prompt in prompts)
        for cell in (*self.main, *self.points):
            rows = asked.setdefault(cell.sampling, {})
            for key in cell.prompts if isinstance(cell, SweepPoint) else every:
                rows[key] = sorted({*rows.get(key, ()), cell.row, self.vanilla})
        return asked


def suite_of(bench: BenchConfig, prompts: Sequence[Prompt] = ()) -> Suite:
    rows = list(bench.rows)
    places = [f"bench.rows.{number}" for number in range(len(rows))]
    main = [
        Cell(row, **asdict(sampling)) for sampling in bench.sampling for row in range(len(rows))
    ]
    points: list[SweepPoint] = []
    for number, sweep in enumerate(bench.sweeps):
        meant = [
            (one.task, one.prompt_id)
            for one in prompts
            if not sweep.tasks or one.task in sweep.tasks
        ]
        by_task = grouped(meant, lambda key: key[0]).values()
        first = {key for keys in by_task for key in keys[: sweep.num_prompts]}
        asked = tuple(key for key in meant if key in first)  # in the order of the prompts
        named: dict[str, Any] = {"sweep": sweep.name, "key": sweep.vary, "prompts": asked}
        for value in sweep.values:
            place = f"bench.sweeps.{number} ({sweep.vary} {value})"
            samplings, varied = (
                sweep.sampling or bench.sampling,
                [copy.deepcopy(row) for row in sweep.rows],
            )
            if sweep.vary == "temperature":  # of the sampling, not of a row
                warmer = [{**asdict(sampling), "temperature": value} for sampling in samplings]
                samplings = tuple(
                    dict.fromkeys(validate(each, SamplingConfig, place, {}) for each in warmer)
                )
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
            for sampling, method in product(samplings, methods):
                points.append(
                    SweepPoint(rows.index(method), **asdict(sampling), value=value, **named)
                )
    vanilla = next(number for number, row in enumerate(rows) if row.method == "vanilla")
    return Suite(tuple(rows), tuple(places), vanilla, tuple(main), tuple(points))
