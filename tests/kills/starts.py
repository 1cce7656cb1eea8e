"""Starts of the real commands, each in a process group of its own, that can be killed at any moment."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
GLANCE_SECONDS = 0.003  # how often the files of a running command are looked at
PATIENCE_SECONDS = 600.0


class Running(Protocol):
    """A command that was started and may have ended; pid is that of its group too."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, minus the signal where one has ended it; None while it runs."""


class Python(Protocol):
    """What starts a command: its words begin with the script, its output is appended to log."""

    name: str

    def start(self, words: list[str], log: Path) -> Running: ...


def watched(running: Running, seconds: float | None, glance: Callable[[], None]) -> int | None:
    """The exit code, or None when the command still runs after so many seconds (None: it is waited for)."""
    limit = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
    while (code := running.poll()) is None:
        left = limit - time.monotonic()
        if left <= 0:
            if seconds is None:
                kill(running)
                raise TimeoutError(f"a command has not ended after {PATIENCE_SECONDS:g} s")
            return None
        glance()
        time.sleep(max(0.0, min(GLANCE_SECONDS, left)))
    glance()
    return code


def kill(running: Running) -> int:
    """Sends SIGKILL to the command's whole group; the exit code is the signal's, or its own where it was done."""
    try:
        os.killpg(running.pid, signal.SIGKILL)
    except ProcessLookupError:
        with suppress(ProcessLookupError):  # it has ended, or has no group of its own yet
            os.kill(running.pid, signal.SIGKILL)
    while (code := running.poll()) is None:
        time.sleep(0.001)
    return code


class ColdPython:
    """`python data/main.py ...` from nothing, as a user types it."""

    name = "cold"

    def start(self, words: list[str], log: Path) -> Running:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )


class Forked:
    """A child of the warm process."""

    def __init__(self, pid: int, poll: Callable[[], int | None]) -> None:
        self.pid, self.poll = pid, poll


class WarmPython:
    """The same commands, begun by a fork of a process that has imported torch (see warm.py); a context."""

    name = "warm"

    def __init__(self) -> None:
        self._line, other = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kills.warm", str(other.fileno())], cwd=ROOT, pass_fds=[other.fileno()]
        )
        other.close()
        self._line.recv()

    def start(self, words: list[str], log: Path, below: Path | None = None, fatal: int | None = None) -> Running:
        """fatal: the command kills itself just before its fatal-th change to the names below a directory."""
        self._line.send(json.dumps({"words": words, "log": str(log), "below": str(below), "fatal": fatal}))
        ended: list[int] = []

        def poll() -> int | None:
            if not ended and self._line.poll():
                ended.append(self._line.recv())
            return ended[0] if ended else None

        return Forked(self._line.recv(), poll)

    def __enter__(self) -> "WarmPython":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()
