"""What a run measured with a head: shipped only where the run's own records prove that it was this very head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.files import read_json
from model.head_files import CONFIG, digests

MEASURE = "python infer/main.py bench --overwrite, then report"


@dataclass(frozen=True)
class Measured:
    """A run's report/summary.json, empty where nothing is proven, and its calibration.json where that is proven."""

    summary: dict[str, Any]
    calibration: Path | None = None
    notes: tuple[str, ...] = ()


def measured(directory: Path, run: Path | None, without_results: bool) -> Measured:
    """What the run measured with the head in directory, or with the head that it was exported from.

    bench/provenance.json and calibration/provenance.json hold the digests of the heads that were measured; without the
    first the results of report/ are nobody's. UserError for results that are not proven; without_results: a note.
    """
    if run is None:
        return Measured({})
    notes = []
    summary, place = json_table(run / "report" / "summary.json"), run / "calibration" / "calibration.json"
    doubt = _doubt(directory, run / "bench") if summary else None
    if doubt is not None and not without_results:
        raise UserError(f"{doubt}; measure this one with: {MEASURE}; or ship without results: --without-results")
    if doubt is not None:
        notes.append(f"report/summary.json left out: {doubt}")
        summary = {}
    doubt = _doubt(directory, run / "calibration")
    if doubt is None and place.is_file():
        return Measured(summary, place, tuple(notes))
    if place.is_file() or "calibration" in summary:
        notes.append(f"calibration left out: {doubt or f'{place} is missing'}")
    return Measured({name: value for name, value in summary.items() if name != "calibration"}, None, tuple(notes))


def json_table(path: Path) -> dict[str, Any]:
    """A JSON file's table, empty where there is no such file."""
    if not path.is_file():
        return {}
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _doubt(directory: Path, stage: Path) -> str | None:
    """Why a stage's output is not this head's, None where it is."""
    inputs = json_table(stage / "provenance.json").get("inputs")
    used = inputs.get("head") if isinstance(inputs, dict) else None
    heads = [head for head in (used if isinstance(used, list) else [used]) if isinstance(head, dict) and head]
    if not heads:
        return f"{stage}: holds no record of the head that was measured (provenance.json)"
    facts = json_table(directory / CONFIG).get("aerie")
    origin = facts.get("exported_from") if isinstance(facts, dict) else None
    files = origin.get("files") if isinstance(origin, dict) else None
    known = [digests(directory), files if isinstance(files, dict) else {}]
    if any(head.items() <= own.items() for head in heads for own in known):
        return None
    return f"{stage}: was measured with another head than {directory}"
