"""Sums that are divided once, over all processes; the log line and metrics.jsonl."""

import json
import resource
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator

from aerie.configs.errors import UserError
from aerie.model.storage import Lock, explained, read_json, write_json, write_text
from aerie.train.objectives.step import Sums
from aerie.train.resume import TRACKERS

SHOWN = {  # shorter in a line
    "classification": "class",
    "greedy_agreement": "agree",
    "predicted_tau": "tau~",
    "accuracy": "acc",
    "in_vocabulary": "in vocab",
}


def all_reduce(values: torch.Tensor) -> torch.Tensor:
    """values summed over the processes (themselves where there is one)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


def raise_together(error: UserError | None, device: torch.device) -> None:
    """Every process must call it; where one has an error all raise: it its own, the others that another failed."""
    raise_any(error, float(all_reduce(torch.tensor(float(error is not None), device=device))), device)


def raise_any(error: UserError | None, num_errors: float, device: torch.device) -> None:
    """Raises, where any of all processes has an error, this one's own or one that sends the reader to another's line.

    Every process must call it with the same number.
    """
    if not num_errors:
        return
    with suppress(RuntimeError):  # who leaves first closes the connections: all must know by then
        all_reduce(torch.zeros(1, device=device))
    raise error or UserError("train: another process failed; the line that it printed says why")


def most_of_all(count: int, device: torch.device) -> int:
    """The largest count of all processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return count
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def means(sums: Sums, device: torch.device) -> dict[str, float]:
    """sum / count of every name over all processes; every process must have the same names."""
    if not sums:
        return {}
    names = sorted(sums)
    table = [[torch.as_tensor(x, dtype=torch.float64) for x in sums[name]] for name in names]
    stacked = torch.stack([torch.stack([x.to(device) for x in pair]) for pair in table])  # [names, 2]
    totals = all_reduce(stacked).tolist()
    found = {name: total / count if count else 0.0 for name, (total, count) in zip(names, totals, strict=True)}
    return {name: found[name] for name in sums}


class Meter:
    """Collects the sums of several steps without waiting for the device."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, sums: Sums) -> None:
        for name, (value, count) in sums.items():
            before = self.sums.get(name)
            pair = (value.double(), count.double())
            self.sums[name] = pair if before is None else (before[0] + pair[0], before[1] + pair[1])

    def flush(self, device: torch.device) -> dict[str, float]:
        """Means over all processes since the last flush."""
        found = means(self.sums, device)
        self.sums = {}
        return found

    def save(self, path: Path) -> None:
        """Writes this process's sums, exactly."""
        sums = {name: [float(value), float(count)] for name, (value, count) in self.sums.items()}
        path.write_text(json.dumps(sums), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Goes on from the sums that save wrote."""
        pairs = json.loads(path.read_text(encoding="utf-8")).items()
        double = lambda number: torch.tensor(number, dtype=torch.float64)  # noqa: E731
        self.sums = {name: (double(value), double(count)) for name, (value, count) in pairs}


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


@dataclass(frozen=True)
class StepRecord:
    """One log line's values; means are per supervised slot."""

    kind: str
    step: int
    total_steps: int
    epoch: int
    means: dict[str, float]
    loss: float
    grad_norm: float | None  # before clipping; DeepSpeed without ZeRO clips in float32 without telling it
    learning_rate: float
    data_wait: float  # share of the wall time
    tokens_per_s: float
    step_ms: float
    peak_memory_gib: float
    eta_s: float

    def line(self) -> str:
        """One dense line with units."""
        parts = [f"step {self.step:,}/{self.total_steps:,}", f"loss {self.loss:.4f}"]
        parts += shown(self.means)
        parts += [
            "grad ?" if self.grad_norm is None else f"grad {self.grad_norm:.3g}",
            f"lr {self.learning_rate:.2e}",
            f"wait {self.data_wait:.0%}",
            f"{thousands(self.tokens_per_s)} tok/s",
            f"{self.step_ms:.0f} ms",
            f"{self.peak_memory_gib:.2f} GiB",
            f"eta {clock(self.eta_s)}",
        ]
        return " | ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            **self.means,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "data_wait_share": self.data_wait,
            "tokens_per_s": self.tokens_per_s,
            "step_ms": self.step_ms,
            "peak_memory_gib": self.peak_memory_gib,
        }


