"""Medusa and Hydra heads: residual blocks and an LM head for each future token."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aerie.model.kv_cache import KeyValueCache
from aerie.model.layers import DecoderLayer, Rotary
from aerie.model.vocab_weights import VocabWeights, transformed

# training's dropout: (x [S, W], index of the block) -> x [S, W]
Drop = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int  # residual blocks for each future token
    max_position_embeddings: int  # the target's
    lm_head: Literal["own", "target"] = "own"  # one per future token, or the target's frozen one
    lm_head_bias: bool = False
    logit_scale: float = 1.0  # this and the next value: the target's final transform
    final_logit_softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class HydraConfig(MedusaConfig):
    """config.json of a Hydra head; without a prefix layer, its sizes are None."""

    lm_head_bias: bool = True
    prefix_layer: bool = False
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None


PREFIX_SIZES = {
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
}


def hydra_values(section: Any, values: dict[str, Any]) -> dict[str, Any]:
    """A new Hydra head's values for config.json: LM heads with biases, a prefix layer if chosen."""
    values = {**values, "lm_head_bias": True}
    if section.prefix_layer:
        return values
    return {name: value for name, value in values.items() if name not in PREFIX_SIZES}


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)) [..., D]; an x [..., W] of another width is projected for the sum."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.projection = nn.Linear(inputs, width) if inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.projection is None else self.projection(x)) + F.silu(self.linear(x))


class Branch(nn.Module):
    """The residual blocks of one future token."""

    def __init__(self, inputs: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ResidualBlock(inputs if i == 0 else width, width) for i in range(num_layers)
        )

    def forward(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """States [..., D] of inputs [..., W]; `drop` acts on each block's input and the output."""
        for number, block in enumerate(self.blocks):
            x = block(x if drop is None else drop(x, number))
        return x if drop is None else drop(x, len(self.blocks))


class TokenLaws(nn.Module):
    """LM heads: one for each future token, or the target's, which is not stored."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        count = config.num_heads if config.lm_head == "own" else 0
        sizes = (config.hidden_size, config.vocab_size, config.lm_head_bias)
        self.lm_heads = nn.ModuleList(nn.Linear(*sizes) for _ in range(count))
        self.vocab: VocabWeights | None = None  # the target's, for its LM head

    def forward(self, index: int, state: Tensor, vocab: VocabWeights | None = None) -> Tensor:
        """Logits [..., V] of future token `index` (0: at t + 2) from states [..., D]."""
        if self.config.lm_head == "own":
            return transformed(
                self.lm_heads[index](state),
                self.config.logit_scale,
                self.config.final_logit_softcap,
            )
        vocab = vocab or self.vocab
        assert vocab is not None
        return vocab.logits(state)


class MultiTokenHead(nn.Module):
    """A branch and a law for each future token."""

    def __init__(self, config: Any, inputs: Iterable[int]) -> None:
        """inputs: the width of each branch's input."""
        super().__init__()
        self.config = config
        self.branches = nn.ModuleList(
            Branch(size, config.hidden_size, config.num_layers) for size in inputs
        )
        self.laws = TokenLaws(config)

    def initialise(
        self, vocab: VocabWeights, generator: torch.Generator, initializer_range: float = 0.02
    ) -> None:
        """Zeroes blocks, copies the target's LM head, and draws the rest.

        Projections are uniform within 1 / sqrt(inputs), and a prefix layer is normal.
        """
        for name, parameter in self.named_parameters():
            if name.startswith("prefix_layer.") and parameter.ndim == 2:
                nn.init.normal_(parameter, 0.0, initializer_range, generator)
            elif ".linear." in name:
                parameter.data.zero_()
        for block in self.modules():
            if isinstance(block, ResidualBlock) and block.projection is not None:
                bound = block.linear.in_features**-0.5
                for parameter in block.projection.parameters():
                    nn.init.uniform_(parameter, -bound, bound, generator)
        for linear in cast(Iterable[nn.Linear], self.laws.lm_heads):
            linear.weight.data.copy_(vocab.lm_head)
            if linear.bias is not None:
                linear.bias.data.copy_(torch.tensor(0.0) if vocab.bias is None else vocab.bias)

    def start_from_target(self, section: Any, vocab: VocabWeights, path: str) -> None:
        """Nothing: these heads always start at the target's LM head."""


class MedusaHead(MultiTokenHead):
    """num_heads branches over the same feature."""

    kind = "medusa"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config, [config.hidden_size] * config.num_heads)

    def state(self, index: int, features: Tensor, drop: Drop | None = None) -> Tensor:
        return self.branches[index](features, drop)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [num_heads, ..., V] of features [..., D]; row k is for the token at t + 2 + k."""
        return torch.stack(
            [self.laws(k, self.state(k, features)) for k in range(self.config.num_heads)]
        )


class HydraHead(MultiTokenHead):
    """num_heads branches, branch k over h_t and k + 1 embeddings, and an optional prefix layer."""

    kind = "hydra"

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config, ((i + 2) * config.hidden_size for i in range(config.num_heads)))
        if config.prefix_layer:
            self.prefix_layer = DecoderLayer(config)
            self.prefix_layer.norm = nn.RMSNorm(
                config.hidden_size, cast(float, config.rms_norm_eps)
            )
            self.rotary = Rotary(config)

    def prefix(
        self,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """h_t [B, T, D], from the target's states [B, T, D] at positions [T]."""
        if not self.config.prefix_layer:
            return states
        rope = self.rotary.at(positions, self.config.max_position_embeddings, states)
        x = self.prefix_layer(states, None, rope, mask, None if cache is None else (cache, 0))
        return cast(nn.RMSNorm, self.prefix_layer.norm)(x)

    def state(
        self, index: int, state: Tensor, embeddings: Tensor, drop: Drop | None = None
    ) -> Tensor:
        return self.branches[index](torch.cat([state, embeddings.to(state.dtype)], dim=-1), drop)

    def step(self, index: int, state: Tensor, embeddings: Tensor) -> Tensor:
        """Logits [n, V] for t + 2 + index from h_t [n, D] and e(x_{t+1}) ... e(x_{t+1+index})."""
        return self.laws(index, self.state(index, state, embeddings))
