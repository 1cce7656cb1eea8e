"""`state/KIND/`: the saves that a stopped run continues from, the newest named in `latest`, and what may continue them.

Nothing here imports torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from aerie.configs.errors import NotWritable, UserError, warn
from aerie.model import storage as saves
from aerie.model.storage import (
    FILE,
    Lock,
    Stage,
    differences,
    digest,
    read_json,
    sound_record,
    write_atomically,
    write_text,
)

LATEST = "latest"
TRACKERS = "trackers.json"  # the run's id there (train.trackers)
# What may change between two sittings of one run: it moves no weight (ROUNDING: by rounding only), or only when the run
# ends.
FREE = (
    "max_seconds",
    "log_every",
    "save_every",
    "keep_last",
    "keep_best",
    "trackers",
    "profile_steps",
    "loss_chunk_slots",
    "gradient_checkpointing",
)
ROUNDING = ("loss_chunk_slots",)  # the same gradients, summed in another order
STATES = "states"  # part of made_of: a digest of the feature cache's bits, None where it has none or there is no cache
DATA = {  # parts of made_of, and what a sentence calls them
    "data": "data",
    "conversations": "conversations",
    "features": "feature cache",
    "after_blocks": "features.after_blocks",
    "shuffle_shards": "features.shuffle_shards",
    "rows": "token ids of the rows",
}


@dataclass(frozen=True)
class Progress:
    """Where a run is: optimiser steps and tokens done, seconds spent, the best held-out scores so far.

    made_of is everything that decides the weights, and the settings that do not (FREE), JSON-ready; engine and machine
    say how and where it was computed.
    """

    made_of: dict[str, Any]
    world_size: int
    engine: str = ""
    machine: str = ""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: tuple[tuple[float, int], ...] = ()  # (score, step), best first

    @property
    def best_step(self) -> int:
        """The step of the best weights, 0 before the first evaluation."""
        return self.best[0][1] if self.best else 0

    def moved(self, **changes: Any) -> Progress:
        return replace(self, **changes)

    def ranked(self, score: float, keep: int) -> Progress:
        """With the weights of this step among the best, of which `keep` count; of equals the first is the best."""
        others = [entry for entry in self.best if entry[1] != self.step]
        ranked = sorted([*others, (score, self.step)], key=lambda entry: (-entry[0], entry[1]))
        return replace(self, best=tuple(ranked[:keep]))

    @classmethod
    def of(cls, values: Any, place: Path) -> Progress:
        """The saved values; UserError when another version wrote them."""
        try:
            return cls(**{**values, "best": tuple((score, step) for score, step in values["best"])})
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"{place}: was written by another version of this code") from error


@dataclass(frozen=True)
class Found:
    """What a run goes on from: the progress and the folder of its states (None: it starts), and what to say of it."""

    progress: Progress
    folder: Path | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find(directory: Path, fresh: Progress, overwrite: bool) -> Found:
    """The newest whole save of this run.

    UserError when there are saves and none is whole, or they are of another recipe, of other data, or of processes that
    cannot share theirs with these, unless overwrite was asked for: then the run starts.
    """
    warnings: list[str] = []
    found = _newest_whole(directory, warnings)
    if found is None:
        if warnings and not overwrite:
            raise UserError(f"{warnings[0]}; no other save is whole: start anew with --overwrite")
        return Found(fresh, warnings=tuple(f"{text}; starting anew" for text in warnings))
    saved, folder = found
    refusal = _refusal(saved, fresh, folder)
    if refusal is None:
        said = tuple(f"{text}; going on from {folder.name}, the newest whole save" for text in warnings)
        if saved.machine != fresh.machine:
            said += (
                f"{folder}: saved with {saved.machine}, this is {fresh.machine}: it goes on, not bit for bit as there",
            )
        moved = {"made_of": fresh.made_of, "machine": fresh.machine}
        return Found(saved.moved(**moved), folder, said, _adaptations(saved, fresh))
    if overwrite:
        return Found(fresh)
    raise UserError(refusal)


def save(
    directory: Path,
    progress: Progress,
    fill: Callable[[Path], None],
    rank: int = 0,
    wait: Callable[[], None] = lambda: None,
    keep_last: int = 1,
) -> None:
    """Writes the states with fill(folder), which all ranks call, and makes them the latest of `keep_last` saves.

    wait is a barrier over all ranks. Earlier saves are removed only when the new one is durable.
    """
    folder = directory / saves.name_of(progress.step)
    try:
        saves.write(folder, asdict(progress), fill, rank, wait)
    except NotWritable as error:
        before = [each.name for each in saves.folders(directory) if each != folder]
        kept = f"; {before[0]} is kept, and the same command goes on from there" if before else ""
        raise NotWritable(f"{error}{kept}", error.is_full) from error
    if rank == 0:
        write_text(directory / LATEST, folder.name + "\n")
        older = [each for each in saves.folders(directory) if saves.step_of(each) <= progress.step]
        for stale in {*saves.folders(directory)} - {*older[:keep_last]}:  # also broken ones of steps that are to come
            saves.remove(stale)
        saves.sweep(directory)
    wait()


def training_alone(directory: Path) -> Lock:
    """A lock on the saves; UserError when another process has it."""
    lock = Lock(directory / ".lock")
    held = lock.acquire(wait=False)
    if not held:
        lock.release()
        raise UserError(f"{directory}: another process is training there; wait for its end, or choose another --run")
    if held == "unknown":
        warn(f"{directory}: this file system knows no locks: start no second training there")
    return lock


def clear(directory: Path, is_over: bool = False) -> None:
    """Forgets the saves, and the trackers' run if the training is over; profiler traces and best weights stay."""
    if is_over:
        (directory / TRACKERS).unlink(missing_ok=True)
    (directory / LATEST).unlink(missing_ok=True)
    for folder in saves.folders(directory):
        saves.remove(folder)
    saves.sweep(directory)


