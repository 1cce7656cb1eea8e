"""The report of a run: summary.json and details.json, tables, pictures and one page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from aerie.configs.errors import UserError
from aerie.infer.measure import record as bench_files
from aerie.infer.measure import statistics
from aerie.infer.measure.record import SummaryRow
from aerie.infer.measure.statistics import Group, summary_row, told_apart
from aerie.infer.report import tables
from aerie.infer.report.plots import pictures, standalone
from aerie.model.storage import read_json, write_json, write_text

SCHEMA = 1
TINTS = 4
CALIBRATION_CONTRACT = ("temperature", "ece", "brier", "bins")


@dataclass(frozen=True)
class Facts:
    """What the records cannot say; the mappings are JSON-ready."""

    run: str
    commit: str | None
    target: dict[str, Any]  # "name" is used in the title
    head: dict[str, Any]  # "kind" is used in the title
    hardware: dict[str, Any]  # device, threads, dtype, ...
    commands: tuple[str, ...] = ()  # that made the run, shown at the end of the page


def write_report(bench: Path, calibration: Path, output: Path, facts: Facts, seed: int = 0) -> list[SummaryRow]:
    """Writes every file of the report from two stages' directories; returns the rows over all tasks.

    Where the suite asks for rows by task, summary.json and the text tables have these, the page the pooled ones.
    """
    records = bench_files.read_records(bench / bench_files.RECORDS)
    if not records:
        fix = "holds no whole record; measure first with: python infer/main.py bench"
        raise UserError(f"{bench / bench_files.RECORDS}: {fix}")
    asked = _read(bench / bench_files.SUITE, bench_files.Asked)
    groups = statistics.main_groups(records, asked)
    rows = told_apart([summary_row(members, seed) for members in groups])
    by_task = [members.by_task() for members in groups]
    parts = [(at, summary_row(one, seed)) for at, each in enumerate(by_task) if len(each) > 1 for one in each]
    sweeps = statistics.sweep_rows(records, asked, seed)
    curve, analysis = _read(calibration / "calibration.json"), _read(calibration / "analysis.json")
    for value, keys in ((curve, {*CALIBRATION_CONTRACT, "nodes"}), (analysis, {"schema", "calibrator", "oracle"})):
        if value is not None and (not keys <= value.keys() or value.get("schema", SCHEMA) != SCHEMA):
            fix = "of another version; make it again with: python infer/main.py calibrate --overwrite"
            raise UserError(f"{calibration / ('calibration.json' if value is curve else 'analysis.json')}: {fix}")
    tuning = _read(bench.parent / "tune" / "tune.json")
    if tuning is not None:
        tuning["measured"] = _read(bench.parent / "tune" / "measured.json")
    reference = _read(bench / bench_files.REFERENCE, bench_files.Reference)
    overhead = _read(bench / bench_files.OVERHEAD, list[bench_files.Overhead]) or []
    places = {members.first.row: at for at, members in reversed(list(enumerate(groups)))}
    extras = []
    for members in groups:
        good = [] if members.failed else members.records
        compared = [one.identical_to_generate for one in good if one.identical_to_generate is not None]
        extra: dict[str, Any] = {"tau_ci95": statistics.tau_interval(good, seed) if good else None}
        extra |= {"identical_to_generate": sum(compared) if compared else None}
        extras.append(extra | {"compared_to_generate": len(compared) or None})
    details: dict[str, Any] = {
        "schema": SCHEMA,
        "rows": extras,
        "by_task": [{"row": at, **part.as_dict()} for at, part in parts],  # row: the position over all tasks
        "reference": None if reference is None else asdict(reference),
        "calibration": curve,
        "overhead": [{**asdict(one), "position": places[one.row]} for one in overhead if one.row in places] or None,
        "analysis": analysis,
        "tuning": tuning,
        "deagle": tables.claims(records, asked, tuning),
    }
    grids, contexts = tables.sweep_grids(sweeps), tables.context_grids(sweeps)
    drawn = pictures(rows, details, grids, contexts)
    suite: dict[str, Any] = {"sweeps": grids, "contexts": contexts, "tasks": tables.task_grid(rows, parts)}
    prompts = {point.sweep: frozenset(point.prompts) for point in asked.points} if asked else {}
    suite["lengths"] = tables.lengths([*rows, *sweeps], {None: frozenset(one.prompt for one in records), **prompts})
    suite["beside"] = tables.beside(rows, parts)
    suite["published"] = {name: tables.published(name) for name in ("ablation", "depths", "contexts")}
    texts = {f"{name}.svg": standalone(svg) for name, svg in drawn.items()}
    texts["index.html"] = render(facts, rows, details, suite=suite, drawn=drawn, sample=sample_answer(groups, rows))
    shown = rows
    if asked is not None and asked.by_task:
        shown = told_apart([summary_row(one, seed) for each in by_task for one in each])
        details["pooled"] = [row.as_dict() for row in rows]
    summary = {
        "schema": SCHEMA,
        **{name: value for name, value in asdict(facts).items() if name != "commands"},
        "rows": [row.as_dict() for row in shown],
        "sweeps": [point.as_dict() for point in sweeps],
        "calibration": curve and {name: curve[name] for name in CALIBRATION_CONTRACT},
    }
    write_json(output / "summary.json", summary)
    write_json(output / "details.json", details)
    texts |= {"table.md": tables.markdown_table(shown), "table.csv": tables.csv_table(shown)}
    texts |= {"sweeps.csv": tables.csv_table(sweeps, sweeps=True)} if sweeps else {}
    for name, text in texts.items():
        write_text(output / name, text)
    for stale in {*output.glob("*.svg"), *output.glob("sweeps.csv")} - {output / name for name in texts}:
        stale.unlink()
    return rows


def render(facts: Facts, rows: Sequence[SummaryRow], details: Mapping[str, Any], **parts: Any) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, loader=loader, autoescape=True)
    environment.undefined = StrictUndefined
    environment.filters.update(number=tables.number, count=lambda value: f"{value:,}", fact=fact_text)
    kinds = {row.head for row in rows if row.head}
    drafting = [row for row in rows if row.status == "ok" and row.tree is not None]
    return environment.get_template("report.html.jinja").render(
        tables=tables,
        nothing=tables.NOTHING,
        facts=facts,
        heads=f"{len(kinds)} draft heads" if len(kinds) > 1 else f"{facts.head.get('kind', 'draft')} head",
        rows=rows,
        details=details,
        pictures={name: Markup(svg) for name, svg in parts.pop("drawn").items()},  # noqa: S704
        lossless=lossless(rows, details["rows"]),
        best_tau=max((row for row in drafting if row.tau), key=lambda row: row.tau or 0.0, default=None),
        best_speedup=max((row for row in drafting if row.speedup), key=lambda row: row.speedup or 0.0, default=None),
        tints=TINTS,
        **parts,
    )


def lossless(rows: Sequence[SummaryRow], extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of greedy outputs compared, over the drafting rows; state: good, partial, bad or unknown."""
    counts = dict.fromkeys(("identical", "compared", "identical_to_generate", "compared_to_generate"), 0)
    for row, extra in zip(rows, extras, strict=True):
        if row.status == "ok" and row.tree is not None and row.temperature == 0 and row.identical is not None:
            seen = {**extra, "identical": row.identical, "compared": row.identical + (row.mismatch or 0)}
            counts = {name: count + (seen[name] or 0) for name, count in counts.items()}
    failed, lossy = sum(row.status != "ok" for row in rows), sum(map(tables.is_lossy, rows))
    state = "partial" if failed or lossy else "good"
    if any(counts[f"identical{of}"] != counts[f"compared{of}"] for of in ("", "_to_generate")):
        state = "bad"
    return {"state": state if counts["compared"] else "unknown", **counts, "failed": failed, "lossy": lossy}


