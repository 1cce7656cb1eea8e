"""Writes files that are whole or absent, and the Manifest that says which.

It does not import torch, which would be slow.
"""

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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from aerie.configs.errors import REQUEUE, NotWritable, Requeued, UserError, rank, warn
from aerie.configs.read import read_text

ROOT = Path(__file__).resolve().parent.parent  # the checkout
# error numbers of a full disk, and of a place that cannot be written
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
)
# errors of file systems without locks
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
# errors of network file systems that cannot sync a directory
WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
# words with which torch.save reports a full disk
TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "iostream error")
OF_DIGESTS = re.compile(r": [0-9a-f]{16,} before|, [0-9a-f]{16,} now")
TEMPORARY = re.compile(r"\..+[.-][0-9a-f]{8}\.tmp")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns errors of a full disk, a missing place or a missing permission into NotWritable."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        number = _error_number(error)
        if number in FULL:
            fix = "free some space"
        elif number in REFUSED:
            fix = "choose another --run or --out, or change the permissions"
        else:
            raise
        reason = os.strerror(number)
        raise NotWritable(f"{path}: cannot be written ({reason}); {fix}") from error


def _error_number(error: Exception) -> int:
    """The operating system's number for an error, 0 if it has none."""
    text = str(error)
    if isinstance(error, RuntimeError) and any(word in text for word in TORCH_WRITER):
        return errno.ENOSPC
    from_safetensors = re.search(r"\(os error (\d+)\)", text)
    return int(from_safetensors[1]) if from_safetensors else getattr(error, "errno", None) or 0


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path, whose file then replaces the one at `path`."""
    with explained(path):
        # A pipe or /dev/stdout must not be replaced by a file.
        is_device = path.absolute().parts[1] in ("dev", "proc")
        if path.exists() and (is_device or not path.is_file()):
            raise NotWritable(f"{path}: is no regular file; name a file, or a new path")
        path.parent.mkdir(parents=True, exist_ok=True)
        # `remove_temporaries` knows this form of names.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            write(temporary)
            # Only setting the umask tells its value.
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # safetensors writes mode 0600 whatever the umask
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from error


def plainly(value: Any, nothing: str = "none") -> str:
    """The value as people read it: yes, no, `nothing`, or a number with at most four decimals."""
    if value is None:
        return nothing
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{round(value, 4):,.15g}" if isinstance(value, int | float) else str(value)


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def directory_atomically(path: Path, barrier: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yields a temporary directory that becomes `path` unless the block raises.

    barrier: waits for all ranks, if all ranks call this.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    old = path.with_name(f".{path.name}.old")
    is_first = barrier is None or rank() == 0
    wait = barrier or (lambda: None)
    try:
        with explained(path):
            if is_first:
                remove_tree(temporary)
                temporary.mkdir(parents=True)
            wait()  # the directory exists
            yield temporary
            wait()  # all ranks have written
            if is_first:
                for inside in [*temporary.rglob("*"), temporary]:
                    sync(inside)
                # The old directory stays until the new one can take its place.
                remove_tree(old)
                if path.is_dir():
                    path.rename(old)
                temporary.rename(path)
                sync(path.parent)
                remove_tree(old)
    except BaseException:
        remove_tree(temporary)
        raise
    wait()


def remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def remove_temporaries(directory: Path) -> None:
    """Removes what killed processes left; no other process may be writing there."""
    for path in [*directory.glob(".*.tmp"), *directory.glob(".*.old")]:
        if path.is_dir():
            remove_tree(path)
        elif TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in WITHOUT_SYNC:
            raise
    finally:
        os.close(descriptor)


class Lock(AbstractContextManager["Lock"]):
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.file = path.open("ab")

    def acquire(self, shared: bool = False, wait: bool = True) -> bool | Literal["unknown"]:
        """Whether this process has the lock; "unknown" (truthy) if the file system has no locks."""
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        mode |= 0 if wait else fcntl.LOCK_NB
        while True:
            try:
                fcntl.flock(self.file, mode)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
                return "unknown"
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self.file.fileno()), self.path.stat()):
                    return True
            self.file.close()  # another process removed or replaced the file before this lock
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("ab")

    def __exit__(self, *_: object) -> None:
        self.file.close()


def working_alone(directory: Path, doing: str) -> Lock:
    """The directory's lock; UserError if another process has it."""
    with explained(directory):
        lock = Lock(directory / ".lock")
    held = lock.acquire(wait=False)
    if not held:
        raise UserError(
            f"{directory}: another process is {doing} there; wait, or choose another --run"
        )
    if held == "unknown":
        warn(f"{directory}: its file system has no locks; start no other process {doing} there")
    return lock


FILE, CALIBRATOR, CHOICES = "provenance.json", "calibrator.json", "choices.yaml"
LATER = (FILE, CALIBRATOR, CHOICES)  # written after an output is finished, so no part of it
DIAGNOSIS = "diagnose.json"  # what `aerie diagnose` writes into a run
PACKAGES = "torch transformers accelerate deepspeed datasets safetensors tokenizers".split()


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of value's canonical JSON."""
    return content_digest(json.dumps(value, sort_keys=True, default=str).encode())