def _newest_whole(directory: Path, warnings: list[str]) -> tuple[Progress, Path] | None:
    folders = saves.folders(directory)
    latest = (directory / LATEST).read_text(encoding="utf-8").strip() if (directory / LATEST).is_file() else None
    if latest is not None and not any(folder.name >= latest for folder in folders):
        warnings.append(f"{directory / latest}: the newest save is missing")
    for folder in folders:
        try:
            return Progress.of(saves.read(folder), folder), folder
        except UserError as error:
            warnings.append(str(error))
    return None


def _refusal(saved: Progress, fresh: Progress, folder: Path) -> str | None:
    """Why these processes cannot go on from the save, and what can be done."""
    anew = "start anew with --overwrite"
    there, now = (decisive(progress.made_of) for progress in (saved, fresh))
    data = [{word: each.get(name) for name, word in DATA.items()} for each in (there, now)]
    others = [{name: value for name, value in each.items() if name not in DATA} for each in (there, now)]
    if changed := differences(*others):
        return f"{folder}: step {saved.step:,} of another recipe ({changed}); choose another --run, or {anew}"
    if changed := differences(*data):
        return f"{folder}: step {saved.step:,} on other data ({changed}); choose another --run, or {anew}"
    if saved.world_size != fresh.world_size:
        return (
            f"{folder}: saved by {saved.world_size} processes, now there are {fresh.world_size}; go on with "
            f"--num_processes {saved.world_size}, or {anew}"
        )
    if saved.engine != fresh.engine:
        return f"{folder}: saved under {saved.engine}, now it is {fresh.engine}; go on as there, or {anew}"
    return None


def _adaptations(saved: Progress, fresh: Progress) -> tuple[str, ...]:
    """A sentence for all that is another now and may be."""
    there, now = ({name: each.made_of.get("train", {}).get(name) for name in FREE} for each in (saved, fresh))
    states = [each.made_of.get(STATES) for each in (saved, fresh)]
    other_states = (
        "feature cache: made anew from the same inputs, and not with the same bits (another features.batch_tokens or "
        "machine); from here on it moves weights by rounding only",
    )
    return (other_states if None not in states and states[0] != states[1] else ()) + tuple(
        f"train.{name}: {there[name]} until now, {now[name]} from here on; "
        f"it moves {'weights by rounding only' if name in ROUNDING else 'no weight'}"
        for name in FREE
        if differences({name: there[name]}, {name: now[name]})
    )


def decisive(made_of: dict[str, Any]) -> dict[str, Any]:
    """The part that decides the weights, but for rounding."""
    train = {name: value for name, value in made_of.get("train", {}).items() if name not in FREE}
    return {name: value for name, value in made_of.items() if name != STATES} | {"train": train}


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


def clear_best(state: Path, but: Iterable[int] = ()) -> None:
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


@dataclass(frozen=True)
class Output:
    """A training's output directory, the run's directory, and that of the training's saves below it."""

    stage: Stage
    run: Path
    state: Path

    @property
    def begun(self) -> Path:
        """Names the output of a training that is under way: what lies there without provenance is this run's own."""
        return self.state.parent / f"{self.state.name}.begun"

    def require_own(self) -> None:
        """UserError for a directory with another training's output, or with files that no training of this run made."""
        if self._is_unfinished():
            return
        self.stage.require_own_directory(overwrite=False)
        output = self.stage.output
        if (output / FILE).is_file() or not output.is_dir() or not any(output.iterdir()) or self._is_begun():
            return
        raise UserError(
            f"{output}: holds files that no run has made; name another output, or replace them with --overwrite"
        )

    def begin(self) -> None:
        """From here on what lies in the directory is this training's; a run that is moved keeps what is inside it."""
        output, run = self.stage.output.resolve(), self.run.resolve()
        write_text(self.begun, f"{output.relative_to(run) if output.is_relative_to(run) else output}\n")
        (self.stage.output / FILE).unlink(missing_ok=True)

    def end(self) -> None:
        """The record in the directory says from here on whose it is."""
        self.begun.unlink(missing_ok=True)

    def _is_begun(self) -> bool:
        if not self.begun.is_file():
            return False
        name = self.begun.read_text(encoding="utf-8").strip()
        places = (self.run / name, Path(name))  # the second as an earlier version wrote it
        return self.stage.output.resolve() in [place.resolve() for place in places]

    def _is_unfinished(self) -> bool:
        """Whether a budget ended this very training, but for settings that move no weight, and its saves are there."""
        record = sound_record(self.stage.output)
        if record.get("ended") != "budget" or not saves.folders(self.state):
            return False
        then, now = (digest(decisive(inputs)) for inputs in (record["inputs"], self.stage.inputs))
        return then == now
