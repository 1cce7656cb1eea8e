"""The decoder layer of draft heads, by Llama's parameter names."""

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from aerie.configs.errors import UserError

QUERY_CHUNK = 256  # rows of scores held at once
Documents = tuple[int, ...] | None  # lengths in a packed row; None: one document
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
Rope = tuple[Tensor, Tensor]  # cos and sin, broadcast over heads


class Rotary:
    """RoPE's cosines and sines, tabulated on demand."""

    def __init__(self, config: Any) -> None:
        parameters = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
        if (kind := parameters["rope_type"]) not in FIXED_ROPE_TYPES:
            raise UserError(f"rope_scaling: {kind!r} changes with the length; set head.rope_theta for a plain RoPE")
        self.max_positions, dim = config.max_position_embeddings, config.head_dim
        sizes = {"hidden_size": dim, "head_dim": dim, "max_position_embeddings": self.max_positions}
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(LlamaConfig(**sizes, num_attention_heads=1, rope_parameters=parameters))
        self._frequencies = rotary.inv_freq.float()  # [head_dim / 2]
        self._scale = float(rotary.attention_scaling)
        self._table = (torch.empty(0), torch.empty(0))  # cos and sin [rows, head_dim]

    def at(self, positions: Tensor, length: int, like: Tensor) -> Rope:
        """cos and sin [..., 1, T, head_dim] at positions [..., T], all below length."""
        cos, sin = self._tabulated(length, like)
        return cos[positions].unsqueeze(-3), sin[positions].unsqueeze(-3)

    def between(self, first: int, stop: int, like: Tensor) -> Rope:
        """cos and sin [1, 1, stop - first, head_dim] at positions first .. stop - 1."""
        cos, sin = self._tabulated(stop, like)
        return cos[None, None, first:stop], sin[None, None, first:stop]

    def _tabulated(self, length: int, like: Tensor) -> Rope:
        known = self._table[0]
        if len(known) >= length and known.device == like.device and known.dtype == like.dtype:
            return self._table
        if length > self.max_positions:
            what = f"position {length - 1} is beyond the head's max_position_embeddings {self.max_positions}"
            raise UserError(f"{what}; train it with a larger one")
        rows = min(self.max_positions, max(256, 2 ** math.ceil(math.log2(max(length, 1)))))
        angles = torch.outer(torch.arange(rows, dtype=torch.float32), self._frequencies)  # [rows, head_dim / 2]
        angles = torch.cat([angles, angles], dim=-1)  # [rows, head_dim]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._table = (cos.to(like.device, like.dtype), sin.to(like.device, like.dtype))
        return self._table


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [..., heads, T, head_dim] (Su et al., arXiv 2104.09864, equation 34; halves as in Llama)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


