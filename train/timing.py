"""How long steps take, and a profiler's window over some of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train.config import TrainConfig


@dataclass
class StepClock:
    """Seconds, waiting for data included, and tokens since the last log line."""

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, tokens: float, seconds: float, waited: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        self.waited += waited

    def flush(self, steps_left: int) -> dict[str, float]:
        """data_wait, tokens_per_s, step_ms and eta_s, and starts anew."""
        steps, seconds = max(self.steps, 1), max(self.seconds, 1e-9)
        found = {
            "data_wait": self.waited / seconds,
            "tokens_per_s": self.tokens / seconds,
            "step_ms": 1000.0 * seconds / steps,
            "eta_s": steps_left * seconds / steps,
        }
        self.steps, self.tokens, self.seconds, self.waited = 0, 0.0, 0.0, 0.0
        return found


class ProfilerWindow:
    """A torch.profiler trace of the steps that config.profile_steps names, one Chrome trace per process."""

    def __init__(self, config: TrainConfig, directory: Path, rank: int) -> None:
        self.first, self.count = config.profile_steps or (0, 0)
        self.path = directory / f"trace-step{self.first}-rank{rank}.json"
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Opens the window before its first step and writes the trace before the step after its last."""
        if self.count and step == self.first:
            self._profiler = torch.profiler.profile(record_shapes=True, profile_memory=True)
            self._profiler.start()
        elif step == self.first + self.count:
            self.close()

    def close(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.path))
        self._profiler = None


@contextmanager
def profiler_window(config: TrainConfig, directory: Path, rank: int) -> Iterator[ProfilerWindow]:
    """A window that is closed, and its trace written, also when the run ends inside it."""
    window = ProfilerWindow(config, directory, rank)
    try:
        yield window
    finally:
        window.close()
