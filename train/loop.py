"""The optimiser and the learning rate of each step."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import Batch, Order, ShardPools, TokenisedRow, collate, prefetched
from aerie.data.progress import bar
from aerie.train import resume
from aerie.train import resume as best
from aerie.train.evaluate import evaluate
from aerie.train.launch import (
    CODES,
    StopRequest,
    engine_of,
    first_process_finds,
    full_weights,
    load_weights,
    machine_of,
)
from aerie.train.log import (
    Meter,
    MetricsFile,
    StepRecord,
    Trackers,
    all_reduce,
    held_out_line,
    means,
    peak_memory_gib,
    raise_any,
    raise_together,
)
from aerie.train.objectives.step import Objective, Sums


def build_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over what is trained; weight decay on matrices alone (not on biases and norms)."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas
    )


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of optimiser step 0, 1, ...: linear warm-up, then the schedule, which would end at total_steps.

    Its end is final_rate (zero) times the recipe's rate. A pure function: no scheduler object, which accelerate would
    advance once per process.
    """
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - warmup) / max(total_steps - warmup, 1)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.final_rate + (1.0 - config.final_rate) * left)


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


METER = "meter-{}.json"  # in a save, one a process

Save = Callable[[Any, Path, dict[str, Any]], None]  # (the module with its whole weights, directory, facts) -> files
Supply = Callable[[Batch], Batch]  # puts the target's states into a batch on the device, where no cache has them
Measure = Callable[[Any], dict[str, float]]  # measures by decoding, on every process; 'tau' then chooses the weights


@dataclass(frozen=True)
class Job:
    """What is trained on what, and where it goes."""

    kind: str
    module: nn.Module
    objective: Objective
    train: Sequence[TokenisedRow]
    lengths: Sequence[int]  # of the training rows, in tokens
    held_out: Sequence[TokenisedRow]
    config: TrainConfig
    output: Path
    state: Path
    metrics: Path
    save: Save
    save_dtype: torch.dtype = torch.float32
    supply: Supply | None = None
    measure: Measure | None = None
    overwrite: bool = False
    pools: ShardPools | None = None
    rows: str | None = None  # digest of the training rows' token ids


