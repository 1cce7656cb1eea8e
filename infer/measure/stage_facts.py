"""Reads what a run's finished stages recorded, after checking target, heads and files."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.data.inputs import target_inputs
from aerie.model import storage
from aerie.model.hub import head_directory
from aerie.model.storage import Manifest, Whole, differences, digests, find_weights


def calibrations_of(run: Path) -> list[Path]:
    """The directories of a run's finished calibrations: RUN/calibration, RUN/*/calibration."""
    records = [*run.glob(f"calibration/{storage.FILE}"), *run.glob(f"*/calibration/{storage.FILE}")]
    return sorted(path.parent for path in records)


def run_facts(
    run: Path, recipe_words: str, target: TargetConfig | None = None
) -> dict[Path, dict[str, Any]]:
    """The `measured_facts` of a run's calibrations, bench and tuning, by directory.

    All stages must have measured `target`, or the bench's target if it is None.
    """
    expected = storage.sound_record(run / "bench").get("inputs", {}).get("target")
    if target and Path(target.path).is_dir():
        expected = target_inputs(target)
    elif expected and Path(expected["path"]).is_dir():
        expected["files"] = target_inputs(TargetConfig(expected["path"]))["files"]
    tuned = [run / "tune"] if (run / "tune" / storage.FILE).is_file() else []
    stages = [*calibrations_of(run), run / "bench", *tuned]
    return {path: measured_facts(path, recipe_words, expected) for path in stages}


def measured_facts(
    directory: Path, recipe_words: str, target: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The facts that a finished stage recorded.

    Raises UserError if the stage is not finished, or if its files, heads or target changed since.
    """
    words = storage.sound_record(directory).get("argv", ())[1:]
    command = shlex.join(word for word in words if word != "--overwrite")
    if not command:
        command = f"{directory.name.replace('calibration', 'calibrate')} {recipe_words}"
    again = f"run: aerie {command}"
    if not (directory / storage.FILE).is_file():
        raise UserError(f"{directory}: the stage is not finished; {again}")
    checked = Manifest.check(directory)
    if not isinstance(checked, Whole):
        raise UserError(f"{checked}; {again} --overwrite")
    if target:
        measured = checked.manifest.inputs.get("target", target)
        changed = differences({"target": measured}, {"target": target})
        if changed:
            raise UserError(
                f"{directory}: measured another target ({changed}); {again} --overwrite"
            )
    facts = checked.manifest.facts
    for head, files in facts.get("heads", {}).items():
        is_here = Path(head).is_dir() and find_weights(head_directory(head))
        if is_here and digests(head_directory(head)) != files:
            raise UserError(f"{directory}: measured other weights of {head}; {again} --overwrite")
    return facts
