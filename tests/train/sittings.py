"""Runs the real loop in this process, on a tiny head and random rows, or in forks that are
killed."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from aerie.configs.read import as_dict
from aerie.configs.schema.heads import Eagle1Train
from aerie.data.batches import Batch
from aerie.model.checkpoint import save_head
from aerie.train.jobs import Job, Rows
from aerie.train.loop import Loop
from aerie.train.objectives import Eagle1Objective
from aerie.train.processes import build_accelerator
from aerie.train.resume import StopRequest
from tests import tiny

VOCAB = tiny.vocab()
CLOCKS = ("data_wait_share", "tokens_per_s", "step_ms", "peak_memory_gib")


class Interrupted(Eagle1Objective):
    """Sends this process a signal, or raises without one, in the forward of a given training
    batch."""

    left, number = 0, 0

    def forward(self, batch: Batch) -> Any:
        self.left -= torch.is_grad_enabled()  # an evaluation is no step
        if torch.is_grad_enabled() and self.left == 0:
            if not self.number:
                raise RuntimeError("power cut")
            signal.raise_signal(self.number)
        return super().forward(batch)


def config(**changes: Any) -> Eagle1Train:
    fixed = {"epochs": 3, "learning_rate": 1e-2, "warmup_steps": 2, "eval_every": 0, "log_every": 1}
    return Eagle1Train(**{**fixed, **changes})


def job(
    directory: Path,
    settings: Eagle1Train,
    stop: tuple[int, int] | None = None,
    vocab: Any = VOCAB,
    held_out: int = 4,
) -> Job:
    """A job on 20 rows that writes below directory; stop: (training batch, signal or 0)."""
    rows = tiny.rows(20)
    objective = Interrupted(tiny.head(VOCAB.embedding, scale=5.0), vocab, settings)
    objective.left, objective.number = stop or (0, 0)
    made = Rows(
        rows, tiny.rows(held_out, seed=1), [len(row.input_ids) for row in rows], [], {"rows": "r"}
    )
    places = directory / "head", directory / "state", directory / "metrics.jsonl"
    return Job("eagle1", objective, made, *places, save_head)


def sitting(made: Job, measure: Any = None) -> tuple[str, Loop]:
    """Runs the job with a fresh accelerator, as a new process would; returns (state at its end,
    loop)."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(
        int(torch.randint(1 << 30, ()).item())
    )  # nothing may depend on the global generator
    accelerator = build_accelerator(made.objective.settings, made.state)
    loop = Loop(
        made, accelerator, {"head": "recipe", "train": as_dict(made.objective.settings)}, measure
    )
    with StopRequest() as stop:
        state = loop.run(stop)
    accelerator.end_training()
    return state, loop


def lines(directory: Path) -> list[dict[str, Any]]:
    return tiny.read_rows(directory / "metrics.jsonl")


def timeless(directory: Path) -> list[dict[str, Any]]:
    """The records without values that depend on the clock or the machine."""
    return [
        {key: value for key, value in line.items() if key not in CLOCKS}
        for line in lines(directory)
    ]


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in loop.job.objective.head.named_parameters()}


def fork(run: Callable[[], object]) -> int:
    """Starts a process that calls run and exits with its result (no number: 0; exception: 1);
    returns its id."""
    child = os.fork()
    if child == 0:
        code: Any = 1
        try:
            if compiler := sys.modules.get("torch._inductor.async_compile"):
                compiler.AsyncCompile.pool.cache_clear()  # its threads stayed in the parent
            code = run()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code if isinstance(code, int) else 0)
    return child


def ended(child: int) -> int:
    """Waits for a process; returns its exit code, or minus the number of the signal that ended
    it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(module: Any, name: str, call: int, run: Callable[[], object], of: str = "") -> bool:
    """Runs in a fork and kills it at the given call of module.name, counted from 1, among calls for
    a path with this ending; returns whether it was killed."""
    real, calls = getattr(module, name), count(1)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if any(str(argument).endswith(of) for argument in arguments) and next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, wrapped)
        return ended(fork(run)) == -signal.SIGKILL
