"""The target's weights that draft heads share, and how its logits come from them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

# The keys of config.json that scale a target's logits, before a softcap.
FACTORS = ("logit_scale", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
# Kinds whose models in transformers leave out the scale of their text part.
WITHOUT_THE_SCALE = ("aya_vision", "cohere2_vision")


@dataclass(frozen=True)
class VocabWeights:
    """The target's weights that draft heads share."""

    embedding: Tensor  # [V, D]
    lm_head: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    scale: float  # a factor of logits (Cohere's logit_scale, 1 / Granite's logits_scaling)
    softcap: float | None  # cap * tanh(logits / cap) (Gemma)
    # [D] the weight of the RMS norm that makes last_hidden; only if a recipe starts a head with it
    final_norm: Tensor | None = None

    def logits(self, last_hidden: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        """Logits [..., V], or only those of `rows`, from states [..., D] after the final norm."""
        rows = slice(None) if rows is None else rows
        weight = self.lm_head[rows]
        bias = None if self.bias is None else self.bias[rows]
        out = nn.functional.linear(last_hidden.to(weight.dtype), weight, bias)
        return transformed(out, self.scale, self.softcap)

    def to(self, device: torch.device | str) -> "VocabWeights":
        return replace(
            self,
            embedding=self.embedding.to(device),
            lm_head=self.lm_head.to(device),
            bias=None if self.bias is None else self.bias.to(device),
        )


def transformed(out: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The LM head's outputs after the target's scale and softcap."""
    if scale != 1.0:
        out = out * scale
    return out if softcap is None else torch.tanh(out / softcap) * softcap


def final_transform(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) of the logits of a model with this config."""
    text_config = config.get_text_config()
    scale = 1.0
    if config.model_type not in WITHOUT_THE_SCALE:
        for factor in FACTORS:
            scale *= float(getattr(text_config, factor, None) or 1.0)
        for divisor in DIVISORS:
            scale /= float(getattr(text_config, divisor, None) or 1.0)
    softcap = getattr(text_config, "final_logit_softcapping", None)
    return scale, None if softcap is None else float(softcap)
