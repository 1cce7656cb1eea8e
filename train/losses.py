"""Sums over supervised slots; only the loop divides. Everything is computed in float32.

Laws are [S, V] over the same S slots: p is the target's, q the draft's. They are made once from the logits and shared.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def smooth_l1(predicted: Tensor, true: Tensor) -> Tensor:
    """Summed over slots [S, D]: Smooth-L1 with beta 1, the mean over the D entries of each slot.

    Source: EAGLE (arXiv 2401.15077), section 4.1, L_reg.
    """
    each = F.smooth_l1_loss(predicted.float(), true.float(), reduction="none", beta=1.0)  # [S, D]
    return each.mean(-1).sum()


def law(logits: Tensor) -> Tensor:
    """p(v) for logits [S, V], in float32."""
    return logits.float().softmax(-1)


def log_law(logits: Tensor) -> Tensor:
    """log q(v) for logits [S, V], in nats and float32."""
    return logits.float().log_softmax(-1)


def soft_cross_entropy(draft_log_law: Tensor, target_law: Tensor) -> Tensor:
    """Summed over slots: H(p, q) = -sum_v p(v) log q(v), in nats.

    Source: EAGLE (arXiv 2401.15077), section 4.1, L_cls.
    """
    return -(target_law * draft_log_law).sum()


def acceptance(draft_log_law: Tensor, target_law: Tensor) -> Tensor:
    """Summed over slots: alpha = sum_v min(p(v), q(v)), the chance that a sampled draft token is accepted.

    Source: Leviathan et al. (arXiv 2211.17192), theorem 3.5.
    """
    return torch.minimum(draft_log_law.exp(), target_law).sum()


def greedy_agreement(draft_log_law: Tensor, target_law: Tensor) -> Tensor:
    """How many slots have the same likeliest token in both laws (DEAGLE's alpha)."""
    return (draft_log_law.argmax(-1) == target_law.argmax(-1)).sum()


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Summed over slots: -log q(token) in nats, logits [S, V] and tokens [S]."""
    return F.cross_entropy(logits.float(), tokens, reduction="sum")
