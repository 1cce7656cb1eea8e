"""The training loop: one sitting of a run, from its last save to its end, its budget or a signal, and what it logs."""

import copy
import json
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.train import TrainConfig
from aerie.data.batches import Batch, TokenisedRow, collate, prefetched
from aerie.data.stage import bar
from aerie.model.storage import Lock, explained, write_text
from aerie.train import resume
from aerie.train.jobs import Job
from aerie.train.launch import all_reduce, engine_and_machine, full_weights, raise_together
from aerie.train.losses import Sums
from aerie.train.objectives import Objective
from aerie.train.resume import CODES, StopRequest

Measure = Callable[[Any], dict[str, float]]
METER = "meter-{}.pt"  # a save's sums since the last log line, of each process


def build_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over what is trained; weight decay on matrices alone (not on biases and norms)."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of optimiser step 0, 1, ...: linear warm-up, then the schedule, which ends at total_steps."""
    # A pure function and no scheduler object, which accelerate would advance once per process.
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - warmup) / max(total_steps - warmup, 1)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.final_rate + (1.0 - config.final_rate) * left)


def means(sums: Sums, device: torch.device) -> dict[str, float]:
    """sum / count of every name over all processes; every process must have the same names."""
    # One collective for all names; their order must be that of every other process.
    pairs = [torch.stack([torch.as_tensor(part).double().to(device) for part in sums[name]]) for name in sorted(sums)]
    totals = all_reduce(torch.stack(pairs)).tolist() if pairs else []  # [names, 2]
    found = dict(zip(sorted(sums), totals, strict=True))
    return {name: found[name][0] / found[name][1] if found[name][1] else 0.0 for name in sums}


def add_sums(totals: Sums, sums: Sums) -> None:
    """Adds sums to totals, which stay tensors: turning each step's into numbers would wait for the device."""
    # float64: a log window may hold millions of slots.
    for name, (value, count) in sums.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + value.double(), before[1] + count.double())


STEP_LINE = (
    "step {step:,}/{total:,} | loss {loss:.4f} | {terms} | grad {grad:.3g} | lr {learning_rate:.2e} | "
    "wait {data_wait_share:.0%} | {tokens_per_s:,.0f} tok/s | {step_ms:.0f} ms | {peak_memory_gib:.2f} GiB | eta {eta}"
)


