"""What a training depends on, its saves (`state/KIND/step-N`, the manifest last), its output, and
signals. Without torch, so that `--is-whole` answers at once."""

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
BEGUN = ".training"  # marks an output while its training is under way; says where the saves are
LOGGING_ONLY = {"log_every", "save_every", "keep_last", "trackers"}  # of the section train
# May change between sittings: they change weights only by rounding, or only the run's end.
FREE = LOGGING_ONLY | {"max_seconds", "loss_chunk_slots", "gradient_checkpointing"}


def state_name(recipe: Recipe) -> str:
    """Names the saves: a run may train both its target LM and a draft LM."""
    # Their kind is the same; only a draft LM distils.
    distill = getattr(recipe.train, "distill", None)
    return recipe.head.kind if distill is None else f"{recipe.head.kind}-{distill}"


def needs_target(recipe: Recipe) -> bool:
    return state_name(recipe) != "draft_lm"


def reads_cache(recipe: Recipe) -> bool:
    return needs_target(recipe) and recipe.features.mode != "online"


def reads_online(recipe: Recipe) -> bool:
    """Whether each step runs the target for its features."""
    is_local = recipe.features.server is None
    return needs_target(recipe) and not reads_cache(recipe) and is_local


def reads_servers(recipe: Recipe) -> bool:
    """Whether servers give each step its features."""
    return needs_target(recipe) and not reads_cache(recipe) and not reads_online(recipe)


def runs_target(recipe: Recipe) -> bool:
    """Whether training needs the target's blocks, for features or to measure tau. Otherwise its
    embedding and LM head are enough: 2 GB instead of 140 for a 70B target."""
    return reads_online(recipe) or bool(getattr(recipe.train, "measure_prompts", 0))


def stage_inputs(recipe: Recipe) -> dict[str, Any]:
    """All that the trained weights depend on, JSON-ready; a feature cache stands for its data."""
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
    # The measured tau, which chooses the weights, depends on this tree.
    if getattr(recipe.train, "measure_prompts", 0):
        inputs["tree"] = as_dict(recipe.tree)
    return inputs


def cache_record(recipe: Recipe) -> dict[str, Any]:
    """The feature cache's provenance, {} without one."""
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
    made_of = cache_record(recipe).get("inputs")
    if made_of:
        if storage.differences(made_of["data"], as_dict(recipe.data)):
            return False  # of other data: opening the cache says so
        # Conversations that are not here are on another machine, where the cache was built.
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
    made_of: dict[str, Any]  # all that decides the weights, and FREE settings, JSON-ready
    world_size: int
    engine: str = ""
    machine: str = ""
    step: int = 0  # optimiser steps done
    tokens: int = 0
    seconds: float = 0.0
    best_score: float | None = None
    best_step: int = 0  # 0 before the first evaluation
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))  # in trackers


def folders(directory: Path) -> list[Path]:
    """All saves, newest first, whole or not."""
    return sorted(directory.glob("step-" + 8 * "[0-9]"), reverse=True)


class Found(NamedTuple):
    progress: Progress
    folder: Path | None  # of the save; None: this training begins
    warnings: list[str]


def find(directory: Path, fresh: Progress, overwrite: bool) -> Found:
    """The newest whole save, if it is of this very training; without one the fresh progress.

    UserError, unless `overwrite`, if all saves are broken or the newest is of another training."""
    broken: list[str] = []
    # A kill or a bad disk may have left the newest in pieces; the one before is as good.
    for folder in folders(directory):
        # Checks every file's digest, as a kill of the machine may leave files of the right size.
        checked = Manifest.check(folder, name=RECORD)
        if isinstance(checked, Whole):
            break
        broken.append(str(checked))
    else:
        if broken and not overwrite:
            raise UserError(f"{broken[0]}; no other save is whole: start anew with --overwrite")
        return Found(fresh, None, [f"{text}; starting anew" for text in broken])
    # An older whole save is never tried for another recipe: the newest tells whose saves these are.
    saved = Progress(**checked.manifest.facts)
    refusal = _refusal(saved, fresh)
    if refusal:
        if not overwrite:
            raise UserError(f"{folder}: {refusal}, or start anew with --overwrite")
        return Found(fresh, None, [])
    warnings = [f"{text}; going on from {folder.name}, the newest whole save" for text in broken]
    if saved.machine != fresh.machine:
        warnings.append(
            f"{folder}: saved with {saved.machine}, this is {fresh.machine}: "
            "not bit for bit as there"
        )
    # The settings that may change between sittings, and the machine, are those of this sitting.
    return Found(replace(saved, made_of=fresh.made_of, machine=fresh.machine), folder, warnings)


