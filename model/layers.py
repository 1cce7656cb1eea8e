"""The decoder layer of draft heads, with Llama's parameter names, and its attention and cache."""

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from aerie.configs.errors import UserError

aten = torch.ops.aten
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
Rope = tuple[Tensor, Tensor]  # cos and sin, broadcast over heads


class Rotary:
    """RoPE's cosines and sines, tabulated on demand."""

    def __init__(self, config: Any) -> None:
        parameters = {
            "rope_type": "default",
            **(config.rope_scaling or {}),
            "rope_theta": config.rope_theta,
        }
        if (kind := parameters["rope_type"]) not in FIXED_ROPE_TYPES:
            raise UserError(
                f"rope_scaling: {kind!r} changes with the length; set head.rope_theta for a plain RoPE"
            )
        self.max_positions, dim = config.max_position_embeddings, config.head_dim
        sizes = {"hidden_size": dim, "head_dim": dim, "max_position_embeddings": self.max_positions}
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(
                LlamaConfig(**sizes, num_attention_heads=1, rope_parameters=parameters)
            )
        self._frequencies = rotary.inv_freq.float()  # [head_dim / 2]
        self._scale = float(rotary.attention_scaling)
        self._table = (torch.empty(0), torch.empty(0))  # cos and sin [rows, head_dim]

    def at(self, positions: Tensor, length: int, like: Tensor) -> Rope:
        """cos and sin [..., 1, T, head_dim] at positions [..., T], all below length."""
        if length > self.max_positions:
            what = f"position {length - 1} is beyond the head's max_position_embeddings {self.max_positions}"
            raise UserError(f"{what}; train it with a larger one")
        cos, sin = self.table(length, like)
        return cos[positions].unsqueeze(-3), sin[positions].unsqueeze(-3)

    def table(self, length: int, like: Tensor) -> Rope:
        """cos and sin [rows, head_dim] of at least the positions below length."""
        known = self._table[0]
        if len(known) >= length and known.device == like.device and known.dtype == like.dtype:
            return self._table
        rows = max(256, 2 ** math.ceil(math.log2(max(length, 1))))
        angles = torch.outer(
            torch.arange(rows, dtype=torch.float32), self._frequencies
        )  # [rows, head_dim / 2]
        angles = torch.cat([angles, angles], dim=-1)  # [rows, head_dim]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._table = (cos.to(like.device, like.dtype), sin.to(like.device, like.dtype))
        return self._table


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [..., heads, T, head_dim] (Su et al., arXiv 2104.09864, equation 34; halves as in Llama)."""
    return x * cos + rotate_half(x) * sin


class Kept:
    """How many rows of a text its caches keep: `length`, on the host; `behind`, on the device: the places after them.

    numbers are 0, 1, ...; columns [W] are the first W of them: one per kept row, or some more. mask is additive: 0 for
    the kept rows, dtype's lowest number behind them. `advance` with a negative count forgets the last rows."""

    def __init__(self, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        # rounded up, as a forward is compiled for one capacity
        self.numbers = torch.arange(-(-capacity // 256) * 256, device=device)
        self.behind = self.numbers.clone()
        self.mask = torch.empty(len(self.numbers), dtype=dtype, device=device)
        # by decoder: its CUDA graphs, which read these places and their caches
        self.captured = weakref.WeakKeyDictionary[Any, dict[Any, Any]]()
        self.restart()

    def restart(self) -> None:
        self.behind.copy_(self.numbers)
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        self.length = 0
        self.advance(0)

    def advance(self, count: int) -> None:
        first, last = sorted((self.length, self.length + count))
        self.mask[first:last] = 0.0 if count > 0 else torch.finfo(self.mask.dtype).min
        self.length += count
        self.behind.add_(count)
        self.columns = self.numbers[: self.length]


class KeyValueCache(Cache):
    """Keys and values of all layers in fixed buffers, for a head as for transformers' models.

    A forward sees the kept rows and `pending` rows behind them, and writes behind both.
    """

    def __init__(self, rows: dict[tuple[int, str], Tensor], kept: Kept) -> None:
        """rows: what each layer's "keys" and "values" begin with, [B, KV, n, head_dim]."""
        super().__init__(layers=[])
        self.kept, self.pending, self.width = kept, 0, 0
        kept.captured.clear()
        # tensors of one device, dtype and shape share a buffer, so that `gather` moves all at once
        self._groups: list[Tensor] = []  # [tensors, B, KV, capacity, head_dim]
        self._rows: dict[tuple[int, str], Tensor] = {}  # views: each layer's keys and values
        alike: dict[Any, dict[tuple[int, str], Tensor]] = {}
        for place, part in rows.items():
            alike.setdefault((part.device, part.dtype, part.shape), {})[place] = part
        for group in alike.values():
            first = next(iter(group.values()))
            # zeros: hidden values are multiplied by 0, and 0 * nan is nan
            store = first.new_zeros(
                len(group), *first.shape[:2], len(kept.numbers), first.shape[-1]
            )
            self._rows |= zip(group, store, strict=True)
            self._groups.append(store)
        self.write(rows)

    def write(self, rows: dict[tuple[int, str], Tensor]) -> None:
        """Writes a new text's first rows."""
        for place, part in rows.items():
            self._rows[place][:, :, : part.shape[2]] = part

    @classmethod
    def empty(cls, num_layers: int, config: Any, kept: Kept, like: Tensor) -> "KeyValueCache":
        """A head's empty cache, of like's dtype and device."""
        nothing = like.new_empty(1, config.num_key_value_heads, 0, config.head_dim)
        return cls(
            {(layer, name): nothing for layer in range(num_layers) for name in ("keys", "values")},
            kept,
        )

    def begin(self, count: int) -> Tensor:
        """The places [count] of the next forward's rows."""
        self.width = self.get_seq_length() + count
        self.places = self.kept.behind[self.pending : self.pending + count]
        return self.places

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        """Writes the rows at `places`, and returns all rows up to them."""
        keys, values = self._rows[layer_idx, "keys"], self._rows[layer_idx, "values"]
        places = self.places.to(keys.device)
        keys.index_copy_(2, places, key_states)
        values.index_copy_(2, places, value_states)
        return keys.narrow(2, 0, self.width), values.narrow(2, 0, self.width)

    def gather(self, nodes: Tensor) -> None:
        """Moves the rows at these ascending offsets [n] behind the kept rows to the first n places there."""
        places, self.pending = self.kept.behind[: nodes.shape[0]], 0
        nodes = self.kept.behind.index_select(0, nodes)
        for store in self._groups:
            store.index_copy_(
                3, places.to(store.device), store.index_select(3, nodes.to(store.device))
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kept.columns.shape[0] + self.pending


@dataclass
class UnrollMemory:
    """Keys and values [1, KV, N, hd] of one layer, by unroll step (EAGLE-3, arXiv 2503.01840, figure 6).

    Step 0 is one row of packed documents of these lengths. Slot i of a later step stands at places[i] of that row.
    """

    documents: tuple[int, ...]
    places: Tensor  # [S]
    is_last: bool = True  # the head's last layer: then step 0, too, has outputs only at places
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def asked(self) -> Tensor | None:
        """The slots whose outputs the step must give; None: all."""
        return self.places if self.is_last and not self.keys else None


Memory = tuple[KeyValueCache, int] | UnrollMemory | None  # a cache with the layer's number


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, memory: Memory) -> Tensor:
    """Attention [B, T, H * hd] of rotated q [B, H, T, hd], rotated k and v [B, KV, T, hd]; mask None: causal.

    With an UnrollMemory, one unroll step; the queries are those of the asked slots.
    """
    if isinstance(memory, UnrollMemory):
        n, is_whole = q.shape[2], not memory.keys and not memory.is_last
        places = torch.arange(n, device=q.device) if is_whole else memory.places[:n]
        memory.keys.append(k.to(v.dtype))  # under autocast RoPE's tables make k float32
        memory.values.append(v)
        pairs = enumerate(zip(memory.keys, memory.values, strict=True))
        columns = [
            (x[:, :, :n] if step else x).squeeze(0).transpose(0, 1)
            for step, pair in pairs
            for x in pair
        ]
        out = _MergedAttention.apply(
            q.squeeze(0).transpose(0, 1).to(v.dtype), places, memory.documents, *columns
        )
        return out.flatten(1)[None]
    is_causal = mask is None and memory is None  # a lone new slot needs no mask
    if memory is not None:
        cache, layer = memory
        k, v = cache.update(k, v, layer)
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped
    )
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

    def project(self, x: Tensor, rope: Rope, asked: Tensor | None = None) -> list[Tensor]:
        """Rotated queries [B, H, T, hd], rotated keys and values [B, KV, T, hd] of x [B, T, inputs].

        asked: the slots that have queries (None: all).
        """
        asking, rope_q = (
            (x, rope)
            if asked is None
            else (x[:, asked], (rope[0][:, :, asked], rope[1][:, :, asked]))
        )
        projected = self.q_proj(asking), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return [rotate(q, *rope_q), rotate(k, *rope), v]


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer whose attention reads the "normed" state, as Llama's, the "raw" one (EAGLE-1's first
    layer), or the "pair" [normed embedding; normed feature] (EAGLE-3's first layer)."""

    def __init__(
        self,
        config: Any,
        reads: Literal["normed", "raw", "pair"] = "normed",
        norm_before_residual: bool = False,
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
        self, x: Tensor, embedded: Tensor | None, rope: Rope, asked: Tensor | None
    ) -> list[Tensor]:
        """The residual, and the queries, keys and values."""
        given, residual = self.read(x, embedded)
        return [
            residual if asked is None else residual[:, asked],
            *self.self_attn.project(given, rope, asked),
        ]

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
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
        """Outputs [B, T, D] of x [B, T, D]; only a pair reads embedded [B, T, D]; mask and memory as in attend."""
        asked = memory.asked if isinstance(memory, UnrollMemory) else None
        residual, q, k, v = self.before(x, embedded, rope, asked)
        return self.after(residual, attend(q, k, v, mask, memory))

    def compile_parts(self) -> None:
        """Compiles what stands before and after attention, each once for all lengths; parameter names stay."""
        for name in ("before", "after"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))


class DraftLayer:
    """A decoder layer for drafting, with merged projections."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.read, attention, mlp, norm = (
            layer.read,
            layer.self_attn,
            layer.mlp,
            layer.post_attention_layernorm,
        )
        self.head_dim, self.norm = attention.head_dim, (norm.weight.shape, norm.weight, norm.eps)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.parts = [len(each.weight) // self.head_dim for each in projections[:2]]  # H and KV
        self.qkv = _stacked([each.weight for each in projections])  # [(H + 2 KV) * hd, inputs]
        self.bias = (
            None if attention.q_proj.bias is None else _stacked([each.bias for each in projections])
        )
        self.qk_norms = (attention.q_norm, attention.k_norm) if attention.has_norms else None
        self.out = attention.o_proj.weight
        self.gate_up = _stacked([mlp.gate_proj.weight, mlp.up_proj.weight])  # [2 I, D]
        self.down = mlp.down_proj.weight

    def __call__(
        self, x: Tensor, embedded: Tensor, rope: Rope, mask: Tensor, memory: Memory
    ) -> Tensor:
        """Outputs [n, D] of x [n, D]; the additive mask [1, 1, n, S] is over the cache's rows and the n slots."""
        given, residual = self.read(x, embedded)
        heads, kv = self.parts
        qkv = (
            F.linear(given, self.qkv, self.bias).view(1, len(x), -1, self.head_dim).transpose(1, 2)
        )
        qk, v = qkv.split([heads + kv, kv], dim=1)  # [1, H + KV, n, hd] and [1, KV, n, hd]
        if self.qk_norms is not None:
            q, k = qk.split(self.parts, dim=1)
            qk = torch.cat([self.qk_norms[0](q), self.qk_norms[1](k)], dim=1)
        q, k = rotate(qk, *rope).split(self.parts, dim=1)
        x = residual + F.linear(attend(q, k, v, mask, memory)[0], self.out)
        gate, up = F.linear(F.rms_norm(x, *self.norm), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate).mul_(up), self.down)