def shown(values: dict[str, float]) -> list[str]:
    """['feature 1.2345', 'accuracy @1 0.710 @2 0.620']: the measures of each depth (NAME_at_1, ...) stand together."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        stem, separator, depth = name.partition("_at_")
        groups.setdefault(stem, []).append(f"@{depth} {value:.3f}" if separator else f"{value:.4f}")
    return [f"{stem} {' '.join(texts)}" for stem, texts in groups.items()]


class MetricsFile:
    """metrics.jsonl, to which all trainings of a run write in turn; one that goes on forgets its lines after a step."""

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


class Loop:
    """One sitting of a run."""

    def __init__(
        self, job: Job, accelerator: Accelerator, made_of: dict[str, Any], measure: Measure | None = None
    ) -> None:
        """made_of is all that decides the weights; saves of something else are refused. measure gives a head's tau."""
        self.job, self.accelerator, self.measure = job, accelerator, measure
        self.config: TrainConfig = job.objective.settings
        self.device, self.rank, self.world = accelerator.device, accelerator.process_index, accelerator.num_processes
        config, rows, objective = self.config, job.rows, job.objective
        self.order, self.total = job.order(self.world)
        # The twin is never sharded; its weights are measured and saved.
        dtype = torch.float32 if objective.target is None else objective.target.lm_head.dtype
        twin: Objective = type(objective)(copy.deepcopy(objective.head), objective.target, config)
        self.twin = twin.to(self.device, dtype).eval()
        # From here on parameters may be sharded: the loop calls self.module, never the objective itself.
        self.module, self.optimizer = accelerator.prepare(objective, build_optimizer(objective, config))
        self.module.train()
        self.sums, self.held_out = Sums(), dict[str, float]()  # sums and clock: since the last log line
        self.clock: Any = Counter()
        made_of = {**made_of, "rows": rows.origin["rows"]}
        self.progress = self._going_on(resume.Progress(made_of, self.world, *engine_and_machine(accelerator)))
        self.file = MetricsFile(job.metrics, job.kind, self.progress.step) if self.rank == 0 else None
        self._start_trackers()
        self.say: Callable[[str], None] = lambda text: None  # prints a line above the bar, on the first process
        self._grad_norm: Any = 0.0
        self._since = time.monotonic() - self.progress.seconds
        self._saved_at = self.progress.step  # or begun, with nothing to save

    def _going_on(self, fresh: resume.Progress) -> resume.Progress:
        """The progress of the save to go on from, with its weights, optimiser, random states, sums and output."""
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [resume.find(self.job.state, fresh, self.job.overwrite)]
            except UserError as error:
                answer = [error]
        # Reading a save means reading every byte of it: one process does so and tells the others.
        broadcast_object_list(answer)
        if isinstance(answer[0], UserError):
            raise answer[0]
        progress, folder, warnings = answer[0]
        if folder is not None:
            self.accelerator.load_state(str(folder))
            self.sums = torch.load(folder / METER.format(self.rank), self.device, weights_only=True)
        if self.rank == 0:
            for text in warnings:
                warn(text)
            if folder is None:
                resume.clear(self.job.state)
            else:
                # Weights that were measured after the save are measured again, so the output goes back with it.
                if progress.best_step:
                    resume.publish(folder / "best", self.job.output)
                print(f"going on from step {progress.step:,} of {self.total:,} ({folder})", flush=True)
        self.accelerator.wait_for_everyone()
        found: resume.Progress = progress
        return found

    def _start_trackers(self) -> None:
        """Opens train.trackers: a run that goes on has the same id, which is the same curve."""
        # What was logged after the save is purged by tensorboard, left out by wandb, and not sent to trackio again.
        if not self.accelerator.log_with:
            return
        progress = self.progress
        config = {"made_of": json.dumps(progress.made_of)} if progress.step == 0 else None
        resumed = {"name": f"{self.job.kind}-{progress.run_id}", "resume": "allow"}
        options: dict[str, dict[str, Any]] = {"wandb": {"id": resumed["name"], **resumed}, "trackio": resumed}
        options["tensorboard"] = {"purge_step": progress.step + 1}
        self.accelerator.init_trackers("aerie", config=config, init_kwargs=options)

    def run(self, stop: StopRequest) -> str:
        """How the sitting ended (finished, budget, interrupted, requeue); what was reached is evaluated or saved."""
        config, accelerator, start, ending = self.config, self.accelerator, self.progress.step, "finished"
        steps = range(start, self.total)
        stop.is_stepping = True
        with bar(self.total, "step", f"train {self.job.kind}", self.rank, done=start) as progress_bar:
            if self.rank == 0:
                self.say = progress_bar.write
            before = time.monotonic()
            # The next step's rows are read in a thread while this one is computed.
            for step, (parts, error) in zip(steps, prefetched(self._read, steps), strict=True):
                waited = time.monotonic() - before
                counts, tokens, asked = self._agree(parts, stop, error)
                if asked in CODES:
                    ending = asked
                    break
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(step, self.total, config)
                # Accelerate and DeepSpeed divide by the accumulation, and average over the processes: undone here.
                factor = self.world * config.accumulation
                scales = {name: factor / max(count, 1.0) for name, count in counts.items()}
                for batch in parts:
                    with accelerator.accumulate(self.module):
                        output = self.module(self._load(batch))
                        accelerator.backward(output.total(self.job.objective.weights, scales))
                        add_sums(self.sums, output.sums())
                        # Under DeepSpeed this only asks for the norm: its own engine clips.
                        if accelerator.sync_gradients:
                            self._grad_norm = accelerator.clip_grad_norm_(self.module.parameters(), config.clip_norm)
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                done, seconds = self.progress.tokens + int(tokens), time.monotonic() - self._since
                self.progress = replace(self.progress, step=step + 1, tokens=done, seconds=seconds)
                self.clock.update(steps=1, tokens=tokens, waited=waited, seconds=time.monotonic() - before)
                progress_bar.update(1)
                if asked or step + 1 == self.total:
                    ending = asked if step + 1 < self.total else ending
                    break
                if (step + 1) % config.log_every == 0:
                    self._log()
                if config.eval_every and (step + 1) % config.eval_every == 0:
                    self._evaluate()
                if (step + 1) % config.save_every == 0:
                    self._save_state()
                before = time.monotonic()
            step = self.progress.step
            if ending in CODES:
                # No log line: its sums are saved, and the line comes where it does in an unbroken run.
                if step != self._saved_at:
                    self._save_state()
                self.say(f"stopped by a signal after step {step:,}; the same command goes on from there")
            else:
                self._log()
                self._evaluate()
                if ending == "budget":
                    spent = f"train.max_seconds {config.max_seconds:g} is spent after step {step:,} of {self.total:,}"
                    self.say(f"{spent}: the learning rate did not reach its end; raise it, or lower train.max_steps")
                    self._save_state()
                accelerator.wait_for_everyone()
        stop.is_stepping = False
        return ending

    def _read(self, step: int) -> tuple[list[Batch], UserError | None]:
        """A step's parts, or why there are none: every process is told before one raises, so that all end alike."""
        # Only EAGLE-3's unroll keeps packed conversations apart.
        packed = bool(getattr(self.config, "packing", False))
        try:
            numbers = self.order.parts(step, self.rank)
            parts = [collate([self.job.rows.train[row] for row in rows], rows, packed) for rows in numbers]
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

    def _log(self) -> None:
        if not self.clock["steps"]:
            return
        found, step, clock = means(self.sums, self.device), self.progress.step, self.clock
        self.sums, self.clock = {}, Counter()
        # The most memory that the GPU or this process has held. Linux counts in KiB, macOS in bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        # DeepSpeed without ZeRO clips without telling the norm, which is that before clipping.
        norm, seconds = None if self._grad_norm is None else float(self._grad_norm), max(clock["seconds"], 1e-9)
        record = {
            "kind": self.job.kind,
            "step": step,
            "epoch": self.order.epoch_of(step - 1),
            "loss": sum(weight * found[name] for name, weight in self.job.objective.weights.items()),
            **found,
            "grad_norm": norm,
            "learning_rate": learning_rate(step - 1, self.total, self.config),
            "data_wait_share": clock["waited"] / seconds,
            "tokens_per_s": clock["tokens"] / seconds,
            "step_ms": 1000.0 * seconds / clock["steps"],
            "peak_memory_gib": peak / 2**30,
        }
        eta = timedelta(seconds=(self.total - step) * seconds // clock["steps"])
        line = {**record, "total": self.total, "eta": eta, "grad": math.nan if norm is None else norm}
        self.say(STEP_LINE.format(**line, terms=" | ".join(shown(found))))
        self._record(record, "train")

    def _record(self, values: dict[str, Any], section: str) -> None:
        """Writes a line of metrics, for the trackers too; UserError when the weights are lost."""
        numbers = {f"{section}/{name}": value for name, value in values.items() if isinstance(value, float)}
        if self.file is not None:
            self.file.write(values)
            for tracker in self.accelerator.trackers:
                if tracker.name != "trackio" or self.progress.step > self.file.reached:
                    with explained(Path(self.accelerator.project_dir)):
                        tracker.log(numbers, step=self.progress.step)
        for name, value in numbers.items():
            if not math.isfinite(value) and "grad_norm" not in name:
                step = self.progress.best_step
                kept = f"the best weights kept are those of step {step:,}" if step else "nothing was kept"
                raise UserError(
                    f"train: {name} is {value} at step {self.progress.step:,}: the training diverged ({kept}); lower "
                    f"train.learning_rate or train.clip_norm, and check head.rope_theta"
                )

    def _evaluate(self) -> None:
        """Measures the weights on held-out rows, and makes them the output where they are the best so far."""
        # Every process takes part in gathering, and measures a share of the rows with the whole weights.
        weights = full_weights(self.accelerator, self.module)
        with torch.no_grad():
            for name, parameter in self.twin.named_parameters():
                parameter.copy_(weights[name])
        rows = self.job.rows.held_out[: self.config.eval_conversations]
        step, best, score = self.progress.step, self.progress.best_score, None
        if rows:
            self.held_out = self._measured(rows)
            score = self.held_out.get("tau", self.held_out.get("predicted_tau", -self.held_out["loss"]))
            place = f"step {step:,}/{self.total:,} | held out ({len(rows):,} rows)"
            self.say(" | ".join([place, *shown(self.held_out)]))
            held_out = {f"held_out_{name}": value for name, value in self.held_out.items()}
            self._record({"kind": self.job.kind, "step": step, **held_out}, "held_out")
        elif step == self.total:
            self.say("no conversation is held out (data.held_out): the last weights are kept, unmeasured")
        if score is None or best is None or score > best:  # unmeasured weights are taken for better than those before
            self.progress = replace(self.progress, best_score=score, best_step=step)
            if self.rank == 0:
                facts = {"step": step, **self.held_out}
                write = partial(self.job.save, self.twin.head, facts=facts)
                resume.keep_best(self.job.state, write, self.job.output)
        self.accelerator.wait_for_everyone()

    def _measured(self, rows: Sequence[TokenisedRow]) -> dict[str, float]:
        """The held-out measures over all processes; UserError where any of them cannot read its rows."""
        sums, error, size = Sums(), None, self.config.batch_size
        # With fewer rows than processes each takes them all: the means are the same, and none has nothing to add.
        own = range(self.rank, len(rows), self.world) if len(rows) >= self.world else range(len(rows))
        try:
            for numbers in (own[first : first + size] for first in range(0, len(own), size)):
                batch = self._load(collate([rows[number] for number in numbers], numbers))
                with torch.no_grad():
                    add_sums(sums, self.twin.measure(batch))
        # A process that cannot read a row must not leave the others waiting in the sum over all.
        except UserError as raised:
            error = raised
        failed = all_reduce(torch.tensor(float(error is not None), device=self.device))
        raise_together(error, float(failed), self.device)
        measured = self.twin.summarise(means(sums, self.device))
        return measured if self.measure is None else measured | self.measure(self.twin.head)

    def _save_state(self) -> None:
        def fill(folder: Path) -> None:
            # The sums since the last log line belong to the state, or that line would be another one.
            self.accelerator.save_state(str(folder))
            torch.save(self.sums, folder / METER.format(self.rank))
            if self.rank == 0 and self.progress.best_step:
                resume.publish(self.job.output, folder / "best")

        self.progress = replace(self.progress, seconds=time.monotonic() - self._since)
        wait, keep_last = self.accelerator.wait_for_everyone, self.config.keep_last
        resume.save(self.job.state, self.progress, fill, self.rank, wait, keep_last)
        self._saved_at = self.progress.step
