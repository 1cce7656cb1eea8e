"""The Medusa head: from the target's last_hidden at t, a law for each of the tokens t+2, t+3, ... independently.

Token t+1 is the target's own. Source: Medusa (arXiv 2401.10774), section 2.1.1; initialisation: the same.
"""

from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from model.heads.multi_token import Branch, Drop, MultiTokenConfig, TokenLaws
from model.target import TargetEnds


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(MultiTokenConfig):
    """config.json of a Medusa head; it has no attention, so positions do not limit it: their number is the target's."""

    def to_json(self) -> dict[str, Any]:
        return {"architectures": ["MedusaModel"], "aerie_kind": "medusa", **asdict(self)}


class MedusaHead(nn.Module):
    """num_heads branches of residual blocks over the same feature, each with its LM head."""

    kind = "medusa"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.branches = nn.ModuleList(Branch(width, width, config.num_layers) for _ in range(config.num_heads))
        self.laws = TokenLaws(config)

    def initialise(self, ends: TargetEnds, generator: torch.Generator) -> None:
        """The law of every future token begins as the target's own law of the next one."""
        for branch in self.branches:
            cast(Branch, branch).initialise(generator)
        self.laws.initialise(ends)

    def state(self, index: int, features: Tensor, drop: Drop | None = None) -> Tensor:
        """What the LM head of future token `index` (0: the one after next) is given: [..., D] of features [..., D]."""
        return self.branches[index](features, drop)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [num_heads, ..., V] of features [..., D]; row k is for the token at t + 2 + k."""
        return torch.stack([self.laws(k, self.state(k, features)) for k in range(self.config.num_heads)])
