"""Held-out measures: accuracy per draft depth and the tau that a greedy chain would reach."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.data.batches import Batch, TokenisedRow, collate
from aerie.model.layers import UnrollMemory
from aerie.train.objectives.step import Objective, Sums

Choose = Callable[[Tensor], Tensor]  # states [S, D] -> token ids [S]


@torch.no_grad()
def chain_hits(
    head: Any, batch: Batch, start: Tensor, choices: Tensor, choose: Choose, depths: int
) -> tuple[Tensor, Tensor]:
    """hits and alive, both float [depths, B, T-1]: where step k drafts the target's likeliest token; where it counts.

    start [B, T-1, D] is what each slot is given, choices [B, T] the target's likeliest token after each position,
    choose turns what the head returns into tokens. Every slot starts a chain of `depths` unroll steps with the
    conversation's own tokens, alive while its turn lasts; where it is not alive there is no hit. The mean over starts
    of sum_k prod_{j<=k} hit_j is the number of drafted tokens that a greedy chain gets accepted: predicted tau - 1.
    """
    slots = batch.input_ids.shape[1] - 1
    begin = batch.positions[:, :slots]
    memories = [UnrollMemory(batch.documents) for _ in range(head.config.num_hidden_layers)]
    hits, alive = (torch.zeros(depths, *begin.shape, device=begin.device) for _ in range(2))
    features = start
    for step in range(depths):
        tokens = shifted(batch.input_ids, 1 + step)[:, :slots]  # [B, T-1], t_{p+1+k}
        positions = (begin + step).clamp(max=head.config.max_position_embeddings - 1)
        features = head.unroll(tokens, features, positions, None, memories)
        counted = batch.supervised(step)[:, :slots]  # [B, T-1]
        goals = shifted(choices, 1 + step)[:, :slots][counted]  # [S], after f_{p+1+k}
        alive[step] = counted.float()
        hits[step][counted] = (choose(features[counted]) == goals).float()
    return hits, alive


def chain_sums(hits: Tensor, alive: Tensor) -> Sums:
    """The sums that become predicted tau and the accuracy at each depth."""
    sums: Sums = {"chain": (hits.cumprod(0).sum(), alive[0].sum())}
    for depth in range(len(hits)):
        sums[f"accuracy_at_{depth + 1}"] = (hits[depth].sum(), alive[depth].sum())
    return sums


def target_choices(batch: Batch, choose: Choose) -> Tensor:
    """The target's likeliest token [B, T] after each position that some supervised slot asks for, elsewhere 0."""
    assert batch.features is not None
    asked = shifted(batch.supervised(), -1)  # [B, T]
    choices = torch.zeros_like(batch.input_ids)
    choices[asked] = choose(batch.features[asked])
    return choices


def likeliest(logits: Callable[[Tensor], Tensor], states: Tensor, chunk: int) -> Tensor:
    """argmax [S] of logits(states [S, D]), the logits of `chunk` slots at a time."""
    return torch.cat([logits(some).argmax(-1) for some in states.split(chunk)])


def evaluate(
    module: Any,
    objective: Objective,
    rows: Sequence[TokenisedRow],
    batch_size: int,
    process: tuple[int, int],
    load: Callable[[Batch], Batch],
    reduce: Callable[[Sums, UserError | None], dict[str, float]],
) -> dict[str, float]:
    """Held-out measures over all processes; process is (rank, world_size).

    load brings a batch to the device with its features, reduce sums over processes and divides; it is told the error
    of a process that cannot read its rows, so that all can raise one.
    """
    totals: Sums = {}
    failure: UserError | None = None
    try:
        totals = _totals(module, objective, rows, batch_size, process, load)
    except UserError as error:
        failure = error
    return objective.summarise(reduce(totals, failure))


def _totals(
    module: Any,
    objective: Objective,
    rows: Sequence[TokenisedRow],
    batch_size: int,
    process: tuple[int, int],
    load: Callable[[Batch], Batch],
) -> Sums:
    """The sums over this process's rows."""
    rank, world_size = process
    # With fewer rows than processes each process takes them all: the means are the same, and none has nothing to add.
    own = range(rank, len(rows), world_size) if len(rows) >= world_size else range(len(rows))
    totals: Sums = {}
    for first in range(0, len(own), batch_size):
        numbers = own[first : first + batch_size]
        batch = collate([rows[number] for number in numbers], numbers)
        for name, (value, count) in objective.evaluate(module, load(batch)).items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value.double(), before[1] + count.double())
    return totals


def shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] moved left by `by` (right where it is negative), zeros for what comes in."""
    out, kept = torch.zeros_like(x), x.shape[1] - abs(by)
    if kept > 0:
        out[:, max(-by, 0) : max(-by, 0) + kept] = x[:, max(by, 0) : max(by, 0) + kept]
    return out
