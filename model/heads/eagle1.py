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

from model.fused import FusedAttention, FusedMLP
from model.layers import MLP, Attention, KeyValueBuffer, LayerSizes, RMSNorm, Rotary, UnrollMemory


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
