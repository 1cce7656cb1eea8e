"""The attention of one unroll step: a softmax over the first step's keys up to a slot and the slot's own later keys.

What all slots share, causal attention over the first step, is flash attention on a CPU; the few own columns are merged
into it through its log-sum-exp, and its backward is given the merged output and log-sum-exp, as ring attention does
(arXiv 2310.01889). So memory grows with T and not with T^2. Elsewhere the scores of a chunk of queries are made at a
time, and made again in the backward pass.
"""

import math
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERY_CHUNK = 256  # rows of scores that the dense form holds at once
Documents = tuple[int, ...] | None  # lengths of the documents of a packed row; None: one document


def unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents = None) -> Tensor:
    """Attention [B, H, T, hd] of queries of step k, for keys and values [B, KV, T, hd] of steps 0..k.

    Slot p sees the step-0 keys of its document up to p, and of each later step its own key alone.
    """
    if q.device.type == "cpu":
        out: Tensor = _MergedAttention.apply(q, spans(documents, q.shape[2]), *keys, *values)
        return out
    return dense_attention(q, keys, values, documents)


def dense_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents = None, chunk: int = QUERY_CHUNK
) -> Tensor:
    """The same by explicit scores, `chunk` queries at a time."""
    length = q.shape[2]
    owners = torch.zeros(length, dtype=torch.long, device=q.device)  # [T], the document of each slot
    for number, (first, last) in enumerate(spans(documents, length)):
        owners[first:last] = number
    pieces = []
    for first in range(0, length, chunk):
        last = min(first + chunk, length)  # causal slots have no use for later keys than the last query's
        later = [x[:, :, first:last] for x in (*keys[1:], *values[1:])]
        given: Any = (first, owners[:last], q[:, :, first:last], keys[0][:, :, :last], values[0][:, :, :last], *later)
        is_recomputed = length > chunk and torch.is_grad_enabled()
        pieces.append(checkpoint(_rows, *given, use_reentrant=False) if is_recomputed else _rows(*given))
    return torch.cat(pieces, dim=2)


def spans(documents: Documents, length: int) -> tuple[tuple[int, int], ...]:
    """First and last slot (excluded) of each document; the last ends with the row."""
    stops = [min(stop, length) for stop in accumulate(documents or (length,))]
    if stops[-1] < length:
        raise ValueError(f"documents of {stops[-1]} tokens do not fill a row of {length} slots")
    return tuple((first, stop) for first, stop in pairwise([0, *stops]) if first < stop)


def _rows(first: int, owners: Tensor, q: Tensor, key: Tensor, value: Tensor, *later: Tensor) -> Tensor:
    """Attention [B, H, n, hd] of the n queries that begin at slot `first`; owners [seen] are the slots' documents."""
    count, kv, dim = q.shape[2], key.shape[1], q.shape[3]
    groups, half = q.shape[1] // kv, len(later) // 2
    slots = torch.arange(key.shape[2], device=q.device)
    rows = slots[first : first + count]
    allowed = (slots <= rows[:, None]) & (owners == owners[rows][:, None])  # [n, seen]
    grouped = q.reshape(q.shape[0], kv, -1, dim)  # [B, KV, groups * n, hd]
    scores = (grouped @ key.transpose(-1, -2)).view(*q.shape[:3], -1) / math.sqrt(dim)  # [B, H, n, seen]
    own_keys, own_values = ([_repeated(x, groups) for x in part] for part in (later[:half], later[half:]))
    columns = [(q * own).sum(-1, keepdim=True) / math.sqrt(dim) for own in own_keys]  # each [B, H, n, 1]
    law = torch.cat([scores.masked_fill(~allowed, float("-inf")), *columns], dim=-1).float().softmax(-1).to(q.dtype)
    shared = law[..., : key.shape[2]].reshape(q.shape[0], kv, groups * count, -1)
    out = (shared @ value).view(q.shape)
    for step, own in enumerate(own_values):
        out = out + law[..., key.shape[2] + step, None] * own
    return out


class _MergedAttention(torch.autograd.Function):
    """Flash attention over the first step's keys, and the slot's own columns, under one softmax."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, documents: tuple[tuple[int, int], ...], *pairs: Tensor) -> Tensor:
        half = len(pairs) // 2
        keys, values = pairs[:half], pairs[half:]
        groups, scale = q.shape[1] // keys[0].shape[1], 1.0 / math.sqrt(q.shape[3])
        shared, normaliser = _causal(q, _repeated(keys[0], groups), _repeated(values[0], groups), documents)
        own = [(q * _repeated(key, groups)).sum(-1, dtype=torch.float32) * scale for key in keys[1:]]  # [B, H, T]
        scores = torch.stack([normaliser, *own])  # [1 + k, B, H, T], natural logarithms
        total = scores.logsumexp(0)  # [B, H, T]
        weights = (scores - total).exp()[..., None]  # [1 + k, B, H, T, 1]
        out = shared * weights[0]
        for weight, value in zip(weights[1:], values[1:], strict=True):
            out = out + weight * _repeated(value, groups)
        out = out.to(q.dtype)
        ctx.documents, ctx.groups, ctx.scale = documents, groups, scale
        ctx.save_for_backward(q, out, total, weights[1:], *pairs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, out, total, weights, *pairs = ctx.saved_tensors
        half, groups, g = len(pairs) // 2, ctx.groups, gradients[0].contiguous()
        keys, values = pairs[:half], pairs[half:]
        first = (_repeated(keys[0], groups), _repeated(values[0], groups))
        for_q, for_key, for_value = _causal_backward(g, (q, *first), (out, total), ctx.documents)
        for_keys, for_values = [_summed(for_key, groups)], [_summed(for_value, groups)]
        delta = (g * out).sum(-1, keepdim=True, dtype=torch.float32)  # [B, H, T, 1]
        for weight, key, value in zip(weights, keys[1:], values[1:], strict=True):
            gain = (g * _repeated(value, groups)).sum(-1, keepdim=True, dtype=torch.float32)
            score = weight * (gain - delta) * ctx.scale  # gradient of the own column's score
            for_q = for_q + score * _repeated(key, groups)
            for_keys.append(_summed(score * q, groups).to(key.dtype))
            for_values.append(_summed(weight * g, groups).to(value.dtype))
        return for_q.to(q.dtype), None, *for_keys, *for_values


def _causal(q: Tensor, k: Tensor, v: Tensor, documents: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """Causal attention [B, H, T, hd] inside each document and its log-sum-exp [B, H, T] in float32."""
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*(x[:, :, a:b] for x in (q, k, v)), 0.0, True)
        for a, b in documents
    ]
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([total for _, total in parts], dim=2)


def _causal_backward(
    g: Tensor, inputs: tuple[Tensor, ...], merged: tuple[Tensor, Tensor], documents: tuple[tuple[int, int], ...]
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v [B, H, T, hd], given the output and log-sum-exp of the whole softmax."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    parts = []
    for a, b in documents:
        q, k, v, out, total = (x[:, :, a:b] for x in (*inputs, *merged))
        parts.append(backward(g[:, :, a:b], q, k, v, out, total.contiguous(), 0.0, True))
    return tuple(torch.cat(column, dim=2) for column in zip(*parts, strict=True))


def _repeated(x: Tensor, groups: int) -> Tensor:
    """[B, KV, T, hd] -> [B, H, T, hd]."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _summed(x: Tensor, groups: int) -> Tensor:
    """[B, H, T, hd] -> [B, KV, T, hd], the transpose of _repeated."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)
