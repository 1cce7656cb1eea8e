"""Wall-clock time of an answer, by phase."""

import time
from collections.abc import Callable
from typing import Any

import torch

PHASES = ("prefill", "draft", "verify", "commit", "other", "wall")


class Clock:
    """Adds the milliseconds of each phase to `ms`."""

    def __init__(self, ms: dict[str, float], waits: bool) -> None:
        """waits: each phase ends by waiting for the device."""
        self.ms = ms
        self.waits = waits
        self._last = 0.0
        self.lap(None)

    def lap(self, phase: str | None) -> float:
        """Ends a phase, adds its milliseconds to ms (None: adds them nowhere) and returns them."""
        if self.waits:
            # Otherwise the phase in which the host next waits would pay for these kernels.
            torch.cuda.synchronize()
        now = time.perf_counter()
        ms = 1000 * (now - self._last)
        self._last = now
        if phase is not None:
            self.ms[phase] += ms
        return ms

    def exclude(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of the call, whose time no phase counts."""
        before = self.lap(None)
        try:
            return work(*arguments)
        finally:
            self.lap(None)
            # The phase goes on as if the call had taken no time.
            self._last -= before / 1000
