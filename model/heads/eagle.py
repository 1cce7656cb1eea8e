"""The EAGLE draft heads: EAGLE-1 (EAGLE-2 decodes with it too) and EAGLE-3.

EAGLE-1 (arXiv 2401.15077, section 4.1): from the feature of t_p (the target's state after its final norm) and the token
t_{p+1} it predicts the feature of t_{p+1}, which the target's own LM head turns into a law for t_{p+2}.
EAGLE-3 (arXiv 2503.01840, section 3): the feature is a fusion of the target's taps, the first layer reads [embedding;
feature], and the head has an LM head of its own over a draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.errors import UserError
from aerie.model.layers import DecoderLayer, DraftLayer, KeyValueBuffer, LayerSizes, Memory, Rotary, UnrollMemory
from aerie.model.target import VocabWeights
from aerie.model.vocab import DraftVocabulary

EMBEDDING = "embed_tokens.weight"
TAP_CONVENTION = "hidden_states"  # after_blocks are entries of transformers' hidden_states: 0 is the embedding


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
        return LayerSizes.of(self)


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
        return LayerSizes.of(self)


class EagleHead(nn.Module):
    """What both kinds have: the target's frozen embedding, decoder layers, RoPE, and their three forwards."""

    kind: str
    config: Eagle1Config | Eagle3Config
    embed_tokens: nn.Embedding
    rotary: Rotary
    gradient_checkpointing = False  # recompute each layer in the backward pass

    @property
    def blocks(self) -> list[DecoderLayer]:
        raise NotImplementedError

    @property
    def shares_embedding(self) -> bool:
        """Whether the embedding is the target's own, frozen."""
        return True

    def enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer is given: hidden states and the tokens' embeddings, both [B, T, D]."""
        raise NotImplementedError

    def leave(self, x: Tensor) -> Tensor:
        """What is fed back as the next slot's feature, of the last layer's output [B, T, D]."""
        return x

    def initialise(self, vocab: VocabWeights, generator: torch.Generator, initializer_range: float = 0.02) -> None:
        """Normal(0, initializer_range) matrices, zero biases; where the widths agree, the target's frozen embedding."""
        for name, parameter in self.named_parameters():
            if name == EMBEDDING and self.shares_embedding:
                parameter.data.copy_(vocab.embedding)
            elif parameter.ndim == 2:
                parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, initializer_range, generator=generator))
            elif name.endswith("bias"):
                parameter.data.zero_()

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs [B, T, D] for shifted tokens [B, T] (slot p holds t_{p+1}), features [B, T, D] and positions [B, T].

        mask None is causal, else boolean [B, 1, T, T].
        """
        return self._run(tokens, features, positions, mask, tokens.shape[1], [None] * len(self.blocks))

    def unroll(self, tokens: Tensor, features: Tensor, positions: Tensor, memories: Sequence[UnrollMemory]) -> Tensor:
        """One step of the parallel unroll (training-time test): each slot's chain takes its next token."""
        return self._run(tokens, features, positions, None, self.config.max_position_embeddings, memories)

    def _run(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        length: int,
        memories: Sequence[Memory],
    ) -> Tensor:
        x, embedded = self.enter(tokens, features)
        rope = self.rotary.at(positions, length, x)
        for layer, memory in zip(self.blocks, memories, strict=True):
            if self.gradient_checkpointing and self.training and memory is None:
                x = checkpoint(layer, x, embedded, rope, mask, use_reentrant=False)
            else:
                x = layer(x, embedded, rope, mask, memory)
        return self.leave(x)

    def fused(self) -> "EagleDraft":
        """The head for drafting, sharing these weights. Make it after the module was moved to its device and dtype."""
        return EagleDraft(self)


