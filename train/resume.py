"""`state/KIND/`: what a stopped run continues from. Whole or absent: written aside, renamed, then named in `latest`."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.files import read_json, write_json, write_text

LATEST, PROGRESS = "latest", "progress.json"
# What may change between two sittings of one run: it moves no weight, or only when the run ends.
FREE = (
    "max_seconds",
    "log_every",
    "save_every",
    "trackers",
    "profile_steps",
    "loss_chunk_slots",
    "gradient_checkpointing",
)


@dataclass(frozen=True)
class Progress:
    """Where a run is: optimiser steps and tokens done, seconds spent, the best held-out score so far."""

    recipe: str  # digest of everything that decides the weights
    world_size: int
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_step: int = 0

    def moved(self, **changes: Any) -> "Progress":
        return replace(self, **changes)


def find(directory: Path, fresh: Progress, overwrite: bool) -> tuple[Progress, Path | None]:
    """The saved progress and the folder of its states, or (fresh, None).

    UserError when the states belong to another recipe or another number of processes and overwrite was not asked for.
    """
    if not (directory / LATEST).is_file():
        return fresh, None
    folder = directory / (directory / LATEST).read_text(encoding="utf-8").strip()
    saved = Progress(**read_json(folder / PROGRESS))
    if saved.recipe == fresh.recipe and saved.world_size == fresh.world_size:
        return saved, folder
    if overwrite:
        return fresh, None
    if saved.recipe != fresh.recipe:
        raise UserError(
            f"{folder}: step {saved.step:,} of another recipe; choose another --run, or start anew with --overwrite"
        )
    raise UserError(
        f"{folder}: saved by {saved.world_size} processes, now there are {fresh.world_size}; go on with "
        f"--num_processes {saved.world_size}, or start anew with --overwrite"
    )


def save(
    directory: Path, progress: Progress, write: Callable[[Path], None], rank: int, wait: Callable[[], None]
) -> None:
    """Writes the states with write(folder), which all ranks call, and makes them the latest.

    wait is a barrier over all ranks. The folder before is removed only when the new one is named in `latest`.
    """
    folder = directory / f"step-{progress.step:08d}"
    temporary = directory / f".{folder.name}.tmp"
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    wait()
    write(temporary)
    wait()
    if rank == 0:
        write_json(temporary / PROGRESS, asdict(progress))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        write_text(directory / LATEST, folder.name + "\n")
        for old in directory.glob("step-*"):
            if old != folder:
                shutil.rmtree(old)
    wait()


def clear(directory: Path) -> None:
    """Forgets the states; profiler traces stay."""
    (directory / LATEST).unlink(missing_ok=True)
    for folder in [*directory.glob("step-*"), *directory.glob(".step-*.tmp")]:
        shutil.rmtree(folder)


def numerics(train: dict[str, Any]) -> dict[str, Any]:
    """The part of the section `train` that decides the weights."""
    return {name: value for name, value in train.items() if name not in FREE}
