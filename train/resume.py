"""What a training depends on, its saves (`state/KIND/step-N`, with the manifest written last), its
output, and signals. Imports no torch, so that `--is-whole` answers at once."""

import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from aerie.configs.errors import Requeued, UserError, rank
from aerie.configs.read import as_dict
from aerie.configs.schema.recipe import Recipe
from aerie.data.inputs import FEATURES_COMMAND, changed_since, conversation_inputs, target_inputs
from aerie.model import storage
from aerie.model.hub import head_directory
from aerie.model.storage import FILE, Manifest, Stage, Whole, digest, sound_record

RECORD = "progress.json"  # a save's manifest
BEGUN = ".training"  # a file in the output of an unfinished training, with the path of its saves
LOGGING_ONLY = {"log_every", "save_every", "keep_last", "trackers"}  # keys of section train
# These may change between sittings: they change only roundings or the end of the run.
FREE = LOGGING_ONLY | {"max_seconds", "loss_chunk_slots", "gradient_checkpointing"}


def state_name(recipe: Recipe) -> str:
    """The name of a training's saves. A run may train both its target LM and a draft LM."""
    # Both have the same kind, but only a draft LM distils.
    distill = getattr(recipe.train, "distill", None)
    return recipe.head.kind if distill is None else f"{recipe.head.kind}-{distill}"


def needs_target(recipe: Recipe) -> bool:
    """Whether training reads the target; a small LM on tokens alone does not."""
    return state_name(recipe) != "draft_lm"


def reads_cache(recipe: Recipe) -> bool:
    """Whether training reads the feature cache."""
    return needs_target(recipe) and recipe.features.mode != "online"


def reads_online(recipe: Recipe) -> bool:
    """Whether each training step runs the target for its features."""
    is_local = recipe.features.server is None
    return needs_target(recipe) and not reads_cache(recipe) and is_local


def reads_servers(recipe: Recipe) -> bool:
    """Whether servers give each training step its features."""
    return needs_target(recipe) and not reads_cache(recipe) and not reads_online(recipe)


def runs_target(recipe: Recipe) -> bool:
    """Whether training needs the target's blocks, for features or to measure tau. Otherwise the
    target's embedding and LM head are enough: 2 GB instead of 140 for a 70B target."""
    return reads_online(recipe) or bool(getattr(recipe.train, "measure_prompts", 0))


def stage_inputs(recipe: Recipe) -> dict[str, Any]:
    """All that the trained weights depend on, ready for JSON. A feature cache stands for its
    data."""
    features = as_dict(recipe.features)
    inputs: dict[str, Any] = {
        "target": target_inputs(recipe.target),
        "head": as_dict(recipe.head),
        "train": without(as_dict(recipe.train), LOGGING_ONLY),
    }
    if reads_cache(recipe):
        inputs["features"] = cache_record(recipe).get("inputs_digest")
        for name in ("after_blocks", "shuffle_shards"):
            if features[name] is not None:
                inputs[name] = features[name]
    else:
        inputs["data"] = as_dict(recipe.data)
        inputs["conversations"] = conversation_inputs(recipe.data.conversations)
        if needs_target(recipe):
            inputs["features"] = {
                name: features[name] for name in ("mode", "after_blocks", "dtype")
            }
    if recipe.head.init_from is not None:
        inputs["init_from"] = storage.digests(head_directory(recipe.head.init_from))
    # Measured tau chooses the weights, and depends on this tree.
    if getattr(recipe.train, "measure_prompts", 0):
        inputs["tree"] = as_dict(recipe.tree)
    return inputs


def cache_record(recipe: Recipe) -> dict[str, Any]:
    """The record of what the feature cache was made from; {} without a cache."""
    directory = recipe.root / "features"
    if not reads_cache(recipe) or not (directory / FILE).is_file():
        return {}
    record = sound_record(directory)
    if not record:
        raise UserError(
            f"{directory / FILE}: cannot be read; rebuild with: {FEATURES_COMMAND} --overwrite"
        )
    return record


