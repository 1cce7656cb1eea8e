"""Files that are either whole or absent: written under a temporary name, synced, renamed."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from model.errors import NotWritable, UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns a full disk and missing permission, met while writing path, into a NotWritable; other errors pass."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _error_number(error)
        if number not in (*FULL, *REFUSED):
            raise
        reason, is_full = os.strerror(number), number in FULL
        fix = "free some space" if is_full else "choose another --run, or change its permissions"
        raise NotWritable(f"{path}: cannot be written ({reason}); {fix}", is_full) from error


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Calls write(temporary path), then syncs and renames it to path, with the umask's usual permissions.

    NotWritable when the disk is full or may not be written to.
    """
    with explained(path):
        _write_atomically(path, write)


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Writers of one file may be processes of the same number on two machines. remove_temporaries knows the name.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # safetensors writes mode 0600 whatever the umask
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power cut, as far as its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # not every network file system knows it
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Makes every file below a directory, and their names, survive a power cut."""
    for place in [*path.rglob("*"), path]:
        if place.is_dir():
            sync_directory(place)
        elif place.is_file():
            with place.open("rb") as handle:
                os.fsync(handle.fileno())


def remove_temporaries(directory: Path) -> None:
    """Removes what killed processes were writing in a directory; nobody else may be writing there."""
    for path in directory.glob(".*.tmp"):
        if TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes text to path atomically (UTF-8)."""
    write_atomically(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes value as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The parsed file; UserError when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error


@contextmanager
def directory_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary directory that becomes path when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _error_number(error: Exception) -> int | None:
    """The errno; safetensors says it in its text alone."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def content_digest(content: bytes) -> str:
    """As file_digest, of bytes that lie in no file yet."""
    return hashlib.sha256(content).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """The first 16 hex digits of the SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:16]
