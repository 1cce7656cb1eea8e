"""The training loop. It trains from the last save to the end of the run, of its budget, or to a
signal."""

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
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.heads import MuonSection, TrainConfig
from aerie.data.batches import Batch, BatchRow, collate, fetch_rows, prefetched, threads_for
from aerie.data.progress import start_progress
from aerie.model.storage import Lock, explained, remove_tree, write_text
from aerie.train import processes, resume
from aerie.train.deepspeed_internals import clip_before_muon, zero_muon
from aerie.train.jobs import Job
from aerie.train.losses import SumsAndCounts
from aerie.train.objectives import Objective
from aerie.train.optimizers import build_optimizers, learning_rate

Measure = Callable[[Any], dict[str, float]]
SAY_SECONDS = 5.0  # the least time between two lines on the terminal
METER = "meter-{}.pt"  # each process's sums since the last log line


def means(sums: SumsAndCounts, device: torch.device) -> dict[str, float]:
    """sum / count of each name over all processes, which must have the same names."""
    names = sorted(sums)  # processes may have met the names in different orders
    flat: list[Tensor] = []
    for name in names:
        flat += [part.double().to(device) for part in sums[name]]
    totals = processes.all_reduce(torch.stack(flat)).view(-1, 2)
    averages = (totals[:, 0] / totals[:, 1].clamp(min=1.0)).tolist()
    by_name = dict(zip(names, averages, strict=True))
    return {name: by_name[name] for name in sums}


def add_sums(totals: SumsAndCounts, sums: SumsAndCounts) -> None:
    """Adds sums to totals, in place."""
    # Tensors, because numbers would wait for the device; float64, for sums over millions of slots.
    for name, (value, count) in sums.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + value.double(), before[1] + count.double())


