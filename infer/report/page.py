"""The report of a run: summary.json and details.json, tables, pictures and one page, from what was measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from aerie.configs.errors import UserError
from aerie.infer.measure import statistics
from aerie.infer.measure.record import (
    OVERHEAD,
    RECORDS,
    REFERENCE,
    SUITE,
    Asked,
    Overhead,
    Record,
    Reference,
    SummaryRow,
    read_as,
    read_records,
)
from aerie.infer.measure.statistics import Group, summary_row, told_apart
from aerie.infer.report import papers, tables
from aerie.infer.report.plots import pictures, standalone
from aerie.model.storage import read_json, write_json, write_text

SCHEMA = 1
TINTS = 4
CALIBRATION_CONTRACT = ("temperature", "ece", "brier", "bins")


@dataclass(frozen=True)
class Facts:
    """What the records cannot say: which run, code, target, head and machine. The mappings are JSON-ready."""

    run: str
    commit: str | None
    target: dict[str, Any]  # "name" is used in the title
    head: dict[str, Any]  # "kind" is used in the title
    hardware: dict[str, Any]  # device, threads, dtype, ...
    commands: tuple[str, ...] = ()  # that made the run, shown at the end of the page


def write_report(bench: Path, calibration: Path, output: Path, facts: Facts, seed: int = 0) -> list[SummaryRow]:
    """Writes every file of the report and returns the rows over all tasks.

    bench holds records.jsonl with suite.json, and, when these were timed, reference.json and overhead.json; calibration
    holds calibration.json, or is absent and then left out. Where the suite asks for rows by task, these are what
    summary.json and the text tables have; the page shows them pooled. The seed is the bootstrap's. UserError for
    missing or damaged input.
    """
    records = read_records(bench / RECORDS)
    if not records:
        raise UserError(f"{bench / RECORDS}: holds no whole record; measure first with: python infer/main.py bench")
    asked = read_as(bench / SUITE, Asked) if (bench / SUITE).is_file() else None
    groups = statistics.main_groups(records, asked)
    rows = told_apart([summary_row(members, seed) for members in groups])
    tasks = [list(members.by_task().values()) for members in groups]
    parts = [(at, summary_row(one, seed)) for at, each in enumerate(tasks) if len(each) > 1 for one in each]
    sweeps = statistics.sweep_rows(records, asked, seed)
    curve = _calibration(calibration / "calibration.json", (*CALIBRATION_CONTRACT, "nodes", "by_depth", "halves"))
    analysis = _calibration(calibration / "analysis.json", ("schema", "calibrator", "by_depth", "laws", "oracle"))
    tuning = _optional(bench.parent / "tune" / "tune.json")
    if tuning is not None:
        tuning["measured"] = _optional(bench.parent / "tune" / "measured.json")
    reference = read_as(bench / REFERENCE, Reference) if (bench / REFERENCE).is_file() else None
    details: dict[str, Any] = {
        "schema": SCHEMA,
        "rows": [_row_detail(members, seed) for members in groups],
        "by_task": [{"row": at, **part.as_dict()} for at, part in parts],  # row: the position over all tasks
        "reference": None if reference is None else asdict(reference),
        "diversity": _diversity(groups),
        "calibration": curve,
        "overhead": _overhead(bench / OVERHEAD, groups),
        "analysis": analysis,
        "tuning": tuning,
        "deagle": papers.claims(records, asked, tuning),
    }
    depths, varied, contexts = papers.depth_grids(sweeps), papers.varied_grids(sweeps), papers.context_grids(sweeps)
    suite = {
        "sweeps": bool(sweeps),
        "ablation": papers.ablation(sweeps),
        "depths": depths,
        "contexts": contexts,
        "varied": varied,
        "tasks": papers.task_grid(rows, parts),
        "beside": papers.beside(rows, parts),
    }
    drawn = pictures(rows, details, [*depths, *varied], contexts)
    page = _render(facts, rows, details, suite, drawn, _sample_answers(groups, rows))
    shown = rows
    if asked is not None and asked.by_task:
        shown = told_apart([summary_row(one, seed) for each in tasks for one in each])
        details["pooled"] = [row.as_dict() for row in rows]
    about = {name: value for name, value in asdict(facts).items() if name != "commands"}
    summary = {
        "schema": SCHEMA,
        **about,
        "rows": [row.as_dict() for row in shown],
        "sweeps": [point.as_dict() for point in sweeps],
        "calibration": None if curve is None else {name: curve[name] for name in CALIBRATION_CONTRACT},
    }
    write_json(output / "summary.json", summary)
    write_json(output / "details.json", details)
    texts = {
        "table.md": tables.markdown_table(shown, sweeps),
        "table.csv": tables.csv_table(shown),
        **({"sweeps.csv": tables.csv_table(sweeps, sweeps=True)} if sweeps else {}),
        **{f"{name}.svg": standalone(svg) for name, svg in drawn.items()},
        "index.html": page,
    }
    for name, text in texts.items():
        write_text(output / name, text)
    for stale in {*output.glob("*.svg"), *output.glob("sweeps.csv")} - {output / name for name in texts}:
        stale.unlink()
    return rows


def _render(
    facts: Facts,
    rows: Sequence[SummaryRow],
    details: Mapping[str, Any],
    suite: Mapping[str, Any],
    drawn: Mapping[str, str],
    samples: Sequence[tuple[str, Record]],
) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=tables.number, count=lambda value: f"{value:,}", fact=fact_text)
    environment.globals.update(
        tree_text=tables.tree_text, sampling_text=tables.sampling_text, identical_text=tables.identical_text,
        interval=tables.interval, ms_per_cycle=tables.ms_per_cycle, label=tables.label,
        nothing=tables.NOTHING, limits=papers.LIMITS,
    )  # fmt: skip
    kinds = {row.head for row in rows if row.head}
    drafting = [row for row in rows if row.status == "ok" and row.tree is not None]
    return environment.get_template("report.html.jinja").render(
        facts=facts,
        heads=f"{len(kinds)} draft heads" if len(kinds) > 1 else f"{facts.head.get('kind', 'draft')} head",
        rows=rows,
        details=details,
        suite=suite,
        published={name: papers.published(name) for name in ("depths", "contexts")},
        paper_tasks=list(papers.TASKS.items()),
        pictures={name: Markup(svg) for name, svg in drawn.items()},  # noqa: S704
        lossless=lossless(rows, details["rows"]),
        best_tau=max((row for row in drafting if row.tau), key=lambda row: row.tau or 0.0, default=None),
        best_speedup=max((row for row in drafting if row.speedup), key=lambda row: row.speedup or 0.0, default=None),
        samples=[(name, record, segments(record)) for name, record in samples],
        tints=TINTS,
    )


def lossless(rows: Sequence[SummaryRow], row_details: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the comparison of greedy outputs showed, over every drafting row; state: good, partial, bad or unknown."""
    greedy = [
        (row, extra)
        for row, extra in zip(rows, row_details, strict=True)
        if row.status == "ok" and row.tree is not None and row.temperature == 0 and row.identical is not None
    ]
    counts = {
        "identical": sum(row.identical or 0 for row, _ in greedy),
        "compared": sum((row.identical or 0) + (row.mismatch or 0) for row, _ in greedy),
        "identical_to_generate": sum(extra["identical_to_generate"] or 0 for _, extra in greedy),
        "compared_to_generate": sum(extra["compared_to_generate"] or 0 for _, extra in greedy),
        "failed": sum(row.status != "ok" for row in rows),
        "lossy": sum(map(tables.is_lossy, rows)),
    }
    pairs = [("identical", "compared"), ("identical_to_generate", "compared_to_generate")]
    state = "partial" if counts["failed"] or counts["lossy"] else "good"
    if any(counts[same] != counts[compared] for same, compared in pairs):
        state = "bad"
    return {"state": state if counts["compared"] else "unknown", **counts}


