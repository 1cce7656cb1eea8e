"""Held-out measures: accuracy per draft depth and the tau that a greedy chain would reach."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from data.batches import Batch, TokenisedRow, collate
from model.layers import UnrollMemory
from model.target import TargetEnds
from train.objectives.step import Objective, Sums

MAX_SCORES = 1 << 27  # attention scores of one unroll step that are held at once


@torch.no_grad()
def chain_hits(head: Any, ends: TargetEnds, batch: Batch, depths: int, chunk: int) -> tuple[Tensor, Tensor]:
    """hits and alive, both float [depths, B, T-1]: where step k drafts the target's likeliest token; where it counts.

    Every slot starts a chain of `depths` unroll steps with the conversation's own tokens. A chain is alive while its
    turn lasts; where it is not alive there is no hit. The mean over starts of sum_k prod_{j<=k} hit_j is the number
    of drafted tokens that a greedy chain gets accepted, so 1 + that is the predicted tau.
    """
    assert batch.features is not None
    slots = batch.input_ids.shape[1] - 1
    dtype = next(head.parameters()).dtype
    features = batch.features[:, :-1].to(dtype)  # [B, T-1, D]
    start = torch.arange(slots, device=features.device)
    mask = (start[:, None] >= start)[None, None]  # [1, 1, T-1, T-1]
    memories = [UnrollMemory() for _ in range(head.config.num_hidden_layers)]
    hits, alive = (torch.zeros(depths, len(batch.rows), slots, device=features.device) for _ in range(2))
    for step in range(depths):
        tokens = _shifted(batch.input_ids, 1 + step)[:, :slots]  # [B, T-1], t_{p+1+k}
        positions = (start + step).clamp(max=head.config.max_position_embeddings - 1).expand_as(tokens)
        features = head.unroll(tokens, features, positions, mask, memories)
        counted = batch.supervised(step)[:, :slots]  # [B, T-1]
        true = _shifted(batch.features, 1 + step)[:, :slots][counted]  # [S, D], f_{p+1+k}
        alive[step] = counted.float()
        hits[step][counted] = _same_choice(features[counted], true, ends, chunk)
    return hits, alive


def evaluate(
    module: Any,
    objective: Objective,
    rows: Sequence[TokenisedRow],
    batch_size: int,
    place: tuple[torch.device, int, int],
    reduce: Callable[[Sums], dict[str, float]],
) -> dict[str, float]:
    """Held-out measures over all processes; place is (device, rank, world_size) and reduce sums, divides and names."""
    device, rank, world_size = place
    heads = int(getattr(module.config, "num_attention_heads", 1))
    # With fewer rows than processes each process takes them all: the means are the same, and none has nothing to add.
    own = list(range(rank, len(rows), world_size)) if len(rows) >= world_size else list(range(len(rows)))
    totals: Sums = {}
    while own:
        batch, own = _next_batch(rows, own, batch_size, heads)
        for name, (value, count) in objective.evaluate(module, batch.to(device)).items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value.double(), before[1] + count.double())
    return objective.summarise(reduce(totals))


def _next_batch(
    rows: Sequence[TokenisedRow], numbers: list[int], batch_size: int, heads: int
) -> tuple[Batch, list[int]]:
    """The next rows, as many as the memory for their attention scores allows, and what is left."""
    taken: list[TokenisedRow] = []
    longest = 0
    for number in numbers[:batch_size]:
        row = rows[number]
        longest = max(longest, len(row.input_ids))
        if taken and (len(taken) + 1) * heads * longest**2 > MAX_SCORES:
            break
        taken.append(row)
    return collate(taken, numbers[: len(taken)]), numbers[len(taken) :]


def _shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] moved left by `by`, zeros behind."""
    out = torch.zeros_like(x)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out


def _same_choice(predicted: Tensor, true: Tensor, ends: TargetEnds, chunk: int) -> Tensor:
    """Float [S]: whether both features make the target's LM head choose the same token."""
    pairs = zip(predicted.split(chunk), true.split(chunk), strict=True)
    found = [ends.logits(drafted).argmax(-1) == ends.logits(goal).argmax(-1) for drafted, goal in pairs]
    return torch.cat(found).float() if found else predicted.new_zeros(0, dtype=torch.float32)
