"""The losses and measures of a slot. Objectives sum them, and only the loop divides. All is computed in float32.

Laws are logarithms over the same S slots, made once from the logits and shared: log q [S, Vd] is the draft's, log p the
target's. A draft vocabulary is a part of the target's, so p comes in two forms: `inside`, renormalised over the draft
vocabulary, for losses that compare laws; `whole`, as it is in the full vocabulary and summing to less than one, for
those that speak of acceptance. Where both vocabularies are one the forms are equal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.schema.train import LossName, TrainConfig
from aerie.model.target import TargetEnds


class TargetLaw:
    """The target's law over a draft vocabulary, in its two forms.

    `at` chooses slots lazily: several steps of an unroll are compared with the same law, which is exponentiated once.
    """

    def __init__(self, inside: Tensor, log_mass: Tensor, slots: Tensor | None = None) -> None:
        """inside: log p [S, Vd], renormalised; log_mass [S]: the logarithm of the draft vocabulary's share of the full
        law, 0 where it is all of it; slots [n]: which of the S laws are meant, and in which order."""
        self._inside, self._log_mass, self._slots = inside, log_mass, slots

    @classmethod
    def of_logits(cls, logits: Tensor, log_normaliser: Tensor | None = None) -> "TargetLaw":
        """From logits [S, Vd] and the log-sum-exp [S] of the full vocabulary (None: Vd is the full vocabulary)."""
        inside = log_law(logits)
        if log_normaliser is None:
            return cls(inside, inside.new_zeros(inside.shape[:1]))
        return cls(inside, logits.float().logsumexp(-1) - log_normaliser)

    @property
    def inside(self) -> Tensor:
        """log p [S, Vd], renormalised over the draft vocabulary."""
        return self._chosen(self._inside)

    @property
    def share(self) -> Tensor:
        """p [S, Vd], renormalised over the draft vocabulary."""
        return self._chosen(self._inside.exp())

    @property
    def whole(self) -> Tensor:
        """log p [S, Vd] as it is in the full vocabulary."""
        return self._chosen(self._inside + self._log_mass[:, None])

    def at(self, slots: Tensor) -> "TargetLaw":
        """The laws of some slots [n], in this order."""
        return TargetLaw(self._inside, self._log_mass, slots if self._slots is None else self._slots[slots])

    def _chosen(self, laws: Tensor) -> Tensor:
        return laws if self._slots is None else laws[self._slots]


Loss = Callable[[Tensor, TargetLaw], Tensor]


def log_law(logits: Tensor) -> Tensor:
    """log q(v) for logits [S, V], in nats and float32."""
    return logits.float().log_softmax(-1)


def smooth_l1(predicted: Tensor, true: Tensor) -> Tensor:
    """[S] from features [S, D]: Smooth-L1 with beta 1, the mean over the D entries of each slot.

    Source: EAGLE (arXiv 2401.15077), section 4.1, L_reg.
    """
    return F.smooth_l1_loss(predicted.float(), true.float(), reduction="none", beta=1.0).mean(-1)


def soft_cross_entropy(log_q: Tensor, p: Tensor) -> Tensor:
    """[S]: H(p, q) = -sum_v p(v) log q(v), in nats; p itself, not its logarithm.

    Source: EAGLE (arXiv 2401.15077), section 4.1, L_cls.
    """
    return -(p * log_q).sum(-1)


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: KL(p || q) = sum_v p(v) (log p(v) - log q(v)), in nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: KL(q || p) = sum_v q(v) (log q(v) - log p(v)), in nats."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """[S]: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, in nats.

    Source: DistillSpec (arXiv 2310.08461), its generalised Jensen-Shannon divergence.
    """
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))  # [S, Vd]
    return beta * kl(log_m, log_p) + (1.0 - beta) * kl(log_m, log_q)


def acceptance(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: alpha = sum_v min(p(v), q(v)), the chance that a sampled draft token is accepted; p is whole.

    Source: Leviathan et al. (arXiv 2211.17192), theorem 3.5.
    """
    return torch.minimum(log_q, log_p).exp().sum(-1)