@dataclass(frozen=True)
class Outcome:
    """How a sitting ended: finished, budget (max_seconds), interrupted or requeue; totals are of all sittings."""

    state: str
    code: int
    progress: resume.Progress
    total_steps: int
    held_out: dict[str, float] = field(default_factory=dict)


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimiser steps of the whole run: its epochs, cut by max_steps."""
    steps = config.epochs * steps_per_epoch
    return steps if config.max_steps is None else min(steps, config.max_steps)


class Loop:
    """One sitting of a run."""

    def __init__(self, job: Job, accelerator: Accelerator, made_of: dict[str, Any]) -> None:
        """made_of is everything that decides the weights (JSON-ready); saves of something else are refused."""
        self.job, self.config, self.accelerator = job, job.config, accelerator
        self.device, self.rank, self.world = accelerator.device, accelerator.process_index, accelerator.num_processes
        config = self.config
        self.order = Order(job.lengths, config.seed, config.batch_size, config.accumulation, self.world, job.pools)
        self.total = total_steps(config, self.order.steps_per_epoch)
        fresh = resume.Progress(
            {**made_of, "rows": job.rows}, self.world, engine_of(accelerator), machine_of(self.device)
        )
        found = first_process_finds(accelerator, lambda: resume.find(job.state, fresh, job.overwrite))
        self.progress = found.progress
        self.twin = (
            copy.deepcopy(job.module).to(self.device, job.save_dtype).eval()
        )  # never sharded: measured and saved
        self.module, self.optimizer = accelerator.prepare(job.module, build_optimizer(job.module, config))
        self.module.train()
        self.meter, self.clock = Meter(), StepClock()
        self._restore(found)
        self.file = MetricsFile(job.metrics, job.kind, self.progress.step) if self.rank == 0 else None
        self.trackers = Trackers(accelerator, job.state, 0 if self.file is None else self.file.reached)
        self.held_out: dict[str, float] = {}
        self._write_line: Callable[[str], None] = print
        self._term_weights: dict[str, float] = {}
        self._grad_norm: Any = 0.0
        self._since = time.monotonic() - self.progress.seconds
        self._saved_at = self.progress.step  # or begun, with nothing to save

    def run(self) -> Outcome:
        """Steps until the end, the budget or a signal; what was reached is then evaluated or saved."""
        steps = range(self.progress.step, self.total)
        ending = "finished"
        with (
            StopRequest() as stop,
            profiler_window(self.config, self.job.state, self.rank) as window,
            bar(self.total, "step", f"train {self.job.kind}", self.rank, done=self.progress.step) as shown,
        ):
            self._write_line = shown.write
            before = time.monotonic()
            for step, (parts, error) in zip(steps, prefetched(self._read, steps), strict=True):
                window.before(step)
                waited = time.monotonic() - before
                divisors, tokens, requests = self._agree(parts, stop, error)
                if requests in CODES:
                    ending = requests
                    break
                self._step(step, parts, divisors, tokens)
                self.clock.add(tokens, time.monotonic() - before, waited)
                shown.update(1)
                if requests and self.progress.step < self.total:
                    ending = requests
                    break
                self._periodic()
                before = time.monotonic()
            return self._end(ending)

    def say(self, text: str) -> None:
        """Prints a line above the bar, on the first process."""
        if self.rank == 0:
            self._write_line(text)

    def _read(self, step: int) -> tuple[list[Batch], UserError | None]:
        """A step's parts, or why there are none: every process is told before one raises, so that all end alike."""
        try:
            return self._parts(step), None
        except UserError as error:
            return [collate([], ())], error

    def _parts(self, step: int) -> list[Batch]:
        epoch = self.order.epoch_of(step)
        parts, packed = self.order.parts(step, self.rank), self.config.packing
        made = [collate([self.job.train[row] for row in rows], rows, packed) for rows in parts]
        return [self.job.objective.prepare(batch, epoch) for batch in made]

    def _load(self, batch: Batch) -> Batch:
        """The batch on the device, with the target's states."""
        batch = batch.to(self.device)
        return batch if self.job.supply is None else self.job.supply(batch)

    def _step(self, step: int, parts: list[Batch], divisors: dict[str, float], tokens: float) -> None:
        """One optimiser step, of so many tokens."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.total, self.config)
        factor = self.world * self.config.accumulation
        scales = {name: factor / max(count, 1.0) for name, count in divisors.items()}
        for batch in parts:
            with self.accelerator.accumulate(self.module):
                output = self.job.objective(self.module, self._load(batch))
                self.accelerator.backward(output.total(scales))
                self.meter.add(output.sums())
                if self.accelerator.sync_gradients:
                    self._grad_norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.clip_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self._term_weights = {name: weight for name, (weight, _, _) in output.terms.items()}
        seconds = time.monotonic() - self._since
        self.progress = self.progress.moved(step=step + 1, tokens=self.progress.tokens + int(tokens), seconds=seconds)

    def _agree(
        self, parts: list[Batch], stop: StopRequest, error: UserError | None
    ) -> tuple[dict[str, float], float, str]:
        """Divisors of the terms and tokens of the whole step, and the ending that any process asks for.

        A signal ends the run before the step, a spent budget after it. UserError where any process has an error.
        """
        budget = self.config.max_seconds
        found = [self.job.objective.divisors(batch) for batch in parts]
        names = list(found[0])
        own = [
            error is not None,
            sum(batch.num_tokens for batch in parts),
            stop.state == "requeue",
            stop.state == "interrupted",
            budget is not None and time.monotonic() - self._since > budget,
            *(sum(each[name] for each in found) for name in names),
        ]
        place = self.device if self.world > 1 else "cpu"
        num_errors, tokens, *rest = all_reduce(torch.tensor(own, dtype=torch.float64, device=place)).tolist()
        raise_any(error, num_errors, self.device)
        endings = [name for name, value in zip(("requeue", "interrupted", "budget"), rest[:3], strict=True) if value]
        return dict(zip(names, rest[3:], strict=True)), tokens, endings[0] if endings else ""

    def _periodic(self) -> None:
        step, config = self.progress.step, self.config
        if step == self.total:
            return
        if step % config.log_every == 0:
            self._log()
        if config.eval_every and step % config.eval_every == 0:
            self._evaluate()
        if step % config.save_every == 0:
            self._save_state()

    def _end(self, ending: str) -> Outcome:
        if ending in CODES:  # no log line: its sums are saved, and the line comes where it does in an unbroken run
            if self.progress.step != self._saved_at:
                self._save_state()
            self.say(f"stopped by a signal after step {self.progress.step:,}; the same command goes on from there")
            return Outcome(ending, CODES[ending], self.progress, self.total)
        self._log()
        if ending == "budget":
            self.say(
                f"train.max_seconds {self.config.max_seconds:g} is spent after step {self.progress.step:,} of "
                f"{self.total:,}: the learning rate did not reach zero; lower train.max_steps, or raise the budget"
            )
        self._evaluate()
        if ending == "budget":
            self._save_state()
        self.accelerator.wait_for_everyone()
        return Outcome(ending, 0, self.progress, self.total, self.held_out)

    def _log(self) -> None:
        if not self.clock.steps:
            return
        found = self.meter.flush(self.device)
        step = self.progress.step
        record = StepRecord(
            kind=self.job.kind,
            step=step,
            total_steps=self.total,
            epoch=self.order.epoch_of(step - 1),
            means=found,
            loss=sum(weight * found[name] for name, weight in self._term_weights.items()),
            grad_norm=None if self._grad_norm is None else float(self._grad_norm),
            learning_rate=learning_rate(step - 1, self.total, self.config),
            peak_memory_gib=peak_memory_gib(self.device),
            **self.clock.flush(self.total - step),
        )
        self.say(record.line())
        self._record(record.to_json(), "train")
        self._require_finite("loss", record.loss)

    def _record(self, values: dict[str, Any], section: str) -> None:
        if self.file is not None:
            self.file.write(values)
        numbers = {f"{section}/{name}": value for name, value in values.items() if isinstance(value, float)}
        self.trackers.log(numbers, self.progress.step)

    def _evaluate(self) -> None:
        """Measures the weights on held-out rows, and keeps them where they are the best so far."""
        load_weights(self.twin, full_weights(self.accelerator, self.module))
        rows = self.job.held_out[: self.config.eval_conversations]
        step, score = self.progress.step, 0.0
        if rows:
            process = (self.rank, self.world)
            size = self.config.batch_size
            self.held_out = evaluate(self.twin, self.job.objective, rows, size, process, self._load, self._means)
            if self.job.measure is not None:
                self.held_out |= self.job.measure(self.twin)
            for name, value in self.held_out.items():
                self._require_finite(f"held-out {name}", value)
            score = self._score()
            self.say(held_out_line(step, self.total, len(rows), self.held_out))
            held_out = {f"held_out_{name}": value for name, value in self.held_out.items()}
            self._record({"kind": self.job.kind, "step": step, **held_out}, "held_out")
        elif step == self.total:
            self.say("no conversation is held out (data.held_out): the last weights are kept, unmeasured")
        self._keep(score, unmeasured=not rows)
        self.accelerator.wait_for_everyone()

    def _means(self, sums: Sums, error: UserError | None) -> dict[str, float]:
        """Held-out means over all processes; UserError where any of them has an error."""
        raise_together(error, self.device)
        return means(sums, self.device)

    def _keep(self, score: float, unmeasured: bool) -> None:
        """Keeps the weights in the twin if they are among the best; they become the output if they are the best."""
        before = self.progress.moved(best=()) if unmeasured else self.progress
        self.progress = before.ranked(score, self.config.keep_best)
        step = self.progress.step
        if self.rank != 0 or step not in [entry[1] for entry in self.progress.best]:
            return
        best.keep(self.job.state, step, lambda place: self.job.save(self.twin, place, {"step": step, **self.held_out}))
        if step == self.progress.best_step:
            best.publish(self.job.state, step, self.job.output)

    def _require_finite(self, name: str, value: float) -> None:
        """UserError when the weights are lost: nothing of them is kept, what was best before stays."""
        if math.isfinite(value):
            return
        step = self.progress.best_step
        kept = f"the best weights kept are those of step {step:,}" if step else "nothing was kept"
        raise UserError(
            f"train: {name} is {value} at step {self.progress.step:,}: the training diverged ({kept}); lower "
            f"train.learning_rate or train.clip_norm, and check head.rope_theta"
        )

    def _score(self) -> float:
        if "tau" in self.held_out:
            return self.held_out["tau"]
        name = self.job.objective.score_name
        return -self.held_out[name[1:]] if name.startswith("-") else self.held_out[name]

    def _save_state(self) -> None:
        def fill(folder: Path) -> None:
            self.accelerator.save_state(str(folder))
            self.meter.save(folder / METER.format(self.rank))

        self.progress = self.progress.moved(seconds=time.monotonic() - self._since)
        wait, keep_last = self.accelerator.wait_for_everyone, self.config.keep_last
        resume.save(self.job.state, self.progress, fill, self.rank, wait, keep_last)
        self._saved_at = self.progress.step
        if self.rank == 0:
            best.forget_others(self.job.state, self.progress)

    def _restore(self, found: resume.Found) -> None:
        """Brings weights, optimiser, random states, sums since the last log line and the output to the save's."""
        if self.rank == 0:
            for text in found.warnings:
                warn(text)
            for text in found.notes:
                print(f"note: {text}", flush=True)
        if found.folder is not None:
            self.accelerator.load_state(str(found.folder))
            self.meter.load(found.folder / METER.format(self.rank))
            if self.rank == 0:
                self.progress = best.restore(self.job.state, self.progress, self.job.output)
                print(f"going on from step {self.progress.step:,} of {self.total:,} ({found.folder})", flush=True)
        elif self.rank == 0 and self.job.state.is_dir():
            resume.clear(self.job.state)
            best.clear_best(self.job.state)
        self.accelerator.wait_for_everyone()
