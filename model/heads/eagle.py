"""The EAGLE-1 draft head, which EAGLE-2 decodes with too.

From the feature of t_p (the target's state after its final norm) and the token t_{p+1} it predicts the feature of
t_{p+1}; the target's own LM head turns that into a law for t_{p+2}. Drafting feeds the predictions back.
Source: EAGLE (arXiv 2401.15077), section 4.1; module names and the missing norms are those of the published weights:
no input norm on the first layer, no final norm.
"""

from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.errors import UserError
from aerie.model.layers import (
    MLP,
    Attention,
    FusedAttention,
    FusedMLP,
    KeyValueBuffer,
    LayerSizes,
    RMSNorm,
    Rotary,
    UnrollMemory,
)
from aerie.model.vocab import DraftVocabulary


@dataclass(frozen=True)
class Eagle1Config:
    """config.json of an EAGLE-1 head; the keys are the published ones, every default spelt out."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    bias: bool = False  # of fc
    qkv_bias: bool = False
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    model_type: str = "llama"

    def to_json(self) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLMEagle"], "aerie_kind": "eagle1", **asdict(self)}

    def sizes(self) -> LayerSizes:
        return LayerSizes(
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.rms_norm_eps,
            self.qkv_bias,
        )


class Eagle1Layer(nn.Module):
    """A pre-norm decoder layer; the first has no norm before its attention."""

    def __init__(self, sizes: LayerSizes, first: bool) -> None:
        super().__init__()
        if not first:
            self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.first = first
        self.self_attn = Attention(sizes, sizes.hidden_size)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        return self.finish(x, self.self_attn(self.normed(x), rope, mask))

    def normed(self, x: Tensor) -> Tensor:
        return x if self.first else self.input_layernorm(x)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle1Head(nn.Module):
    """fc([embedding; feature]) and one or more decoder layers."""

    kind = "eagle1"

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.config = config
        sizes = config.sizes()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList(Eagle1Layer(sizes, first=i == 0) for i in range(config.num_hidden_layers))
        self.rotary = Rotary(config.rope_theta, config.rope_scaling, config.head_dim, config.max_position_embeddings)
        self.gradient_checkpointing = False  # recompute each layer in the backward pass

    @property
    def blocks(self) -> list[Eagle1Layer]:
        """The decoder layers, typed."""
        return cast(list[Eagle1Layer], list(self.layers))

    def initialise(self, embedding: Tensor, generator: torch.Generator) -> None:
        """Normal(0, 0.02) matrices, zero biases, and the target's embedding [V, D], which stays frozen."""
        for name, parameter in self.named_parameters():
            if name == "embed_tokens.weight":
                parameter.data.copy_(embedding)
            elif parameter.ndim == 2:
                parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
            elif name.endswith("bias"):
                parameter.data.zero_()

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Predicted features [B, T, D] for tokens [B, T], features [B, T, D], positions [B, T].

        tokens are already shifted (slot p holds t_{p+1}); mask None is causal, else boolean [B, 1, T, T].
        """
        x, rope = self._enter(tokens, features, positions, tokens.shape[1])
        for layer in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, rope, mask, use_reentrant=False)
            else:
                x = layer(x, rope, mask)
        return x

    def fused(self) -> "Eagle1Draft":
        """The head for drafting, sharing these weights. Make it after the module was moved to its device and dtype."""
        return Eagle1Draft(self)

    def unroll(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, memories: list[UnrollMemory]
    ) -> Tensor:
        """One step of the parallel unroll: each slot's chain takes its next token; features: the last step's output."""
        x, rope = self._enter(tokens, features, positions, self.config.max_position_embeddings)
        for layer, memory in zip(self.blocks, memories, strict=True):
            x = layer.finish(x, layer.self_attn.unroll(layer.normed(x), rope, mask, memory))
        return x

    def _enter(
        self, tokens: Tensor, features: Tensor, positions: Tensor, length: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        embedded = self.embed_tokens(tokens).to(features.dtype)
        x = self.fc(torch.cat([embedded, features], dim=-1))  # [B, T, D]
        return x, self.rotary.at(positions, length, x)


class Eagle1Draft:
    """One decoding forward of an EAGLE-1 head, over buffers, with merged projections."""

    def __init__(self, head: Eagle1Head) -> None:
        self.head = head
        self._layers = [
            (block, FusedAttention(block.self_attn), FusedMLP(block.post_attention_layernorm, block.mlp))
            for block in head.blocks
        ]

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: tuple[int, int], mask: Tensor, buffers: list[KeyValueBuffer]
    ) -> Tensor:
        """Predicted features [1, n, D] of n slots with tokens [1, n] and features [1, n, D].

        positions are (first, stop): one position per slot, or (first, first + 1) for slots that all stand at first.
        The additive mask [1, 1, n, S] says what they see of the buffers and of themselves.
        """
        head = self.head
        x = torch.cat([F.embedding(tokens, head.embed_tokens.weight), features], dim=-1)
        x = F.linear(x, head.fc.weight, head.fc.bias)  # [1, n, D]
        rope = head.rotary.between(*positions, x)
        for (block, attention, mlp), buffer in zip(self._layers, buffers, strict=True):
            x = x + attention(block.normed(x), rope, mask, buffer)
            x = x + mlp(x)
        return x


EMBEDDING = "embed_tokens.weight"
TAP_CONVENTION = "hidden_states"  # after_blocks are entries of transformers' hidden_states: 0 is the embedding


@dataclass(frozen=True)
class Eagle3Config:
    """config.json of an EAGLE-3 head; Llama's keys and the published ones, every default spelt out."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    target_hidden_size: int
    after_blocks: tuple[int, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    qk_norm: bool = False  # Qwen3's flavour
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm per fused feature before fc
    norm_output: bool = False  # EAGLE-3.1: the normed output is fed back
    norm_before_residual: bool = False  # the first layer adds to the normed feature instead of the feature
    norm_before_fc: bool = False  # one RMSNorm over all the taps before fc
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "aerie_kind": "eagle3",
            "model_type": "qwen3" if self.qk_norm else "llama",
            "tap_convention": TAP_CONVENTION,
            **asdict(self),
        }

    def sizes(self) -> LayerSizes:
        return LayerSizes(
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.rms_norm_eps,
            qk_norm=self.qk_norm,
        )