def total_variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: TV(p, q) = 1 - alpha; the target's mass outside the draft vocabulary counts as distance.

    Source: Leviathan et al. (arXiv 2211.17192), definition 3.2 and lemma 3.3.
    """
    return 1.0 - acceptance(log_q, log_p)


def negative_log_alpha(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: -log alpha, from logarithms, so that laws without common mass have a gradient; p is whole.

    Source: LK losses (arXiv 2602.23881), likelihood form.
    """
    return -torch.minimum(log_q, log_p).logsumexp(-1)


def lk_hybrid(log_q: Tensor, target: TargetLaw, eta: float) -> Tensor:
    """[S]: lambda KL(p || q) + (1 - lambda) TV(p, q) with lambda = exp(-eta alpha), a constant of its own slot.

    KL takes the law inside the draft vocabulary, alpha and TV the whole one. Source: LK losses (arXiv 2602.23881),
    hybrid form.
    """
    alpha = acceptance(log_q, target.whole)
    mix = torch.exp(-eta * alpha.detach())
    return mix * kl(log_q, target.inside) + (1.0 - mix) * (1.0 - alpha)


def loss_named(name: LossName, config: TrainConfig) -> Loss:
    """The loss [S] of (log q, target law) that a recipe's train.loss names."""
    named: dict[LossName, Loss] = {
        "soft_cross_entropy": lambda log_q, target: soft_cross_entropy(log_q, target.share),
        "kl": lambda log_q, target: kl(log_q, target.inside),
        "reverse_kl": lambda log_q, target: reverse_kl(log_q, target.inside),
        "jsd": lambda log_q, target: jensen_shannon(log_q, target.inside, config.jsd_beta),
        "total_variation": lambda log_q, target: total_variation(log_q, target.whole),
        "negative_log_alpha": lambda log_q, target: negative_log_alpha(log_q, target.whole),
        "lk_hybrid": lambda log_q, target: lk_hybrid(log_q, target, config.lk_eta),
    }
    return named[name]


def greedy_agreement(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S] bool: both laws have the same likeliest token (DEAGLE's alpha)."""
    return log_q.argmax(-1) == log_p.argmax(-1)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """[S]: -log q(token) in nats, logits [S, V] and tokens [S]."""
    return F.cross_entropy(logits.float(), tokens, reduction="none")


VOCABULARY_CHUNK = 16384  # columns of logits that are held at once


@dataclass(frozen=True)
class DraftedLaw:
    """The target's law at S states."""

    law: TargetLaw  # log p [S, Vd], inside the draft vocabulary and whole
    choice: Tensor  # [S], the likeliest token of the full vocabulary


@torch.no_grad()
def drafted_law(states: Tensor, ends: TargetEnds, ids: Tensor, chunk: int = VOCABULARY_CHUNK) -> DraftedLaw:
    """The law of last_hidden states [S, D] at the draft vocabulary's ascending target ids [Vd].

    The log-sum-exp and the argmax of all V columns are gathered from `chunk` columns at a time, in float32.
    """
    drafted = states.new_empty(states.shape[0], len(ids), dtype=torch.float32)  # [S, Vd]
    normaliser = states.new_full(states.shape[:1], float("-inf"), dtype=torch.float32)  # [S]
    best, choice = normaliser.clone(), torch.zeros_like(normaliser, dtype=torch.long)
    total = ends.lm_head.shape[0]
    firsts = list(range(0, total, chunk))
    borders = torch.searchsorted(ids, torch.tensor([*firsts, total], device=ids.device)).tolist()
    with torch.autocast(states.device.type, enabled=False):
        for number, first in enumerate(firsts):
            logits = ends.logits(states, slice(first, first + chunk)).float()  # [S, chunk]
            normaliser = torch.logaddexp(normaliser, logits.logsumexp(-1))
            highest, place = logits.max(-1)
            choice = torch.where(highest > best, place + first, choice)
            best = torch.maximum(highest, best)
            inside = slice(borders[number], borders[number + 1])
            drafted[:, inside] = logits[:, ids[inside] - first]
    return DraftedLaw(TargetLaw.of_logits(drafted, normaliser), choice)