def is_whole(recipe: Recipe, stage: Stage) -> bool:
    """Whether the training is done; UserError if its feature cache is older than its inputs."""
    made_of = cache_record(recipe).get("inputs")
    if made_of:
        if storage.differences(made_of["data"], as_dict(recipe.data)):
            return False  # the cache is of other data, and opening it will say so
        # Conversations may be missing here, because another machine built the cache.
        present = [name for name in recipe.data.conversations if Path(name).exists()]
        changed = changed_since(made_of, stage.inputs["target"], conversation_inputs(present))
        if changed:
            raise UserError(
                f"{recipe.root / 'features'}: made before {changed} changed; "
                f"rebuild with: {FEATURES_COMMAND} --overwrite"
            )
    return stage.is_whole()


@dataclass(frozen=True)
class Progress:
    """How far a training has come, and what it was made from."""

    made_of: dict[str, Any]  # all that decides the weights, and the FREE settings; ready for JSON
    world_size: int
    engine: str = ""
    machine: str = ""
    step: int = 0  # optimiser steps done
    tokens: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_step: int = 0  # 0 before the first evaluation
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))  # for trackers


def folders(directory: Path) -> list[Path]:
    """All saves, whole or not, the newest first."""
    return sorted(directory.glob("step-" + 8 * "[0-9]"), reverse=True)


class Found(NamedTuple):
    """The progress from which a training starts."""

    progress: Progress
    folder: Path | None  # the save's; None if this training begins
    warnings: list[str]


def find(directory: Path, fresh: Progress, overwrite: bool) -> Found:
    """The newest whole save if this training wrote it; without a save, the fresh progress.

    UserError if all saves are broken, or if another training wrote the newest. With `overwrite`,
    the fresh progress instead.
    """
    broken: list[str] = []
    # A kill or a bad disk may have broken the newest save; the one before it serves as well.
    for folder in folders(directory):
        # Checks every file's digest, because a crash may leave wrong content of the right size.
        checked = Manifest.check(folder, name=RECORD)
        if isinstance(checked, Whole):
            break
        broken.append(str(checked))
    else:
        if broken and not overwrite:
            raise UserError(f"{broken[0]}; no other save is whole: start again with --overwrite")
        return Found(fresh, None, [f"{text}; starting again" for text in broken])
    # If another recipe wrote the newest whole save, no older one is tried.
    saved = Progress(**checked.manifest.facts)
    refusal = _refusal(saved, fresh)
    if refusal:
        if not overwrite:
            raise UserError(f"{folder}: {refusal}, or start again with --overwrite")
        return Found(fresh, None, [])
    warnings = [f"{text}; going on from {folder.name}, the newest whole save" for text in broken]
    if saved.machine != fresh.machine:
        warnings.append(
            f"{folder}: saved on {saved.machine}, this is {fresh.machine}; "
            "the weights will not be the same bit for bit"
        )
    # This sitting's machine and FREE settings replace those of the save.
    return Found(replace(saved, made_of=fresh.made_of, machine=fresh.machine), folder, warnings)


def _refusal(saved: Progress, fresh: Progress) -> str:
    """Why the saved training cannot go on as the fresh one, and the fix; "" if it can."""
    changed = storage.differences(decisive(saved.made_of), decisive(fresh.made_of))
    if changed:
        return (
            f"holds step {saved.step:,} of another recipe or other data ({changed}); "
            "choose another --run"
        )
    # With another number of processes, steps have other batches and shards other parts.
    if saved.world_size != fresh.world_size:
        return (
            f"saved by {saved.world_size} processes, but this run has {fresh.world_size}; "
            f"go on with --num_processes {saved.world_size}"
        )
    if saved.engine != fresh.engine:
        return f"saved under {saved.engine}, but this run uses {fresh.engine}; launch it as before"
    return ""


def decisive(made_of: dict[str, Any]) -> dict[str, Any]:
    """made_of without the settings that may change between sittings."""
    return {**made_of, "train": without(made_of.get("train", {}), FREE)}


