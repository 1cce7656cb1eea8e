"""index.html: one file without scripts or requests; every word that came from a model or a recipe is escaped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from infer.figures.length_words import length_words, measured_constants
from infer.figures.reading import claim_words, claimed_on, reading
from infer.figures.sections import sections
from infer.palette import DARK, LIGHT
from infer.records import Record
from infer.table import (
    NOTHING,
    identical_text,
    interval,
    is_lossy,
    label,
    ms_per_cycle,
    number,
    sampling_text,
    tree_text,
)

TEMPLATE = "report.html.jinja"
TINTS = 4
REFERENCE_NAMES = {
    "generate_dynamic_ms_per_token": "transformers generate, dynamic cache",
    "generate_static_ms_per_token": "transformers generate, static cache",
    "vanilla_ms_per_token": "vanilla row",
    "bare_forward_ms_per_token": "bare forwards replayed",
}


@dataclass(frozen=True)
class Verdict:
    """Whether the greedy outputs are the target's own: state is good, partial (rows failed), bad or unknown."""

    state: str
    sentence: str
    identical: int
    compared: int


@dataclass(frozen=True)
class Segment:
    """The text of one cycle; tint 0 (nothing accepted, or the prefill) to TINTS."""

    text: str
    tint: int
    title: str


def render(
    summary: dict[str, Any],
    details: dict[str, Any],
    drawn: Mapping[str, str],
    samples: Sequence[tuple[str, Record]],
    commands: Sequence[str] = (),
) -> str:
    """The page's HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, count=lambda value: f"{value:,}", fact=fact_text)
    environment.globals.update(
        tree_text=tree_text, sampling_text=sampling_text, identical_text=identical_text, interval=interval,
        ms_per_cycle=ms_per_cycle, label=label, nothing=NOTHING, tints=TINTS, claim_words=claim_words,
        claimed_on=claimed_on, length_words=length_words, measured_constants=measured_constants,
    )  # fmt: skip
    rows = summary["rows"]
    kept = [row for row in rows if row["status"] == "ok" and row["tree"] is not None]
    return environment.get_template(TEMPLATE).render(
        summary=summary,
        details=details,
        light=LIGHT,
        dark=DARK,
        pictures={name: Markup(svg) for name, svg in drawn.items()},  # noqa: S704 (our own SVG, its text escaped by matplotlib)
        title=title(summary),
        verdict=verdict(rows, details["rows"]),
        said=reading(summary, details),
        suite=sections(rows, details["by_task"], summary["sweeps"], details.get("traces", ())),
        best_tau=max((row for row in kept if row["tau"]), key=lambda row: row["tau"], default=None),
        best_speedup=max((row for row in kept if row["speedup"]), key=lambda row: row["speedup"], default=None),
        task_table=task_table(rows, details["by_task"]),
        references=reference_lines(details["reference"]),
        samples=[(name, record, segments(record)) for name, record in samples],
        commands=commands,
    )


def title(summary: dict[str, Any]) -> str:
    """'eagle1 head for NAME', or '5 draft heads for NAME' where the rows have several."""
    kinds = {row["head"] for row in summary["rows"] if row.get("head")}
    heads = f"{len(kinds)} draft heads" if len(kinds) > 1 else f"{summary['head'].get('kind', 'draft')} head"
    return f"{heads} for {summary['target'].get('name', summary['run'])}"


def verdict(rows: Sequence[dict[str, Any]], row_details: Sequence[dict[str, Any]]) -> Verdict:
    """What the comparison of greedy outputs showed, over every row that drafts; failed rows are named."""
    greedy = [(row, extra) for row, extra in zip(rows, row_details, strict=True) if _is_compared(row)]
    identical = sum(row["identical"] for row, _ in greedy)
    compared = sum(row["identical"] + row["mismatch"] for row, _ in greedy)
    generate = [extra for _, extra in greedy if extra["compared_to_generate"]]
    generate_identical = sum(extra["identical_to_generate"] for extra in generate)
    generate_compared = sum(extra["compared_to_generate"] for extra in generate)
    failed = sum(row["status"] != "ok" for row in rows)
    tail = f" {failed} of {len(rows)} rows failed and {'is' if failed == 1 else 'are'} not counted." if failed else ""
    lossy = sum(is_lossy(row) for row in rows)
    if lossy:
        tail += f" {lossy} sampled row{'s' * (lossy > 1)} with typical acceptance: NOT lossless."
    if not compared:
        return Verdict("unknown", f"No greedy output was compared with vanilla's.{tail}", 0, 0)
    sentence = f"{identical:,} of {compared:,} greedy outputs are token-identical to the vanilla row"
    if (generate_identical, generate_compared) == (identical, compared):
        sentence += " and to transformers’ generate."
    elif generate_compared:
        sentence += f", {generate_identical:,} of {generate_compared:,} to transformers’ generate."
    else:
        sentence += "; none was compared with transformers’ generate."
    whole = identical == compared and generate_identical == generate_compared
    state = ("partial" if failed or lossy else "good") if whole else "bad"
    return Verdict(state, sentence + tail, identical, compared)


def segments(record: Record) -> list[Segment]:
    """The answer's text by cycle, tinted by how many draft tokens the cycle kept."""
    most = max(record.accepted, default=0)
    parts = [Segment(record.cycle_texts[0], 0, "the prefill’s token")]
    for text, kept, new in zip(record.cycle_texts[1:], record.accepted, record.cycle_tokens, strict=False):
        tint = math.ceil(TINTS * kept / most) if most else 0
        parts.append(Segment(text, tint, f"{kept} accepted, {new} new"))
    return parts


def task_table(rows: Sequence[dict[str, Any]], by_task: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Tau and speedup of every drafting row by task: {"tasks": [name], "rows": [(row, [its part of each task])]}."""
    drafting = [position for position, row in enumerate(rows) if row["tree"] is not None and row["status"] == "ok"]
    if not by_task or not drafting:
        return None
    cells = {(item["task"], item["row"]): item for item in by_task}
    tasks = list(dict.fromkeys(item["task"] for item in by_task))
    return {
        "tasks": tasks,
        "rows": [(rows[position], [cells.get((task, position)) for task in tasks]) for position in drafting],
    }


def reference_lines(reference: dict[str, Any] | None) -> list[tuple[str, float, float]]:
    """(name, ms per token, times the vanilla row's) of what was timed, slowest first."""
    if reference is None:
        return []
    vanilla = reference["vanilla_ms_per_token"]
    lines = [
        (name, reference[key], reference[key] / vanilla)
        for key, name in REFERENCE_NAMES.items()
        if reference[key] is not None
    ]
    return sorted(lines, key=lambda line: -line[1])


def fact_text(value: Any) -> str:
    """A value of a fact as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {fact_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(fact_text(item) for item in value)
    return NOTHING if value is None else str(value)


def _is_compared(row: dict[str, Any]) -> bool:
    return bool(
        row["status"] == "ok" and row["tree"] is not None and row["temperature"] == 0 and row["identical"] is not None
    )
