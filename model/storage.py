"""Files that are either whole or absent: written under a temporary name, synced, renamed."""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from safetensors import SafetensorError

from aerie.configs.errors import REQUEUE, NotWritable, Requeued, UserError

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


WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of file systems


class Lock:
    """A lock on a file, which is made where it does not exist; a context that frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = _opened(path)

    def acquire(self, shared: bool = False, wait: bool = True) -> bool | Literal["unknown"]:
        """Whether this process has it now; "unknown", which is true as a condition, where there are no locks."""
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            try:
                fcntl.flock(self.file, kind)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
                return "unknown"
            if _is_named(self.file, self.path):
                return True
            self.file.close()
            self.file = _opened(self.path)

    def forget(self) -> None:
        """Removes the file: whoever takes a new one finds the work done."""
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        self.file.close()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _is_named(file: IO[bytes], path: Path) -> bool:
    """Whether path still is this open file: before it was locked another may have removed or replaced it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _opened(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


FILE = "provenance.json"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "safetensors", "tokenizers")


@dataclass
class Stage:
    """One step of the pipeline: its output directory and everything that its output depends on.

    `inputs` is JSON-ready; two calls with equal inputs would write the same thing, so the second reuses the first.
    """

    name: str
    output: Path
    inputs: dict[str, Any]
    started: float = field(default_factory=time.time)

    def is_whole(self) -> bool:
        """True when the output is finished and was made from these inputs."""
        return sound_record(self.output).get("inputs_digest") == digest(self.inputs)

    def require_own_directory(self, overwrite: bool) -> None:
        """UserError when the directory holds another run's output and overwrite was not asked for."""
        path = self.output / FILE
        if overwrite or not path.is_file():
            return
        found = sound_record(self.output)
        if not found:
            raise UserError(f"{path}: cannot be read; write it anew with --overwrite")
        if found.get("inputs_digest") == digest(self.inputs):
            return
        raise UserError(
            f"{self.output}: holds another {found.get('stage', 'output')} "
            f"({differences(found.get('inputs', {}), self.inputs) or 'made by another version'}); "
            f"choose another --run, or replace it with --overwrite"
        )

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Writes provenance.json, which marks the output as whole, and returns it."""
        record = {
            "stage": self.name,
            "inputs_digest": digest(self.inputs),
            "inputs": self.inputs,
            "seconds": round(time.time() - self.started, 1),
            **facts,
            **environment(),
        }
        write_json(self.output / FILE, record)
        return record


def sound_record(directory: Path) -> dict[str, Any]:
    """What its provenance.json says; nothing where it is missing or broken, or its inputs are not those it digests."""
    try:
        record: dict[str, Any] = read_json(directory / FILE)
        return record if record["inputs_digest"] == digest(record["inputs"]) else {}
    except (UserError, KeyError, TypeError):
        return {}


def environment() -> dict[str, Any]:
    """Commit, dirty flag, versions and argv of this process."""
    return {"commit": commit(), "dirty": is_dirty(), "argv": _argv(), "versions": versions()}


def commit() -> str | None:
    """The checkout's commit, or None outside a git checkout."""
    return _git("rev-parse", "--short=12", "HEAD")


def is_dirty() -> bool | None:
    """Whether tracked files differ from the commit; None outside a git checkout."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def versions() -> dict[str, str]:
    """Installed versions of the packages that can move a number."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_status(path: Path, stage: str, state: str, code: int = 0) -> None:
    """`status.json` for scripts: {stage, state, code}; only rank 0 writes."""
    if int(os.environ.get("RANK", "0")) == 0:
        write_json(path, {"stage": stage, "state": state, "code": code})


def with_status(path: Path, stage: str, run: Callable[[], tuple[str, int]]) -> int:
    """run's exit code; run returns (state, exit code), and status.json at path follows it, failures included."""
    write_status(path, stage, "running")
    try:
        state, code = run()
    except Requeued:
        _write_failure(path, stage, "requeue", REQUEUE)
        raise
    except KeyboardInterrupt:
        _write_failure(path, stage, "interrupted", 130)
        raise
    except UserError:
        _write_failure(path, stage, "failed", 2)
        raise
    except BaseException:
        _write_failure(path, stage, "failed", 1)
        raise
    write_status(path, stage, state, code)
    return code


def _write_failure(path: Path, stage: str, state: str, code: int) -> None:
    with suppress(NotWritable):  # a full disk is what may have failed
        write_status(path, stage, state, code)


def _argv() -> list[str]:
    """The command without the machine's own directories; a script of this checkout by its path in it."""
    if not sys.argv:
        return []
    script, root = Path(sys.argv[0]), Path(__file__).resolve().parent.parent
    inside = script.suffix == ".py" and script.resolve().is_relative_to(root)
    return [script.resolve().relative_to(root).as_posix() if inside else script.name, *sys.argv[1:]]


def _git(*arguments: str) -> str | None:
    try:
        root = Path(__file__).resolve().parent.parent
        result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def differences(found: dict[str, Any], asked: dict[str, Any]) -> str:
    """'key: 1 there, 2 asked' of the first few keys whose values differ; '' when none does."""
    rows = [f"{key}: {_short(old)} there, {_short(new)} asked" for key, old, new in _flat_difference(found, asked, "")]
    return "; ".join(rows[:3])


def _flat_difference(found: Any, asked: Any, prefix: str) -> list[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(asked, dict):
        rows = []
        for key in sorted({*found, *asked}):
            rows += _flat_difference(found.get(key), asked.get(key), f"{prefix}.{key}" if prefix else key)
        return rows
    return [] if digest(found) == digest(asked) else [(prefix, found, asked)]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


RECORD = "progress.json"
TEMPORARY_saves = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")  # a file's that is being written (model.files)
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
        if TEMPORARY_saves.fullmatch(place.name):
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


CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
CALIBRATOR = "calibrator.json"  # what its confidence stood for on held-out prompts; decides nothing about the head
MULTI_TOKEN = ("medusa_lm_head.pt", "hydra_lm_head.pt")  # as Medusa and Hydra publish theirs
ORDER = (  # the first that is there is read
    WEIGHTS,
    f"{WEIGHTS}.index.json",
    PICKLE,
    f"{PICKLE}.index.json",
    *MULTI_TOKEN,
)


def find_weights(directory: Path) -> Path | None:
    """The file that holds a directory's tensors or lists its shards; None where there is none."""
    return next((directory / name for name in ORDER if (directory / name).is_file()), None)


def digests(directory: Path) -> dict[str, str]:
    """File name -> digest of everything that decides a head."""
    names = (CONFIG, "*.safetensors", "*.bin", *MULTI_TOKEN)
    return {path.name: file_digest(path) for pattern in names for path in sorted(directory.glob(pattern))}