@torch.no_grad()
def _stacked(parameters: list[Tensor]) -> Tensor:  # parameters become its views
    stacked = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(
        parameters, stacked.split([len(p) for p in parameters]), strict=True
    ):
        parameter.data = part
    return stacked


class _MergedAttention(torch.autograd.Function):
    """Causal attention to step 0, merged with a slot's columns of later steps by log-sum-exp (arXiv 2310.01889).

    q [n, H, hd]; pairs: key and value of each step in turn, [N or n, KV, hd]; g is H / KV.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, places: Tensor, documents: tuple[int, ...], *pairs: Tensor
    ) -> Tensor:
        by_group, ctx.scale, ctx.documents = (pairs[0].shape[1], -1), q.shape[2] ** -0.5, documents
        whole = _causal(
            _placed(q, places, len(pairs[0])), pairs[0], pairs[1], documents
        )  # [N, H, hd], [N, H]
        shared, normaliser = (x[places] for x in whole)
        grouped = q.unflatten(1, by_group)  # [n, KV, g, hd]
        own = [
            (grouped * key[:, :, None]).sum(-1, dtype=torch.float32) * ctx.scale
            for key in pairs[2::2]
        ]
        scores = torch.stack(
            [normaliser.unflatten(1, by_group), *own]
        )  # [1 + k, n, KV, g], natural logarithms
        total = scores.logsumexp(0)  # [n, KV, g]
        weights = (scores - total).exp()[..., None]  # [1 + k, n, KV, g, 1]
        out = shared.unflatten(1, by_group) * weights[0]
        for weight, value in zip(weights[1:], pairs[3::2], strict=True):
            out = out + weight * value[:, :, None]
        out = out.to(q.dtype).flatten(1, 2)
        ctx.save_for_backward(q, places, out, total.flatten(1), weights[1:], *pairs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, places, out, total, weights, *pairs = ctx.saved_tensors
        g, by_group = gradients[0], (pairs[0].shape[1], -1)
        whole = [_placed(x, places, len(pairs[0])) for x in (g, q, out, total)]
        for_q, *found = _causal_backward(whole, pairs[0], pairs[1], ctx.documents)
        for_q = for_q[places].unflatten(1, by_group)  # [n, KV, g, hd]
        g, q, out = (x.unflatten(1, by_group) for x in (g, q, out))
        delta = (g * out).sum(-1, keepdim=True, dtype=torch.float32)  # [n, KV, g, 1]
        for weight, key, value in zip(weights, pairs[2::2], pairs[3::2], strict=True):
            gain = (g * value[:, :, None]).sum(-1, keepdim=True, dtype=torch.float32)
            score = weight * (gain - delta) * ctx.scale  # gradient of the own column's score
            for_q = for_q + score * key[:, :, None]
            found += [(score * q).sum(2).to(key.dtype), (weight * g).sum(2).to(value.dtype)]
        return for_q.flatten(1, 2).to(q.dtype), None, None, *found


def _placed(
    x: Tensor, places: Tensor, length: int
) -> Tensor:  # [n, ...] -> [length, ...], zero elsewhere
    return x.new_zeros(length, *x.shape[1:]).index_copy_(0, places, x)


def _kernel(x: Tensor) -> Literal["cpu", "flash", "efficient"]:
    # We call kernels by name: scaled_dot_product_attention hides the log-sum-exp, and its backward takes no other. The
    # calls are as in torch/nn/attention/varlen.py and torch's context parallelism. CUDA's flash takes no float32.
    if not x.is_cuda:
        return "cpu"
    return "flash" if x.dtype in (torch.float16, torch.bfloat16) else "efficient"


def _causal(q: Tensor, k: Tensor, v: Tensor, documents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Causal attention [N, H, hd] of q [N, H, hd], k and v [N, KV, hd] inside each document; its log-sum-exp [N, H]."""
    if _kernel(q) == "flash" and documents:
        out, logs, *_ = aten._flash_attention_forward(
            q, k, v, *_borders(documents, q), 0.0, True, False
        )
        return out, logs.T
    out, normaliser = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows, given in _by_document(documents, k.shape[1], q, k, v):
        if _kernel(q) == "cpu":
            part, logs = aten._scaled_dot_product_flash_attention_for_cpu(
                *given, 0.0, True
            )  # [KV, g, n, hd]
        else:
            part, logs, *_ = aten._scaled_dot_product_efficient_attention(
                *given, None, True, 0.0, True
            )
        out[rows] = part.permute(2, 0, 1, 3).flatten(1, 2)
        normaliser[rows] = logs.flatten(0, 1).T[: part.shape[2]]  # CUDA pads it
    return out, normaliser


