"""Rows of a bench as grids: by the values of a sweep, by context length, by task."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.bench_files import SummaryRow
from aerie.infer.measure.statistics import grouped, told_apart
from aerie.infer.report.tables import SummaryRows, label, sampling_text, tree_text

LEVELS = "tree.levels"  # the key of a sweep over depths or lengths


class Line(NamedTuple):
    """One line of a grid; `value` of each point is its place along the line."""

    label: str
    points: tuple[Any, ...]  # SummaryRow, or a point that a paper published
    note: str = ""

    def at(self, value: Any) -> Any:
        return next((point for point in self.points if point.value == value), None)


class Grid(NamedTuple):
    title: str
    lines: tuple[Line, ...]
    values: tuple[Any, ...]
    key: str = ""  # what varies in a sweep
    picture: str = ""  # its name, if there is one


def is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def sweep_grids(sweeps: SummaryRows) -> list[Grid]:
    """A grid per sweep; those over numbers have a picture."""
    own_values = [point for point in sweeps if point.sweep != CONTEXT]
    grids = []
    for number, (name, points) in enumerate(grouped(own_values, lambda p: str(p.sweep)).items()):
        values = values_along(points)
        picture = f"sweep-{number}" if is_numeric(values) and len(values) > 1 else ""
        grids.append(Grid(name, sweep_lines(points), values, str(points[0].key), picture))
    return grids


def values_along(points: SummaryRows) -> tuple[Any, ...]:
    """The different values of the points; numbers in ascending order."""
    values = list({repr(point.value): point.value for point in points}.values())
    return tuple(sorted(values) if is_numeric(values) else values)


def sweep_lines(points: SummaryRows) -> tuple[Line, ...]:
    """A line per row of a sweep: its first at every value, its second, and so on.

    A line's label has the method and, of the other words that all its points share, those that
    not all lines share.
    """
    by_value = grouped(points, lambda point: repr(point.value)).values()
    lines = [tuple(filter(None, members)) for members in zip_longest(*by_value)]
    words = []
    for line in lines:
        first, *rest = [describing_words(point) for point in line]
        words.append([word for word in first if all(word in words_there for words_there in rest)])
    of_all_lines = set.intersection(*map(set, words))
    labels = []
    for method, *details in words:
        labels.append(", ".join([method, *(word for word in details if word not in of_all_lines)]))
    return tuple(map(Line, labels, lines))


def describing_words(point: SummaryRow) -> list[str]:
    """The method, what it does not have from its paper, head and sampling, and the tree's sizes."""
    about = f"{point.head_path or point.head} head, T {sampling_text(point)}"
    if point.tree is None:
        return [point.method, *about.split(", ")]
    sizes = replace(point.tree, variant="").words
    words = ", ".join(filter(None, (point.tree.variant, about, sizes)))
    return [point.method, *words.split(", ")]


def context_grids(sweeps: SummaryRows) -> dict[str, Grid]:
    """Grids 'cumulative' (up to a length) and 'bucket' (from one length to the next), or none.

    Rows whose answers reach more lengths stand first, then the faster ones.
    """
    points = [point for point in sweeps if point.sweep == CONTEXT and point.tree is not None]
    if not points:
        return {}
    points = told_apart(points)
    rows = list(grouped(points, lambda point: label(point, points)).items())
    rows.sort(key=lambda row: (len(row[1]), row[1][-1].speedup or 0.0), reverse=True)
    values = values_along(points)
    grids = {}
    for span in ("cumulative", "bucket"):
        lines = []
        for name, members in rows:
            lines.append(Line(name, tuple(point for point in members if point.span == span)))
        grids[span] = Grid(span, tuple(lines), values)
    return grids


def task_grid(rows: SummaryRows, by_task: Mapping[int, SummaryRows]) -> Grid | None:
    """Drafting rows by task; by_task: by position in rows, the row on each task (its `value`)."""
    lines = []
    for position, points in by_task.items():
        row = rows[position]
        if row.tree is not None and row.status == "ok":
            sampling = "" if row.temperature == 0 else f", T {sampling_text(row)}"
            note = tree_text(row) + sampling
            if row.trained_length is not None:
                note += f", trained on up to {row.trained_length:,} tokens"
            lines.append(Line(row.method, tuple(points), note))
    tasks = dict.fromkeys(row.task for row in chain(*by_task.values()))
    return Grid("By task", tuple(lines), tuple(tasks)) if lines else None
