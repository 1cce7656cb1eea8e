"""What an objective is: a module around what is trained, whose forward returns the sums of one batch.

Objectives return sums and the loop divides them, so that padding, accumulation and processes cannot move a gradient.
An objective is a module because ZeRO-3 has an LM head whole only inside the forward of the module that it has wrapped.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from aerie.data.batches import Batch, TokenisedRow, collate, empty_like
from aerie.model.layers import UnrollMemory
from aerie.model.target import VocabWeights

Sums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count)
Choose = Callable[[Tensor], Tensor]  # states [S, D] -> token ids [S]


@dataclass(frozen=True)
class StepOutput:
    """Sums of one batch: the loss is the objective's weighted total of the terms, metrics are only logged."""

    terms: Sums
    metrics: Sums

    def total(self, weights: dict[str, float], scales: dict[str, float] | None = None) -> Tensor:
        """The weighted total of the terms, each times its scale (1 where there are none)."""
        parts = [weights[name] * value * (scales[name] if scales else 1.0) for name, (value, _) in self.terms.items()]
        return sum(parts[1:], parts[0])

    def sums(self) -> Sums:
        """Terms and metrics alike, detached."""
        return {name: (value.detach(), count) for name, (value, count) in {**self.terms, **self.metrics}.items()}


class Objective(nn.Module):
    """A head with its training. weights are those of the terms that forward returns."""

    weights: dict[str, float]

    def __init__(self, head: Any, target: VocabWeights | None, settings: Any) -> None:
        """target is None where a small LM learns from tokens alone; settings are the recipe's section `train`."""
        super().__init__()
        self.head, self.target = head, target
        self.settings: Any = settings

    @property
    def config(self) -> Any:
        """The head's: DeepSpeed looks up a model's width there."""
        return self.head.config

    def twin(self) -> Self:
        """The same objective around a copy of the head; the target is shared."""
        return type(self)(copy.deepcopy(self.head), self.target, self.settings)

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        """The batch with what training adds to it; runs in the prefetching thread."""
        # A process without rows must call the module like the others; padding adds nothing to the sums.
        if batch.features is None and batch.num_tokens == 0 and self.target is not None:
            vocabulary = self.target.embedding
            num_taps = len(getattr(self.head.config, "after_blocks", ()))
            return empty_like(batch, vocabulary.shape[1], vocabulary.dtype, num_taps)
        return batch

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """For each term the batch's share of what its sum is divided by, counted from the token ids alone."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> StepOutput:
        raise NotImplementedError

    def measure(self, batch: Batch) -> Sums:
        """Held-out sums, asked of the twin without gradient."""
        raise NotImplementedError

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """The held-out measures from the means of measure's sums."""
        loss = sum(weight * means[name] for name, weight in self.weights.items())
        rest = {name: value for name, value in means.items() if name != "chain"}
        return {"predicted_tau": 1.0 + means["chain"], "loss": loss, **rest}


def held_out_sums(
    objective: Objective,
    rows: Sequence[TokenisedRow],
    batch_size: int,
    process: tuple[int, int],
    load: Callable[[Batch], Batch],
) -> Sums:
    """The sums of measure over the rows of process (rank, world size); load brings a batch to the device."""
    rank, world_size = process
    # With fewer rows than processes each process takes them all: the means are the same, and none has nothing to add.
    own = range(rank, len(rows), world_size) if len(rows) >= world_size else range(len(rows))
    totals: Sums = {}
    for first in range(0, len(own), batch_size):
        numbers = own[first : first + batch_size]
        batch = load(collate([rows[number] for number in numbers], numbers))
        with torch.no_grad():
            add_sums(totals, objective.measure(batch))
    return totals


def add_sums(totals: Sums, sums: Sums) -> None:
    """Adds sums to totals, in float64."""
    # float64: a log window may hold millions of slots.
    for name, (value, count) in sums.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + value.double(), before[1] + count.double())


def shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] moved left by `by` (right where it is negative), zeros for what comes in."""
    out, kept = torch.zeros_like(x), x.shape[1] - abs(by)
    if kept > 0:
        out[:, max(-by, 0) : max(-by, 0) + kept] = x[:, max(by, 0) : max(by, 0) + kept]
    return out


def chain_hits(
    head: Any, batch: Batch, start: Tensor, choices: Tensor, choose: Choose, depths: int
) -> tuple[Tensor, Tensor]:
    """hits and alive, both float [depths, B, T-1]: where step k drafts the target's likeliest token; where it counts.

    start [B, T-1, D] is what each slot is given, choices [B, T] the target's likeliest token after each position,
    choose turns what the head returns into tokens. Every slot starts a chain of `depths` unroll steps with the
    conversation's own tokens, alive while its turn lasts; where it is not alive there is no hit.
    """
    slots = batch.input_ids.shape[1] - 1
    begin = batch.positions[:, :slots]
    memories = [UnrollMemory(batch.documents) for _ in range(head.config.num_hidden_layers)]
    hits, alive = (torch.zeros(depths, *begin.shape, device=begin.device) for _ in range(2))
    features = start
    # Positions beyond the head's own count for nothing, and are clamped so that they can be looked up.
    for step in range(depths):
        tokens = shifted(batch.input_ids, 1 + step)[:, :slots]  # [B, T-1], t_{p+1+k}
        positions = (begin + step).clamp(max=head.config.max_position_embeddings - 1)
        features = head.unroll(tokens, features, positions, memories)
        counted = batch.supervised(step)[:, :slots]  # [B, T-1]
        goals = shifted(choices, 1 + step)[:, :slots][counted]  # [S], after f_{p+1+k}
        alive[step] = counted.float()
        hits[step][counted] = (choose(features[counted]) == goals).float()
    return hits, alive


def chain_sums(hits: Tensor, alive: Tensor) -> Sums:
    """The sums that become predicted tau and the accuracy at each depth, from hits and alive [depths, B, T-1].

    The mean over starts of sum_k prod_{j<=k} hit_j is the number of drafted tokens that a greedy chain gets accepted:
    predicted tau - 1.
    """
    sums: Sums = {"chain": (hits.cumprod(0).sum(), alive[0].sum())}
    for depth in range(len(hits)):
        sums[f"accuracy_at_{depth + 1}"] = (hits[depth].sum(), alive[depth].sum())
    return sums


def target_choices(batch: Batch, choose: Choose) -> Tensor:
    """The target's likeliest token [B, T] after each position that some supervised slot asks for, elsewhere 0."""
    assert batch.features is not None
    asked = shifted(batch.supervised(), -1)  # [B, T]: slot p asks for the law after t_{p+1}
    choices = torch.zeros_like(batch.input_ids)
    choices[asked] = choose(batch.features[asked])
    return choices


def likeliest(logits: Callable[[Tensor], Tensor], states: Tensor, chunk: int) -> Tensor:
    """argmax [S] of logits(states [S, D]), the logits of `chunk` slots at a time."""
    return torch.cat([logits(some).argmax(-1) for some in states.split(chunk)])
