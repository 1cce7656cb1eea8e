"""A training's saves in `state/KIND/`, and its output directory: what may be gone on from, and whose it is.

A save is a folder `step-N` with the states of all processes, the best weights so far (`best`), and a manifest that was
written last. Nothing here imports torch.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from aerie.configs.errors import NotWritable, UserError, warn
from aerie.model.storage import (
    FILE,
    Lock,
    Manifest,
    Stage,
    Whole,
    differences,
    digest,
    directory_atomically,
    explained,
    remove_directory,
    remove_temporaries,
    sound_record,
    write_atomically,
    write_text,
)

RECORD = "progress.json"  # a save's manifest
TRACKERS = "trackers.json"  # the run's id there (train.trackers)
BEGUN = ".training"  # lies in an output directory while its training is under way, and says where the saves are
# What may change between two sittings of one run: it moves no weight (ROUNDING: by rounding only), or only when the run
# ends.
FREE = (
    "max_seconds",
    "log_every",
    "save_every",
    "keep_last",
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
    """Where a run is: optimiser steps and tokens done, seconds spent, the best held-out score so far and its step.

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
    best_score: float | None = None
    best_step: int = 0  # 0 before the first evaluation


@dataclass(frozen=True)
class Found:
    """What a run goes on from: the progress and the save (None: it starts), and what to say of it."""

    progress: Progress
    folder: Path | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def folders(directory: Path) -> list[Path]:
    """The folders of all saves, newest first, whole or not."""
    return sorted(directory.glob("step-" + 8 * "[0-9]"), reverse=True)


def find(directory: Path, fresh: Progress, overwrite: bool) -> Found:
    """The newest whole save of this run.

    UserError when there are saves and none is whole, or they are of another recipe, of other data, or of processes that
    cannot share theirs with these, unless overwrite was asked for: then the run starts.
    """
    broken: list[str] = []
    for folder in folders(directory):
        checked = Manifest.check(folder, name=RECORD)
        if isinstance(checked, Whole):
            break
        broken.append(str(checked))
    else:
        if broken and not overwrite:
            raise UserError(f"{broken[0]}; no other save is whole: start anew with --overwrite")
        return Found(fresh, warnings=tuple(f"{text}; starting anew" for text in broken))
    saved = Progress(**checked.manifest.facts)
    refusal = _refusal(saved, fresh, folder)
    if refusal is not None and not overwrite:
        raise UserError(refusal)
    if refusal is not None:
        return Found(fresh)
    warnings = [f"{text}; going on from {folder.name}, the newest whole save" for text in broken]
    if saved.machine != fresh.machine:
        was = f"saved with {saved.machine}, this is {fresh.machine}"
        warnings.append(f"{folder}: {was}: it goes on, not bit for bit as there")
    progress = replace(saved, made_of=fresh.made_of, machine=fresh.machine)
    return Found(progress, folder, tuple(warnings), _changes(saved, fresh))


def _refusal(saved: Progress, fresh: Progress, folder: Path) -> str | None:
    """Why these processes cannot go on from the save, and what can be done."""
    anew = "start anew with --overwrite"
    there, now = (decisive(progress.made_of) for progress in (saved, fresh))
    data = [{word: parts.pop(name, None) for name, word in DATA.items()} for parts in (there, now)]
    for changed, what in ((differences(there, now), "of another recipe"), (differences(*data), "on other data")):
        if changed:
            return f"{folder}: step {saved.step:,} {what} ({changed}); choose another --run, or {anew}"
    if saved.world_size != fresh.world_size:
        return (
            f"{folder}: saved by {saved.world_size} processes, now there are {fresh.world_size}; go on with "
            f"--num_processes {saved.world_size}, or {anew}"
        )
    if saved.engine != fresh.engine:
        return f"{folder}: saved under {saved.engine}, now it is {fresh.engine}; go on as there, or {anew}"
    return None