def grouped_by_stem(values: dict[str, float]) -> list[str]:
    """Texts such as ['feature 1.234', 'accuracy @1 0.71 @2 0.62'], from feature, accuracy_at_1 and
    accuracy_at_2."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        stem, separator, depth = name.partition("_at_")
        groups.setdefault(stem, []).append(f"@{depth} {value:.3g}" if separator else f"{value:.4g}")
    return [f"{stem} {' '.join(texts)}" for stem, texts in groups.items()]


class MetricsFile:
    """metrics.jsonl, which all trainings of a run share. A training that goes on removes its own
    lines after from_step."""

    def __init__(self, path: Path, kind: str, from_step: int) -> None:
        self.path = path
        self.reached = 0  # the last step of this kind with a line
        # Under a lock, because another training of the run may append meanwhile.
        with self._turn():
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            kept = []
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:  # cut off by a kill
                    continue
                step = int(record.get("step", 0)) if record.get("kind") == kind else 0
                self.reached = max(self.reached, step)
                if step <= from_step:
                    kept.append(line + "\n")
            if len(kept) != len(lines):
                write_text(path, "".join(kept))

    def write(self, record: dict[str, Any]) -> None:
        """Appends a line."""
        with self._turn(), self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record) + "\n")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with explained(self.path), Lock(self.path.with_name(f".{self.path.name}.lock")) as lock:
            lock.acquire()
            yield


class Agreement(NamedTuple):
    """What all processes have agreed on before a step."""

    counts: dict[str, float]  # per term: the number of slots that divides its loss
    tokens: int
    # The ending that some process asks for; "" if none does. The loop ends before the step for
    # "requeue" and "interrupted", and after it for "budget".
    wish: str


class Loop:
    """A training in this process. Every process of the run makes one and calls `run`."""

    def __init__(
        self, job: Job, accelerator: Accelerator, made_of: dict[str, Any], measure: Measure | None
    ) -> None:
        """made_of holds all that decides the weights; measure gives a head's tau."""
        self.job = job
        self.accelerator = accelerator
        self.measure = measure
        self.config: TrainConfig = job.objective.settings
        self.is_muon = isinstance(self.config.optimizer, MuonSection)
        self.device = accelerator.device
        self.rank = accelerator.process_index
        self.world = accelerator.num_processes
        # The order depends only on the seed and the rows, so a sitting can begin at any step.
        self.order, self.total = job.order(self.world)
        # The copy comes before accelerate wraps the module and DeepSpeed shards it.
        self.twin = self._copied_objective()
        self._prepare_module()
        # Since the last log line:
        self.sums = SumsAndCounts()
        self.clock: Any = Counter()
        self.held_out: dict[str, float] = {}  # measures of the last evaluation
        made_of = {**made_of, "rows": job.rows.digest}
        engine_and_machine = processes.engine_and_machine(accelerator)
        self.progress = self._resume(resume.Progress(made_of, self.world, *engine_and_machine))
        self.file = None if self.rank else MetricsFile(job.metrics, job.kind, self.progress.step)
        if accelerator.log_with:
            self._init_trackers()
        # On the first process, prints a line above the progress bar.
        self.say: Callable[[str], None] = lambda text: None
        self._grad_norm: Any = 0.0
        self._said_at = -math.inf
        self._since = time.monotonic() - self.progress.seconds
        self._saved_at = self.progress.step  # the step of the last save or of the start

    def _copied_objective(self) -> Objective:
        """The twin: a copy that is never sharded. The loop measures and saves the twin."""
        objective = self.job.objective
        dtype = torch.float32 if objective.target is None else objective.target.lm_head.dtype
        head = copy.deepcopy(objective.head)
        return type(objective)(head, objective.target, self.config).to(self.device, dtype).eval()

    def _prepare_module(self) -> None:
        objective = self.job.objective
        is_zero = self.accelerator.state.deepspeed_plugin is not None
        optimizers = build_optimizers(objective, self.config, zero_muon if is_zero else None)
        # From here on parameters may be sharded, so the loop calls self.module, not the objective.
        self.module, *self.optimizers = self.accelerator.prepare(objective, *optimizers)
        if is_zero and self.is_muon:
            clip_before_muon(self.module.optimizer, self.config.clip_norm)
        self.module.train()

    def _resume(self, fresh: resume.Progress) -> resume.Progress:
        """Loads the newest save, and makes its best weights the output again; returns the
        progress."""
        # Only the first process looks for a save. It sends the result, or its error, to the others.
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [resume.find(self.job.state, fresh, self.job.overwrite)]
            except UserError as error:
                answer = [error]
        broadcast_object_list(answer)
        if isinstance(answer[0], UserError):
            raise answer[0]
        saved: resume.Found = answer[0]
        folder = saved.folder
        if folder is not None:
            # Each process loads its own part, because ZeRO cuts weights and moments into shards.
            processes.load_state(self.accelerator, folder)
            self.sums = torch.load(folder / METER.format(self.rank), self.device, weights_only=True)
        if self.rank == 0:
            for text in saved.warnings:
                warn(text)
            if folder is None:
                resume.clear(self.job.state)
            else:
                # The steps after the save run again, so the output goes back to the best before it.
                if saved.progress.best_step:
                    resume.publish(folder / "best", self.job.output)
                at = f"{saved.progress.step:,} of {self.total:,}"
                print(f"going on from step {at} ({folder})", flush=True)
        self.accelerator.wait_for_everyone()
        return saved.progress

    def _init_trackers(self) -> None:
        from pandas import json_normalize

        # A resumed run keeps its id. For steps after the save, tensorboard drops the old values and
        # wandb the new ones.
        step = self.progress.step
        run_id = self.progress.run_id
        name = f"{self.job.metrics.parent.resolve().name}-{self.job.kind}"
        options: dict[str, Any] = {
            "tensorboard": {"purge_step": step + 1},
            "wandb": {"id": f"{self.job.kind}-{run_id}", "name": name, "resume": "allow"},
            "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},  # its name is its id
        }
        # Trackers take flat tables of numbers and texts.
        flat = {
            key: value if isinstance(value, int | float | str) else str(value)
            for key, value in json_normalize(self.progress.made_of).to_dict("records")[0].items()
        }
        self.accelerator.init_trackers("aerie", None if step else flat, options)

    def run(self, stop: resume.StopRequest) -> str:
        """Trains; returns how it ended: finished, budget, interrupted or requeue."""
        job = self.job
        start = self.progress.step
        steps = range(start, self.total)
        ending = "finished"
        stop.is_stepping = True
        with start_progress(self.total, "step", f"train {job.kind}", done=start) as progress_bar:
            if self.rank == 0:
                self.say = progress_bar.write
            # Threads read the next steps ahead; `waited` is how long the loop waited for them.
            began = time.monotonic()
            threads = threads_for(job.rows.train, self.order.rows_per_step // self.world)
            read_ahead = prefetched(self._read, steps, threads)
            for step, (batches, error) in zip(steps, read_ahead, strict=True):
                waited = time.monotonic() - began
                # -------------------------------------------------------------------
                # Before the step: all processes agree on its divisors and on whether to go on.
                counts, tokens, wish = self._agree(batches, stop, error)
                if wish in resume.EXIT_CODES:
                    # The loop drops the batches; the next sitting reads them again.
                    ending = wish
                    break
                # -------------------------------------------------------------------
                # A single training step: `accumulation` batches, then the optimisers.
                self._set_rates(step)
                scales = self._loss_scales(counts)
                for batch in batches:
                    with self.accelerator.accumulate(self.module):
                        output = self.module(self._load(batch))
                        loss = output.total(job.objective.weights, scales)
                        self.accelerator.backward(loss)
                        add_sums(self.sums, output.sums())
                        self._clip()
                        # accelerate's optimisers do nothing before the last accumulated batch.
                        for optimizer in self.optimizers:
                            optimizer.step()
                            optimizer.zero_grad()
                # -------------------------------------------------------------------
                # After the step: count, then log, evaluate and save where it is time.
                now = time.monotonic()
                self.progress = replace(
                    self.progress,
                    step=step + 1,
                    tokens=self.progress.tokens + tokens,
                    seconds=now - self._since,
                )
                self.clock.update(steps=1, tokens=tokens, waited=waited, seconds=now - began)
                progress_bar.update(1)
                # `_end` logs and evaluates the last step at any intervals. Nothing goes on from the
                # last step, so it is not saved.
                if step + 1 == self.total:
                    break
                if wish:  # a budget
                    ending = wish
                    break
                if (step + 1) % self.config.log_every == 0:
                    self._log()
                if self.config.eval_every and (step + 1) % self.config.eval_every == 0:
                    self._evaluate()
                if (step + 1) % self.config.save_every == 0:
                    self._save_state()
                # The clock leaves out logging, evaluating and saving.
                began = time.monotonic()
            self._end(ending)
        stop.is_stepping = False
        return ending

    def _end(self, ending: str) -> None:
        """Leaves what the next sitting or the user needs."""
        if ending in resume.EXIT_CODES:
            # The sums are saved without a log line, which comes at the step of an unbroken run.
            step = self.progress.step
            if step != self._saved_at:
                self._save_state()
            self.say(
                f"stopped by a signal after step {step:,}; run the same command again to continue"
            )
            return
        self._log()
        # This comes before the save, which holds the best weights, too.
        self._evaluate()
        if ending == "budget":
            self._save_state()
        self.accelerator.wait_for_everyone()

    def _read(self, step: int) -> tuple[list[Batch], UserError | None]:
        """This process's batches of a step, and an error if reading failed. The prefetching threads
        call this."""
        # An error is returned, because every process must learn of it before one raises it.
        batches = []
        try:
            parts = self.order.parts(step, self.rank)
            rows = iter(fetch_rows(self.job.rows.train, [*chain.from_iterable(parts)]))
            for numbers in parts:
                of_part = [*islice(rows, len(numbers))]
                # Only EAGLE-3's unroll keeps packed conversations apart.
                batch = collate(of_part, numbers, getattr(self.config, "packing", False))
                batch = self.job.objective.prepare(batch, self.order.epoch_of(step))
                batches.append(batch.pinned() if self.device.type == "cuda" else batch)
            return batches, None
        except UserError as error:
            return [collate([], ())], error

    def _load(self, batch: Batch) -> Batch:
        """The batch on the device, with its features."""
        # Online features are made here on the device, not in the prefetching threads.
        batch = batch.to(self.device)
        return batch if self.job.features is None else self.job.features(batch)

    def _agree(
        self, batches: list[Batch], stop: resume.StopRequest, error: UserError | None
    ) -> Agreement:
        """Sums each process's counts and wishes; any process may ask for an ending.

        This comes before the step's first backward pass, because DeepSpeed steps inside the last
        one, when it is too late to scale a loss. The token ids alone decide the counts.
        """
        # One all-reduce sums errors, tokens, wishes and counts.
        counts = [self.job.objective.counts(batch) for batch in batches]
        names = list(counts[0])
        budget = self.config.max_seconds
        mine = [
            error is not None,
            sum(batch.num_tokens for batch in batches),
            stop.state == "requeue",
            stop.state == "interrupted",
            budget is not None and time.monotonic() - self._since > budget,
        ]
        mine += [sum(int(count[name]) for count in counts) for name in names]
        device = self.device if self.world > 1 else "cpu"
        totals = processes.all_reduce(torch.tensor(mine, dtype=torch.float64, device=device))
        num_errors, tokens, requeue, interrupted, over_budget, *sums = totals.tolist()
        processes.raise_together(error, num_errors, self.device)
        wishes = {"requeue": requeue, "interrupted": interrupted, "budget": over_budget}
        # The first wish that any process has, in this order: a signal comes before the budget.
        wish = next(filter(wishes.get, wishes), "")
        return Agreement(dict(zip(names, sums, strict=True)), int(tokens), wish)

    def _loss_scales(self, counts: dict[str, float]) -> dict[str, float]:
        """The factors that turn a batch's sum of each term into its part of the mean over the
        step's slots."""
        # accelerate and DeepSpeed divide by the accumulation, and average over the processes. The
        # factor undoes both.
        factor = self.world * self.config.accumulation
        return {name: factor / max(count, 1.0) for name, count in counts.items()}

    def _set_rates(self, step: int) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                is_muon = group.get("use_muon", False)
                group["lr"] = learning_rate(step, self.total, self.config, is_muon)

    def _clip(self) -> None:
        # Under DeepSpeed this only reads the norm, because the engine clips.
        if self.accelerator.sync_gradients:
            self._grad_norm = self.accelerator.clip_grad_norm_(
                self.module.parameters(), self.config.clip_norm
            )

    def _log(self) -> None:
        """Writes the means since the last line of the log."""
        if not self.clock["steps"]:
            return
        clock = self.clock
        last = self.progress.step - 1  # steps count from 0
        # All processes call this all-reduce, although only the first one writes.
        averages = means(self.sums, self.device)
        self.sums = {}
        self.clock = Counter()
        weights = self.job.objective.weights
        record = {
            "epoch": self.order.epoch_of(last),
            "loss": sum(weight * averages[name] for name, weight in weights.items()),
            **averages,
            # The norm before clipping; None under DeepSpeed without ZeRO.
            "grad_norm": None if self._grad_norm is None else float(self._grad_norm),
            "learning_rate": learning_rate(last, self.total, self.config),
        }
        if self.is_muon:
            record["matrix_rate"] = learning_rate(last, self.total, self.config, is_muon=True)
        record |= {
            "data_wait_share": clock["waited"] / clock["seconds"],
            "tokens_per_s": clock["tokens"] / clock["seconds"],
            "step_ms": 1000.0 * clock["seconds"] / clock["steps"],
            "peak_memory_gib": peak_bytes(self.device) / 2**30,
        }
        self._record(record, "train")

    def _record(self, values: dict[str, Any], section: str) -> None:
        """Writes a line of metrics; UserError if a value is not finite."""
        step = self.progress.step
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        if section != "train" or time.monotonic() - self._said_at >= SAY_SECONDS:
            self.say(" | ".join([f"step {step:,}/{self.total:,}", *grouped_by_stem(numbers)]))
            self._said_at = time.monotonic()
        if self.file is not None:
            self.file.write(
                {"kind": self.job.kind, "step": step, "total_steps": self.total, **values}
            )
            curves = {f"{section}/{name}": value for name, value in numbers.items()}
            for tracker in self.accelerator.trackers:
                # trackio keeps the old values of steps after the save, so it gets no new ones.
                if tracker.name != "trackio" or step > self.file.reached:
                    with explained(Path(self.accelerator.project_dir)):
                        tracker.log(curves, step=step)
        # This comes after the line, so that the file shows where the training diverged.
        for name, value in numbers.items():
            if not math.isfinite(value) and name != "grad_norm":
                best = self.progress.best_step
                kept = f"the weights of step {best:,} are kept" if best else "nothing was kept"
                of_muon = ", train.optimizer.matrix_rate" if self.is_muon else ""
                raise UserError(
                    f"train: {name} is {value} at step {step:,}: the training diverged ({kept}); "
                    f"lower train.learning_rate{of_muon} or train.clip_norm"
                )

    def _evaluate(self) -> None:
        """Measures the weights; if they are the best so far, they become the output."""
        # All processes call this, because ZeRO gathers from all; only the first one saves.
        weights = processes.full_weights(self.accelerator, self.module)
        with torch.no_grad():
            for name, parameter in self.twin.named_parameters():
                parameter.copy_(weights[name])
        rows = self.job.rows.held_out[: self.config.eval_conversations]
        score = None
        if rows:
            self.held_out = self._measure_held_out(rows)
            # The score is the measured tau; without one the predicted tau; without both the loss.
            predicted = self.held_out.get("predicted_tau", -self.held_out["loss"])
            score = self.held_out.get("tau", predicted)
            self._record({f"held_out_{k}": value for k, value in self.held_out.items()}, "held_out")
        best = self.progress.best_score
        # Without held-out rows the latest weights are the best.
        if score is None or best is None or score > best:
            self.progress = replace(self.progress, best_score=score, best_step=self.progress.step)
            if self.rank == 0:
                self._publish_twin()
        self.accelerator.wait_for_everyone()

    def _publish_twin(self) -> None:
        # First saved elsewhere, because a full disk must not leave half a head as the output.
        fresh = self.job.state / ".best.tmp"
        remove_tree(fresh)
        with explained(self.job.output):
            fresh.mkdir(parents=True)
            self.job.save(self.twin.head, fresh, step=self.progress.step, **self.held_out)
        resume.publish(fresh, self.job.output)
        remove_tree(fresh)

    def _measure_held_out(self, rows: Sequence[BatchRow]) -> dict[str, float]:
        # Every process needs a row, so that all have the same names. All measure all rows if there
        # are fewer rows than processes.
        is_shared = len(rows) >= self.world
        numbers = range(len(rows))[self.rank :: self.world] if is_shared else range(len(rows))
        sums = SumsAndCounts()
        error = None
        try:
            for first in range(0, len(numbers), self.config.batch_size):
                part = numbers[first : first + self.config.batch_size]
                with torch.no_grad():
                    batch = self._load(collate(fetch_rows(rows, part), part))
                    add_sums(sums, self.twin.measure(batch))
        except UserError as raised:
            error = raised
        failed = torch.tensor(float(error is not None), device=self.device)
        processes.raise_together(error, float(processes.all_reduce(failed)), self.device)
        measured = self.twin.summarise(means(sums, self.device))
        return measured | (self.measure(self.twin.head) if self.measure else {})

    def _save_state(self) -> None:
        def fill(folder: Path) -> None:
            # With the sums since the last log line, which the next line needs.
            self.accelerator.save_state(str(folder))
            torch.save(self.sums, folder / METER.format(self.rank))
            if self.rank == 0 and self.progress.best_step:
                resume.publish(self.job.output, folder / "best")

        self.progress = replace(self.progress, seconds=time.monotonic() - self._since)
        resume.save(
            self.job.state,
            self.progress,
            fill,
            self.accelerator.wait_for_everyone,
            self.config.keep_last,
        )
        self._saved_at = self.progress.step


def peak_bytes(device: torch.device) -> int:
    """The most memory in bytes that this process has used, on its GPU if it trains on one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
