"""Which records stand among the rows of a summary, and which make the points of its sweeps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from infer.aggregate import Group, baselines_of, group, row, tau_interval
from infer.contexts import context_rows
from infer.records import Record
from infer.suite import Asked, AskedPoint
from model.errors import UserError
from model.files import read_json

SUITE = "suite.json"


def read_asked(bench: Path) -> Asked | None:
    """What the bench asked; null where it did not write it down: then every record is of a row."""
    path = bench / SUITE
    if not path.is_file():
        return None
    try:
        return TypeAdapter(Asked).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {place}: {first['msg']}; measure again with: python infer/main.py bench") from error


def main_groups(records: Sequence[Record], asked: Asked | None) -> list[Group]:
    """The groups of the bench's own rows."""
    if asked is None:
        return group(records)
    cells = {(cell.row, (cell.temperature, cell.top_k, cell.top_p)) for cell in asked.main}
    return group([record for record in records if (record.row, record.sampling) in cells])


def sweep_rows(
    records: Sequence[Record], asked: Asked | None, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`sweeps` of summary.json, and what details.json says of each in the same order.

    A row is one of the summary's with `sweep`, the `key` that varies and its `value`; those of the context lengths
    have a `span` too, and the figures that can be cut.
    """
    if asked is None:
        return [], []
    baselines = baselines_of(records)
    rows, details = [], []
    for point in asked.points:
        members = members_of(records, point)
        if members:
            named = {"sweep": point.sweep, "key": point.key, "value": point.value}
            rows.append({**row(Group(members, baselines.get(members[0].sampling, {})), seed), **named})
            failed = any(record.status != "ok" for record in members)
            details.append({"tau_ci95": None if failed else tau_interval(members, seed)})
    for each in main_groups(records, asked) if asked.contexts else []:
        found = context_rows(each, asked.contexts, asked.max_context, seed)
        rows += found
        details += [{"tau_ci95": None}] * len(found)
    return rows, details


def members_of(records: Sequence[Record], point: AskedPoint) -> tuple[Record, ...]:
    """The answers that a point of a sweep asked."""
    sampling, prompts = (point.temperature, point.top_k, point.top_p), set(point.prompts)
    return tuple(r for r in records if r.row == point.row and r.sampling == sampling and r.prompt in prompts)
