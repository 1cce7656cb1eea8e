"""What a training depends on, how it stops and goes on: its inputs, its saves, its output directory, and signals.

A save is a folder `state/KIND/step-N` with the states of all processes, the best weights so far (`best`), and a
manifest that was written last. Nothing here imports torch.
"""

import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from aerie.configs.errors import Requeued, UserError, warn
from aerie.configs.read import as_dict
from aerie.configs.schema.recipe import Recipe, RunPaths
from aerie.data.stage import COMMAND, changed_since, conversation_inputs, target_inputs
from aerie.model import storage
from aerie.model.hub import head_directory
from aerie.model.storage import FILE, Lock, Manifest, Stage, Whole, digest, sound_record

RECORD = "progress.json"  # a save's manifest
BEGUN = ".training"  # lies in an output directory while its training is under way, and says where the saves are
LOGGING_ONLY = {"log_every", "save_every", "keep_last", "trackers"}  # of the section train
# What may change between two sittings of one run: it moves no weight (loss_chunk_slots and gradient_checkpointing: by
# rounding only), or only when the run ends.
FREE = LOGGING_ONLY | {"max_seconds", "loss_chunk_slots", "gradient_checkpointing"}


def state_name(recipe: Recipe) -> str:
    """The name of a training: a run may hold the small LM that is its target, and one that drafts for it."""
    distill = getattr(recipe.train, "distill", None)
    return recipe.head.kind if distill is None else f"{recipe.head.kind}-{distill}"


def needs_target(recipe: Recipe) -> bool:
    """Whether training needs the target's states, and not only tokens."""
    return state_name(recipe) != "draft_lm"


def reads_cache(recipe: Recipe) -> bool:
    """Whether training reads the target's states from a feature cache."""
    return needs_target(recipe) and recipe.features.mode != "online"


def stage_inputs(recipe: Recipe) -> dict[str, Any]:
    """Everything that the trained weights depend on, JSON-ready; a feature cache stands for its data."""
    # Settings that move no weight stay out, so that a finished training is whole also with other ones.
    section = {name: value for name, value in as_dict(recipe.train).items() if name not in LOGGING_ONLY}
    inputs: dict[str, Any] = {"target": target_inputs(recipe.target), "head": as_dict(recipe.head), "train": section}
    features = as_dict(recipe.features)
    if reads_cache(recipe):
        # The cache's own inputs hold the conversations, the target and the states' dtype.
        inputs["features"] = cache_record(recipe).get("inputs_digest")
        inputs |= {name: features[name] for name in ("after_blocks", "shuffle_shards") if features[name] is not None}
    else:
        inputs |= {"data": as_dict(recipe.data), "conversations": conversation_inputs(recipe.data.conversations)}
        if needs_target(recipe):
            inputs["features"] = {name: features[name] for name in ("mode", "after_blocks", "dtype")}
    if recipe.head.init_from is not None:
        inputs["init_from"] = storage.digests(head_directory(recipe.head.init_from))
    # Measured tau chooses the weights, and it is that of this tree.
    if getattr(recipe.train, "measure_prompts", 0):
        inputs["tree"] = as_dict(recipe.tree)
    return inputs


def cache_record(recipe: Recipe) -> dict[str, Any]:
    """The provenance of the feature cache that training reads, {} without one; UserError where it is damaged."""
    directory = RunPaths(Path(recipe.run)).features
    if not reads_cache(recipe) or not (directory / FILE).is_file():
        return {}
    if record := sound_record(directory):
        return record
    raise UserError(f"{directory / FILE}: cannot be read; write it anew with: {COMMAND} --overwrite")


def is_whole(recipe: Recipe, stage: Stage) -> bool:
    """Whether nothing is left to do. UserError where a file has changed since the feature cache was made of it."""
    made_of = cache_record(recipe).get("inputs")
    # A cache of another section data is another one, though its digest may stand in the output's inputs. Opening it
    # tells of that.
    if made_of is not None and digest(made_of["data"]) != digest(as_dict(recipe.data)):
        return False
    if made_of is not None:
        changed = changed_since(made_of, stage.inputs["target"], conversation_inputs(recipe.data.conversations))
        if changed is not None:
            features = RunPaths(Path(recipe.run)).features
            raise UserError(f"{features}: made before {changed} changed; rebuild with: {COMMAND} --overwrite")
    return stage.is_whole()


@dataclass(frozen=True)
class Progress:
    """Where a run is: optimiser steps and tokens done, seconds spent, the best held-out score so far and its step."""

    made_of: dict[str, Any]  # everything that decides the weights, and settings that do not (FREE), JSON-ready
    world_size: int
    engine: str = ""
    machine: str = ""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_step: int = 0  # 0 before the first evaluation
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))  # in trackers


def folders(directory: Path) -> list[Path]:
    """The folders of all saves, newest first, whole or not."""
    return sorted(directory.glob("step-" + 8 * "[0-9]"), reverse=True)


