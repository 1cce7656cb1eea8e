"""Folders of which every byte is known: written aside, synced, renamed; a record in each tells whether it is whole.

The record, written last, holds the length and digest of every other file of the folder, and a digest of itself.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.errors import NotWritable, UserError
from model.files import digest, explained, file_digest, read_json, sync_directory, sync_tree, write_json

RECORD = "progress.json"
TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")  # a file's that is being written (model.files)
TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "iostream error")  # it tells no errno


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def folders(directory: Path) -> list[Path]:
    """The folders of all steps, newest first, whole or not."""
    found = [folder for folder in directory.glob("step-*") if folder.name.removeprefix("step-").isdigit()]
    return sorted(found, key=step_of, reverse=True)


def write(
    folder: Path, values: Any, fill: Callable[[Path], None], rank: int = 0, wait: Callable[[], None] = lambda: None
) -> None:
    """Makes the folder of what fill(temporary folder) writes, on all ranks, and of values, on the first.

    wait is a barrier over all ranks. What lay there before is gone only when the new folder is durable. NotWritable
    when the disk is full or may not be written to; nothing of the new folder is left then.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        with explained(folder):
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            wait()
            fill(temporary)
            wait()
            if rank == 0:
                _seal(temporary, values)
                _swap(temporary, folder)
    except (OSError, RuntimeError, UserError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, RuntimeError) and any(word in str(error) for word in TORCH_WRITER):
            free = shutil.disk_usage(folder.parent).free
            text = f"{folder}: cannot be written ({free:,} bytes are free on the disk); free some space"
            raise NotWritable(text, is_full=True) from error
        raise
    wait()


def read(folder: Path, record: Any = None) -> Any:
    """The values of a whole folder; UserError names the first file that is missing or not as it was written.

    record: that of another folder, which this one is held against.
    """
    sealed = record if record is not None else read_json(folder / RECORD)
    try:
        values, files, seal = sealed["values"], dict(sealed["files"]), sealed["seal"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / RECORD}: was written by another version of this code") from error
    if seal != digest([values, files]):
        raise UserError(f"{folder / RECORD}: is not what was written (its checksum differs)")
    for name, (size, expected) in files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing")
        if path.stat().st_size != size:
            raise UserError(f"{path}: {path.stat().st_size:,} bytes long instead of {size:,}")
        if file_digest(path) != expected:
            raise UserError(f"{path}: is not what was written (its checksum differs)")
    return values


def remove(folder: Path) -> None:
    """Removes a folder; whatever kills it midway, no half of it can be taken for a save."""
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.is_dir():
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Removes what killed processes left half written or half removed: temporary files, halves of folders."""
    for place in [*directory.glob(".step-*.tmp"), *directory.glob(".step-*.old")]:
        shutil.rmtree(place, ignore_errors=True)
    for place in directory.glob(".*.tmp"):
        if TEMPORARY.fullmatch(place.name):
            place.unlink(missing_ok=True)


def _seal(folder: Path, values: Any) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): [path.stat().st_size, file_digest(path)] for path in paths}
    write_json(folder / RECORD, {"values": values, "files": files, "seal": digest([values, files])})
    sync_tree(folder)


def _swap(temporary: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        folder.rename(old)
    temporary.rename(folder)
    sync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
