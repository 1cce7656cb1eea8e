"""What calibrate leaves behind: arrays, tables, and the calibrator, here and beside the head."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from infer.calibrate import summarise
from infer.calibration.analysis import FILE, analyse
from infer.calibration.calibrator import Calibrator, save
from infer.calibration.fitting import fit_and_score
from infer.calibration.measure import Recording
from infer.records import write_cycles
from model.errors import warn
from model.files import write_json
from model.head_files import CALIBRATOR, digests


def write_calibration(
    output: Path, recording: Recording, bins: int, head: str | None, name: Callable[[int], str]
) -> list[str]:
    """Writes cycles.npz, recorded.npz, calibration.json and analysis.json, and calibrator.json also beside the head.

    The lines tell what was found. name gives a token id's text.
    """
    nodes = recording.nodes
    write_cycles(output / "cycles.npz", nodes)
    recording.write(output)
    summary = summarise(nodes, bins)
    fitted = fit_and_score(nodes, bins)
    tables = analyse(recording, name, bins)
    tables["calibrator"] = None if fitted is None else fitted[1]
    write_json(output / "calibration.json", summary)
    write_json(output / FILE, tables)
    lines = [
        f"calibrate: {len(nodes.prompt):,} drafted nodes of {len(nodes.accepted_length):,} cycles"
        + (f"; ECE {summary['ece']:.4f}, Brier {summary['brier']:.4f}" if len(nodes.prompt) else "")
    ]
    if fitted is None:
        return [*lines, "calibrate: no calibrator: one half of the prompts drafted nothing"]
    lines.append(calibrator_text(fitted[1]))
    lines += _save(fitted[0], output, head)
    return lines


def calibrator_text(scores: dict[str, Any]) -> str:
    """One line: ECE on the held-out half before and after."""
    held_out = scores["held_out"]
    return (
        f"calibrate: on {scores['held_out_prompts']} prompts that the calibrator was not fitted on: ECE "
        f"{held_out['before']['ece']:.4f} before, {held_out['temperature']['ece']:.4f} by temperature "
        f"{scores['temperature']:.3f}, {held_out['isotonic']['ece']:.4f} isotonic"
    )


def _save(calibrator: Calibrator, output: Path, head: str | None) -> list[str]:
    if head is None:
        save(calibrator, output)
        return []
    place = Path(head)
    if not place.is_dir():
        save(calibrator, output)
        return [f"calibrate: {head} is no directory, so the calibrator stays in {output}"]
    calibrator = replace(calibrator, head=digests(place))
    save(calibrator, output)
    try:
        save(calibrator, place)
    except OSError as error:
        warn(f"{place}: {CALIBRATOR} cannot be written ({error.strerror or error}); it stays in {output}")
        return []
    return [f"calibrate: {place / CALIBRATOR}: decode by it with --tree.calibrated temperature or isotonic"]