def without(settings: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The settings whose names are not in names."""
    return {name: value for name, value in settings.items() if name not in names}


def save(
    state: Path,
    progress: Progress,
    fill: Callable[[Path], None],
    wait: Callable[[], None],
    keep_last: int,
) -> None:
    """Writes a save with fill(folder), which all ranks call, then removes old saves.

    wait is a barrier for all ranks.
    """
    # Eight digits, so that the names sort in the order of the steps.
    folder = state / f"step-{progress.step:08d}"
    with storage.directory_atomically(folder, wait) as temporary:
        fill(temporary)
        # The manifest digests all parts, so they must be there first.
        wait()
        if rank() == 0:
            Manifest.of(temporary, facts=asdict(progress)).write(temporary, RECORD)
    if rank() == 0:
        # Saves of later steps belong to a training that this one replaces.
        earlier = [path for path in folders(state) if path <= folder]
        clear(state, keep=earlier[:keep_last])
    wait()


def clear(directory: Path, keep: Sequence[Path] = ()) -> None:
    """Removes all saves but those in keep."""
    storage.remove_temporaries(directory)
    for folder in {*folders(directory)} - {*keep}:
        # The new name makes sure that what a kill leaves is no save.
        storage.remove_tree(folder.rename(folder.with_name(f".{folder.name}.old")))


def publish(source: Path, output: Path) -> None:
    """Copies all files of source to output, the weights first. After a kill each file is old or
    new, never half."""
    # Hidden files are temporary, and are left out.
    files = [path for path in source.rglob("[!.]*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.suffix != ".safetensors", path)):
        storage.write_atomically(output / path.relative_to(source), partial(shutil.copyfile, path))
    storage.remove_temporaries(output)


def require_own_output(stage: Stage, state: Path) -> None:
    """UserError if the output holds files that this training has not made."""
    output = stage.output
    record = sound_record(output)
    # A training that a time budget ended has a record, and may go on with another budget.
    is_unfinished = record.get("ended") == "budget" and bool(folders(state))
    if is_unfinished and digest(decisive(record["inputs"])) == digest(decisive(stage.inputs)):
        return  # the output is of this very training
    stage.require_own_directory(overwrite=False)
    if (output / FILE).is_file() or not output.is_dir() or not any(output.iterdir()):
        return
    # After a kill, the files have no record, but this run's marker.
    marker = output / BEGUN
    text = marker.read_text(encoding="utf-8").strip() if marker.is_file() else None
    if text != os.path.relpath(state, output):
        raise UserError(
            f"{output}: holds files that no run has made; name another output, or add --overwrite"
        )


def begin_output(output: Path, state: Path) -> None:
    """Marks the output as being trained, and removes its record."""
    # The path is relative, so that a run can be moved.
    storage.write_text(output / BEGUN, f"{os.path.relpath(state, output)}\n")
    # Only after the marker, because a kill in between must not leave files without an owner.
    (output / FILE).unlink(missing_ok=True)
    storage.remove_temporaries(output)


def forget_saves(output: Path, state: Path) -> None:
    """Removes the saves of a finished training. After a time budget they stay, so that another
    budget can go on."""
    # The record is there already. If a kill leaves saves here, the next start removes them.
    (output / BEGUN).unlink(missing_ok=True)
    if sound_record(output).get("ended") == "finished":
        clear(state)


# After its signal a scheduler repeats the command. After Ctrl-C the user decides.
SIGNAL_STATES = {signal.SIGINT: "interrupted", signal.SIGTERM: "requeue", signal.SIGUSR1: "requeue"}
EXIT_CODES = {"interrupted": 130, "requeue": 75}
PATIENCE_SECONDS = 5.0


class StopRequest:
    """Handles signals. Inside the training loop, the first signal sets `state`; outside, it ends
    the program at once."""

    def __init__(self) -> None:
        self.is_stepping = False
        self.state: str | None = None  # after a signal, its value of SIGNAL_STATES
        self._since = 0.0

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNAL_STATES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.state is None:
            self.state = SIGNAL_STATES[signal.Signals(number)]
            self._since = time.monotonic()
            if not self.is_stepping:
                raise KeyboardInterrupt if number == signal.SIGINT else Requeued
        # Launchers repeat a signal, which must not disturb the saving. A later Ctrl-C ends it.
        elif number == signal.SIGINT and time.monotonic() - self._since > PATIENCE_SECONDS:
            raise KeyboardInterrupt