def fact_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return tables.NOTHING if value is None else str(value)


def sample_answer(groups: Sequence[Group], rows: Sequence[SummaryRow]) -> dict[str, Any] | None:
    """The answer of median tau of the fastest greedy row that drafts, with (text, tint, title) of each cycle.

    The tint, 0 to TINTS, grows with the draft tokens that the cycle kept.
    """
    drafting = [at for at, row in enumerate(rows) if row.status == "ok" and row.tree and row.temperature == 0]
    fastest = max(drafting, key=lambda at: (rows[at].speedup or 0.0, at), default=None)
    usable = [] if fastest is None else [one for one in groups[fastest].records if one.cycle_texts and one.accepted]
    if not usable:
        return None
    usable.sort(key=lambda record: statistics.tau([record]) or 0.0)
    record = usable[len(usable) // 2]
    parts, most = [(record.cycle_texts[0], 0, "the prefill’s token")], max(record.accepted) or 1
    for text, kept, new in zip(record.cycle_texts[1:], record.accepted, record.cycle_tokens, strict=False):
        parts.append((text, math.ceil(TINTS * kept / most), f"{kept} accepted, {new} new"))
    return {"record": record, "parts": parts, "tau": statistics.tau([record])}


def _read(path: Path, schema: Any = None) -> Any:
    if not path.is_file():
        return None
    return read_json(path) if schema is None else bench_files.read_as(path, schema)