def _causal_backward(
    of_q: list[Tensor], k: Tensor, v: Tensor, documents: tuple[int, ...]
) -> list[Tensor]:
    """Gradients of q, k and v; of_q: out's gradient, q, out, the log-sum-exp (the last two: of all steps)."""
    g, q, out, normaliser = of_q
    if _kernel(q) == "flash" and documents:
        whole = g.contiguous(), q, k, v, out, normaliser.T.contiguous(), *_borders(documents, q)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of no dropout
        return [*aten._flash_attention_backward(*whole, 0.0, True, seed, q.new_empty(0))]
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    for rows, given in _by_document(documents, k.shape[1], g, q, k, v, out, normaliser[..., None]):
        logs, count = given.pop()[..., 0].contiguous(), given[0].shape[2]  # [KV, g, n]
        if _kernel(q) == "cpu":
            parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, logs, 0.0, True
            )
        else:
            logs = F.pad(logs, (0, -count % 32), value=math.inf)  # as the forward pass pads it
            *most, part = (x.transpose(1, 2) for x in given)  # [KV, n, g, hd]
            seed = torch.empty((), dtype=torch.long, device=q.device)
            sizes = (
                None,
                part.contiguous(),
                None,
                None,
                count,
                count,
                logs,
                0.0,
                seed,
                seed,
                1,
                False,
            )
            parts = [
                x.transpose(1, 2) for x in aten._efficient_attention_backward(*most, *sizes)[:3]
            ]
        for gradient, part in zip(gradients, parts, strict=True):
            part = part if gradient is gradients[0] else part.sum(1, keepdim=True)  # [KV, 1, n, hd]
            gradient[rows] = part.permute(2, 0, 1, 3).flatten(1, 2)
    return gradients


def _borders(documents: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor, int, int]:
    borders = torch.tensor([0, *accumulate(documents)], dtype=torch.int32).to(
        like.device, non_blocking=True
    )
    return borders, borders, max(documents), max(documents)


def _by_document(
    documents: tuple[int, ...], kv: int, *parts: Tensor
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Each document's rows, and these rows of the parts [N, H or KV, w], as [KV, g, n, w]."""
    groups = parts[0].shape[1] // kv
    for first, stop in pairwise([0, *accumulate(documents)]):
        split = [x[first:stop].unflatten(1, (kv, -1)).permute(1, 2, 0, 3) for x in parts]
        yield slice(first, stop), [x.expand(-1, groups, -1, -1) for x in split]
