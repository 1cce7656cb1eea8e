"""What Medusa and Hydra heads are made of: residual blocks, and an LM head for each future token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.target import TargetEnds, transformed

Drop = Callable[[Tensor, int], Tensor]  # training's dropout: (x [S, W], the place in its branch) -> x [S, W]


@dataclass(frozen=True, kw_only=True)
class MultiTokenConfig:
    """The part of config.json that both kinds have; the last two entries are the target's own final transform."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int  # residual blocks of each head
    max_position_embeddings: int
    lm_head: Literal["own", "target"] = "own"  # one LM head for each future token, or the target's frozen one for all
    lm_head_bias: bool = False
    logit_scale: float = 1.0
    final_logit_softcap: float | None = None


class ResidualBlock(nn.Module):
    """residual(x) + SiLU(linear(x)) [..., D]; the residual of an input [..., W] that is wider is a projection.

    Source: Medusa (arXiv 2401.10774), section 2.1.1; the projection is that of the published Hydra code.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.projection = nn.Linear(inputs, width) if inputs != width else None

    def initialise(self, generator: torch.Generator) -> None:
        """Zero for what is added, so that a block begins as its residual; U(-1, 1) / sqrt(inputs) for a projection."""
        self.linear.weight.data.zero_()
        self.linear.bias.data.zero_()
        if self.projection is not None:
            bound = self.linear.in_features**-0.5
            for parameter in (self.projection.weight, self.projection.bias):
                parameter.data.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.projection is None else self.projection(x)
        return kept + F.silu(self.linear(x))


class Branch(nn.Module):
    """The residual blocks of one future token; every block has weights of its own."""

    def __init__(self, inputs: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(inputs if i == 0 else width, width) for i in range(num_layers))

    def initialise(self, generator: torch.Generator) -> None:
        for block in self.blocks:
            cast(ResidualBlock, block).initialise(generator)

    def forward(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """[..., D] of inputs [..., W]; dropout acts on each block's input, and on what the LM head is given."""
        for place, block in enumerate(self.blocks):
            x = block(x if drop is None else drop(x, place))
        return x if drop is None else drop(x, len(self.blocks))


class TokenLaws(nn.Module):
    """The LM heads: one for each future token, or the target's own for all, which is not stored."""

    def __init__(self, config: MultiTokenConfig) -> None:
        super().__init__()
        self.config = config
        count = config.num_heads if config.lm_head == "own" else 0
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias) for _ in range(count)
        )
        self.ends: TargetEnds | None = None  # of the target, where its LM head is shared; whoever trains gives them

    def initialise(self, ends: TargetEnds) -> None:
        """Copies of the target's LM head; a bias that it has not is zero."""
        for layer in self.lm_heads:
            linear = cast(nn.Linear, layer)
            linear.weight.data.copy_(ends.lm_head)
            if self.config.lm_head_bias:
                linear.bias.data.copy_(torch.zeros_like(linear.bias) if ends.bias is None else ends.bias)

    def forward(self, index: int, state: Tensor, ends: TargetEnds | None = None) -> Tensor:
        """Logits [..., V] of future token `index` (0: the one after next) from states [..., D]."""
        if self.config.lm_head == "own":
            logits = self.lm_heads[index](state)
            return transformed(logits, self.config.logit_scale, self.config.final_logit_softcap)
        ends = ends or self.ends
        assert ends is not None, "a head with lm_head 'target' is loaded with its target's ends"
        return ends.logits(state)
