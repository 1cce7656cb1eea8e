"""Where an output came from, and whether it is whole: `provenance.json` beside everything a stage writes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from model.errors import REQUEUE, NotWritable, Requeued, UserError
from model.files import digest, read_json, write_json

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