class EagleDraft:
    """One decoding forward of an EAGLE head, over buffers, with merged projections.

    It holds tensors, because looking up and calling modules takes a large part of a small head's forward.
    """

    def __init__(self, head: EagleHead) -> None:
        self._embedding, self._rotary, self._leave = head.embed_tokens.weight, head.rotary, head.leave
        self._fc = (head.fc.weight, head.fc.bias) if isinstance(head, Eagle1Head) else None  # EAGLE-3 has fused before
        self._layers = [DraftLayer(layer) for layer in head.blocks]

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: tuple[int, int], mask: Tensor, buffers: list[KeyValueBuffer]
    ) -> Tensor:
        """Outputs [1, n, D] of n slots with tokens [1, n] and features [1, n, D], as the head's forward.

        positions are (first, stop): one per slot, or (first, first + 1) for slots that all stand at first. The additive
        mask [1, 1, n, S] says what they see of the buffers and of themselves.
        """
        embedded = F.embedding(tokens, self._embedding).to(features.dtype)
        x = features
        if self._fc is not None:
            x = F.linear(torch.cat([embedded, features], dim=-1), *self._fc)  # [1, n, D]
        rope = self._rotary.between(*positions, x)
        for layer, buffer in zip(self._layers, buffers, strict=True):
            x = layer(x, embedded, rope, mask, buffer)
        return self._leave(x)


class Eagle1Head(EagleHead):
    """fc([embedding; feature]) and one or more decoder layers."""

    kind = "eagle1"
    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.config, sizes, width = config, config.sizes(), config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        first, others = DecoderLayer(sizes, reads="raw"), range(config.num_hidden_layers - 1)
        self.layers = nn.ModuleList([first, *(DecoderLayer(sizes) for _ in others)])
        self.rotary = Rotary(config.rope_theta, config.rope_scaling, config.head_dim, config.max_position_embeddings)

    @property
    def blocks(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    def enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embed_tokens(tokens).to(features.dtype)
        return self.fc(torch.cat([embedded, features], dim=-1)), embedded


class Eagle3Head(EagleHead):
    """fc over the taps, the double-width layer, further plain layers, and an LM head over the draft vocabulary."""

    kind = "eagle3"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, sizes, width = config, config.sizes(), config.hidden_size
        eps, taps_width = config.rms_norm_eps, len(config.after_blocks) * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_tokens.weight.requires_grad_(not self.shares_embedding)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in config.after_blocks)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(taps_width, eps)
        self.fc = nn.Linear(taps_width, width, bias=False)
        self.midlayer = DecoderLayer(sizes, "pair", config.norm_before_residual)
        if config.num_hidden_layers > 1:
            self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(config.num_hidden_layers - 1))
        self.norm = nn.RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        self.rotary = Rotary(config.rope_theta, config.rope_scaling, config.head_dim, config.max_position_embeddings)
        self.saves_embedding = not self.shares_embedding  # or when its file held one that is not the target's

    @property
    def blocks(self) -> list[DecoderLayer]:
        further = cast(list[DecoderLayer], list(self.layers)) if self.config.num_hidden_layers > 1 else []
        return [self.midlayer, *further]

    @property
    def shares_embedding(self) -> bool:
        """Whether the embedding is the target's own, frozen; a head of another width trains one of its own."""
        return self.config.target_hidden_size == self.config.hidden_size

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The draft vocabulary, on the head's device."""
        return DraftVocabulary(cast(Tensor, self.d2t), cast(Tensor, self.t2d))

    def set_vocabulary(self, vocabulary: DraftVocabulary) -> None:
        cast(Tensor, self.d2t).copy_(vocabulary.d2t)
        cast(Tensor, self.t2d).copy_(vocabulary.t2d)

    def take_lm_head(self, lm_head: Tensor, target_path: str) -> None:
        """Starts the LM head from the target's rows [V, D] of the draft vocabulary; UserError where widths differ."""
        if lm_head.shape[1] != self.config.hidden_size:
            raise UserError(
                f"head.lm_head_init: {target_path} has rows of {lm_head.shape[1]} and the head states of "
                f"{self.config.hidden_size}; use random, or leave head.hidden_size out"
            )
        self.lm_head.weight.data.copy_(lm_head[self.vocabulary.ids.to(lm_head.device)])  # [Vd, D]

    def fuse(self, taps: Tensor) -> Tensor:
        """Fused features [..., D] of the target's taps [..., L*Dt], low to high."""
        taps = taps.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            pieces = taps.split(self.config.target_hidden_size, dim=-1)
            taps = torch.cat([norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        return self.fc(taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., Vd] over the draft vocabulary of outputs [..., D]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    def enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return features, self.embed_tokens(tokens).to(features.dtype)

    def leave(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.config.norm_output else x