def _changes(saved: Progress, fresh: Progress) -> tuple[str, ...]:
    """A sentence for everything that differs and may differ."""
    there, now = ({name: each.made_of.get("train", {}).get(name) for name in FREE} for each in (saved, fresh))
    notes = [
        f"train.{name}: {there[name]} until now, {now[name]} from here on; "
        f"it moves {'weights by rounding only' if name in ROUNDING else 'no weight'}"
        for name in FREE
        if digest(there[name]) != digest(now[name])
    ]
    states = [each.made_of.get(STATES) for each in (saved, fresh)]
    if None not in states and states[0] != states[1]:
        why = "another features.batch_tokens or machine"
        notes.append(f"feature cache: made anew with other bits ({why}); it moves weights by rounding only")
    return tuple(notes)


def decisive(made_of: dict[str, Any]) -> dict[str, Any]:
    """The part that decides the weights, but for rounding."""
    train = {name: value for name, value in made_of.get("train", {}).items() if name not in FREE}
    return {name: value for name, value in made_of.items() if name != STATES} | {"train": train}


def save(
    directory: Path,
    progress: Progress,
    fill: Callable[[Path], None],
    rank: int = 0,
    wait: Callable[[], None] = lambda: None,
    keep_last: int = 2,
) -> None:
    """Writes a save with fill(folder), which all ranks call; wait is a barrier over them.

    Earlier saves but the newest ones are removed when it is durable.
    """
    folder = directory / f"step-{progress.step:08d}"
    try:
        with directory_atomically(folder, rank, wait) as temporary:
            fill(temporary)
            wait()
            if rank == 0:
                Manifest.of(temporary, facts=asdict(progress)).write(temporary, RECORD)
    except NotWritable as error:
        before = [place.name for place in folders(directory) if place != folder]
        kept = f"; {before[0]} is kept, and the same command goes on from there" if before else ""
        raise NotWritable(f"{error}{kept}", error.is_full) from error
    if rank == 0:
        older = [place for place in folders(directory) if place <= folder]
        for stale in {*folders(directory)} - {*older[:keep_last]}:  # also broken ones of steps that are to come
            remove_directory(stale)
        remove_temporaries(directory)
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
    """Forgets the saves, and the trackers' run if the training is over; profiler traces stay."""
    if is_over:
        (directory / TRACKERS).unlink(missing_ok=True)
    for folder in folders(directory):
        remove_directory(folder)
    remove_temporaries(directory)


def keep_best(state: Path, write: Callable[[Path], None], output: Path) -> None:
    """Makes what write(directory) writes the output."""
    fresh = state / ".best.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    with explained(output):
        fresh.mkdir(parents=True)
        write(fresh)
    publish(fresh, output)
    shutil.rmtree(fresh)


def publish(source: Path, output: Path) -> None:
    """Copies weights to the output: file by file, each whole or as before, the weights first."""
    files = sorted(path for path in source.rglob("[!.]*") if path.is_file())
    for path in sorted(files, key=lambda path: ".safetensors" not in path.suffixes):
        write_atomically(output / path.relative_to(source), partial(_copy, path))
    for stale in output.glob("*.safetensors*"):
        if not (source / stale.name).exists():
            stale.unlink()
    remove_temporaries(output)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def require_own_output(stage: Stage, state: Path) -> None:
    """UserError for a directory with another training's output, or with files that no training of this run made."""
    output, record = stage.output, sound_record(stage.output)
    is_unfinished = record.get("ended") == "budget" and bool(folders(state))
    if is_unfinished and digest(decisive(record["inputs"])) == digest(decisive(stage.inputs)):
        return  # a budget ended this very training, but for settings that move no weight: it goes on
    stage.require_own_directory(overwrite=False)
    if (output / FILE).is_file() or not output.is_dir() or not any(output.iterdir()):
        return
    begun = output / BEGUN
    if not begun.is_file() or begun.read_text(encoding="utf-8").strip() != os.path.relpath(state, output):
        raise UserError(
            f"{output}: holds files that no run has made; name another output, or replace them with --overwrite"
        )


def begin_output(output: Path, state: Path) -> None:
    """From here on what lies in the directory is this training's; the way is relative, so that a run can be moved."""
    write_text(output / BEGUN, f"{os.path.relpath(state, output)}\n")
    (output / FILE).unlink(missing_ok=True)
    remove_temporaries(output)
