"""EAGLE-3's objective against its plain form: the same loss, and what trimming saves in time and memory.

The plain form holds the scores of all T x T pairs, the full vocabulary's logits in float32 and the draft's law at every
slot of every step, padding and prompts included, as trainers commonly do.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.data.batches import Batch
from aerie.model.layers import UnrollMemory
from aerie.model.target import TargetEnds
from aerie.train import losses
from aerie.train.evaluate import shifted
from aerie.train.log import peak_memory_gib
from aerie.train.objectives.eagle import Eagle3Objective, UnrolledHead


@dataclass(frozen=True)
class Comparison:
    """Totals over the batches, each form with its backward pass."""

    trimmed_ms: float
    plain_ms: float
    trimmed_peak_gib: float
    plain_peak_gib: float
    loss_difference: float  # relative, the largest of all batches
    tokens: int
    supervised_share: float

    def text(self) -> str:
        """One line."""
        speed, ratio = 1000.0 * self.tokens / self.trimmed_ms, self.plain_ms / self.trimmed_ms
        return (
            f"objective: trimmed {self.trimmed_ms:,.0f} ms, {speed:,.0f} tok/s, peak {self.trimmed_peak_gib:.2f} GiB | "
            f"plain {self.plain_ms:,.0f} ms, peak {self.plain_peak_gib:.2f} GiB | {ratio:.2f} times as long | "
            f"{self.supervised_share:.0%} of the slots supervised | losses differ by {self.loss_difference:.1e} at most"
        )


def compare(
    module: UnrolledHead, objective: Eagle3Objective, batches: Sequence[Batch], load: Callable[[Batch], Batch]
) -> Comparison:
    """Both forms on the same batches, in turn; the first batch is run once more for warming up."""
    device = next(module.parameters()).device
    plain = lambda batch: plain_sums(module, batch, objective.ends)  # noqa: E731
    trimmed = lambda batch: module(batch, objective.ends)[0]  # noqa: E731
    loaded = [load(objective.prepare(batch, 0)) for batch in batches]
    found: dict[str, tuple[float, float, list[Tensor]]] = {}
    for name, form in (("trimmed", trimmed), ("plain", plain)):  # a CPU's peak only grows: the smaller form goes first
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _run(module, form, loaded[:1])
        began = time.perf_counter()
        losses_found = _run(module, form, loaded)
        found[name] = (1000.0 * (time.perf_counter() - began), peak_memory_gib(device), losses_found)
    pairs = zip(found["trimmed"][2], found["plain"][2], strict=True)
    slots = sum(batch.input_ids.numel() for batch in loaded)
    return Comparison(
        trimmed_ms=found["trimmed"][0],
        plain_ms=found["plain"][0],
        trimmed_peak_gib=found["trimmed"][1],
        plain_peak_gib=found["plain"][1],
        loss_difference=max(float(((a - b).abs() / b.abs().clamp(min=1e-9)).max()) for a, b in pairs),
        tokens=sum(batch.num_tokens for batch in loaded),
        supervised_share=sum(int(batch.supervised().sum()) for batch in loaded) / slots,
    )


def plain_sums(module: UnrolledHead, batch: Batch, ends: TargetEnds) -> Tensor:
    """[K] sums of the loss, as UnrolledHead gives them, by the plain form; for batches that are not packed."""
    assert batch.features is not None and batch.taps is not None
    head, settings = module.head, module.settings
    slots = batch.input_ids.shape[1] - 1
    mask = torch.ones(slots, slots, dtype=torch.bool, device=batch.input_ids.device).tril()
    memories = [UnrollMemory() for _ in range(head.config.num_hidden_layers)]
    with torch.no_grad():
        logits = ends.logits(batch.features[:, 1:]).float()  # [B, T-1, V]
        normaliser, choices = logits.logsumexp(-1), logits.argmax(-1)
        logits = logits[..., head.vocabulary.ids]  # [B, T-1, Vd]
    x, sums = head.fuse(batch.taps[:, :-1]), []
    for step in range(settings.unroll_steps):
        tokens = shifted(batch.input_ids, 1 + step)[:, :slots]
        x = head.unroll(tokens, x, batch.positions[:, :slots] + step, mask, memories)
        log_q = losses.log_law(head.logits(x))  # [B, T-1, Vd]
        goal, goal_normaliser = shifted(logits, step), shifted(normaliser, step)
        law = losses.TargetLaw.of_logits(goal.flatten(0, 1), goal_normaliser.flatten())
        counted = batch.supervised(step)[:, :slots].flatten()
        if settings.mask_outside_vocabulary:
            counted = counted & head.vocabulary.t2d[shifted(choices, step).flatten()]
        sums.append((module.loss(log_q.flatten(0, 1), law) * counted).sum())
    return torch.stack(sums)


def _run(module: UnrolledHead, form: Callable[[Batch], Any], batches: Sequence[Batch]) -> list[Tensor]:
    sums = []
    for batch in batches:
        loss = form(batch)
        loss.sum().backward()
        sums.append(loss.detach().cpu())  # waits for the device
        module.zero_grad()
    return sums
