"""The decoder layer of draft heads, with Llama's parameter names.

`DecoderLayer` is for training; `HeadLayer` merges its weights for drafting.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from aerie.configs.errors import UserError
from aerie.model.kv_cache import KeyValueCache
from aerie.model.unrolled_attention import UnrollMemory

ORIGINAL = "original_max_position_embeddings"
# RoPE scalings whose table does not depend on the text's length, and the keys that a head keeps.
FIXED_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate"),
}
Rope = tuple[Tensor, Tensor]  # cos and sin, broadcast over heads
Memory = tuple[KeyValueCache, int] | UnrollMemory | None  # a cache with the layer's number


def fixed_scaling(parameters: dict[str, Any], context: int | None) -> dict[str, Any] | None:
    """A head's rope_scaling, from the RoPE parameters of a configuration; None: plain RoPE.

    It keeps only what makes a fixed table. It spells out values that transformers would take from
    elsewhere in the configuration, and drops what servers would read differently (partial rotation,
    mrope). context: max_position_embeddings.
    """
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in FIXED_SCALING:
        return None
    keys = FIXED_SCALING[rope_type]
    scaling = {key: parameters[key] for key in keys if parameters.get(key) is not None}
    if ORIGINAL in keys:
        scaling.setdefault(ORIGINAL, context)
    if rope_type == "yarn":
        if "factor" not in scaling and context is not None:
            scaling["factor"] = context / scaling[ORIGINAL]
        numerator, divisor = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if numerator and divisor:  # DeepSeek's
            factor = scaling["factor"]
            of_both = yarn_factor(factor, numerator) / yarn_factor(factor, divisor)
            scaling.setdefault("attention_factor", of_both)
    return {"rope_type": rope_type, **scaling}


def yarn_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of cosines and sines (Peng et al., arXiv 2309.00071, equation 22)."""
    return 0.1 * weight * math.log(max(1.0, factor)) + 1.0


