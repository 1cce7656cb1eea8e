"""Signals that ask a run to stop at its next step: Ctrl-C, a scheduler's SIGTERM, SIGUSR1 before a time limit."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any

STATES = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("interrupted", 130), signal.SIGUSR1: ("requeue", 75)}
PATIENCE_SECONDS = (
    5.0  # a launcher repeats the terminal's Ctrl-C to its children at once: only a later one is impatience
)


class StopRequest:
    """While entered, remembers the first of the signals; a second Ctrl-C after some seconds ends at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

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
