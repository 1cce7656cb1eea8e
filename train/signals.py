"""Signals that ask a run to stop: Ctrl-C, a scheduler's SIGTERM, SIGUSR1 before a time limit."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# What becomes of the run: after Ctrl-C somebody decides; a scheduler's signal means that the same command follows.
STATES = {signal.SIGINT: "interrupted", signal.SIGTERM: "requeue", signal.SIGUSR1: "requeue"}
CODES = {"interrupted": 130, "requeue": 75}
PATIENCE_SECONDS = (
    5.0  # a launcher repeats the terminal's Ctrl-C to its children at once: only a later one is impatience
)


class StopRequest:
    """While entered, remembers the first of the signals; a second Ctrl-C after some seconds ends at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def state(self) -> str | None:
        """'interrupted', 'requeue', or None while no signal has come."""
        return None if self.received is None else STATES[self.received]

    def __enter__(self) -> "StopRequest":
        for number in STATES:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > PATIENCE_SECONDS:
            raise KeyboardInterrupt


class _Stopped(BaseException):
    """A scheduler's signal came where nothing has to be saved."""


def answered(run: Callable[[], tuple[str, int]]) -> tuple[str, int]:
    """run's (state, exit code); those of a requeue when a scheduler's signal comes before or after the steps.

    Nothing is trained there, so it ends at once. While a StopRequest is entered it hears the signals instead.
    """
    before = {number: signal.signal(number, _stop) for number, state in STATES.items() if state == "requeue"}
    try:
        return run()
    except _Stopped:
        return "requeue", CODES["requeue"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped
