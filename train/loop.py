"""The training loop: one sitting of a run, from its last save to its end, its budget or a signal."""

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
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.heads import MuonSection, TrainConfig
from aerie.data.batches import Batch, BatchRow, collate, prefetched
from aerie.data.progress import start_progress
from aerie.model.storage import Lock, explained, remove_tree, write_text
from aerie.train import processes, resume
from aerie.train.deepspeed_internals import clip_before_muon, zero_muon
from aerie.train.jobs import Job
from aerie.train.losses import SumsAndCounts
from aerie.train.objectives import Objective
from aerie.train.optimizers import build_optimizers, learning_rate

Measure = Callable[[Any], dict[str, float]]
SAY_SECONDS = 5.0  # between two lines of the terminal
METER = "meter-{}.pt"  # each process's sums since the last log line


def means(sums: SumsAndCounts, device: torch.device) -> dict[str, float]:
    """sum / count of every name over all processes, which must have the same names."""
    pairs = [
        torch.stack([part.double().to(device) for part in sums[name]]) for name in sorted(sums)
    ]
    totals = processes.all_reduce(torch.stack(pairs)).tolist()  # [names, 2]
    found = dict(zip(sorted(sums), totals, strict=True))
    return {name: found[name][0] / found[name][1] if found[name][1] else 0.0 for name in sums}


def add_sums(totals: SumsAndCounts, sums: SumsAndCounts) -> None:
    # Tensors, as numbers would wait for the device; float64, for millions of slots.
    for name, (value, count) in sums.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + value.double(), before[1] + count.double())


