"""The block head: one forward gives the distributions of all drafted tokens.

The tokens before a drafted token may correct its distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from aerie.model.heads.eagle import LayerConfig, LMHead, pass_on_highest_tap
from aerie.model.kv_cache import KeyValueCache
from aerie.model.layers import DecoderLayer, HeadLayer, Rope, Rotary, attend, rotate
from aerie.model.vocab_weights import VocabWeights


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """config.json, with the names of speculators, whose layers have Qwen3's form."""

    after_blocks: tuple[int, ...]
    block_size: int
    mask_token_id: int
    in_block: Literal["bidirectional", "causal"] = "bidirectional"
    sample_from_anchor: bool = False
    anchor_feature: bool = False
    markov_rank: int = 0
    markov_order: int = 1
    markov_head: Literal["vanilla", "gated"] = "vanilla"
    qk_norm: ClassVar[bool] = True

    @property
    def num_drafted(self) -> int:
        """How many tokens a block drafts: its first `block_size - num_drafted` rows draft none."""
        return self.block_size - 1 + self.sample_from_anchor


class PathCorrection(nn.Module):
    """A bias [..., V] on the logits of a drafted token from the n tokens before it [..., n].

    It is W2 e, where e is the sum of all W1_i[t_i]; with n = 1 it is DSpark's Markov head. Gated,
    it is W2 (sigmoid(G [h; e]) * e), where h [..., D] is the state of the row that drafts.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self._vocab_size = config.vocab_size
        # all W1_i, the nearest token's last
        self.markov_w1 = nn.Embedding(config.markov_order * config.vocab_size, rank)
        self.markov_w2 = LMHead(rank, config.vocab_size, bias=False)
        is_gated = config.markov_head == "gated"
        self.gate_proj = nn.Linear(config.hidden_size + rank, rank) if is_gated else None

    def forward(self, before: Tensor, states: Tensor) -> Tensor:
        # All W1_i are stacked in one table.
        first = torch.arange(before.shape[-1], device=before.device) * self._vocab_size
        code = self.markov_w1(before + first).sum(-2)  # [..., r]
        if self.gate_proj is not None:
            code = code * self.gate_proj(torch.cat([states.to(code.dtype), code], dim=-1)).sigmoid()
        return self.markov_w2(code)


class BlockHead(nn.Module):
    """Decoder layers over blocks of rows (DFlash, arXiv 2602.06036): the known token, then masks.

    A block at anchor a has positions a, a + 1, ... Its rows see each other, and the target's fused
    taps before a, from which each layer makes keys and values. Embedding and LM head are the
    target's, and not stored.
    """

    kind = "block"
    gradient_checkpointing = False  # recompute each layer in the backward pass

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.after_blocks) * width, width, bias=False)
        self.anchor_proj = nn.Linear(width, width, bias=False) if config.anchor_feature else None
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(width, eps)
        self.markov_head = PathCorrection(config) if config.markov_rank else None
        self.rotary = Rotary(config)

    def initialise(
        self, vocab: VocabWeights, generator: torch.Generator, initializer_range: float = 0.02
    ) -> None:
        """Draws normal matrices, zeroes biases, and sets anchor_proj to the identity.

        The path correction starts at zero. The final norm is the target's if vocab has it.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                spread = {"markov_head.markov_w1.weight": 0.01, "markov_head.markov_w2.weight": 0.0}
                drawn = torch.empty(parameter.shape).normal_(generator=generator)
                parameter.data.copy_(drawn * spread.get(name, initializer_range))
            elif name.endswith("bias"):
                parameter.data.zero_()
        if self.anchor_proj is not None:
            self.anchor_proj.weight.data.copy_(torch.eye(self.config.hidden_size))
        if vocab.final_norm is not None:
            self.norm.weight.data.copy_(vocab.final_norm)

    def start_from_target(self, section: Any, vocab: VocabWeights, path: str) -> None:
        if section.fc_init == "highest_tap":
            pass_on_highest_tap(self.fc)

    def fuse(self, taps: Tensor) -> Tensor:
        """What blocks see of the text [..., D], from the target's taps [..., L*D], low to high."""
        return self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))

    def rows(self, tokens: Tensor, embedding: Tensor, before: Tensor) -> Tensor:
        """The first layer's input [..., block, D] of blocks with known tokens [...].

        before [..., D]: the fused taps before the known tokens.
        """
        known = F.embedding(tokens, embedding)[..., None, :]  # [..., 1, D]
        mask = embedding[self.config.mask_token_id]
        masks = mask.expand(*tokens.shape, self.config.block_size - 1, -1)
        rows = torch.cat([known, masks], dim=-2).to(self.fc.weight.dtype)  # [..., block, D]
        return rows if self.anchor_proj is None else rows + self.anchor_proj(before)[..., None, :]

    def correct(self, logits: Tensor, before: Tensor, states: Tensor) -> Tensor:
        """Logits [..., V] in float32, corrected by the n tokens before [..., n].

        states [..., D]: the states that gave the logits.
        """
        logits = logits.float()
        if self.markov_head is None:
            return logits
        return logits + self.markov_head(before, states).float()

    def forward(self, tokens: Tensor, taps: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """States [B, A, K, D] for the LM head, of the K drafting rows of A blocks.

        tokens [B, A] stand at anchors [B, A] of texts with taps [B, T, L*D].
        """
        size = self.config.block_size
        length = taps.shape[1]
        positions = anchors[..., None] + torch.arange(size, device=anchors.device)  # [B, A, block]
        positions = positions.flatten(1)  # [B, A * block]
        cos, sin = self.rotary.table(length + size, self.fc.weight)
        rope_of_rows = (cos[positions][:, None], sin[positions][:, None])  # [B, 1, A * block, hd]
        rope_of_text = (cos[:length], sin[:length])
        context = self.fuse(taps)  # [B, T, D]
        # where the fused taps before each anchor stand
        previous = (anchors - 1).clamp(min=0)[..., None].expand(-1, -1, context.shape[-1])
        x = self.rows(tokens, embedding, context.gather(1, previous)).flatten(1, 2)
        attention = self._attention(anchors, length)
        for layer in self.layers:
            inputs = (layer, x, context, rope_of_rows, rope_of_text, attention)
            if self.gradient_checkpointing and self.training:
                x = checkpoint(_layer, *inputs, use_reentrant=False)
            else:
                x = _layer(*inputs)
        first = size - self.config.num_drafted  # earlier rows draft nothing
        return self.norm(x.unflatten(1, (-1, size))[:, :, first:])

    def _attention(self, anchors: Tensor, length: int) -> "BlockAttention":
        """The attention of A * block rows to T rows of text and to themselves.

        On a CPU the mask is dense, [B, 1, A * block, T + A * block]. On CUDA, FlexAttention skips
        what the mask hides.
        """
        size = self.config.block_size
        batch, count = anchors.shape
        is_causal = self.config.in_block == "causal"
        # By column: a row of the text has a negative number, and a block's row its own number.
        row_of = torch.arange(-length, count * size, device=anchors.device)

        def sees(text: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
            other = row_of[column]
            is_inside = (other // size == row // size) & ((other <= row) | (not is_causal))
            is_before = column < anchors[text, row // size]
            return torch.where(other < 0, is_before, is_inside)

        if _is_sparse(anchors):
            sizes = (batch, None, count * size, len(row_of))
            return partial(_sparse, mask=create_block_mask(sees, *sizes, device=anchors.device))
        texts = torch.arange(batch, device=anchors.device)[:, None, None, None]
        rows = torch.arange(count * size, device=anchors.device)
        columns = torch.arange(len(row_of), device=anchors.device)
        mask = sees(texts, rows, rows[:, None], columns)  # [B, 1, A * block, T + A * block]
        return partial(attend, mask=mask, memory=None)


BlockAttention = Callable[[Tensor, Tensor, Tensor], Tensor]  # as attend
_flex = torch.compile(flex_attention)


def _is_sparse(x: Tensor) -> bool:
    return x.is_cuda


def _sparse(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    # Under autocast, RoPE's float32 tables make q and k float32.
    out = _flex(
        q.to(v.dtype), k.to(v.dtype), v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(2)


def _layer(
    layer: Any, x: Tensor, context: Tensor, rows: Rope, text: Rope, attention: BlockAttention
) -> Tensor:
    """A layer's outputs [B, A * block, D].

    The fused taps, context [B, T, D], give keys and values, but no queries.
    """
    projector = layer.self_attn
    residual, of_rows = layer.before(x, None, rows, None)
    keys = projector.by_head(projector.k_proj(context))
    values = projector.by_head(projector.v_proj(context))
    keys = rotate(projector.k_norm(keys), *text)
    keys = torch.cat([keys, of_rows.keys], dim=2)
    values = torch.cat([values, of_rows.values], dim=2)
    return layer.after(residual, attention(of_rows.queries, keys, values))


class BlockForward:
    """A head's forwards for decoding with a cache; make it after the head is on its device."""

    def __init__(self, head: BlockHead) -> None:
        self._layers = [HeadLayer(layer) for layer in head.layers]  # type: ignore[arg-type]
        self._norm = head.norm

    def read(self, context: Tensor, rope: Tensor, cache: KeyValueCache) -> None:
        """Writes the keys and values of fused taps [n, D] to the cache; rope [2, n, hd]."""
        for number, layer in enumerate(self._layers):
            keys, values = layer.keys_and_values(context, (rope[0], rope[1]))
            cache.update(keys, values, number)

    def __call__(self, x: Tensor, rope: Tensor, mask: Tensor, cache: KeyValueCache) -> Tensor:
        """States [block, D] of a block's rows x [block, D].

        rope [2, block, hd]; mask as in HeadLayer.
        """
        for number, layer in enumerate(self._layers):
            x = layer(x, x, (rope[0], rope[1]), mask, (cache, number))
        return self._norm(x)
