"""The decoder layer that every trained head is built of: RMSNorm, RoPE, attention, SwiGLU.

Parameter names are those of Llama in transformers, because published heads use them. The layer takes its keys and
values from whoever calls it, so that training (a whole sequence), drafting (a preallocated buffer) and the unrolled
forward (step 0 plus the slot's own later steps) share one set of weights and one forward each.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from aerie.configs.errors import UserError
from aerie.model.unroll import Documents, unrolled_attention

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class LayerSizes:
    """Widths of one decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm over head_dim on queries and keys, before RoPE


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 inside (Zhang and Sennrich, arXiv 1910.07467, equation 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary:
    """RoPE's cosines and sines for any position below max_position_embeddings, tabulated as far as was asked.

    The frequencies are transformers' own, so that a head follows its target's base and scaling. A plain object and no
    module: its table is derived, never saved, and never cast to bf16.
    """

    def __init__(self, theta: float, scaling: dict[str, Any] | None, head_dim: int, max_positions: int) -> None:
        parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        if parameters["rope_type"] not in FIXED_ROPE_TYPES:
            raise UserError(
                f"rope_scaling: type {parameters['rope_type']!r} changes its frequencies with the length; heads know "
                f"{', '.join(FIXED_ROPE_TYPES)}: set head.rope_theta to give the head a plain RoPE"
            )
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=parameters,
        )
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        self._frequencies = rotary.inv_freq.float()  # [head_dim / 2]
        self._scale = float(rotary.attention_scaling)
        self.max_positions = max_positions
        self._cos: Tensor | None = None
        self._sin: Tensor | None = None

    def at(self, positions: Tensor, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at positions [..., T], all below length: two tensors [..., 1, T, head_dim] of like's dtype."""
        if (
            self._cos is None
            or self._cos.shape[0] < length
            or self._cos.device != like.device
            or self._cos.dtype != like.dtype
        ):
            self._tabulate(length, like)
        assert self._cos is not None and self._sin is not None
        return self._cos[positions].unsqueeze(-3), self._sin[positions].unsqueeze(-3)

    def between(self, first: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at positions first .. stop - 1, two views [1, 1, stop - first, head_dim]."""
        if (
            self._cos is None
            or self._cos.shape[0] < stop
            or self._cos.device != like.device
            or self._cos.dtype != like.dtype
        ):
            self._tabulate(stop, like)
        assert self._cos is not None and self._sin is not None
        return self._cos[None, None, first:stop], self._sin[None, None, first:stop]

    def _tabulate(self, length: int, like: Tensor) -> None:
        if length > self.max_positions:
            raise UserError(
                f"position {length - 1} is beyond the head's max_position_embeddings {self.max_positions}; "
                f"train the head with a larger head.max_position_embeddings"
            )
        rows = min(self.max_positions, max(256, 2 ** math.ceil(math.log2(max(length, 1)))))
        angles = torch.outer(torch.arange(rows, dtype=torch.float32), self._frequencies)  # [rows, head_dim / 2]
        angles = torch.cat([angles, angles], dim=-1)  # [rows, head_dim]
        self._cos = (angles.cos() * self._scale).to(like.device, like.dtype)
        self._sin = (angles.sin() * self._scale).to(like.device, like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE applied to x [..., heads, T, head_dim] (Su et al., arXiv 2104.09864, equation 34; halves as in Llama)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


@dataclass
class KeyValueBuffer:
    """Preallocated keys and values of one layer, [B, KV, capacity, head_dim]; `length` columns are in use."""

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def allocate(cls, batch: int, sizes: LayerSizes, capacity: int, like: Tensor) -> "KeyValueBuffer":
        shape = (batch, sizes.num_key_value_heads, capacity, sizes.head_dim)
        return cls(like.new_empty(shape), like.new_empty(shape))

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes after `length` and returns everything up to there; the caller moves `length` when rows are kept."""
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class UnrollMemory:
    """Keys and values of the earlier unroll steps of one layer, each [B, KV, T, head_dim]; step 0 is the sequence."""

    documents: Documents = None  # of a packed row: a slot sees its own document alone
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Attention(nn.Module):
    """Causal self-attention with RoPE and grouped key/value heads."""

    def __init__(self, sizes: LayerSizes, input_size: int) -> None:
        super().__init__()
        self.sizes = sizes
        heads, kv, dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        self.q_proj = nn.Linear(input_size, heads * dim, bias=sizes.attention_bias)
        self.k_proj = nn.Linear(input_size, kv * dim, bias=sizes.attention_bias)
        self.v_proj = nn.Linear(input_size, kv * dim, bias=sizes.attention_bias)
        self.o_proj = nn.Linear(heads * dim, sizes.hidden_size, bias=False)
        if sizes.qk_norm:
            self.q_norm = RMSNorm(dim, sizes.rms_norm_eps)
            self.k_norm = RMSNorm(dim, sizes.rms_norm_eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, H, T, hd], rotated keys and values [B, KV, T, hd]."""
        shape = (*x.shape[:-1], -1, self.sizes.head_dim)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.sizes.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Attention over x itself (mask None: causal); drafting over a buffer is model/fused.py."""
        q, k, v = self.project(x, rope)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def unroll(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, memory: UnrollMemory) -> Tensor:
        """One unroll step for all slots at once: step-0 keys up to the slot, later steps' keys of the slot alone.

        Slot p's chain at step k sees the step-0 keys of its document up to p (or those that mask [.., T, T] allows) and
        its own keys of steps 1..k, in one softmax: what step-by-step drafting from prefix p would see. Source: EAGLE-3
        (arXiv 2503.01840), figure 6.
        """
        q, k, v = self.project(x, rope)
        memory.keys.append(k.to(v.dtype))  # under autocast the float32 tables of RoPE have raised q and k
        memory.values.append(v)
        out = unrolled_attention(q.to(v.dtype), memory.keys, memory.values, mask, memory.documents)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202, section 2)."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedAttention:
    """Attention over a buffer's rows and the new ones, with one product for queries, keys and values."""

    def __init__(self, attention: Attention) -> None:
        sizes = attention.sizes
        self.heads, self.kv_heads, self.head_dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.weight = merge([projection.weight for projection in projections])  # [(H + 2 KV) * hd, inputs]
        self.bias = merge([p.bias for p in projections]) if attention.q_proj.bias is not None else None
        self.out = attention.o_proj.weight
        self.norms = (attention.q_norm, attention.k_norm) if sizes.qk_norm else None

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, buffer: KeyValueBuffer) -> Tensor:
        """x [1, n, inputs], rope [.., n or 1, hd], additive mask [1, 1, n, S] -> [1, n, D]."""
        both = F.linear(x, self.weight, self.bias).view(1, x.shape[1], -1, self.head_dim).transpose(1, 2)
        q_and_k, v = both.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.norms is not None:
            q, k = q_and_k.split([self.heads, self.kv_heads], dim=1)
            q_and_k = torch.cat([self.norms[0](q), self.norms[1](k)], dim=1)
        cos, sin = rope
        half = self.head_dim // 2
        turned = torch.cat([-q_and_k[..., half:], q_and_k[..., :half]], dim=-1)
        q, k = (q_and_k * cos + turned * sin).split([self.heads, self.kv_heads], dim=1)
        k, v = buffer.append(k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)
        return F.linear(out.transpose(1, 2).flatten(2), self.out)


class FusedMLP:
    """SwiGLU after its norm, with one product for gate and up."""

    def __init__(self, norm: RMSNorm, mlp: MLP) -> None:
        self.norm = norm
        self.weight = merge([mlp.gate_proj.weight, mlp.up_proj.weight])  # [2 I, D]
        self.down = mlp.down_proj.weight

    def __call__(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, self.norm.weight.shape, self.norm.weight, self.norm.eps)
        gate, up = F.linear(normed, self.weight).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), self.down)


@torch.no_grad()
def merge(parameters: list[Tensor]) -> Tensor:
    """The parameters stacked along their first axis; each becomes a view of its part."""
    merged = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, merged.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return merged
