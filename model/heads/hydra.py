"""The Hydra head: a Medusa head whose laws also depend on the tokens drafted so far.

Future token t+2+i has the law of a branch that reads [h_t; e(x_{t+1}); ...; e(x_{t+1+i})] with the target's frozen
embedding e. In Hydra++ one decoder layer over the target's last_hidden makes h_t (`prefix_layer`).
Source: Hydra (arXiv 2402.05109), sections 3 and 4; blocks, LM-head bias and the norm after the prefix layer are those
of the published code.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.heads.multi_token import Branch, Drop, MultiTokenConfig, TokenLaws
from model.layers import MLP, Attention, KeyValueBuffer, LayerSizes, RMSNorm, Rotary
from model.target import TargetEnds


@dataclass(frozen=True, kw_only=True)
class HydraConfig(MultiTokenConfig):
    """config.json of a Hydra head; the sizes are those of its prefix layer, None without one."""

    lm_head_bias: bool = True
    prefix_layer: bool = False
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"architectures": ["HydraModel"], "aerie_kind": "hydra", **asdict(self)}

    def sizes(self) -> LayerSizes:
        """Of the prefix layer."""
        widths = (self.intermediate_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        assert self.rms_norm_eps is not None and None not in widths, "this head has no prefix layer"
        return LayerSizes(self.hidden_size, *cast(tuple[int, int, int, int], widths), self.rms_norm_eps)


class PrefixLayer(nn.Module):
    """A Llama decoder layer and a norm after it."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes, sizes.hidden_size)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes)
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, buffer: KeyValueBuffer | None
    ) -> Tensor:
        """[B, T, D]; with a buffer attention is over its rows and the new ones, as mask [.., T, S] allows."""
        given, attention = self.input_layernorm(x), self.self_attn
        if buffer is None:
            x = x + attention(given, rope, mask)
        else:
            q, k, v = attention.project(given, rope)
            k, v = buffer.append(k, v)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))


class HydraHead(nn.Module):
    """num_heads branches, each reading one embedding more than the one before, and perhaps a prefix layer."""

    kind = "hydra"

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.branches = nn.ModuleList(
            Branch((i + 2) * width, width, config.num_layers) for i in range(config.num_heads)
        )
        self.laws = TokenLaws(config)
        if config.prefix_layer:
            sizes = config.sizes()
            self.prefix_layer = PrefixLayer(sizes)
            theta = cast(float, config.rope_theta)
            self.rotary = Rotary(theta, config.rope_scaling, sizes.head_dim, config.max_position_embeddings)

    @property
    def num_buffers(self) -> int:
        """How many key/value buffers `prefix` fills when drafting."""
        return int(self.config.prefix_layer)

    def initialise(self, ends: TargetEnds, generator: torch.Generator, initializer_range: float = 0.02) -> None:
        """Branches as ResidualBlock says, LM heads from the target's; Normal(0, initializer_range) before them."""
        if self.config.prefix_layer:
            for parameter in self.prefix_layer.parameters():
                if parameter.ndim == 2:
                    made = torch.empty(parameter.shape).normal_(0.0, initializer_range, generator=generator)
                    parameter.data.copy_(made)
        for branch in self.branches:
            cast(Branch, branch).initialise(generator)
        self.laws.initialise(ends)

    def prefix(
        self,
        features: Tensor,
        span: tuple[int, int],
        mask: Tensor | None = None,
        buffers: Sequence[KeyValueBuffer] = (),
    ) -> Tensor:
        """h_t [B, T, D] for last_hidden [B, T, D] at positions span = (first, stop); the features without the layer.

        Without buffers the T slots see each other causally, or as mask says. A buffer receives their keys and values
        (the caller moves its length), and the additive mask [1, 1, T, S] says what they see of it and of themselves.
        """
        if not self.config.prefix_layer:
            return features
        return self.prefix_layer(features, self.rotary.between(*span, features), mask, buffers[0] if buffers else None)

    def state(self, index: int, state: Tensor, embeddings: Tensor, drop: Drop | None = None) -> Tensor:
        """What the LM head of future token `index` is given: [n, D]; see `step`."""
        return self.branches[index](torch.cat([state, embeddings.to(state.dtype)], dim=-1), drop)

    def step(self, index: int, state: Tensor, embeddings: Tensor) -> Tensor:
        """Logits [n, V] of the token at t + 2 + index from h_t [n, D] and e(x_{t+1}) ... e(x_{t+1+index}).

        The embeddings [n, (index + 1) * D] are the target's, in this order.
        """
        return self.laws(index, self.state(index, state, embeddings))
