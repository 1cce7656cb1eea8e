"""What a training says of itself: means over all processes, the log line, metrics.jsonl and the trackers."""

import json
import resource
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas
import torch
from accelerate import Accelerator

from aerie.model.storage import Lock, explained, read_json, write_json, write_text
from aerie.train.launch import all_reduce
from aerie.train.objectives.base import Sums, add_sums
from aerie.train.resume import TRACKERS

PROJECT = "aerie"  # of the trackers


def means(sums: Sums, device: torch.device) -> dict[str, float]:
    """sum / count of every name over all processes; every process must have the same names."""
    names = sorted(sums)
    pairs = [[torch.as_tensor(part, dtype=torch.float64).to(device) for part in sums[name]] for name in names]
    if not pairs:
        return {}
    # One collective for all names; their order must be that of every other process.
    totals = all_reduce(torch.stack([torch.stack(pair) for pair in pairs])).tolist()  # [names, 2]
    found = {name: total / count if count else 0.0 for name, (total, count) in zip(names, totals, strict=True)}
    return {name: found[name] for name in sums}


class Meter:
    """Collects sums and times of the steps since the last log line, without waiting for the device."""

    def __init__(self) -> None:
        self.sums: Sums = {}
        self._restart_clock()

    def _restart_clock(self) -> None:
        self.steps, self.tokens, self.seconds, self.waited = 0, 0.0, 0.0, 0.0

    def add(self, sums: Sums) -> None:
        add_sums(self.sums, sums)

    def tick(self, tokens: float, seconds: float, waited: float) -> None:
        """Counts a step; seconds with waiting for data included."""
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.seconds, self.waited = self.seconds + seconds, self.waited + waited

    def flush(self, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
        """(means over all processes, times) since the last flush."""
        # Sums stay tensors until here: turning each step's into numbers would wait for the device.
        found, steps, seconds = means(self.sums, device), max(self.steps, 1), max(self.seconds, 1e-9)
        times = {
            "data_wait_share": self.waited / seconds,
            "tokens_per_s": self.tokens / seconds,
            "step_ms": 1000.0 * seconds / steps,
            "peak_memory_gib": peak_memory_gib(device),
        }
        self.sums = {}
        self._restart_clock()
        return found, times

    def save(self, path: Path) -> None:
        """Writes this process's sums, exactly."""
        sums = {name: [float(value), float(count)] for name, (value, count) in self.sums.items()}
        path.write_text(json.dumps(sums), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Goes on from the sums that save wrote."""
        for name, pair in json.loads(path.read_text(encoding="utf-8")).items():
            value, count = (torch.tensor(number, dtype=torch.float64) for number in pair)
            self.sums[name] = (value, count)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def step_line(record: dict[str, Any], total_steps: int, names: list[str]) -> str:
    """A dense line with units of a step's record; names are those of its means."""
    seconds = (total_steps - record["step"]) * record["step_ms"] / 1000.0
    hours, minutes, rest = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    rate = record["tokens_per_s"]
    unit, size = next(((unit, size) for unit, size in (("M", 1e6), ("k", 1e3)) if rate >= size), ("", 1.0))
    # DeepSpeed without ZeRO clips without telling the norm.
    norm = record["grad_norm"]
    parts = [
        f"step {record['step']:,}/{total_steps:,}",
        f"loss {record['loss']:.4f}",
        *shown({name: record[name] for name in names}),
        "grad ?" if norm is None else f"grad {norm:.3g}",
        f"lr {record['learning_rate']:.2e}",
        f"wait {record['data_wait_share']:.0%}",
        f"{rate / size:.{1 if unit else 0}f}{unit} tok/s",
        f"{record['step_ms']:.0f} ms",
        f"{record['peak_memory_gib']:.2f} GiB",
        f"eta {hours}:{minutes:02}:{rest:02}" if hours else f"eta {minutes}:{rest:02}",
    ]
    return " | ".join(parts)


def held_out_line(step: int, total_steps: int, rows: int, values: dict[str, float]) -> str:
    """One line: the first measure, then the accuracies by depth, then the rest."""
    first = next(iter(values), None)
    values = dict(sorted(values.items(), key=lambda item: (item[0] != first, not item[0].startswith("accuracy_at_"))))
    return " | ".join([f"step {step:,}/{total_steps:,} | held out ({rows:,} rows)", *shown(values)])


def shown(values: dict[str, float]) -> list[str]:
    """['feature 1.2345', 'accuracy @1 0.710 @2 0.620']: the measures of each depth (NAME_at_1, ...) stand together."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        stem, separator, depth = name.partition("_at_")
        groups.setdefault(stem, []).append(f"@{depth} {value:.3f}" if separator else f"{value:.4f}")
    return [f"{stem} {' '.join(texts)}" for stem, texts in groups.items()]


class MetricsFile:
    """metrics.jsonl: one JSON object a line. A run that goes on from a step forgets what came after it.

    Several heads of one run may be trained at once: they take turns, so that none forgets the others' lines.
    """

    def __init__(self, path: Path, kind: str, from_step: int) -> None:
        self.path = path
        self.reached = 0  # the last step of that kind that had a line
        with self._turn():
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            kept = []
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:  # a kill has cut it off
                    continue
                # Lines of other trainings of this run stay.
                step = int(record.get("step", 0)) if record.get("kind") == kind else 0
                self.reached = max(self.reached, step)
                if step <= from_step:
                    kept.append(line + "\n")
            if len(kept) != len(lines):
                write_text(path, "".join(kept))

    def write(self, record: dict[str, Any]) -> None:
        with self._turn(), self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record) + "\n")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with explained(self.path), Lock(self.path.with_name(f".{self.path.name}.lock")) as lock:
            lock.acquire()
            yield


def start_trackers(accelerator: Accelerator, state: Path, from_step: int, made_of: str, config: Any) -> None:
    """Opens the trackers: a run of the same made_of (a digest) that was stopped goes on under its own id.

    What was logged after from_step, and is about to be logged again, is purged by tensorboard; wandb leaves out what it
    has, and to trackio, which would take a step twice, log_values does not send it.
    """
    if not accelerator.log_with:
        return
    is_known, path = False, state / TRACKERS
    stored = {"id": f"{state.name}-{secrets.token_hex(4)}", "made_of": made_of}
    if accelerator.is_main_process:
        is_known = path.is_file() and read_json(path).get("made_of") == made_of
        if is_known:
            stored = read_json(path)
        else:
            write_json(path, stored)
    rows = pandas.json_normalize(config, sep=".").to_dict("records")  # flat numbers and strings are all that they take
    shown_config = {
        str(key): value if isinstance(value, int | float | str) else str(value) for key, value in rows[0].items()
    }
    # The same id is the same curve, over all sittings.
    resumed = {"name": stored["id"], "resume": "allow"}
    options = {"tensorboard": {"purge_step": from_step + 1}, "wandb": {"id": stored["id"], **resumed}}
    accelerator.init_trackers(
        PROJECT, config=None if is_known else shown_config, init_kwargs={**options, "trackio": resumed}
    )


def log_values(accelerator: Accelerator, values: dict[str, float], step: int, reached: int) -> None:
    """Logs values of a step to all trackers; reached: the last step that earlier sittings have logged."""
    # trackio would take a step twice, and cannot be told to forget the first one.
    for tracker in accelerator.trackers:
        if tracker.name != "trackio" or step > reached:
            with explained(Path(accelerator.project_dir)):
                tracker.log(values, step=step)
