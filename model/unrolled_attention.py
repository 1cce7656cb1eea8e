"""Attention of EAGLE-3's training-time test (arXiv 2503.01840, figure 6), for all slots at once.

At unroll step k a slot sees, as in decoding, step 0's keys of the text up to itself, and one key
of each later step, its own. So a query's keys are one long causal part and k single columns.
Attention is computed to each part apart, and the parts are merged by their log-sum-exp (ring
attention's rule, arXiv 2310.01889). With scores a_j and values v_j,

    out = sum_j exp(a_j) v_j / sum_j exp(a_j)               over all keys j
    s_i = log sum_{j in part i} exp(a_j)                    the log-sum-exp of a part
    out_i = sum_{j in part i} exp(a_j - s_i) v_j            attention inside the part

gives  out = sum_i w_i out_i  with  w_i = exp(s_i - s),  s = log sum_i exp(s_i).

A single column has s_i = a_i and out_i = v_i. For step 0 a kernel gives s_0 and out_0. In the
backward pass g is the gradient of out, and that of a_j is exp(a_j - s) (g v_j - g out). For step 0
the kernel's own backward computes just this, if it gets the merged out and s instead of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
Documents = tuple[int, ...]  # the lengths of documents that are packed into one row


@dataclass
class UnrollMemory:
    """Keys and values of one layer, by unroll step.

    Step 0 is one row of packed documents. Slot i of the later steps stands at rows[i] of that row.
    """

    documents: Documents
    rows: Tensor  # [S]
    is_last: bool = True  # the head's last layer, of which step 0 needs outputs only at `rows`
    keys: list[Tensor] = field(default_factory=list)  # [1, KV, N or n, hd] of each step
    values: list[Tensor] = field(default_factory=list)  # the same

    @property
    def query_rows(self) -> Tensor | None:
        """The rows whose outputs the next step must give; None: all."""
        is_step_0 = not self.keys
        return self.rows if self.is_last and is_step_0 else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [1, n, H * hd] of the next unroll step.

        q [1, H, n, hd] stands at `query_rows`; k and v are [1, KV, N or n, hd].
        """
        count = q.shape[2]
        is_partial = self.keys or self.is_last  # else step 0 of a lower layer: all rows
        rows = self.rows[:count] if is_partial else torch.arange(count, device=q.device)
        self.keys.append(k.to(v.dtype))  # under autocast RoPE's tables make k float32
        self.values.append(v)
        columns: list[Tensor] = []
        for step, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            # A later step has only the first slots of the step before.
            shown = slice(None) if step == 0 else slice(count)
            columns.append(_rows_first(key[:, :, shown]))
            columns.append(_rows_first(value[:, :, shown]))
        queries = _rows_first(q).to(v.dtype)
        out = _MergedAttention.apply(queries, rows, self.documents, *columns)  # [n, H, hd]
        return out.flatten(1)[None]


def _rows_first(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)  # [1, heads, n, hd] -> [n, heads, hd]


