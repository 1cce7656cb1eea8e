"""`state/KIND/`: the saves that a stopped run continues from, the newest named in `latest`, and what may continue them.

Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data.locks import Lock
from data.provenance import differences
from model.errors import NotWritable, UserError, warn
from model.files import write_text
from train import saves

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

    def moved(self, **changes: Any) -> "Progress":
        return replace(self, **changes)

    def ranked(self, score: float, keep: int) -> "Progress":
        """With the weights of this step among the best, of which `keep` count; of equals the first is the best."""
        others = [entry for entry in self.best if entry[1] != self.step]
        ranked = sorted([*others, (score, self.step)], key=lambda entry: (-entry[0], entry[1]))
        return replace(self, best=tuple(ranked[:keep]))

    @classmethod
    def of(cls, values: Any, place: Path) -> "Progress":
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
