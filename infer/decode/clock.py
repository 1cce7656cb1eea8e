"""Wall-clock time of an answer, by phase."""

import time
from collections.abc import Callable
from typing import Any

import torch

PHASES = ("prefill", "draft", "verify", "commit", "other", "wall")


class Clock:
    def __init__(self, ms: dict[str, float], waits: bool) -> None:
        """waits: for the device, at the end of each phase; ms: gets the milliseconds of each."""
        self.ms = ms
        self.waits = waits
        self._last = 0.0
        self.lap(None)

    def lap(self, phase: str | None) -> float:
        """Ends a phase, adds its milliseconds to ms and returns them; None: adds them nowhere."""
        if self.waits:
            # else a phase's kernels would be counted where the host next waits
            torch.cuda.synchronize()
        now = time.perf_counter()
        ms = 1000 * (now - self._last)
        self._last = now
        if phase is not None:
            self.ms[phase] += ms
        return ms

    def exclude(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the call's result; no phase counts its time."""
        before = self.lap(None)
        try:
            return work(*arguments)
        finally:
            self.lap(None)
            # the phase goes on as if the call had taken no time
            self._last -= before / 1000