class _MergedAttention(torch.autograd.Function):
    """Causal attention to step 0, merged with each query's own columns of the later steps.

    q [n, H, hd] stands at rows [n]. pairs: the key and the value of each step in turn,
    [N or n, KV, hd]. In shapes g is H / KV.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, rows: Tensor, documents: Documents, *pairs: Tensor) -> Tensor:
        keys, values = pairs[::2], pairs[1::2]
        by_group = (keys[0].shape[1], -1)  # splits H into [KV, g]
        ctx.scale = q.shape[2] ** -0.5
        ctx.documents = documents
        length = len(keys[0])
        outputs, logs = _causal(_spread(q, rows, length), keys[0], values[0], documents)
        first_out = outputs[rows]  # [n, H, hd]
        first_log = logs[rows]  # [n, H]
        grouped = q.unflatten(1, by_group)  # [n, KV, g, hd]
        scores = [first_log.unflatten(1, by_group)]  # s_i, natural logarithms: [n, KV, g]
        for key in keys[1:]:
            scores.append((grouped * key[:, :, None]).sum(-1, dtype=torch.float32) * ctx.scale)
        stacked = torch.stack(scores)  # [1 + k, n, KV, g]
        total = stacked.logsumexp(0)  # s: [n, KV, g]
        weights = (stacked - total).exp()[..., None]  # w_i: [1 + k, n, KV, g, 1]
        out = first_out.unflatten(1, by_group) * weights[0]
        for weight, value in zip(weights[1:], values[1:], strict=True):
            out = out + weight * value[:, :, None]
        out = out.to(q.dtype).flatten(1, 2)  # [n, H, hd]
        ctx.save_for_backward(q, rows, out, total.flatten(1), weights[1:], *pairs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, rows, out, total, weights, *pairs = ctx.saved_tensors
        keys, values = pairs[::2], pairs[1::2]
        gradient = gradients[0]  # of out: [n, H, hd]
        by_group = (keys[0].shape[1], -1)
        length = len(keys[0])
        # step 0: the kernel's backward
        whole = _Queries(*(_spread(x, rows, length) for x in (gradient, q, out, total)))
        of_q, of_key, of_value = _causal_backward(whole, keys[0], values[0], ctx.documents)
        of_pairs = [of_key, of_value]
        of_q = of_q[rows].unflatten(1, by_group)  # [n, KV, g, hd]
        # the single columns
        gradient = gradient.unflatten(1, by_group)
        q = q.unflatten(1, by_group)
        out = out.unflatten(1, by_group)
        delta = (gradient * out).sum(-1, keepdim=True, dtype=torch.float32)  # g out: [n, KV, g, 1]
        for weight, key, value in zip(weights, keys[1:], values[1:], strict=True):
            gain = (gradient * value[:, :, None]).sum(-1, keepdim=True, dtype=torch.float32)
            of_score = weight * (gain - delta) * ctx.scale  # [n, KV, g, 1]
            of_q = of_q + of_score * key[:, :, None]
            of_pairs.append((of_score * q).sum(2).to(key.dtype))
            of_pairs.append((weight * gradient).sum(2).to(value.dtype))
        return of_q.flatten(1, 2).to(q.dtype), None, None, *of_pairs


def _spread(x: Tensor, rows: Tensor, length: int) -> Tensor:
    """x [n, ...] at its rows of [length, ...]; zero elsewhere."""
    return x.new_zeros(length, *x.shape[1:]).index_copy_(0, rows, x)


# torch's kernels are called by name, because scaled_dot_product_attention hides the log-sum-exp,
# and its backward takes no other one. The calls are those of torch/nn/attention/varlen.py and of
# torch's context parallelism. `constraints.txt` pins torch, and tests/model/test_layers.py compares
# each kernel with plain attention.


@dataclass(frozen=True)
class _Queries:
    """What the backward pass needs of all N queries."""

    gradient: Tensor  # of out: [N, H, hd]
    q: Tensor  # [N, H, hd]
    out: Tensor  # [N, H, hd], merged
    log: Tensor  # [N, H], the log-sum-exp of all parts


def kernel_of(x: Tensor) -> Literal["cpu", "flash", "efficient"]:
    if not x.is_cuda:
        return "cpu"
    # CUDA's flash kernel does not take float32.
    return "flash" if x.dtype in (torch.float16, torch.bfloat16) else "efficient"


def _causal(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """Causal attention [N, H, hd] inside each document, and its log-sum-exp [N, H].

    q [N, H, hd], k and v [N, KV, hd].
    """
    if kernel_of(q) == "flash" and documents:
        out, logs, *_ = aten._flash_attention_forward(
            q, k, v, *_borders(documents, q), 0.0, True, False
        )
        return out, logs.T
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    log = q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows in _rows_of(documents):
        parts = [_by_head(x, rows, kv_heads, groups) for x in (q, k, v)]
        if kernel_of(q) == "cpu":
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
            part, logs = kernel(*parts, 0.0, True)  # [KV, g, n, hd]
        else:
            kernel = aten._scaled_dot_product_efficient_attention
            part, logs, *_ = kernel(*parts, None, True, 0.0, True)
        out[rows] = part.permute(2, 0, 1, 3).flatten(1, 2)
        log[rows] = logs.flatten(0, 1).T[: part.shape[2]]  # CUDA pads the log-sum-exp
    return out, log


def _causal_backward(
    queries: _Queries, k: Tensor, v: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    q = queries.q
    if kernel_of(q) == "flash" and documents:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: there is no dropout
        of_q, of_k, of_v = aten._flash_attention_backward(
            queries.gradient.contiguous(),
            q,
            k,
            v,
            queries.out,
            queries.log.T.contiguous(),
            *_borders(documents, q),
            0.0,
            True,
            seed,
            q.new_empty(0),
        )
        return of_q, of_k, of_v
    backward = _cpu_backward if kernel_of(q) == "cpu" else _efficient_backward
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows in _rows_of(documents):
        parts = [
            _by_head(x, rows, kv_heads, groups) for x in (queries.gradient, q, k, v, queries.out)
        ]
        log = _by_head(queries.log[..., None], rows, kv_heads, groups)[..., 0].contiguous()
        part_q, part_k, part_v = backward(parts, log)  # [KV, g, n, hd] each
        of_q[rows] = part_q.permute(2, 0, 1, 3).flatten(1, 2)
        # A group's queries share one key and one value, so their gradients add up.
        of_k[rows] = part_k.sum(1, keepdim=True).permute(2, 0, 1, 3).flatten(1, 2)
        of_v[rows] = part_v.sum(1, keepdim=True).permute(2, 0, 1, 3).flatten(1, 2)
    return of_q, of_k, of_v


def _cpu_backward(parts: list[Tensor], log: Tensor) -> Any:
    """Gradients of q, k and v.

    parts: out's gradient, q, k, v and out, [KV, g, n, hd] each. log: [KV, g, n].
    """
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*parts, log, 0.0, True)


def _efficient_backward(parts: list[Tensor], log: Tensor) -> list[Tensor]:
    count = parts[0].shape[2]
    log = F.pad(log, (0, -count % 32), value=math.inf)  # as the forward pass pads it
    gradient, q, k, v, out = (x.transpose(1, 2) for x in parts)  # [KV, n, g, hd]
    seed = torch.empty((), dtype=torch.long, device=log.device)  # unused: there is no dropout
    gradients = aten._efficient_attention_backward(
        gradient,
        q,
        k,
        v,
        None,  # no bias
        out.contiguous(),
        None,  # one document: no borders in q
        None,  # nor in k
        count,
        count,
        log,
        0.0,
        seed,
        seed,
        1,  # the causal mask
        False,
    )
    return [x.transpose(1, 2) for x in gradients[:3]]


def _borders(documents: Documents, like: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """The flash kernel's cumulative lengths and longest length, for queries and for keys."""
    cumulative = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    cumulative = cumulative.to(like.device, non_blocking=True)
    return cumulative, cumulative, max(documents), max(documents)


def _rows_of(documents: Documents) -> Iterator[slice]:
    for first, stop in pairwise([0, *accumulate(documents)]):
        yield slice(first, stop)


def _by_head(x: Tensor, rows: slice, kv_heads: int, groups: int) -> Tensor:
    """These rows of x [N, H or KV, w] as [KV, g, n, w]; a group's queries get the same key."""
    split = x[rows].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    return split.expand(-1, groups, -1, -1)
