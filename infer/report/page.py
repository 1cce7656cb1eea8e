"""The report of a run: its figures, its page and its other files."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from aerie.configs.errors import UserError
from aerie.infer.measure import bench_files as files
from aerie.infer.measure import statistics
from aerie.infer.measure.bench_files import Record, SummaryRow
from aerie.infer.measure.served import served_figures
from aerie.infer.measure.tasks import set_of
from aerie.infer.report import tables
from aerie.infer.report.grids import context_grids, sweep_grids, task_grid
from aerie.infer.report.pictures import draw_pictures
from aerie.infer.report.tables import SummaryRows
from aerie.infer.report.training import stopped_by_budget, training_curves
from aerie.model.storage import (
    DIAGNOSIS,
    plainly,
    read_json,
    sound_record,
    write_json,
    write_text,
)

SCHEMA = 1  # of summary.json and details.json
TINTS = 4  # of the sample answer
XML = '<?xml version="1.0" encoding="utf-8"?>\n'  # before a picture that is a file of its own
PICTURE_STYLE = "<style>svg{background:#fff;font-family:sans-serif}</style>"


@dataclass(frozen=True)
class Findings:
    """What the stages of a run measured."""

    groups: list[statistics.Group]  # the answers of each row
    rows: list[SummaryRow]  # over all tasks
    # by position in rows: the row on each of several tasks, and on each set of which they are parts
    by_task: dict[int, list[SummaryRow]]
    sweeps: list[SummaryRow]  # their points
    table: list[SummaryRow]  # rows as the suite wants them in tables: over all tasks, or by task
    checks: list[dict[str, Any]]  # what details.json adds to rows
    reference: files.Reference | None
    calibration: dict[str, Any] | None  # calibration.json
    analysis: dict[str, Any] | None  # analysis.json
    tuning: dict[str, Any] | None  # tune.json, with measured.json and the name of tuned.yaml


@dataclass(frozen=True)
class Appendix:
    """A last part of the report, which another package brings along."""

    template: Path | None = None  # a part of the page
    details: dict[str, Any] = field(default_factory=dict)  # further keys of details.json
    pictures: dict[str, str] = field(default_factory=dict)  # name -> an <svg> element
    files: dict[str, str] = field(default_factory=dict)  # name -> text
    values: dict[str, Any] = field(default_factory=dict)  # that the template reads


def write_report(
    bench: Path,
    calibration: Path,
    output: Path,
    facts: dict[str, Any],
    seed: int,
    write_appendix: Callable[[Findings], Appendix] | None = None,
) -> SummaryRows:
    """Writes every file of the report; returns the rows over all tasks.

    bench, calibration: the directories of these stages. facts: run, commit, target (with `name`),
    head (with `kind`), hardware and the commands that made the run. Where the suite asks for rows
    by task, summary.json and table.csv have these, the page and table.md the pooled ones.
    """
    findings = read_findings(bench, calibration, seed)
    appendix = write_appendix(findings) if write_appendix else Appendix()
    details = make_details(findings, facts, bench.parent / "metrics.jsonl")
    details |= appendix.details
    diagnosis = bench.parent / DIAGNOSIS
    details["diagnosis"] = read_json(diagnosis) if diagnosis.is_file() else None
    sweeps = sweep_grids(findings.sweeps)
    contexts = context_grids(findings.sweeps)
    pictures = draw_pictures(findings.rows, details, sweeps, contexts) | appendix.pictures
    texts = {
        **appendix.files,
        "table.md": tables.markdown_table(findings.rows),
        "table.csv": tables.csv_table(findings.table),
    }
    if findings.sweeps:
        texts["sweeps.csv"] = tables.csv_table(findings.sweeps, are_points=True)
    for name, svg in pictures.items():
        texts[f"{name}.svg"] = XML + svg.replace(">", f">{PICTURE_STYLE}", 1)
    values = {"sweeps": sweeps, "contexts": contexts, **appendix.values}
    texts["index.html"] = render_page(facts, findings, details, pictures, values, appendix.template)
    write_json(output / "summary.json", make_summary(findings, facts))
    write_json(output / "details.json", details)
    for name, text in texts.items():
        write_text(output / name, text)
    for path in (*output.glob("*.svg"), *output.glob("sweeps.csv")):
        if path.name not in texts:  # of earlier input
            path.unlink()
    return findings.rows


# --- what was measured ---


def read_findings(bench: Path, calibration: Path, seed: int) -> Findings:
    records = files.read_records(bench / files.RECORDS)
    if not records:
        raise UserError(f"{bench / files.RECORDS}: holds no whole record; run: aerie bench")
    suite = read_if_there(bench / files.SUITE, files.SuiteFile)
    if suite is None:  # then all rows are the bench's own
        suite = files.SuiteFile(tuple(files.Cell(r.row, *r.sampling) for r in records))
    main = {(cell.row, cell.sampling) for cell in suite.main}
    all_groups = statistics.group(records)
    trained_lengths = sound_record(bench).get("trained_lengths", {})  # of each row's head
    served = read_if_there(bench / files.SERVED_FILE, files.ServedFile)

    def summary_row(members: statistics.Group, is_whole: bool = True) -> SummaryRow:
        row = statistics.summary_row(members, seed)
        length = trained_lengths.get(str(members.first.row))
        if length is not None:
            share = statistics.beyond(members, length)
            row = replace(row, trained_length=length, beyond_trained=share)
        if row.method != statistics.SERVED or row.status != "ok":
            return row
        file = served if is_whole else replace(served, loads=())
        return replace(row, served=served_figures(members, all_groups, file))

    groups = [
        members for members in all_groups if (members.first.row, members.first.sampling) in main
    ]
    rows = statistics.told_apart([summary_row(members) for members in groups])
    table = []
    by_task = {}
    checks = []
    for position, members in enumerate(groups):
        tasks = members.by_task()
        parts = [summary_row(part, is_whole=len(tasks) == 1) for part in tasks.values()]
        table += parts
        if len(parts) > 1:
            for name, whole in members.by_task(set_of).items():
                if name not in tasks:
                    parts.append(replace(summary_row(whole, is_whole=False), task=name))
            by_task[position] = [replace(part, value=part.task) for part in parts]
        answers = () if members.failed else members.records
        checks.append(
            {"tau_ci95": statistics.tau_interval(answers, seed), **check_answers(answers)}
        )
    tune = bench.parent / "tune"
    tuning = read_if_there(tune / "tune.json")
    if tuning is not None:
        tuning["measured"] = read_if_there(tune / "measured.json")
        tuning["file"] = str(tune / "tuned.yaml")
    return Findings(
        groups=groups,
        rows=rows,
        by_task=by_task,
        sweeps=statistics.sweep_rows(all_groups, groups, suite, seed),
        table=statistics.told_apart(table) if suite.by_task else rows,
        checks=checks,
        reference=read_if_there(bench / files.REFERENCE, files.Reference),
        calibration=read_if_there(calibration / "calibration.json"),
        analysis=read_if_there(calibration / "analysis.json"),
        tuning=tuning,
    )


def read_if_there(path: Path, schema: Any = dict[str, Any]) -> Any:
    return files.read_as(path, schema) if path.is_file() else None


def check_answers(answers: Sequence[Record]) -> dict[str, Any]:
    """How answers compare with vanilla's and with those of transformers' generate.

    margin: the largest of the differing answers', in units of what rounding makes. differing:
    answers with other tokens than either; rounding: of them, those that began with a near-tie.
    """
    same = [answer.identical_to_generate for answer in answers]
    compared = [is_same for is_same in same if is_same is not None]
    differing = [
        answer for answer in answers if False in (answer.identical, answer.identical_to_generate)
    ]
    margins = [answer.margin for answer in differing if answer.margin is not None]
    return {
        "margin": max(margins, default=None),
        "differing": len(differing),
        "rounding": sum(margin <= 1 for margin in margins),
        "identical_to_generate": sum(compared) if compared else None,
        "compared_to_generate": len(compared) if compared else None,
    }


# --- summary.json and details.json ---


def make_summary(findings: Findings, facts: Mapping[str, Any]) -> dict[str, Any]:
    calibration = findings.calibration
    shown = ("temperature", "ece", "brier", "bins")
    about = ("run", "commit", "target", "head", "hardware")
    return {
        "schema": SCHEMA,
        **{name: facts[name] for name in about},
        "rows": [row.as_dict() for row in findings.table],
        "sweeps": [point.as_dict() for point in findings.sweeps],
        "calibration": calibration and {name: calibration[name] for name in shown},
    }


def make_details(findings: Findings, facts: Mapping[str, Any], metrics: Path) -> dict[str, Any]:
    by_task = []
    for position, parts in findings.by_task.items():
        # row: its position in `rows`
        by_task += [{"row": position, **part.as_dict()} for part in parts]
    trainings = facts.get("trainings", {})
    details = {
        "schema": SCHEMA,
        "rows": findings.checks,
        "by_task": by_task,
        "reference": findings.reference and asdict(findings.reference),
        "calibration": findings.calibration,
        "analysis": findings.analysis,
        "tuning": findings.tuning,
        "training": {
            "runs": trainings,
            "stopped": stopped_by_budget(trainings),
            "curves": training_curves(metrics),
        },
    }
    if findings.table is not findings.rows:
        details["pooled"] = [row.as_dict() for row in findings.rows]
    return details


# --- the page ---


def render_page(
    facts: Mapping[str, Any],
    findings: Findings,
    details: Mapping[str, Any],
    pictures: Mapping[str, str],
    values: Mapping[str, Any],  # more that the templates read
    appendix: Path | None,
) -> str:
    templates = [path for path in (Path(__file__), appendix) if path]
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader([path.parent for path in templates]),
        autoescape=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "number": tables.number,
        "method_text": tables.method_text,
        "fact": partial(plainly, nothing=tables.NOTHING),
    }
    rows = findings.rows
    kinds = {row.head for row in rows if row.head}
    head = f"{facts['head'].get('kind', 'draft')} head"
    page = environment.get_template("report.html.jinja").render(
        tables=tables,
        nothing=tables.NOTHING,
        facts=facts,
        heads=f"{len(kinds)} draft heads" if len(kinds) > 1 else head,
        rows=rows,
        details=details,
        pictures={name: Markup(svg) for name, svg in pictures.items()},  # noqa: S704
        lossless=lossless_verdict(findings),
        best_tau=best_row(rows, "tau"),
        best_speedup=best_row(rows, "speedup"),
        tints=TINTS,
        sample=sample_answer(findings),
        tasks=task_grid(rows, findings.by_task),
        appendix=appendix and appendix.name,
        **values,
    )
    headings = re.findall(r'<(h2|details) id="([\w-]+)">(?:<summary>)?([^<]+)', page)
    links = [f'<a class="{tag}" href="#{name}">{text}</a>' for tag, name, text in headings]
    return page.replace("<nav></nav>", f"<nav>{''.join(links)}</nav>")


def best_row(rows: SummaryRows, key: str) -> SummaryRow | None:
    """The drafting row of the highest tau or speedup."""
    drafting = [row for row in rows if row.status == "ok" and row.tree and getattr(row, key)]
    return max(drafting, key=lambda row: getattr(row, key), default=None)


def lossless_verdict(findings: Findings) -> dict[str, Any]:
    """Counts of compared greedy answers of rows that draft here, and what they come to.

    state: good, partial, rounding (every difference is a near-tie of a 16-bit dtype), bad or
    unknown.
    """
    answers: list[Record] = []
    for row, members in zip(findings.rows, findings.groups, strict=True):
        is_drafting = row.tree is not None and row.method != statistics.SERVED
        if row.status == "ok" and is_drafting and row.identical is not None:
            answers += members.records
    compared = [answer.identical for answer in answers if answer.identical is not None]
    checks = check_answers(answers)
    own = [row for row in findings.rows if row.method != statistics.SERVED]
    failed = sum(row.status != "ok" for row in own)
    if not compared:
        state = "unknown"
    elif checks["differing"]:
        state = "bad" if checks["differing"] > checks["rounding"] else "rounding"
    else:
        state = "partial" if failed else "good"
    return {
        **checks,
        "identical": sum(compared),
        "compared": len(compared),
        "failed": failed,
        "state": state,
    }


def sample_answer(findings: Findings) -> dict[str, Any] | None:
    """The answer of median tau of the fastest greedy row that drafts, cycle by cycle."""
    by_speedup: dict[float, Sequence[Record]] = {}
    for row, members in zip(findings.rows, findings.groups, strict=True):
        if row.status == "ok" and row.tree is not None and row.temperature == 0:
            by_speedup[row.speedup or 0.0] = members.records
    fastest = by_speedup[max(by_speedup)] if by_speedup else ()
    answers = [answer for answer in fastest if answer.cycle_texts and answer.accepted]
    if not answers:
        return None
    answers.sort(key=lambda answer: statistics.tau([answer]) or 0.0)
    record = answers[len(answers) // 2]
    first, *texts = record.cycle_texts
    cycles = [(first, 0, "the prefill’s token")]  # text, tint, title of each
    most = max(record.accepted) or 1
    for text, kept, new in zip(texts, record.accepted, record.cycle_tokens, strict=False):
        tint = math.ceil(TINTS * kept / most)  # 0 to TINTS
        cycles.append((text, tint, f"{kept} accepted, {new} new"))
    return {"record": record, "cycles": cycles, "tau": statistics.tau([record])}