def find(directory: Path, fresh: Progress, overwrite: bool) -> tuple[Progress, Path | None, list[str]]:
    """(progress, save, warnings) of the newest whole save of this run; without a save the fresh progress and None.

    UserError when none is whole or they are of another run, unless overwrite was asked for: then the run starts.
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
        return fresh, None, [f"{text}; starting anew" for text in broken]
    # Found by its manifest, which is written last: every file is as it was written.
    saved, refusal = Progress(**checked.manifest.facts), ""
    if changed := storage.differences(decisive(saved.made_of), decisive(fresh.made_of)):
        refusal = f"step {saved.step:,} of another recipe or other data ({changed}); choose another --run"
    elif saved.world_size != fresh.world_size:
        refusal = f"saved by {saved.world_size} processes, now there are {fresh.world_size}; "
        refusal += f"go on with --num_processes {saved.world_size}"
    elif saved.engine != fresh.engine:
        refusal = f"saved under {saved.engine}, now it is {fresh.engine}; go on as there"
    if refusal and not overwrite:
        raise UserError(f"{folder}: {refusal}, or start anew with --overwrite")
    if refusal:
        return fresh, None, []
    warnings = [f"{text}; going on from {folder.name}, the newest whole save" for text in broken]
    if saved.machine != fresh.machine:
        was = f"saved with {saved.machine}, this is {fresh.machine}"
        warnings.append(f"{folder}: {was}: it goes on, not bit for bit as there")
    return replace(saved, made_of=fresh.made_of, machine=fresh.machine), folder, warnings


def decisive(made_of: dict[str, Any]) -> dict[str, Any]:
    """The part that decides the weights, but for rounding."""
    return {**made_of, "train": {name: value for name, value in made_of.get("train", {}).items() if name not in FREE}}


def save(
    state: Path, progress: Progress, fill: Callable[[Path], None], rank: int, wait: Callable[[], None], keep_last: int
) -> None:
    """Writes a save with fill(folder), which all ranks call, and then removes old ones; wait is their barrier."""
    folder = state / f"step-{progress.step:08d}"
    with storage.directory_atomically(folder, rank, wait) as temporary:
        fill(temporary)
        wait()
        if rank == 0:
            Manifest.of(temporary, facts=asdict(progress)).write(temporary, RECORD)
    if rank == 0:
        # Broken saves of steps that are to come go, too: the continued run will write them anew.
        older = [place for place in folders(state) if place <= folder]
        clear(state, keep=older[:keep_last])
    wait()


def clear(directory: Path, keep: list[Path] | None = None) -> None:
    """Removes all saves but those to keep, and what killed ones left."""
    for folder in {*folders(directory)} - {*(keep or [])}:
        storage.remove_directory(folder)
    storage.remove_temporaries(directory)


def training_alone(directory: Path) -> Lock:
    """A lock on the saves; UserError when another process has it."""
    lock = Lock(directory / ".lock")
    held = lock.acquire(wait=False)
    if not held:
        lock.file.close()
        raise UserError(f"{directory}: another process is training there; wait for its end, or choose another --run")
    if held == "unknown":
        warn(f"{directory}: this file system knows no locks: start no second training there")
    return lock


def keep_best(state: Path, write: Callable[[Path], None], output: Path) -> None:
    """Makes what write(directory) writes the output."""
    fresh = state / ".best.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    with storage.explained(output):
        fresh.mkdir(parents=True)
        write(fresh)
    publish(fresh, output)
    shutil.rmtree(fresh)


def publish(source: Path, output: Path) -> None:
    """Copies weights to the output: file by file, each whole or as before, the weights first."""
    files = sorted(path for path in source.rglob("[!.]*") if path.is_file())
    for path in sorted(files, key=lambda path: ".safetensors" not in path.suffixes):
        storage.write_atomically(output / path.relative_to(source), partial(shutil.copyfile, path))
    storage.remove_temporaries(output)


def require_own_output(stage: Stage, state: Path) -> None:
    """UserError for a directory with another training's output, or with files that no training of this run made."""
    output, record = stage.output, sound_record(stage.output)
    is_unfinished = record.get("ended") == "budget" and bool(folders(state))
    if is_unfinished and digest(decisive(record["inputs"])) == digest(decisive(stage.inputs)):
        return  # a budget ended this very training, but for settings that move no weight: it goes on
    stage.require_own_directory(overwrite=False)
    if (output / FILE).is_file() or not output.is_dir() or not any(output.iterdir()):
        return
    # A kill leaves files without a record; the marker tells that they are of this run.
    begun = output / BEGUN
    if not begun.is_file() or begun.read_text(encoding="utf-8").strip() != os.path.relpath(state, output):
        raise UserError(
            f"{output}: holds files that no run has made; name another output, or replace them with --overwrite"
        )


def begin_output(output: Path, state: Path) -> None:
    """From here on what lies in the directory is this training's; the way is relative, so that a run can be moved."""
    storage.write_text(output / BEGUN, f"{os.path.relpath(state, output)}\n")
    (output / FILE).unlink(missing_ok=True)
    storage.remove_temporaries(output)


def forget_saves(output: Path, state: Path) -> None:
    """Removes what a finished training would go on from; one that a budget ended may go on."""
    (output / BEGUN).unlink(missing_ok=True)
    if sound_record(output).get("ended") == "finished":
        clear(state)


# After Ctrl-C somebody decides what becomes of the run; a scheduler's signal means that the same command follows.
STATES = {signal.SIGINT: "interrupted", signal.SIGTERM: "requeue", signal.SIGUSR1: "requeue"}
CODES = {"interrupted": 130, "requeue": 75}
PATIENCE_SECONDS = 5.0


class StopRequest(AbstractContextManager["StopRequest"]):
    """While entered it answers the first signal: between steps by ending at once, while stepping by remembering it."""

    def __init__(self) -> None:
        self.is_stepping = False
        self.state: str | None = None  # 'interrupted', 'requeue', or None while no signal has come
        self._since = 0.0

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._receive) for number in STATES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.state is None:
            self.state, self._since = STATES[signal.Signals(number)], time.monotonic()
            if not self.is_stepping:
                raise KeyboardInterrupt if number == signal.SIGINT else Requeued
        # Launchers and schedulers repeat a signal, which must not disturb the saving; a person's second Ctrl-C, which
        # comes later than a launcher's copy of the first, ends it.
        elif number == signal.SIGINT and time.monotonic() - self._since > PATIENCE_SECONDS:
            raise KeyboardInterrupt