@dataclass
class KeyValueBuffer:
    """Keys and values of one layer, [B, KV, capacity, head_dim]; `length` columns are in use."""

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def allocate(cls, batch: int, config: Any, capacity: int, like: Tensor) -> "KeyValueBuffer":
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        return cls(like.new_empty(shape), like.new_empty(shape))

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All columns up to the new ones; the caller moves `length`."""
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class UnrollMemory:
    """Keys and values [B, KV, T, head_dim] of one layer, by unroll step; step 0 is the sequence."""

    documents: Documents = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


Memory = KeyValueBuffer | UnrollMemory | None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, memory: Memory) -> Tensor:
    """[B, T, H * hd] of rotated queries [B, H, T, hd], rotated keys and values [B, KV, T, hd]; mask None: causal.

    With an UnrollMemory, one unroll step for all slots (EAGLE-3, arXiv 2503.01840, figure 6).
    """
    if isinstance(memory, UnrollMemory):
        memory.keys.append(k.to(v.dtype))  # autocast: RoPE's tables are float32
        memory.values.append(v)
        q = q.to(v.dtype)
        if q.device.type == "cpu":
            out = _MergedAttention.apply(q, spans(memory.documents, q.shape[2]), *memory.keys, *memory.values)
        else:
            out = dense_attention(q, memory.keys, memory.values, memory.documents)
    else:
        is_causal = mask is None and memory is None  # a lone new slot needs no mask
        if memory is not None:
            k, v = memory.append(k, v)
        is_grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, config: Any, input_size: int) -> None:
        super().__init__()
        heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = getattr(config, "qkv_bias", False)
        self.head_dim, self.has_norms = dim, getattr(config, "qk_norm", False)
        self.q_proj = nn.Linear(input_size, heads * dim, bias=bias)
        self.k_proj = nn.Linear(input_size, kv * dim, bias=bias)
        self.v_proj = nn.Linear(input_size, kv * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)
        if self.has_norms:  # as in Qwen3: over head_dim, before RoPE
            self.q_norm = nn.RMSNorm(dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None = None, memory: Memory = None) -> Tensor:
        """[B, T, D] of x [B, T, inputs]; mask and memory as in attend."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(attend(rotate(q, *rope), rotate(k, *rope), v, mask, memory))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202, section 2)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer whose attention reads the "normed" state, as Llama's, the "raw" one (EAGLE-1's first
    layer), or the "pair" [normed embedding; normed feature] (EAGLE-3's first layer)."""

    def __init__(
        self, config: Any, reads: Literal["normed", "raw", "pair"] = "normed", norm_before_residual: bool = False
    ) -> None:
        super().__init__()
        self.reads, self.norm_before_residual = reads, norm_before_residual
        width, eps = config.hidden_size, config.rms_norm_eps
        if reads != "raw":
            self.input_layernorm = nn.RMSNorm(width, eps)  # in a pair: of the embedding
        if reads == "pair":
            self.hidden_norm = nn.RMSNorm(width, eps)  # of the feature
        self.self_attn = Attention(config, 2 * width if reads == "pair" else width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(width, config.intermediate_size)

    def read(self, x: Tensor, embedded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention's input, and the residual."""
        if self.reads == "raw":
            return x, x
        if self.reads == "normed":
            return self.input_layernorm(x), x
        assert embedded is not None
        pair = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], dim=-1)  # [B, T, 2D]
        return pair, self.hidden_norm(x) if self.norm_before_residual else x

    def forward(
        self, x: Tensor, embedded: Tensor | None, rope: Rope, mask: Tensor | None = None, memory: Memory = None
    ) -> Tensor:
        """[B, T, D] of x [B, T, D]; only a pair reads embedded [B, T, D]."""
        given, residual = self.read(x, embedded)
        x = residual + self.self_attn(given, rope, mask, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftLayer:
    """A decoder layer for drafting, with merged projections."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.read, attention, mlp, norm = layer.read, layer.self_attn, layer.mlp, layer.post_attention_layernorm
        self.head_dim, self.norm = attention.head_dim, (norm.weight.shape, norm.weight, norm.eps)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.parts = [len(each.weight) // self.head_dim for each in projections[:2]]  # H and KV
        self.qkv = _stacked([each.weight for each in projections])  # [(H + 2 KV) * hd, inputs]
        self.bias = None if attention.q_proj.bias is None else _stacked([each.bias for each in projections])
        self.qk_norms = (attention.q_norm, attention.k_norm) if attention.has_norms else None
        self.out = attention.o_proj.weight
        self.gate_up = _stacked([mlp.gate_proj.weight, mlp.up_proj.weight])  # [2 I, D]
        self.down = mlp.down_proj.weight

    def __call__(self, x: Tensor, embedded: Tensor, rope: Rope, mask: Tensor, buffer: KeyValueBuffer) -> Tensor:
        """[1, n, D] of x [1, n, D]; the additive mask [1, 1, n, S] is over the buffer and the n slots."""
        given, residual = self.read(x, embedded)
        heads, kv = self.parts
        qkv = F.linear(given, self.qkv, self.bias).view(1, x.shape[1], -1, self.head_dim).transpose(1, 2)
        qk, v = qkv.split([heads + kv, kv], dim=1)  # [1, H + KV, n, hd] and [1, KV, n, hd]
        if self.qk_norms is not None:
            q, k = qk.split(self.parts, dim=1)
            qk = torch.cat([self.qk_norms[0](q), self.qk_norms[1](k)], dim=1)
        q, k = rotate(qk, *rope).split(self.parts, dim=1)
        x = residual + F.linear(attend(q, k, v, mask, buffer), self.out)
        gate, up = F.linear(F.rms_norm(x, *self.norm), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate).mul_(up), self.down)


@torch.no_grad()
def _stacked(parameters: list[Tensor]) -> Tensor:  # parameters become its views
    stacked = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, stacked.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return stacked


def dense_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents = None, chunk: int = QUERY_CHUNK
) -> Tensor:
    """Attention [B, H, T, hd] of queries of step k to keys and values [B, KV, T, hd] of steps 0..k, in chunks."""
    length, kv, dim = q.shape[2], keys[0].shape[1], q.shape[3]
    groups, later, scale = q.shape[1] // kv, len(keys) - 1, math.sqrt(dim)
    slots = torch.arange(length, device=q.device)
    begin = torch.zeros_like(slots)  # [T], the first slot of each slot's document
    for start, stop in spans(documents, length):
        begin[start:stop] = start

    def rows(first: int, q: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        # [B, H, n, hd] of n queries from slot `first`; own: their later keys and values
        count, seen = q.shape[2], key.shape[2]
        asking = slots[first : first + count, None]
        allowed = (slots[:seen] <= asking) & (slots[:seen] >= begin[asking])  # [n, seen]
        grouped = q.reshape(q.shape[0], kv, -1, dim)  # [B, KV, groups * n, hd]
        scores = (grouped @ key.transpose(-1, -2)).view(*q.shape[:3], -1) / scale  # [B, H, n, seen]
        repeated = [_repeated(x, groups) for x in own]
        columns = [(q * x).sum(-1, keepdim=True) / scale for x in repeated[:later]]  # each [B, H, n, 1]
        law = torch.cat([scores.masked_fill(~allowed, float("-inf")), *columns], dim=-1).float().softmax(-1).to(q.dtype)
        out = (law[..., :seen].reshape(q.shape[0], kv, groups * count, -1) @ value).view(q.shape)
        for step, x in enumerate(repeated[later:]):
            out = out + law[..., seen + step, None] * x
        return out

    pieces = []
    for first in range(0, length, chunk):
        last = min(first + chunk, length)  # causal: no later keys
        own = [x[:, :, first:last] for x in (*keys[1:], *values[1:])]
        given: Any = (first, q[:, :, first:last], keys[0][:, :, :last], values[0][:, :, :last], *own)
        is_recomputed = length > chunk and torch.is_grad_enabled()
        pieces.append(checkpoint(rows, *given, use_reentrant=False) if is_recomputed else rows(*given))
    return torch.cat(pieces, dim=2)


def spans(documents: Documents, length: int) -> tuple[tuple[int, int], ...]:
    """(first, stop) of each document."""
    stops = [min(stop, length) for stop in accumulate(documents or (length,))]
    return tuple((first, stop) for first, stop in pairwise([0, *stops]) if first < stop)


class _MergedAttention(torch.autograd.Function):
    """Flash attention to step 0, merged with the slot's own columns (backward: arXiv 2310.01889)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, documents: tuple[tuple[int, int], ...], *pairs: Tensor) -> Tensor:
        keys, values = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        groups, scale = q.shape[1] // keys[0].shape[1], 1.0 / math.sqrt(q.shape[3])
        first = (_repeated(keys[0], groups), _repeated(values[0], groups))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # causal, inside each document
        parts = [flash(*(x[:, :, a:b] for x in (q, *first)), 0.0, True) for a, b in documents]
        shared, normaliser = (torch.cat(column, dim=2) for column in zip(*parts, strict=True))  # float32 [B, H, T]
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
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = []
        for a, b in ctx.documents:
            *inputs, whole = (x[:, :, a:b] for x in (q, *first, out, total))
            parts.append(backward(g[:, :, a:b], *inputs, whole.contiguous(), 0.0, True))
        for_q, for_key, for_value = (torch.cat(column, dim=2) for column in zip(*parts, strict=True))
        for_keys, for_values = [_summed(for_key, groups)], [_summed(for_value, groups)]
        delta = (g * out).sum(-1, keepdim=True, dtype=torch.float32)  # [B, H, T, 1]
        for weight, key, value in zip(weights, keys[1:], values[1:], strict=True):
            gain = (g * _repeated(value, groups)).sum(-1, keepdim=True, dtype=torch.float32)
            score = weight * (gain - delta) * ctx.scale  # gradient of the own column's score
            for_q = for_q + score * _repeated(key, groups)
            for_keys.append(_summed(score * q, groups).to(key.dtype))
            for_values.append(_summed(weight * g, groups).to(value.dtype))
        return for_q.to(q.dtype), None, *for_keys, *for_values


def _repeated(x: Tensor, groups: int) -> Tensor:  # [B, KV, T, hd] -> [B, H, T, hd]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _summed(x: Tensor, groups: int) -> Tensor:  # [B, H, T, hd] -> [B, KV, T, hd], the transpose of _repeated
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)
