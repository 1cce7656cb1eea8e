"""Sittings in processes of their own that are killed, with SIGKILL, wherever a test wants."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from aerie.data.batches import Batch
from aerie.train.objectives.eagle import Eagle1Objective
from tests.train.sittings import ENDS


class Interrupted(Eagle1Objective):
    """Sends this process a signal, or fails, while the batch of a given training call is in the forward."""

    def __init__(self, settings: Any, at_call: int, number: signal.Signals | None) -> None:
        super().__init__(ENDS, settings)
        self.left, self.number = at_call, number

    def __call__(self, module: Any, batch: Batch) -> Any:
        self.left -= torch.is_grad_enabled()  # an evaluation is no step
        if self.left == 0:
            if self.number is None:
                raise RuntimeError("power cut")
            signal.raise_signal(self.number)
        return super().__call__(module, batch)


def ended_by(run: Callable[[], object]) -> int:
    """How a forked process that calls run ends: its exit code (1 after an exception), or minus the signal's number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(module: Any, name: str, call: int) -> None:
    """Has the given call (counted from 1) of module.name kill this process instead."""
    real, left = getattr(module, name), [call]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(module, name, wrapped)