class Eagle3Layer(nn.Module):
    """The decoder layer whose attention reads [normed embedding; normed feature].

    Its residual is the feature, or with norm_before_residual the normed feature.
    """

    def __init__(self, sizes: LayerSizes, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)  # of the feature
        self.self_attn = Attention(sizes, 2 * sizes.hidden_size)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads: [B, T, 2D]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)

    def residual(self, hidden: Tensor) -> Tensor:
        """What attention's output is added to: [B, T, D]."""
        return self.hidden_norm(hidden) if self.norm_before_residual else hidden

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = self.residual(hidden) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """fc over the taps, the double-width layer, further plain layers if any, and an LM head over the draft vocabulary.

    `forward`, `draft` and `unroll` return what is fed back as the next slot's feature; `logits` turns it into a law.
    """

    kind = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        sizes, width = config.sizes(), config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_tokens.weight.requires_grad_(not self.shares_embedding)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.after_blocks)
            self.fc_norm = nn.ModuleList(norms)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(len(config.after_blocks) * config.target_hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.after_blocks) * config.target_hidden_size, width, bias=False)
        self.midlayer = Eagle3Layer(sizes, config.norm_before_residual)
        if config.num_hidden_layers > 1:
            self.layers = nn.ModuleList(Eagle1Layer(sizes, first=False) for _ in range(config.num_hidden_layers - 1))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        self.rotary = Rotary(config.rope_theta, config.rope_scaling, config.head_dim, config.max_position_embeddings)
        self.saves_embedding = not self.shares_embedding  # or when its file held one that is not the target's

    @property
    def shares_embedding(self) -> bool:
        """Whether the embedding is the target's own, frozen; a head of another width trains one of its own."""
        return self.config.target_hidden_size == self.config.hidden_size

    @property
    def further(self) -> list[Eagle1Layer]:
        """The plain layers after the first, typed."""
        return cast(list[Eagle1Layer], list(self.layers)) if self.config.num_hidden_layers > 1 else []

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The draft vocabulary, on the head's device."""
        return DraftVocabulary(cast(Tensor, self.d2t), cast(Tensor, self.t2d))

    def set_vocabulary(self, vocabulary: DraftVocabulary) -> None:
        """Copies a vocabulary of the head's own sizes into its buffers."""
        cast(Tensor, self.d2t).copy_(vocabulary.d2t)
        cast(Tensor, self.t2d).copy_(vocabulary.t2d)

    def initialise(self, embedding: Tensor, generator: torch.Generator) -> None:
        """Normal(0, 0.02) matrices and, where the widths agree, the target's embedding [V, D], which stays frozen."""
        for name, parameter in self.named_parameters():
            if name == EMBEDDING and self.shares_embedding:
                parameter.data.copy_(embedding)
            elif parameter.ndim == 2:
                parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))

    def take_lm_head(self, lm_head: Tensor, target_path: str) -> None:
        """Starts the LM head from the target's rows [V, D] of the draft vocabulary; UserError where widths differ."""
        if lm_head.shape[1] != self.config.hidden_size:
            raise UserError(
                f"head.lm_head_init: {target_path} has rows of {lm_head.shape[1]} and the head states of "
                f"{self.config.hidden_size}; use random, or leave head.hidden_size out"
            )
        rows = lm_head[self.vocabulary.ids.to(lm_head.device)]  # [Vd, D]
        self.lm_head.weight.data.copy_(rows)

    def fuse(self, taps: Tensor) -> Tensor:
        """Fused features [..., D] of the target's taps [..., L*Dt], low to high."""
        taps = taps.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            pieces = taps.split(self.config.target_hidden_size, dim=-1)
            taps = torch.cat([norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        return self.fc(taps)

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs [B, T, D] for tokens [B, T] (slot p holds t_{p+1}), fused features [B, T, D] and positions [B, T].

        mask None is causal, else boolean [B, 1, T, T].
        """
        embedded, rope = self._enter(tokens, features, positions, tokens.shape[1])
        layer = self.midlayer
        x = layer.finish(features, layer.self_attn(layer.joined(embedded, features), rope, mask))
        for plain in self.further:
            x = plain(x, rope, mask)
        return self._leave(x)

    def fused(self) -> "Eagle3Draft":
        """The head for drafting, sharing these weights. Make it after the module was moved to its device and dtype."""
        return Eagle3Draft(self)

    def unroll(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None, memories: list[UnrollMemory]
    ) -> Tensor:
        """One step of the parallel unroll (training-time test): features are the fused ones, then the last output."""
        embedded, rope = self._enter(tokens, features, positions, self.config.max_position_embeddings)
        layer = self.midlayer
        attended = layer.self_attn.unroll(layer.joined(embedded, features), rope, mask, memories[0])
        x = layer.finish(features, attended)
        for plain, memory in zip(self.further, memories[1:], strict=True):
            x = plain.finish(x, plain.self_attn.unroll(plain.normed(x), rope, mask, memory))
        return self._leave(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., Vd] over the draft vocabulary of outputs [..., D]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    def _enter(
        self, tokens: Tensor, features: Tensor, positions: Tensor, length: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        embedded = self.embed_tokens(tokens).to(features.dtype)
        return embedded, self.rotary.at(positions, length, features)

    def _leave(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.config.norm_output else x


class Eagle3Draft:
    """One decoding forward of an EAGLE-3 head, over buffers, with merged projections."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head = head
        layers: list[Eagle3Layer | Eagle1Layer] = [head.midlayer, *head.further]
        self._attention = [FusedAttention(layer.self_attn) for layer in layers]
        self._mlp = [FusedMLP(layer.post_attention_layernorm, layer.mlp) for layer in layers]

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: tuple[int, int], mask: Tensor, buffers: list[KeyValueBuffer]
    ) -> Tensor:
        """Outputs [1, n, D] of n slots with tokens [1, n] and features [1, n, D] (fused, or the last output).

        positions are (first, stop): one position per slot, or (first, first + 1) for slots that all stand at first.
        The additive mask [1, 1, n, S] says what they see of the buffers and of themselves.
        """
        head, x = self.head, features
        embedded = head.embed_tokens(tokens).to(features.dtype)
        rope = head.rotary.between(*positions, x)
        given = head.midlayer.joined(embedded, features)
        x = head.midlayer.residual(features)
        for place, buffer in enumerate(buffers):
            if place > 0:
                given = head.further[place - 1].normed(x)
            x = x + self._attention[place](given, rope, mask, buffer)
            x = x + self._mlp[place](x)
        return head._leave(x)
