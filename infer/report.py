"""Records and calibration in; report/{summary.json, details.json, index.html, table.md, *.csv, *.svg} out."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infer.aggregate import VANILLA, Group, row, tau_interval
from infer.calibration import pictures as calibration_pictures
from infer.diversity import distinct_ngrams, pooled_prompt_lookup_tau
from infer.figures import sections as suites
from infer.figures.claim import claims
from infer.figures.lengths import lengths
from infer.figures.traces import traced
from infer.page import render
from infer.palette import standalone
from infer.plots import pictures
from infer.records import OVERHEAD, Record, Reference, read_overhead, read_records, read_reference
from infer.sweeps import main_groups, read_asked, sweep_rows
from infer.table import console_table, csv_table, markdown_table, sweeps_csv
from infer.tuning import pictures as tuning_pictures
from infer.variant import told_apart
from model.errors import UserError
from model.files import read_json, write_json, write_text

__all__ = ["Facts", "console_table", "write_report"]

SCHEMA = 1
PICTURES = ("tau", "speedup", "milliseconds", "depth", "lengths", "reliability")
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


def write_report(bench: Path, calibration: Path, output: Path, facts: Facts, seed: int = 0) -> dict[str, Any]:
    """Writes every file of the report and returns the content of summary.json.

    bench holds records.jsonl with suite.json, and, when these were timed, reference.json and overhead.json; calibration
    holds calibration.json, or is absent and then left out. Where the suite asks for rows by task, these are what the
    tables have; the page shows them pooled. The seed is the bootstrap's. Raises UserError for missing or
    damaged input.
    """
    records_path = bench / "records.jsonl"
    records = read_records(records_path)
    if not records:
        raise UserError(f"{records_path}: holds no whole record; measure first with: python infer/main.py bench")
    asked = read_asked(bench)
    groups = main_groups(records, asked)
    curve = _calibration(calibration / "calibration.json")
    reference_path = bench / "reference.json"
    reference = read_reference(reference_path) if reference_path.is_file() else None
    pooled = summarise(groups, curve, facts, seed)
    details = detail(groups, reference, curve, seed)
    details["overhead"] = _overhead(bench / OVERHEAD, groups)
    details["analysis"] = _analysis(calibration / "analysis.json")
    drawn = pictures(pooled["rows"], [item["tau_ci95"] for item in details["rows"]], curve)
    if details["analysis"] is not None:
        drawn |= calibration_pictures.pictures(details["analysis"])
    details["tuning"] = tuning_of(bench.parent / "tune")
    if details["tuning"] is not None:
        drawn |= tuning_pictures.pictures(details["tuning"])
    pooled["sweeps"], details["sweeps"] = sweep_rows(records, asked, seed)
    details["deagle"] = claims(records, asked, details["tuning"], seed)
    details["lengths"] = lengths(records, asked, details["tuning"], seed)
    details["traces"] = [asdict(one) for one in traced(groups)]
    drawn |= suites.pictures(suites.sections(pooled["rows"], details["by_task"], pooled["sweeps"], details["traces"]))
    samples = sample_answers(groups, pooled["rows"])
    page = render(pooled, details, drawn, samples, facts.commands)
    summary = dict(pooled)
    if asked is not None and asked.by_task:
        parts = [part for members in groups for part in members.by_task().values()]
        details["pooled"] = [{**one, **more} for one, more in zip(pooled["rows"], details["rows"], strict=True)]
        summary["rows"] = told_apart([row(part, seed) for part in parts])
        details["rows"] = [_row_detail(part, seed) for part in parts]
    write_json(output / "summary.json", summary)
    write_json(output / "details.json", details)
    write_text(output / "table.md", markdown_table(summary))
    write_text(output / "table.csv", csv_table(summary))
    _write_or_remove(output / "sweeps.csv", sweeps_csv(summary) if summary["sweeps"] else None)
    _write_pictures(output, drawn)
    write_text(output / "index.html", page)
    return summary


def _write_pictures(output: Path, drawn: Mapping[str, str]) -> None:
    """Every picture as a file of its own; those of an earlier report on other input go."""
    sections = {"calibration": calibration_pictures.NAMES, "tuning": tuning_pictures.NAMES}
    ours = {*PICTURES, *(f"{section}-{name}" for section, names in sections.items() for name in names)}
    ours |= {path.stem for path in output.glob(f"{suites.PREFIX}*.svg")}
    for name in sorted(ours | set(drawn)):
        _write_or_remove(output / f"{name}.svg", standalone(drawn[name]) if name in drawn else None)


def _write_or_remove(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    else:
        write_text(path, text)


def summarise(groups: Sequence[Group], curve: dict[str, Any] | None, facts: Facts, seed: int = 0) -> dict[str, Any]:
    """The content of summary.json."""
    return {
        "schema": SCHEMA,
        "run": facts.run,
        "commit": facts.commit,
        "target": facts.target,
        "head": facts.head,
        "hardware": facts.hardware,
        "rows": told_apart([row(members, seed) for members in groups]),
        "sweeps": [],
        "calibration": None if curve is None else {name: curve[name] for name in CALIBRATION_CONTRACT},
    }


def detail(
    groups: Sequence[Group], reference: Reference | None, curve: dict[str, Any] | None, seed: int = 0
) -> dict[str, Any]:
    """The content of details.json: what the page shows beyond summary.json; `rows` are in the same order.

    Where the summary's rows are by task, `pooled` has the rows over all tasks, and by_task and overhead name those.
    """
    by_task = []
    for position, members in enumerate(groups):
        tasks = members.by_task()
        if len(tasks) > 1:
            by_task += [{"row": position, **row(part, seed)} for part in tasks.values()]
    return {
        "schema": SCHEMA,
        "rows": [_row_detail(members, seed) for members in groups],
        "by_task": by_task,
        "reference": None if reference is None else asdict(reference),
        "diversity": _diversity(groups),
        "calibration": curve,
    }


def sample_answers(groups: Sequence[Group], rows: Sequence[dict[str, Any]]) -> list[tuple[str, Record]]:
    """The answers of lowest, median and highest tau (named so) of the fastest greedy row that drafts."""
    candidates = [
        (values["speedup"] or 0.0, position)
        for position, values in enumerate(rows)
        if values["status"] == "ok" and values["tree"] is not None and values["temperature"] == 0
    ]
    if not candidates:
        return []
    _, fastest = max(candidates)
    usable = [record for record in groups[fastest].records if record.cycle_texts and record.target_forwards]
    usable.sort(key=lambda record: (record.new_tokens - 1) / record.target_forwards)
    places = {"lowest tau": 0, "median tau": len(usable) // 2, "highest tau": len(usable) - 1}
    if len(usable) < len(places):
        return [("answer", record) for record in usable]
    return [(name, usable[place]) for name, place in places.items()]


def _row_detail(members: Group, seed: int) -> dict[str, Any]:
    if members.failed:
        return {"tau_ci95": None, "identical_to_generate": None, "compared_to_generate": None}
    compared = [r.identical_to_generate for r in members.records if r.identical_to_generate is not None]
    return {
        "tau_ci95": tau_interval(members.records, seed),
        "identical_to_generate": sum(compared) if compared else None,
        "compared_to_generate": len(compared) or None,
    }


def _diversity(groups: Sequence[Group]) -> dict[str, Any] | None:
    """How varied the greedy answers are, measured on vanilla's (or else the first greedy row's); None without any."""
    greedy = [members for members in groups if members.first.temperature == 0 and not members.failed]
    if not greedy:
        return None
    chosen = next((members for members in greedy if members.first.method == VANILLA), greedy[0])
    distinct, total = distinct_ngrams([record.output_ids for record in chosen.records], size=4)
    pairs = [(record.prompt_ids, record.output_ids) for record in chosen.records]
    return {
        "method": chosen.first.method,
        "answers": len(chosen.records),
        "distinct_4grams": distinct,
        "total_4grams": total,
        "distinct_4gram_share": distinct / total if total else None,
        "prompt_lookup_tau": pooled_prompt_lookup_tau(pairs),
        "prompt_lookup_tau_latest": pooled_prompt_lookup_tau(pairs, latest=True),
    }


def _overhead(path: Path, groups: Sequence[Group]) -> list[dict[str, Any]] | None:
    """overhead.json with each row's position among the summary's; None where it was not measured."""
    if not path.is_file():
        return None
    places = {members.first.row: position for position, members in reversed(list(enumerate(groups)))}
    measured = [each for each in read_overhead(path) if each.row in places]
    return [{**asdict(each), "position": places[each.row]} for each in measured] or None


def tuning_of(directory: Path) -> dict[str, Any] | None:
    """tune.json with measured.json, if there is one, under "measured"; None where nothing was tuned."""
    found, measured = directory / "tune.json", directory / "measured.json"
    if not found.is_file():
        return None
    return {**read_json(found), "measured": read_json(measured) if measured.is_file() else None}


def _calibration(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    value = read_json(path)
    expected = (*CALIBRATION_CONTRACT, "nodes", "by_depth", "halves")
    missing = [name for name in expected if not isinstance(value, dict) or name not in value]
    if missing:
        raise UserError(f"{path}: missing {', '.join(missing)}; make it again with: python infer/main.py calibrate")
    assert isinstance(value, dict)
    return value


def _analysis(path: Path) -> dict[str, Any] | None:
    """analysis.json; None where calibrate wrote none, UserError where another version of it did."""
    if not path.is_file():
        return None
    value = read_json(path)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise UserError(f"{path}: of another version; make it again with: python infer/main.py calibrate --overwrite")
    return value