class Rotary:
    """RoPE's cosines and sines, tabulated on demand."""

    def __init__(self, config: Any) -> None:
        parameters = {
            "rope_type": "default",
            **(config.rope_scaling or {}),
            "rope_theta": config.rope_theta,
        }
        rope_type = parameters["rope_type"]
        if rope_type not in ("default", *FIXED_SCALING):
            raise UserError(
                f"rope_scaling: rope_type {rope_type!r} is not supported; "
                f"heads have default, {', '.join(FIXED_SCALING)}"
            )
        self.max_positions = config.max_position_embeddings
        llama = LlamaConfig(
            hidden_size=config.head_dim,
            head_dim=config.head_dim,
            num_attention_heads=1,
            max_position_embeddings=self.max_positions,
            rope_parameters=parameters,
        )
        # on the CPU, even if the head is built on another device
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(llama)
        self._frequencies = rotary.inv_freq.float()  # [head_dim / 2]
        self.scale = float(rotary.attention_scaling)  # a factor of cosines and sines
        self._table = (torch.empty(0), torch.empty(0))  # cos and sin [rows, head_dim]

    def at(self, positions: Tensor, length: int, like: Tensor) -> Rope:
        """cos and sin [..., 1, T, head_dim] at positions [..., T], all below length."""
        if length > self.max_positions:
            raise UserError(
                f"position {length - 1} is beyond the head's max_position_embeddings "
                f"{self.max_positions}; train the head with a larger value"
            )
        cos, sin = self.table(length, like)
        return cos[positions].unsqueeze(-3), sin[positions].unsqueeze(-3)

    def table(self, length: int, like: Tensor) -> Rope:
        """cos and sin [rows, head_dim] of at least the positions below length."""
        known = self._table[0]
        if len(known) >= length and known.device == like.device and known.dtype == like.dtype:
            return self._table
        # a power of two: for a growing text, the table is made only when the length doubles
        rows = max(256, 2 ** math.ceil(math.log2(max(length, 1))))
        positions = torch.arange(rows, dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies)  # [rows, head_dim / 2]
        angles = torch.cat([angles, angles], dim=-1)  # [rows, head_dim]
        cos = angles.cos() * self.scale
        sin = angles.sin() * self.scale
        self._table = (cos.to(like.device, like.dtype), sin.to(like.device, like.dtype))
        return self._table


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [..., heads, T, head_dim] (arXiv 2104.09864, equation 34; halves as in Llama)."""
    return x * cos + rotate_half(x) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, memory: Memory) -> Tensor:
    """Attention [B, T, H * hd] of q [B, H, T, hd] and k [B, KV, T, hd], both rotated, and v.

    mask None: causal. memory: a cache adds its rows to k and v. An UnrollMemory makes this one
    unroll step, with queries at its `query_rows`.
    """
    if isinstance(memory, UnrollMemory):
        return memory.attend(q, k, v)
    is_causal = mask is None and memory is None  # with a cache and no mask, one slot sees all rows
    if memory is not None:
        cache, layer = memory
        k, v = cache.update(k, v, layer)
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped
    )
    return out.transpose(1, 2).flatten(2)


class Projections(NamedTuple):
    """The inputs of attention."""

    queries: Tensor  # [B, H, n, hd], rotated
    keys: Tensor  # [B, KV, T, hd], rotated
    values: Tensor  # [B, KV, T, hd]


class Attention(nn.Module):
    """The projections around attention, which `attend` computes."""

    def __init__(self, config: Any, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.has_norms = getattr(config, "qk_norm", False)
        bias = getattr(config, "qkv_bias", False)
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        if self.has_norms:  # as in Qwen3: over head_dim, before RoPE
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, rope: Rope, query_rows: Tensor | None = None) -> Projections:
        """Projects x [B, T, inputs]; query_rows: the rows that need queries (None: all)."""
        rows = slice(None) if query_rows is None else query_rows
        q = self.by_head(self.q_proj(x[:, rows]))  # [B, H, n, hd]
        k = self.by_head(self.k_proj(x))  # [B, KV, T, hd]
        v = self.by_head(self.v_proj(x))
        if self.has_norms:
            q = self.q_norm(q)
            k = self.k_norm(k)
        cos, sin = rope
        return Projections(rotate(q, cos[:, :, rows], sin[:, :, rows]), rotate(k, cos, sin), v)

    def by_head(self, projected: Tensor) -> Tensor:
        """[B, T, heads * hd] -> [B, heads, T, hd]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer. What its attention reads:

    normed   the normed state, as in Llama
    raw      the state itself (EAGLE-1's first layer)
    pair     [normed embedding; normed feature] (EAGLE-3's first layer)
    """

    def __init__(
        self,
        config: Any,
        reads: Literal["normed", "raw", "pair"] = "normed",
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        self.reads = reads
        self.norm_before_residual = norm_before_residual
        width, eps = config.hidden_size, config.rms_norm_eps
        if reads != "raw":
            self.input_layernorm = nn.RMSNorm(width, eps)  # in a pair: of the embedding
        if reads == "pair":
            self.hidden_norm = nn.RMSNorm(width, eps)  # of the feature
        self.self_attn = Attention(config, 2 * width if reads == "pair" else width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        sizes = {"hidden_size": width, "intermediate_size": config.intermediate_size}
        # SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202, section 2)
        self.mlp = LlamaMLP(LlamaConfig(**sizes, num_attention_heads=1))

    def read(self, x: Tensor, embedded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention's input, and the residual."""
        if self.reads == "raw":
            return x, x
        if self.reads == "normed":
            return self.input_layernorm(x), x
        assert embedded is not None
        pair = torch.cat(
            [self.input_layernorm(embedded), self.hidden_norm(x)], dim=-1
        )  # [B, T, 2D]
        return pair, self.hidden_norm(x) if self.norm_before_residual else x

    def before(
        self, x: Tensor, embedded: Tensor | None, rope: Rope, query_rows: Tensor | None
    ) -> tuple[Tensor, Projections]:
        """The residual at the query rows, and attention's inputs."""
        reading, residual = self.read(x, embedded)
        if query_rows is not None:
            residual = residual[:, query_rows]
        return residual, self.self_attn.project(reading, rope, query_rows)

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's outputs [B, n, D]."""
        x = residual + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(
        self,
        x: Tensor,
        embedded: Tensor | None,
        rope: Rope,
        mask: Tensor | None = None,
        memory: Memory = None,
    ) -> Tensor:
        """Outputs [B, T, D] of x [B, T, D]. Only a pair reads embedded [B, T, D].

        mask and memory: see `attend`.
        """
        query_rows = memory.query_rows if isinstance(memory, UnrollMemory) else None
        residual, projections = self.before(x, embedded, rope, query_rows)
        return self.after(residual, attend(*projections, mask, memory))


class HeadLayer:
    """A decoder layer for drafting: projections that read the same input are one matrix product.

    The module's parameters become views of the merged weights, so no weight is stored twice.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        attention, norm = layer.self_attn, layer.post_attention_layernorm
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.read = layer.read
        self.head_dim = attention.head_dim
        self.heads = len(attention.q_proj.weight) // self.head_dim  # H
        self.kv_heads = len(attention.k_proj.weight) // self.head_dim  # KV
        # [(H + 2 KV) * hd, inputs]
        self.qkv = _merged([projection.weight for projection in projections])
        biases = [projection.bias for projection in projections]
        self.qkv_bias = None if biases[0] is None else _merged(biases)
        self.q_norm = attention.q_norm if attention.has_norms else None
        self.k_norm = attention.k_norm if attention.has_norms else None
        self.out = attention.o_proj.weight
        self.norm = (norm.weight.shape, norm.weight, norm.eps)  # rms_norm's arguments
        self.gate_up = _merged([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])  # [2 I, D]
        self.down = layer.mlp.down_proj.weight

    def __call__(
        self, x: Tensor, embedded: Tensor, rope: Rope, mask: Tensor, memory: Memory
    ) -> Tensor:
        """Outputs [n, D] of x [n, D]; the additive mask is [1, 1, n, cached rows + n]."""
        reading, residual = self.read(x, embedded)
        qkv = self._by_head(F.linear(reading, self.qkv, self.qkv_bias))  # [1, H + 2 KV, n, hd]
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        # One product rotates queries and keys.
        q, k = rotate(qk, *rope).split([self.heads, self.kv_heads], dim=1)
        x = residual + F.linear(attend(q, k, v, mask, memory)[0], self.out)  # [n, D]
        gate, up = F.linear(F.rms_norm(x, *self.norm), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate).mul_(up), self.down)

    def keys_and_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [1, KV, n, hd] of rows x [n, D] that have no queries."""
        weight = self.qkv[self.heads * self.head_dim :]  # [2 KV * hd, D]
        k, v = self._by_head(F.linear(x, weight)).chunk(2, dim=1)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return rotate(k, *rope), v

    def _by_head(self, projected: Tensor) -> Tensor:
        """[n, heads * hd] -> [1, heads, n, hd]."""
        return projected.view(1, len(projected), -1, self.head_dim).transpose(1, 2)


@torch.no_grad()
def _merged(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters, stacked in one tensor; each becomes a view of it."""
    merged = torch.cat([parameter.detach() for parameter in parameters])
    lengths = [len(parameter) for parameter in parameters]
    for parameter, part in zip(parameters, merged.split(lengths), strict=True):
        parameter.data = part
    return merged
