"""The training loop: one sitting of a run, from its last save to its end, its budget or a signal."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.profiler import profile, schedule

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import Batch, Order, ShardPools, TokenisedRow, collate, prefetched
from aerie.data.stage import bar
from aerie.model.storage import digest
from aerie.model.target import Target
from aerie.train import resume
from aerie.train.launch import all_reduce, engine_of, full_weights, machine_of, raise_together
from aerie.train.log import Meter, MetricsFile, held_out_line, log_values, means, start_trackers, step_line
from aerie.train.objectives.base import Objective, Sums, held_out_sums
from aerie.train.resume import CODES, StopRequest

Measure = Callable[[Any], dict[str, float]]
METER = "meter-{}.json"  # of each process, in a save


@dataclass(frozen=True)
class Rows:
    """The rows of both splits, from a feature cache or as they were tokenised just now."""

    train: Sequence[TokenisedRow]
    held_out: Sequence[TokenisedRow]
    lengths: Sequence[int]  # of the training rows, in tokens
    tokens: Iterable[tuple[Any, Any]]  # (input_ids, turns) of the training rows
    origin: dict[str, Any]  # what the tokens were made from; "rows" is a digest of the training rows' ids
    pools: ShardPools | None = None  # where rows are drawn from some shards of the cache at a time


@dataclass(frozen=True)
class Job:
    """What is trained on what, and where it goes."""

    kind: str
    objective: Objective
    rows: Rows
    output: Path
    state: Path
    metrics: Path
    save: Callable[[Any, Path, dict[str, Any]], None]  # writes a head with whole weights, and facts, to a directory
    features: Callable[[Batch], Batch] | None = None  # puts the target's states into a batch; None: they are cached
    target: Target | None = None  # where it is loaded whole
    overwrite: bool = False

    @property
    def config(self) -> TrainConfig:
        settings: TrainConfig = self.objective.settings
        return settings


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimiser steps of the whole run: its epochs, cut by max_steps."""
    steps = config.epochs * steps_per_epoch
    return steps if config.max_steps is None else min(steps, config.max_steps)


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

    Its end is final_rate (zero) times the recipe's rate.
    """
    # A pure function and no scheduler object, which accelerate would advance once per process.
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - warmup) / max(total_steps - warmup, 1)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.final_rate + (1.0 - config.final_rate) * left)


def profiler(config: TrainConfig, start: int, directory: Path, rank: int) -> Any:
    """A context that writes a Chrome trace of the steps which config.profile_steps names, one per process."""
    first, count = config.profile_steps or (0, 0)
    if not count or first < start:
        return nullcontext()

    def write(profiled: profile) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(directory / f"trace-step{first}-rank{rank}.json"))

    warmup = min(1, first - start)
    window = schedule(skip_first=first - start - warmup, wait=0, warmup=warmup, active=count, repeat=1)
    return profile(schedule=window, on_trace_ready=write, record_shapes=True, profile_memory=True)


class Loop:
    """One sitting of a run."""

    def __init__(
        self, job: Job, accelerator: Accelerator, made_of: dict[str, Any], shown: Any, measure: Measure | None = None
    ) -> None:
        """made_of is everything that decides the weights (JSON-ready); saves of something else are refused.

        shown is what trackers show as the run's configuration. measure decodes with a head; the weights are then chosen
        by its tau.
        """
        self.job, self.config, self.accelerator, self.measure = job, job.config, accelerator, measure
        self.device, self.rank, self.world = accelerator.device, accelerator.process_index, accelerator.num_processes
        config = self.config
        rows, parts = job.rows, config.accumulation
        self.order = Order(rows.lengths, config.seed, config.batch_size, parts, self.world, rows.pools)
        self.total = total_steps(config, self.order.steps_per_epoch)
        made_of = {**made_of, "rows": rows.origin["rows"]}
        fresh = resume.Progress(made_of, self.world, engine_of(accelerator), machine_of(self.device))
        folder = self._find(fresh)
        # The twin is never sharded; its weights are measured and saved.
        target = job.objective.target
        dtype = torch.float32 if target is None else target.lm_head.dtype
        self.twin = job.objective.twin().to(self.device, dtype).eval()
        # From here on parameters may be sharded: the loop calls self.module, never the objective itself.
        self.module, self.optimizer = accelerator.prepare(job.objective, build_optimizer(job.objective, config))
        self.module.train()
        self.meter = Meter()
        self._restore(folder)
        self.file = MetricsFile(job.metrics, job.kind, self.progress.step) if self.rank == 0 else None
        start_trackers(accelerator, job.state, self.progress.step, digest(resume.decisive(made_of)), shown)
        self.held_out: dict[str, float] = {}
        self._write_line: Callable[[str], None] = print
        self._grad_norm: Any = 0.0
        self._since = time.monotonic() - self.progress.seconds
        self._saved_at = self.progress.step  # or begun, with nothing to save

    def _find(self, fresh: resume.Progress) -> Path | None:
        """The save to go on from, as the first process finds it; its UserError, too, is that of all."""
        answer: list[Any] = [fresh, None, [], None]
        if self.rank == 0:
            try:
                answer[:3] = resume.find(self.job.state, fresh, self.job.overwrite)
            except UserError as error:
                answer[3] = str(error)
        # Reading a save means reading every byte of it: one process does so and tells the others.
        if self.world > 1:
            broadcast_object_list(answer)
        self.progress, folder, warnings, refusal = answer
        if refusal is not None:
            raise UserError(refusal)
        for text in warnings if self.rank == 0 else ():
            warn(text)
        found: Path | None = folder
        return found

    def _restore(self, folder: Path | None) -> None:
        """Brings weights, optimiser, random states, sums since the last log line and the output to the save's."""
        if folder is not None:
            self.accelerator.load_state(str(folder))
            self.meter.load(folder / METER.format(self.rank))
        if self.rank == 0 and folder is not None:
            # Weights that were measured after the save are measured again, so the output goes back with it.
            if self.progress.best_step:
                resume.publish(folder / "best", self.job.output)
            print(f"going on from step {self.progress.step:,} of {self.total:,} ({folder})", flush=True)
        elif self.rank == 0 and self.job.state.is_dir():
            resume.clear(self.job.state)
        self.accelerator.wait_for_everyone()

    def run(self, stop: StopRequest) -> str:
        """Steps until the end, the budget or a signal; what was reached is then evaluated or saved.

        How the sitting ended: finished, budget (max_seconds), interrupted or requeue.
        """
        start, ending = self.progress.step, "finished"
        steps = range(start, self.total)
        traced = profiler(self.config, start, self.job.state, self.rank)
        stop.is_stepping = True
        with traced, bar(self.total, "step", f"train {self.job.kind}", self.rank, done=start) as shown:
            self._write_line = shown.write
            before = time.monotonic()
            # The next step's rows are read in a thread while this one is computed.
            for step, (parts, error) in zip(steps, prefetched(self._read, steps), strict=True):
                waited = time.monotonic() - before
                counts, tokens, asked = self._agree(parts, stop, error)
                if asked in CODES:
                    ending = asked
                    break
                self._step(step, parts, counts, tokens)
                self.meter.tick(tokens, time.monotonic() - before, waited)
                shown.update(1)
                if isinstance(traced, profile):
                    traced.step()
                if asked and self.progress.step < self.total:
                    ending = asked
                    break
                self._periodic()
                before = time.monotonic()
            self._end(ending)
        stop.is_stepping = False
        return ending

    def _read(self, step: int) -> tuple[list[Batch], UserError | None]:
        """A step's parts, or why there are none: every process is told before one raises, so that all end alike."""
        # Only EAGLE-3's unroll keeps packed conversations apart.
        packed = bool(getattr(self.config, "packing", False))
        try:
            parts = [
                collate([self.job.rows.train[row] for row in rows], rows, packed)
                for rows in self.order.parts(step, self.rank)
            ]
            return [self.job.objective.prepare(batch, self.order.epoch_of(step)) for batch in parts], None
        except UserError as error:
            return [collate([], ())], error

    def _load(self, batch: Batch) -> Batch:
        """The batch on the device, with the target's states."""
        batch = batch.to(self.device)
        return batch if self.job.features is None else self.job.features(batch)

    def _agree(
        self, parts: list[Batch], stop: StopRequest, error: UserError | None
    ) -> tuple[dict[str, float], float, str]:
        """Counts of the terms and tokens of the whole step, and the ending that any process asks for.

        A signal ends the run before the step, a spent budget after it. UserError where any process has an error.
        """
        # Before the first backward of an accumulation window: DeepSpeed steps in the last one, after which nothing can
        # be rescaled.
        counts = [self.job.objective.counts(batch) for batch in parts]
        budget = self.config.max_seconds
        own = [
            error is not None,
            sum(batch.num_tokens for batch in parts),
            stop.state == "requeue",
            stop.state == "interrupted",
            budget is not None and time.monotonic() - self._since > budget,
            *(sum(int(count[name]) for count in counts) for name in counts[0]),
        ]
        device = self.device if self.world > 1 else "cpu"
        num_errors, tokens, *rest = all_reduce(torch.tensor(own, dtype=torch.float64, device=device)).tolist()
        raise_together(error, num_errors, self.device)
        endings = [name for name, value in zip(("requeue", "interrupted", "budget"), rest[:3], strict=True) if value]
        return dict(zip(counts[0], rest[3:], strict=True)), tokens, endings[0] if endings else ""

    def _step(self, step: int, parts: list[Batch], counts: dict[str, float], tokens: float) -> None:
        """One optimiser step, of so many tokens."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.total, self.config)
        # Accelerate and DeepSpeed divide by the accumulation, and average over the processes: both are undone here.
        factor = self.world * self.config.accumulation
        scales = {name: factor / max(count, 1.0) for name, count in counts.items()}
        for batch in parts:
            with self.accelerator.accumulate(self.module):
                output = self.module(self._load(batch))
                self.accelerator.backward(output.total(self.job.objective.weights, scales))
                self.meter.add(output.sums())
                # Under DeepSpeed this only asks for the norm: its own engine clips.
                if self.accelerator.sync_gradients:
                    self._grad_norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.clip_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        seconds = time.monotonic() - self._since
        self.progress = replace(
            self.progress, step=step + 1, tokens=self.progress.tokens + int(tokens), seconds=seconds
        )

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

    def _end(self, ending: str) -> None:
        step, config = self.progress.step, self.config
        if ending in CODES:
            # No log line: its sums are saved, and the line comes where it does in an unbroken run.
            if step != self._saved_at:
                self._save_state()
            self.say(f"stopped by a signal after step {step:,}; the same command goes on from there")
            return
        self._log()
        if ending == "budget":
            self.say(
                f"train.max_seconds {config.max_seconds:g} is spent after step {step:,} of {self.total:,}: the "
                f"learning rate did not reach zero; lower train.max_steps, or raise the budget"
            )
        self._evaluate()
        if ending == "budget":
            self._save_state()
        self.accelerator.wait_for_everyone()

    def say(self, text: str) -> None:
        """Prints a line above the bar, on the first process."""
        if self.rank == 0:
            self._write_line(text)

    def _log(self) -> None:
        if not self.meter.steps:
            return
        found, times = self.meter.flush(self.device)
        step = self.progress.step
        loss = sum(weight * found[name] for name, weight in self.job.objective.weights.items())
        record = {
            "kind": self.job.kind,
            "step": step,
            "epoch": self.order.epoch_of(step - 1),
            "loss": loss,
            **found,
            "grad_norm": None if self._grad_norm is None else float(self._grad_norm),  # before clipping
            "learning_rate": learning_rate(step - 1, self.total, self.config),
            **times,
        }
        self.say(step_line(record, self.total, list(found)))
        self._record(record, "train")
        self._require_finite("loss", loss)

    def _record(self, values: dict[str, Any], section: str) -> None:
        numbers = {f"{section}/{name}": value for name, value in values.items() if isinstance(value, float)}
        if self.file is not None:
            self.file.write(values)
            log_values(self.accelerator, numbers, self.progress.step, self.file.reached)

    def _evaluate(self) -> None:
        """Measures the weights on held-out rows, and makes them the output where they are the best so far."""
        # Every process takes part in gathering, and measures a share of the rows with the whole weights.
        weights = full_weights(self.accelerator, self.module)
        with torch.no_grad():
            for name, parameter in self.twin.named_parameters():
                parameter.copy_(weights[name])
        rows = self.job.rows.held_out[: self.config.eval_conversations]
        step, best = self.progress.step, self.progress.best_score
        score = None
        if rows:
            self.held_out = self._measured(rows)
            for name, value in self.held_out.items():
                self._require_finite(f"held-out {name}", value)
            score = self.held_out.get("tau", self.held_out.get("predicted_tau", -self.held_out["loss"]))
            self.say(held_out_line(step, self.total, len(rows), self.held_out))
            held_out = {f"held_out_{name}": value for name, value in self.held_out.items()}
            self._record({"kind": self.job.kind, "step": step, **held_out}, "held_out")
        elif step == self.total:
            self.say("no conversation is held out (data.held_out): the last weights are kept, unmeasured")
        if score is None or best is None or score > best:  # unmeasured weights are taken for better than those before
            self.progress = replace(self.progress, best_score=score, best_step=step)
            if self.rank == 0:
                facts = {"step": step, **self.held_out}
                write = partial(self.job.save, self.twin.head)
                resume.keep_best(self.job.state, lambda place: write(place, facts), self.job.output)
        self.accelerator.wait_for_everyone()

    def _measured(self, rows: Sequence[TokenisedRow]) -> dict[str, float]:
        """The held-out measures over all processes; UserError where any of them cannot read its rows."""
        # A process that cannot read a row must not leave the others waiting in the sum over all.
        sums, error = Sums(), None
        try:
            sums = held_out_sums(self.twin, rows, self.config.batch_size, (self.rank, self.world), self._load)
        except UserError as raised:
            error = raised
        failed = all_reduce(torch.tensor(float(error is not None), device=self.device))
        raise_together(error, float(failed), self.device)
        measured = self.twin.summarise(means(sums, self.device))
        return measured if self.measure is None else measured | self.measure(self.twin.head)

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

    def _save_state(self) -> None:
        def fill(folder: Path) -> None:
            # The sums since the last log line belong to the state, or that line would be another one.
            self.accelerator.save_state(str(folder))
            self.meter.save(folder / METER.format(self.rank))
            if self.rank == 0 and self.progress.best_step:
                resume.publish(self.job.output, folder / "best")

        self.progress = replace(self.progress, seconds=time.monotonic() - self._since)
        wait, keep_last = self.accelerator.wait_for_everyone, self.config.keep_last
        resume.save(self.job.state, self.progress, fill, self.rank, wait, keep_last)
        self._saved_at = self.progress.step