def _refusal(saved: Progress, fresh: Progress) -> str:
    """Why the saved training cannot go on as the fresh one; "": it can."""
    changed = storage.differences(decisive(saved.made_of), decisive(fresh.made_of))
    if changed:
        return (
            f"step {saved.step:,} of another recipe or other data ({changed}); choose another --run"
        )
    # Another number of processes cuts each step into other batches, and shards into other parts.
    if saved.world_size != fresh.world_size:
        return (
            f"saved by {saved.world_size} processes, now there are {fresh.world_size}; "
            f"go on with --num_processes {saved.world_size}"
        )
    if saved.engine != fresh.engine:
        return f"saved under {saved.engine}, now it is {fresh.engine}; go on as there"
    return ""


def decisive(made_of: dict[str, Any]) -> dict[str, Any]:
    """made_of without the settings that may change between sittings."""
    return {**made_of, "train": without(made_of.get("train", {}), FREE)}


def without(settings: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def save(
    state: Path,
    progress: Progress,
    fill: Callable[[Path], None],
    wait: Callable[[], None],
    keep_last: int,
) -> None:
    """Writes a save with fill(folder), which all ranks call, then removes old ones.

    wait: a barrier of all ranks."""
    # Eight digits, so that names sort as numbers.
    folder = state / f"step-{progress.step:08d}"
    with storage.directory_atomically(folder, wait) as temporary:
        fill(temporary)
        # All parts must be there before the manifest, which digests them.
        wait()
        if rank() == 0:
            Manifest.of(temporary, facts=asdict(progress)).write(temporary, RECORD)
    if rank() == 0:
        # Later saves are of a training that this one has replaced.
        earlier = [path for path in folders(state) if path <= folder]
        clear(state, keep=earlier[:keep_last])
    wait()


def clear(directory: Path, keep: Sequence[Path] = ()) -> None:
    storage.remove_temporaries(directory)
    for folder in {*folders(directory)} - {*keep}:
        # Renamed first, so that the rest after a kill is no save.
        storage.remove_tree(folder.rename(folder.with_name(f".{folder.name}.old")))


def publish(source: Path, output: Path) -> None:
    """Copies all files, the weights first; a kill leaves each file old or new, never half."""
    # Without hidden files, which are temporaries.
    files = [path for path in source.rglob("[!.]*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.suffix != ".safetensors", path)):
        storage.write_atomically(output / path.relative_to(source), partial(shutil.copyfile, path))
    storage.remove_temporaries(output)


def require_own_output(stage: Stage, state: Path) -> None:
    output = stage.output
    record = sound_record(output)
    # A time budget ends a run regularly, with a record: another budget may go on.
    is_unfinished = record.get("ended") == "budget" and bool(folders(state))
    if is_unfinished and digest(decisive(record["inputs"])) == digest(decisive(stage.inputs)):
        return  # a budget ended this very training: it goes on
    stage.require_own_directory(overwrite=False)
    if (output / FILE).is_file() or not output.is_dir() or not any(output.iterdir()):
        return
    # A kill leaves files without a record, but with this run's marker.
    marker = output / BEGUN
    text = marker.read_text(encoding="utf-8").strip() if marker.is_file() else None
    if text != os.path.relpath(state, output):
        raise UserError(
            f"{output}: holds files that no run has made; name another output, or --overwrite them"
        )


def begin_output(output: Path, state: Path) -> None:
    # A relative path, because a run can be moved.
    storage.write_text(output / BEGUN, f"{os.path.relpath(state, output)}\n")
    # After the marker: a kill between them must not leave files that no run has made.
    (output / FILE).unlink(missing_ok=True)
    storage.remove_temporaries(output)


def forget_saves(output: Path, state: Path) -> None:
    """Removes a finished training's saves; after a budget they stay, to go on."""
    # The record is written by now. A kill here leaves saves, which the next start removes.
    (output / BEGUN).unlink(missing_ok=True)
    if sound_record(output).get("ended") == "finished":
        clear(state)


# After its signal a scheduler repeats the command; after Ctrl-C the user decides.
SIGNAL_STATES = {signal.SIGINT: "interrupted", signal.SIGTERM: "requeue", signal.SIGUSR1: "requeue"}
EXIT_CODES = {"interrupted": 130, "requeue": 75}
PATIENCE_SECONDS = 5.0


class StopRequest:
    """Handles the first signal: inside the training loop it is told by `state`, outside of it the
    program ends at once."""

    def __init__(self) -> None:
        self.is_stepping = False
        self.state: str | None = None  # of SIGNAL_STATES, after a signal
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
        # Launchers repeat a signal, which must not disturb the saving; a later Ctrl-C ends it.
        elif number == signal.SIGINT and time.monotonic() - self._since > PATIENCE_SECONDS:
            raise KeyboardInterrupt