def shown(values: dict[str, float]) -> list[str]:
    """['feature 1.234', 'accuracy @1 0.71 @2 0.62'] of feature, accuracy_at_1 and accuracy_at_2."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        stem, separator, depth = name.partition("_at_")
        groups.setdefault(stem, []).append(f"@{depth} {value:.3g}" if separator else f"{value:.4g}")
    return [f"{stem} {' '.join(texts)}" for stem, texts in groups.items()]


class MetricsFile:
    """metrics.jsonl, shared by all trainings of a run; one that goes on removes its lines after from_step."""

    def __init__(self, path: Path, kind: str, from_step: int) -> None:
        self.path = path
        self.reached = 0  # the last step of this kind with a line
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
        with self._turn(), self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record) + "\n")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with explained(self.path), Lock(self.path.with_name(f".{self.path.name}.lock")) as lock:
            lock.acquire()
            yield


class Loop:
    def __init__(
        self, job: Job, accelerator: Accelerator, made_of: dict[str, Any], measure: Measure | None
    ) -> None:
        """made_of: all that decides the weights; measure: gives a head's tau."""
        self.job, self.accelerator, self.measure = job, accelerator, measure
        self.config: TrainConfig = job.objective.settings
        self.device, self.rank, self.world = (
            accelerator.device,
            accelerator.process_index,
            accelerator.num_processes,
        )
        config, rows, objective = self.config, job.rows, job.objective
        self.order, self.total = job.order(self.world)
        # The twin is a copy, never sharded: we measure and save it.
        dtype = torch.float32 if objective.target is None else objective.target.lm_head.dtype
        twin: Objective = type(objective)(copy.deepcopy(objective.head), objective.target, config)
        self.twin = twin.to(self.device, dtype).eval()
        if getattr(config, "compile", False):
            for layer in objective.head.blocks:
                layer.compile_parts()
        # From here on parameters may be sharded: the loop calls self.module, never the objective itself.
        is_zero = accelerator.state.deepspeed_plugin is not None
        optimizers = build_optimizers(objective, config, zero_muon if is_zero else None)
        self.module, *self.optimizers = accelerator.prepare(objective, *optimizers)
        if is_zero and isinstance(config.optimizer, MuonSection):
            clip_before_muon(self.module.optimizer, config.clip_norm)
        self.module.train()
        self.sums, self.held_out = (
            SumsAndCounts(),
            dict[str, float](),
        )  # sums and clock: since the last log line
        self.clock: Any = Counter()
        made_of = {**made_of, "rows": rows.digest}
        self.progress = self._going_on(
            resume.Progress(made_of, self.world, *processes.engine_and_machine(accelerator))
        )
        self.file = (
            MetricsFile(job.metrics, job.kind, self.progress.step) if self.rank == 0 else None
        )
        # A run that goes on keeps its id; of steps after the save tensorboard drops the old, wandb the new values.
        if accelerator.log_with:
            name, number = f"{job.metrics.parent.resolve().name}-{job.kind}", self.progress.run_id
            options: dict[str, Any] = {"tensorboard": {"purge_step": self.progress.step + 1}}
            options["wandb"] = {"id": f"{job.kind}-{number}", "name": name, "resume": "allow"}
            options["trackio"] = {
                "name": f"{name}-{number}",
                "resume": "allow",
            }  # its id is the name
            from pandas import json_normalize

            flat = json_normalize(self.progress.made_of).to_dict("records")[0]
            flat = {
                key: value if isinstance(value, int | float | str) else str(value)
                for key, value in flat.items()
            }
            accelerator.init_trackers("aerie", None if self.progress.step else flat, options)
        self.say: Callable[[str], None] = lambda text: (
            None
        )  # prints a line above the bar, on the first process
        self._grad_norm: Any = 0.0
        self._is_timed, self._said_at = False, -math.inf
        self._since = time.monotonic() - self.progress.seconds
        self._saved_at = self.progress.step  # or started there, with nothing to save

    def _going_on(self, fresh: resume.Progress) -> resume.Progress:
        """Loads the save to go on from, and makes its best weights the output again."""
        answer: list[Any] = [None]
        try:
            answer = (
                [resume.find(self.job.state, fresh, self.job.overwrite)]
                if self.rank == 0
                else answer
            )
        except UserError as error:
            answer = [error]
        broadcast_object_list(answer)
        if isinstance(answer[0], UserError):
            raise answer[0]
        progress, folder, warnings = answer[0]
        if folder is not None:
            processes.load_state(self.accelerator, folder)
            self.sums = torch.load(folder / METER.format(self.rank), self.device, weights_only=True)
        if self.rank == 0:
            for text in warnings:
                warn(text)
            if folder is None:
                resume.clear(self.job.state)
            else:
                # Later weights are measured again, so the output goes back too.
                if progress.best_step:
                    resume.publish(folder / "best", self.job.output)
                print(
                    f"going on from step {progress.step:,} of {self.total:,} ({folder})", flush=True
                )
        self.accelerator.wait_for_everyone()
        return cast(resume.Progress, progress)

    def run(self, stop: resume.StopRequest) -> str:
        """Trains; returns how it ended: finished, budget, interrupted or requeue."""
        config, accelerator, start, ending = (
            self.config,
            self.accelerator,
            self.progress.step,
            "finished",
        )
        steps = range(start, self.total)
        stop.is_stepping = True
        with start_progress(
            self.total, "step", f"train {self.job.kind}", done=start
        ) as progress_bar:
            if self.rank == 0:
                self.say = progress_bar.write
            before = time.monotonic()
            for step, (parts, error) in zip(steps, prefetched(self._read, steps), strict=True):
                waited = time.monotonic() - before
                counts, tokens, asked = self._agree(parts, stop, error)
                if asked in resume.CODES:
                    ending = asked
                    break
                self._set_rates(step)
                # Accelerate and DeepSpeed divide by the accumulation and average over processes: undone here.
                scales = {
                    name: self.world * config.accumulation / max(count, 1.0)
                    for name, count in counts.items()
                }
                for batch in parts:
                    with accelerator.accumulate(self.module):
                        output = self.module(self._load(batch))
                        accelerator.backward(output.total(self.job.objective.weights, scales))
                        add_sums(self.sums, output.sums())
                        # Under DeepSpeed this only reads the norm: the engine itself clips.
                        if accelerator.sync_gradients:
                            self._grad_norm = accelerator.clip_grad_norm_(
                                self.module.parameters(), config.clip_norm
                            )
                        for optimizer in self.optimizers:
                            optimizer.step()
                            optimizer.zero_grad()
                done, seconds = self.progress.tokens + int(tokens), time.monotonic() - self._since
                self.progress = replace(self.progress, step=step + 1, tokens=done, seconds=seconds)
                self.clock.update(
                    steps=1, tokens=tokens, waited=waited, seconds=time.monotonic() - before
                )
                progress_bar.update(1)
                if asked or step + 1 == self.total:
                    ending = asked if step + 1 < self.total else ending
                    break
                if (step + 1) % config.log_every == 0:
                    self._log(goes_on=True)
                if config.eval_every and (step + 1) % config.eval_every == 0:
                    self._evaluate()
                if (step + 1) % config.save_every == 0:
                    self._save_state()
                before = time.monotonic()
            step = self.progress.step
            if ending in resume.CODES:
                # No log line: its sums are saved, and it comes at the same step as in an unbroken run.
                if step != self._saved_at:
                    self._save_state()
                self.say(
                    f"stopped by a signal after step {step:,}; run the same command again to continue"
                )
            else:
                self._log()
                self._evaluate()
                if ending == "budget":
                    self._save_state()
                accelerator.wait_for_everyone()
        stop.is_stepping = False
        return ending

    def _read(self, step: int) -> tuple[list[Batch], UserError | None]:
        # Returns an error: first every process has to know of it.
        # Only EAGLE-3's unroll keeps packed conversations apart.
        packed = bool(getattr(self.config, "packing", False))
        try:
            numbers = self.order.parts(step, self.rank)
            parts = [
                collate([self.job.rows.train[row] for row in rows], rows, packed)
                for rows in numbers
            ]
            parts = [
                self.job.objective.prepare(batch, self.order.epoch_of(step)) for batch in parts
            ]
            return [
                batch.pinned() for batch in parts
            ] if self.device.type == "cuda" else parts, None
        except UserError as error:
            return [collate([], ())], error

    def _load(self, batch: Batch) -> Batch:
        batch = batch.to(self.device)
        return batch if self.job.features is None else self.job.features(batch)

    def _agree(
        self, parts: list[Batch], stop: resume.StopRequest, error: UserError | None
    ) -> tuple[dict[str, float], float, str]:
        """(counts, tokens, ending) of the step over all processes; any may ask for an ending (a budget: after it)."""
        # Before the first backward pass: DeepSpeed steps inside the last one, when it is too late to rescale.
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
        num_errors, tokens, *rest = processes.all_reduce(
            torch.tensor(own, dtype=torch.float64, device=device)
        ).tolist()
        processes.raise_together(error, num_errors, self.device)
        endings = [
            name
            for name, value in zip(("requeue", "interrupted", "budget"), rest[:3], strict=True)
            if value
        ]
        return dict(zip(counts[0], rest[3:], strict=True)), tokens, endings[0] if endings else ""

    def _set_rates(self, step: int) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(
                    step, self.total, self.config, group.get("use_muon", False)
                )

    def _log(self, goes_on: bool = False) -> None:
        if not self.clock["steps"]:
            return
        found, step, clock = means(self.sums, self.device), self.progress.step, self.clock
        self.sums, self.clock = {}, Counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        seconds = max(clock["seconds"], 1e-9)
        is_muon = isinstance(self.config.optimizer, MuonSection)
        record = {
            "epoch": self.order.epoch_of(step - 1),
            "loss": sum(
                weight * found[name] for name, weight in self.job.objective.weights.items()
            ),
            **found,
            # Before clipping; None under DeepSpeed without ZeRO.
            "grad_norm": None if self._grad_norm is None else float(self._grad_norm),
            "learning_rate": learning_rate(step - 1, self.total, self.config),
            **(
                {"matrix_rate": learning_rate(step - 1, self.total, self.config, is_muon=True)}
                if is_muon
                else {}
            ),
            "data_wait_share": clock["waited"] / seconds,
            "tokens_per_s": clock["tokens"] / seconds,
            "step_ms": 1000.0 * seconds / clock["steps"],
            "peak_memory_gib": peak / 2**30,
        }
        self._record(record, "train")
        if goes_on and not self._is_timed:  # once a sitting
            self._is_timed, rest, budget = True, self.total - step, self.config.max_seconds
            left, needed = (
                (budget or math.inf) - self.progress.seconds,
                rest * seconds / clock["steps"],
            )
            ends = f"; train.max_seconds {budget} will end them near step {step + rest * left / needed:,.0f}"
            took = f"{needed:,.0f} s" if needed < 120 else f"{needed / 60:,.0f} min"
            self.say(f"about {took} for the other {rest:,} steps{ends if left < needed else ''}")

    def _record(self, values: dict[str, Any], section: str) -> None:
        """Writes a line of metrics; UserError if one is not finite."""
        step, best = self.progress.step, self.progress.best_step
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        if section != "train" or time.monotonic() - self._said_at >= SAY_SECONDS:
            self.say(" | ".join([f"step {step:,}/{self.total:,}", *shown(numbers)]))
            self._said_at = time.monotonic()
        if self.file is not None:
            self.file.write(
                {"kind": self.job.kind, "step": step, "total_steps": self.total, **values}
            )
            for tracker in self.accelerator.trackers:
                if tracker.name != "trackio" or step > self.file.reached:
                    with explained(Path(self.accelerator.project_dir)):
                        tracker.log(
                            {f"{section}/{name}": value for name, value in numbers.items()},
                            step=step,
                        )
        for name, value in numbers.items():
            if not math.isfinite(value) and name != "grad_norm":
                kept = f"step {best:,} is kept" if best else "nothing was kept"
                place = f"train: {name} is {value} at step {step:,}: the training diverged ({kept})"
                of_muon = (
                    ", train.optimizer.matrix_rate"
                    if isinstance(self.config.optimizer, MuonSection)
                    else ""
                )
                raise UserError(f"{place}; lower train.learning_rate{of_muon} or train.clip_norm")

    def _evaluate(self) -> None:
        """Measures the weights; the best so far become the output."""
        weights = processes.full_weights(self.accelerator, self.module)
        with torch.no_grad():
            for name, parameter in self.twin.named_parameters():
                parameter.copy_(weights[name])
        rows = self.job.rows.held_out[: self.config.eval_conversations]
        step, best, score = self.progress.step, self.progress.best_score, None
        if rows:
            self.held_out = self._measured(rows)
            score = self.held_out.get(
                "tau", self.held_out.get("predicted_tau", -self.held_out["loss"])
            )
            self._record(
                {f"held_out_{name}": value for name, value in self.held_out.items()}, "held_out"
            )
        if (
            score is None or best is None or score > best
        ):  # without a score the latest weights are the best
            self.progress = replace(self.progress, best_score=score, best_step=step)
            if self.rank == 0:
                fresh = self.job.state / ".best.tmp"
                remove_tree(fresh)
                with explained(self.job.output):
                    fresh.mkdir(parents=True)
                    self.job.save(self.twin.head, fresh, step=step, **self.held_out)
                resume.publish(fresh, self.job.output)
                remove_tree(fresh)
        self.accelerator.wait_for_everyone()

    def _measured(self, rows: Sequence[BatchRow]) -> dict[str, float]:
        sums, error, size = SumsAndCounts(), None, self.config.batch_size
        own = (
            range(self.rank, len(rows), self.world) if len(rows) >= self.world else range(len(rows))
        )
        try:
            for numbers in (own[first : first + size] for first in range(0, len(own), size)):
                batch = self._load(collate([rows[number] for number in numbers], numbers))
                with torch.no_grad():
                    add_sums(sums, self.twin.measure(batch))
        except UserError as raised:
            error = raised
        failed = processes.all_reduce(torch.tensor(float(error is not None), device=self.device))
        processes.raise_together(error, float(failed), self.device)
        measured = self.twin.summarise(means(sums, self.device))
        return measured if self.measure is None else measured | self.measure(self.twin.head)

    def _save_state(self) -> None:
        def fill(folder: Path) -> None:
            # Also the sums since the last log line: the next line needs them.
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
