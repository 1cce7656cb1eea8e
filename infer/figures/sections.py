"""What the page's sections on the suite are made of, and their pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.config import CONTEXT
from infer.figures import ablation as ablations
from infer.figures import context_tables as contexts
from infer.figures import depths
from infer.figures.lines import Line, lines_of, numeric, values_of
from infer.figures.pictures import context_picture, depth_picture, draft_picture, trace_picture, value_picture
from infer.figures.policies import Policies, policy_tables
from infer.figures.published import TASKS, Beside, beside
from infer.figures.reasoning import Reasoning, reasoning_tables
from infer.figures.traces import Traced, from_json

PREFIX = "sweep-"


@dataclass(frozen=True)
class Varied:
    """A sweep over a setting that no paper's table is about."""

    name: str
    key: str
    values: tuple[Any, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Sections:
    """The tables, each with the name of its picture where it has one."""

    ablation: ablations.Ablation | None
    depths: tuple[tuple[str, depths.Depths], ...]
    contexts: contexts.Contexts | None
    varied: tuple[tuple[str | None, Varied], ...]
    policies: tuple[Policies, ...]
    traces: tuple[tuple[str, Traced], ...]
    reasoning: tuple[Reasoning, ...]
    beside: tuple[Beside, ...]

    @property
    def published(self) -> dict[str, Any]:
        """The papers' numbers that stand beside, for the template."""
        return {
            "tasks": tuple(TASKS.values()),
            "depth_columns": depths.PUBLISHED_COLUMNS,
            "depths": depths.PUBLISHED,
            "lengths": contexts.PUBLISHED_LENGTHS,
            "contexts": contexts.PUBLISHED,
            "greedy_lengths": contexts.PUBLISHED_GREEDY_LENGTHS,
            "greedy_contexts": contexts.PUBLISHED_GREEDY,
        }


def sections(
    rows: Sequence[dict[str, Any]],
    by_task: Sequence[dict[str, Any]],
    sweeps: Sequence[dict[str, Any]],
    traces: Sequence[dict[str, Any]] = (),
) -> Sections:
    """Everything that the rows (pooled over tasks), their parts, the sweeps and the details' traces allow."""
    varied = [
        (f"{PREFIX}{place}-{_file_name(one.name)}" if numeric(one.values) and len(one.values) > 1 else None, one)
        for place, one in enumerate(varied_tables(sweeps))
    ]
    tables = depths.depth_tables(sweeps)
    return Sections(
        ablations.ablation(sweeps),
        tuple((f"{PREFIX}depths" + (f"-{place}" if place else ""), table) for place, table in enumerate(tables)),
        contexts.context_tables(sweeps),
        tuple(varied),
        tuple(policy_tables(rows)),
        tuple((f"{PREFIX}trace-{place}", from_json(one)) for place, one in enumerate(traces)),
        tuple(reasoning_tables(rows, by_task)),
        tuple(beside(rows, by_task)),
    )


def varied_tables(sweeps: Sequence[dict[str, Any]]) -> list[Varied]:
    """The sweeps that are in no other table, each with its lines."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for point in sweeps:
        if point["sweep"] != CONTEXT and point["key"] not in ablations.KEYS and not depths.is_of_depth(point):
            by_name.setdefault(point["sweep"], []).append(point)
    found = []
    for name, points in by_name.items():
        lines = lines_of(points)
        found.append(Varied(name, points[0]["key"], tuple(values_of(lines)), tuple(lines)))
    return found


def pictures(made: Sections) -> Mapping[str, str]:
    """name -> SVG text; the names start with PREFIX."""
    drawn = {name: depth_picture(name, table) for name, table in made.depths}
    drawn |= {name: value_picture(name, one.key, one.lines) for name, one in made.varied if name is not None}
    drawn |= {name: trace_picture(name, table) for name, table in made.traces}
    if made.contexts is not None:
        drawn[f"{PREFIX}contexts"] = context_picture(f"{PREFIX}contexts", made.contexts)
        if contexts.chains_of(made.contexts):
            drawn[f"{PREFIX}drafts"] = draft_picture(f"{PREFIX}drafts", made.contexts)
    return drawn


def _file_name(name: str) -> str:
    """The name of a sweep as part of a file's name and of an id."""
    return "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name)
