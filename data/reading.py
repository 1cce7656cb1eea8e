"""How fast a feature cache is read in training's own order, and how long training would wait for it."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.batches import Batch, Order, collate, prefetched
from data.cache import FeatureCache
from data.plan import size


@dataclass(frozen=True)
class Reading:
    """Some steps' reading: bytes as stored, and seconds with nothing else to do, cold (first read) and warm."""

    num_steps: int
    num_tokens: int
    num_bytes: int
    cold_seconds: float
    warm_seconds: float
    step_seconds: float | None = None  # of the training step that was imitated by sleeping
    waited_seconds: float = 0.0  # of all those steps, for their batches
    is_cold: bool = True  # whether the system could be asked to forget the pages before

    def text(self) -> str:
        """One line to three."""
        rates = [
            f"{name} {self.num_bytes / seconds / 1e9:.2f} GB/s ({self.num_tokens / seconds:,.0f} tok/s)"
            for name, seconds in (("first read", self.cold_seconds), ("again", self.warm_seconds))
        ]
        read = f"{self.num_steps:,} steps, {self.num_tokens:,} tokens, {size(self.num_bytes)}"
        lines = [f"read: {read}: {', '.join(rates)}; one thread, checksums compared"]
        if not self.is_cold:
            lines.append("read: this system cannot be asked to forget files: the first read may come from memory")
        if self.step_seconds is not None:
            total = self.num_steps * self.step_seconds + self.waited_seconds
            lines.append(
                f"read: beside steps of {1000 * self.step_seconds:,.0f} ms, {self.waited_seconds / total:.1%} of the "
                f"time is spent waiting for batches"
            )
        return "\n".join(lines)


def measure(cache: FeatureCache, order: Order, num_steps: int, step_seconds: float | None) -> Reading:
    """The reading of the order's first steps.

    The cache's files are unmapped and their pages dropped before, as far as the system allows it: those that another
    process maps stay.
    """
    steps = range(min(num_steps, order.steps_per_epoch))
    numbers = [number for step in steps for number in order.rows(step)]
    is_cold = _drop_pages(cache, numbers)
    seconds = []
    tokens = 0
    for _ in ("first read", "again"):
        before = time.perf_counter()
        tokens = sum(_batch(cache, order, step).num_tokens for step in steps)
        seconds.append(time.perf_counter() - before)
        cache.close()  # so that checksums are compared the second time, too
    waited = 0.0
    if step_seconds is not None:
        _drop_pages(cache, numbers)
        waited = _waited(cache, order, steps, step_seconds)
    return Reading(
        num_steps=len(steps),
        num_tokens=tokens,
        num_bytes=tokens * cache.token_bytes,
        cold_seconds=seconds[0],
        warm_seconds=seconds[1],
        step_seconds=step_seconds,
        waited_seconds=waited,
        is_cold=is_cold,
    )


def last_step(metrics: Path, kind: str) -> tuple[float, float] | None:
    """(milliseconds without waiting, share of the whole that was waited) of a training's last record, or None."""
    found = None
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:  # a training that was killed, or is writing now, leaves a torn line
            continue
        if record.get("kind") == kind and "step_ms" in record:
            waited = float(record["data_wait_share"])
            found = (float(record["step_ms"]) * (1.0 - waited), waited)
    return found


def _batch(cache: FeatureCache, order: Order, step: int) -> Batch:
    rows = order.rows(step)
    return collate([cache[row] for row in rows], rows)


def _waited(cache: FeatureCache, order: Order, steps: Sequence[int], step_seconds: float) -> float:
    """Seconds for which steps that sleep instead of computing wait for their batches."""
    waited, before = 0.0, time.perf_counter()
    for _ in prefetched(lambda step: _batch(cache, order, step), steps):
        waited += time.perf_counter() - before
        time.sleep(step_seconds)
        before = time.perf_counter()
    return waited


def _drop_pages(cache: FeatureCache, numbers: Sequence[int]) -> bool:
    """Asks the system to forget the shards of these rows, so that they come from the disk; False where it cannot."""
    cache.close()  # pages of a mapped file stay
    if not hasattr(os, "posix_fadvise"):  # macOS
        return False
    for name in {cache.file_of(number) for number in numbers}:
        descriptor = os.open(cache.directory / name, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True
