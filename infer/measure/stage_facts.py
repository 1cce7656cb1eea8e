"""What the finished stages of a run recorded, if their target, heads and files are still the same."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import RunPaths
from aerie.data.inputs import target_inputs
from aerie.model import storage
from aerie.model.hub import head_directory
from aerie.model.storage import (
    Manifest,
    Whole,
    differences,
    digests,
    find_weights,
)

ANALYSIS_SCHEMA = 2  # of a calibration's analysis.json


def calibrations_of(run: Path) -> list[Path]:
    """The finished calibrations of a run, in RUN/calibration and RUN/*/calibration."""
    return sorted(
        path.parent
        for place in ("", "*/")
        for path in run.glob(f"{place}calibration/{storage.FILE}")
    )


def run_facts(
    run: RunPaths, recipe_words: str, target: TargetConfig | None = None
) -> dict[Path, dict[str, Any]]:
    """`measured_facts` of a run's calibrations, bench and tuning: all of one target (default: the bench's)."""
    here = storage.sound_record(run.bench).get("inputs", {}).get("target")
    if target and Path(target.path).is_dir():
        here = target_inputs(target)
    elif here and Path(here["path"]).is_dir():
        here["files"] = target_inputs(TargetConfig(here["path"]))["files"]
    parts = [
        *calibrations_of(run.root),
        run.bench,
        *([run.tune] if (run.tune / storage.FILE).is_file() else ()),
    ]
    return {path: measured_facts(path, recipe_words, here) for path in parts}


def measured_facts(
    directory: Path, recipe_words: str, target: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The facts that a stage recorded at its end; UserError if its files, heads or target (an input) changed since."""
    made = [
        word
        for word in storage.sound_record(directory).get("argv", ())[1:]
        if word != "--overwrite"
    ]
    again = "run: aerie " + (
        shlex.join(made) or f"{directory.name.replace('calibration', 'calibrate')} {recipe_words}"
    )
    if not (directory / storage.FILE).is_file():
        raise UserError(f"{directory}: no {directory.name}, or one that was stopped; {again}")
    checked = Manifest.check(directory)
    if not isinstance(checked, Whole):
        raise UserError(f"{checked}; {again} --overwrite")
    facts, of_target = checked.manifest.facts, checked.manifest.inputs.get("target", target)
    if target and (changed := differences({"target": of_target}, {"target": target})):
        raise UserError(f"{directory}: measured another target ({changed}); {again} --overwrite")
    for head, files in facts.get("heads", {}).items():
        is_here = Path(head).is_dir() and find_weights(head_directory(head))
        if is_here and digests(head_directory(head)) != files:
            raise UserError(
                f"{directory}: measured {head} before it was trained anew; {again} --overwrite"
            )
    return facts