def content_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def file_digest(path: Path, digits: int = 16) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:digits]


def user_cache() -> Path:
    """The user's folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "aerie"


@dataclass(frozen=True)
class Whole:
    manifest: "Manifest"


@dataclass(frozen=True)
class Damaged:
    """The first file that is missing or changed; it may be the manifest."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True)
class Foreign:
    manifest: "Manifest"
    differences: str  # what the function `differences` gives


@dataclass(frozen=True)
class Manifest:
    """What a directory holds and was made from; written last, to mark the directory as complete."""

    # by relative name: the size in bytes, and the digest
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)  # all that decides the files' content
    facts: dict[str, Any] = field(default_factory=dict)  # what else may interest a reader

    @classmethod
    def of(
        cls,
        directory: Path,
        inputs: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> "Manifest":
        files = {
            path.relative_to(directory).as_posix(): (path.stat().st_size, file_digest(path))
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        return cls(files, inputs or {}, facts or {})

    def as_json(self) -> dict[str, Any]:
        table = {
            "inputs_digest": digest(self.inputs),
            "inputs": self.inputs,
            "files": self.files,
            **self.facts,
        }
        # Sealed as it is read: JSON turns a number that is a key into text, which sorts otherwise.
        table = json.loads(json.dumps(table))
        return {**table, "seal": digest(table)}

    def write(self, directory: Path, name: str = FILE) -> None:
        write_json(directory / name, self.as_json())

    @classmethod
    def read(cls, directory: Path, name: str = FILE) -> "Manifest":
        table = read_json(directory / name)
        if not isinstance(table, dict) or table.pop("seal", None) != digest(table):
            raise UserError(f"{directory / name}: is damaged (its checksum differs)")
        del table["inputs_digest"]
        files = {file: (size, checksum) for file, (size, checksum) in table.pop("files").items()}
        return cls(files, table.pop("inputs"), table)

    @classmethod
    def check(
        cls,
        directory: Path,
        inputs: dict[str, Any] | None = None,
        content: bool = True,
        name: str = FILE,
    ) -> Whole | Damaged | Foreign:
        """Whether all listed files are there, and were made from these inputs (None: any).

        content: also compares the files' digests, not only their sizes.
        """
        try:
            manifest = cls.read(directory, name)
        except UserError as error:
            return Damaged(directory / name, str(error).removeprefix(f"{directory / name}: "))
        if inputs is not None and (changed := differences(manifest.inputs, inputs)):
            return Foreign(manifest, changed)
        return manifest.damage(directory, content) or Whole(manifest)

    def damage(self, directory: Path, content: bool = True) -> Damaged | None:
        for name, (size, checksum) in self.files.items():
            path = directory / name
            if not path.is_file():
                return Damaged(path, "missing")
            if path.stat().st_size != size:
                return Damaged(path, f"{path.stat().st_size:,} bytes instead of {size:,}")
            if content and file_digest(path) != checksum:
                return Damaged(path, "is damaged")
        return None


@dataclass
class Stage:
    """A step that writes one directory, such as train or bench; its manifest records the inputs."""

    name: str
    output: Path
    inputs: dict[str, Any]
    is_indexed: bool = False  # another manifest lists the files
    started: float = field(default_factory=time.time)

    def is_whole(self) -> bool:
        return isinstance(Manifest.check(self.output, self.inputs), Whole)

    def require_own_directory(self, overwrite: bool) -> None:
        """UserError if the output holds something else or is damaged, unless it is overwritten."""
        if overwrite or not (self.output / FILE).is_file():
            return
        match Manifest.check(self.output, self.inputs):
            case Foreign(manifest, changed):
                is_targets = changed.startswith("target.path:")
                fix = "choose another --run" + ("" if is_targets else ", or add --overwrite")
                stage = manifest.facts.get("stage", "output")
                raise UserError(f"{self.output}: holds another {stage} ({changed}); {fix}")
            case Damaged() as damaged:
                raise UserError(f"{damaged}; write it again with --overwrite")

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Writes provenance.json, and returns it."""
        written = {} if self.is_indexed else Manifest.of(self.output).files
        files = {
            name: entry
            for name, entry in written.items()
            if Path(name).name not in LATER and not name.startswith(".")
        }
        own_facts = {"stage": self.name, "seconds": round(time.time() - self.started, 1)}
        manifest = Manifest(files, self.inputs, {**own_facts, **facts, **environment()})
        manifest.write(self.output)
        return manifest.as_json()


def sound_record(directory: Path) -> dict[str, Any]:
    """provenance.json; {} where it is missing or damaged."""
    with suppress(UserError):
        return Manifest.read(directory).as_json()
    return {}


def differences(recorded: dict[str, Any], current: dict[str, Any]) -> str:
    """'key: 1 before, 2 now' for at most three keys that differ.

    target.path comes first, digests last.
    """
    rows = sorted(
        dict.fromkeys(_differing(recorded, current, "")),
        key=lambda row: (not row.startswith("target.path:"), bool(OF_DIGESTS.search(row))),
    )
    return "; ".join(rows[:3])


def _differing(recorded: Any, current: Any, key: str) -> list[str]:
    """A row for each key below `key` that differs."""
    if digest(recorded) == digest(current):
        return []
    if isinstance(recorded, dict) and isinstance(current, dict):
        rows = []
        for name in sorted({*recorded, *current}):
            below = f"{key}.{name}" if key else f"{name}"
            rows += _differing(recorded.get(name), current.get(name), below)
        return rows
    are_lists = isinstance(recorded, list) and isinstance(current, list)
    if are_lists and any(isinstance(entry, dict) for entry in [*recorded, *current]):
        return _differing(dict(enumerate(recorded)), dict(enumerate(current)), key)
    if key == "date" or key.endswith(".date"):
        # An output made with a template that writes no date fits any date.
        return [date_change(recorded, current)] if recorded else []
    if key.endswith("after_blocks"):
        key += " (null: those of head.kind)"
    return [f"{key}: {recorded!s:.40} before, {current!s:.40} now"]


def date_change(before: Any, now: Any) -> str:
    """A sentence about two dates that differ (None: not known)."""
    return (
        f"the date that the template writes was {before or 'not recorded'}, "
        f"is {now or 'not known'} (data.date)"
    )


def environment() -> dict[str, Any]:
    """The commit, the command line and the versions of packages; without paths of this machine."""
    path = Path(sys.argv[0]).resolve()
    is_script = path.suffix == ".py" and path.is_relative_to(ROOT)  # of the checkout
    name = path.relative_to(ROOT).as_posix() if is_script else path.name
    versions = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": is_dirty(),
        "argv": ["aerie" if path.name == "__main__.py" else name, *sys.argv[1:]],
        "versions": versions,
    }


def is_dirty() -> bool | None:
    """Whether tracked files differ from the commit; None outside a git checkout."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    if not (ROOT / ".git").exists():  # an installed package may stand in the user's own repository
        return None
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            ["git", *arguments], cwd=ROOT, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return None


def write_status(path: Path, stage: str, state: str, code: int = 0) -> None:
    """Writes `status.json`, which is for scripts; only rank 0 writes."""
    if rank() == 0:
        write_json(path, {"stage": stage, "state": state, "code": code})


@contextmanager
def status_file(path: Path, stage: str) -> Iterator[dict[str, Any]]:
    """Keeps status.json: running, then how the stage ended.

    The block may put its end into the dict; an exception is a failure.
    """
    write_status(path, stage, "running")
    ended: dict[str, Any] = {"state": "done", "code": 0}
    try:
        # The lock tells a running stage from a killed one.
        with Lock(path.with_name(f".{path.name}.lock")) as lock:
            lock.acquire(wait=False)
            yield ended
    except BaseException as error:
        state, code = _ending(error)
        try:
            write_status(path, stage, state, code)
        except NotWritable:  # the disk may be full: overwrite the old file in place
            with suppress(OSError), path.open("r+", encoding="utf-8") as file:
                file.write(json.dumps({"stage": stage, "state": state, "code": code}))
                file.truncate()
        raise
    write_status(path, stage, **ended)


def _ending(error: BaseException) -> tuple[str, int]:
    """The state and the exit code of a stage that this exception ended."""
    if isinstance(error, Requeued):
        return "requeue", REQUEUE
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    return "failed", 2 if isinstance(error, UserError | OSError | SafetensorError) else 1


CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
MULTI_TOKEN = ("medusa_lm_head.pt", "hydra_lm_head.pt")  # the published names
# If a directory has several of these files, the first one is read.
TARGET_WEIGHTS = (WEIGHTS, f"{WEIGHTS}.index.json", PICKLE, f"{PICKLE}.index.json")
HEAD_WEIGHTS = (*TARGET_WEIGHTS, *MULTI_TOKEN)
SHIPPED_TEMPLATE = "configs/templates/vicuna.jinja"


def find_weights(directory: Path) -> Path | None:
    """The file that holds a directory's tensors or lists its shards."""
    return next((directory / name for name in HEAD_WEIGHTS if (directory / name).is_file()), None)


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor; UserError if the index names none, or one in another folder."""
    values = read_json(index)
    files = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(files, dict):
        raise UserError(f"{index}: has no weight_map from tensors to files; fetch it again")
    outside = [name for name in files.values() if Path(name).name != name]
    if outside:
        raise UserError(
            f"{index}: names {outside[0]!r}, which is no file beside it; fetch it again"
        )
    return files


def digests(directory: Path) -> dict[str, str]:
    """Digests of the files that define a head, by name."""
    return {
        path.name: file_digest(path)
        for path in sorted(directory.glob("*"))
        if path.name in (CONFIG, *MULTI_TOKEN) or path.suffix in (".safetensors", ".bin")
    }


def template_path(path: str) -> Path:
    """The file of target.chat_template, looked for in the working directory and the checkout."""
    for file in (Path(path).expanduser(), ROOT / path):
        if file.is_file():
            read_text(file)  # UserError for a file that is no text
            return file
    raise UserError(
        f"target.chat_template: {path}: no such file; for Vicuna, name {SHIPPED_TEMPLATE}"
    )
