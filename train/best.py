"""`state/KIND/best/step-N/`: the best-measured weights so far, ready to use; the very best are also the run's output.

A save names those that were the best when it was written, so that a run which goes on from it has them, whatever was
measured after it and before the kill.
"""

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from model.errors import UserError, warn
from model.files import read_json, write_atomically
from train import saves
from train.resume import Progress

FOLDER = "best"


def keep(state: Path, step: int, fill: Callable[[Path], None]) -> None:
    """Keeps what fill(folder) writes as the weights of a step."""
    saves.write(state / FOLDER / saves.name_of(step), None, fill)


def publish(state: Path, step: int, output: Path) -> None:
    """Makes the kept weights of a step the output: file by file, each whole or as before, the weights first."""
    source = state / FOLDER / saves.name_of(step)
    files = [path for path in source.rglob("*") if path.is_file() and path != source / saves.RECORD]
    for path in sorted(files, key=lambda path: (".safetensors" not in path.suffixes, path)):
        write_atomically(output / path.relative_to(source), partial(_copy, path))
    for stale in output.glob("*.safetensors*"):
        if not (source / stale.name).exists():
            stale.unlink()
    saves.sweep(output)


def restore(state: Path, progress: Progress, output: Path) -> Progress:
    """Brings the output to what it was at a save; a warning, and other progress, when the best weights are lost."""
    whole = tuple(entry for entry in progress.best if _is_whole(state, entry[1], output))
    for _, step in progress.best:
        if step not in [entry[1] for entry in whole]:
            warn(f"{state / FOLDER / saves.name_of(step)}: broken or missing; weights that are measured later are kept")
    if whole:
        publish(state, whole[0][1], output)
    return progress.moved(best=whole)


def forget_others(state: Path, progress: Progress) -> None:
    """Removes the weights that neither the progress nor a save counts among the best."""
    named = {step for _, step in progress.best}
    for folder in saves.folders(state):
        try:
            named |= {step for _, step in read_json(folder / saves.RECORD)["values"]["best"]}
        except (UserError, KeyError, TypeError, ValueError):
            continue  # a broken save names nothing
    _keep_only(state, named)


def clear(state: Path, but: Iterable[int] = ()) -> None:
    """Removes all kept weights but those of some steps."""
    _keep_only(state, set(but))


def _keep_only(state: Path, steps: set[int]) -> None:
    for folder in saves.folders(state / FOLDER):
        if saves.step_of(folder) not in steps:
            saves.remove(folder)
    saves.sweep(state / FOLDER)
    if not steps:
        shutil.rmtree(state / FOLDER, ignore_errors=True)


def _is_whole(state: Path, step: int, output: Path) -> bool:
    """Whether the kept weights are whole, after taking them from the output where only that still has them."""
    folder = state / FOLDER / saves.name_of(step)
    try:
        saves.read(folder)
        return True
    except UserError:
        pass
    try:
        record = read_json(folder / saves.RECORD)
        saves.read(output, record)
        saves.write(folder, None, lambda place: _copy_all(output, place, record["files"]))
        return True
    except UserError:
        return False


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _copy_all(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _copy(source / name, target / name)