class MetricsFile:
    """metrics.jsonl: one JSON object a line. A run that goes on from a step forgets what came after it.

    Several heads of one run may be trained at once: they take turns, so that none forgets the others' lines.
    """

    def __init__(self, path: Path, kind: str, from_step: int) -> None:
        self.path = path
        self.reached = 0  # the last step of that kind that had a line
        with self._turn():
            if not path.is_file():
                return
            lines = path.read_text(encoding="utf-8").splitlines()
            self.reached = max((_step(line, kind) for line in lines), default=0)
            kept = [line for line in lines if not _is_stale(line, kind, from_step)]
            if len(kept) != len(lines):
                write_text(path, "".join(line + "\n" for line in kept))

    def write(self, record: dict[str, Any]) -> None:
        with self._turn(), self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record) + "\n")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with explained(self.path), Lock(self.path.with_name(f".{self.path.name}.lock")) as lock:
            lock.acquire()
            yield


def held_out_line(step: int, total_steps: int, rows: int, values: dict[str, float]) -> str:
    """One line: the first measure, then the accuracies by depth, then the rest."""
    first = next(iter(values), None)
    values = dict(sorted(values.items(), key=lambda item: (item[0] != first, not item[0].startswith("accuracy_at_"))))
    return " | ".join([f"step {step:,}/{total_steps:,} | held out ({rows:,} rows)", *shown(values)])


def shown(values: dict[str, float]) -> list[str]:
    """['class 1.2345', 'acc @1 0.710 @2 0.620']: the measures of each depth (NAME_at_1, ...) stand together."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        stem, separator, depth = name.partition("_at_")
        groups.setdefault(stem, []).append(f"@{depth} {value:.3f}" if separator else f"{value:.4f}")
    return [f"{SHOWN.get(stem, stem)} {' '.join(texts)}" for stem, texts in groups.items()]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as flat numbers and strings, which is all that trackers take."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, int | float | str | bool) else str(value)
    return found


def thousands(value: float) -> str:
    """912, 41.2k, 3.4M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def clock(seconds: float) -> str:
    """0:43, 12:05, 3:20:11."""
    whole = int(max(seconds, 0))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _is_stale(line: str, kind: str, from_step: int) -> bool:
    return _step(line, kind) > from_step or _step(line, None) < 0


def _step(line: str, kind: str | None) -> int:
    """The step of a line, 0 where it is of another kind than asked for, -1 where a kill has cut it off."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return -1
    return int(record.get("step", 0)) if kind in (None, record.get("kind")) else 0


PROJECT = "aerie"


class Trackers:
    """Logs to all trackers of an accelerator."""

    def __init__(self, accelerator: Accelerator, state: Path, reached: int) -> None:
        """reached: the last step that earlier sittings have logged, which may be past the save that is gone on from."""
        self.accelerator, self.state, self.reached = accelerator, state, reached

    def start(self, from_step: int, made_of: str, config: dict[str, Any]) -> None:
        """Opens them: a run of the same made_of (a digest) that was stopped goes on under its own id.

        What was logged after from_step, and is about to be logged again, is purged by tensorboard; wandb leaves out
        what it has, and to trackio, which would take a step twice, it is not sent.
        """
        if not self.accelerator.log_with:
            return
        known, run_id = False, ""
        if self.accelerator.is_main_process:
            known, run_id = self._id(made_of)
        resumed = {"id": run_id, "name": run_id, "resume": "allow"}
        options = {
            "tensorboard": {"purge_step": from_step + 1},
            "wandb": resumed,
            "trackio": {"name": run_id, "resume": "allow"},
        }
        self.accelerator.init_trackers(PROJECT, config=None if known else config, init_kwargs=options)

    def log(self, values: dict[str, float], step: int) -> None:
        """Logs values of a step, on the first process."""
        for tracker in self.accelerator.trackers:
            if tracker.name != "trackio" or step > self.reached:
                with explained(self.state.parent):
                    tracker.log(values, step=step)

    def _id(self, made_of: str) -> tuple[bool, str]:
        """(whether an earlier sitting has opened the trackers, the run's id there)."""
        path = self.state / TRACKERS
        if path.is_file():
            stored = read_json(path)
            if stored.get("made_of") == made_of:
                return True, str(stored["id"])
        run_id = f"{self.state.name}-{secrets.token_hex(4)}"
        write_json(path, {"id": run_id, "made_of": made_of})
        return False, run_id