def segments(record: Record) -> list[tuple[str, int, str]]:
    """(text, tint, title) of each cycle; the tint, 0 to TINTS, is how many draft tokens the cycle kept."""
    most = max(record.accepted, default=0) or 1
    parts = [(record.cycle_texts[0], 0, "the prefill’s token")]
    for text, kept, new in zip(record.cycle_texts[1:], record.accepted, record.cycle_tokens, strict=False):
        parts.append((text, math.ceil(TINTS * kept / most), f"{kept} accepted, {new} new"))
    return parts


def fact_text(value: Any) -> str:
    """A value of a fact as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return tables.NOTHING if value is None else str(value)


def _sample_answers(groups: Sequence[Group], rows: Sequence[SummaryRow]) -> list[tuple[str, Record]]:
    """The answers of lowest, median and highest tau (named so) of the fastest greedy row that drafts."""
    drafting = [at for at, row in enumerate(rows) if row.status == "ok" and row.tree and row.temperature == 0]
    if not drafting:
        return []
    fastest = max(drafting, key=lambda at: (rows[at].speedup or 0.0, at))
    usable = [one for one in groups[fastest].records if one.cycle_texts and one.target_forwards]
    usable.sort(key=lambda record: (record.new_tokens - 1) / record.target_forwards)
    if len(usable) < 3:
        return [("answer", record) for record in usable]
    return [("lowest tau", usable[0]), ("median tau", usable[len(usable) // 2]), ("highest tau", usable[-1])]


def _row_detail(members: Group, seed: int) -> dict[str, Any]:
    compared = [one.identical_to_generate for one in members.records if one.identical_to_generate is not None]
    known = bool(compared) and not members.failed
    return {
        "tau_ci95": None if members.failed else statistics.tau_interval(members.records, seed),
        "identical_to_generate": sum(compared) if known else None,
        "compared_to_generate": len(compared) if known else None,
    }


def _diversity(groups: Sequence[Group]) -> dict[str, Any] | None:
    """How varied the greedy answers are, measured on vanilla's (or else the first greedy row's); None without any."""
    greedy = [members for members in groups if members.first.temperature == 0 and not members.failed]
    if not greedy:
        return None
    chosen = next((members for members in greedy if members.first.method == statistics.VANILLA), greedy[0])
    distinct, total = statistics.distinct_ngrams([record.output_ids for record in chosen.records])
    return {
        "method": chosen.first.method,
        "answers": len(chosen.records),
        "distinct_4grams": distinct,
        "total_4grams": total,
    }


def _overhead(path: Path, groups: Sequence[Group]) -> list[dict[str, Any]] | None:
    """overhead.json with each row's position among the rows over all tasks; None where it was not measured."""
    if not path.is_file():
        return None
    places = {members.first.row: at for at, members in reversed(list(enumerate(groups)))}
    measured = [one for one in read_as(path, list[Overhead]) if one.row in places]
    return [{**asdict(one), "position": places[one.row]} for one in measured] or None


def _optional(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def _calibration(path: Path, expected: Sequence[str]) -> dict[str, Any] | None:
    """A file of calibrate's; None where it wrote none, UserError where another version did."""
    value: dict[str, Any] | None = _optional(path)
    if value is not None and (not {*expected} <= value.keys() or value.get("schema", SCHEMA) != SCHEMA):
        raise UserError(f"{path}: of another version; make it again with: python infer/main.py calibrate --overwrite")
    return value
