"""The losses and measures of a slot. Objectives sum them, and only the loop divides. All is computed in float32.

Laws are logarithms over the same S slots, made once from the logits and shared: log q [S, Vd] is the draft's, log p the
target's. A draft vocabulary is a part of the target's, so p comes in two forms: `inside`, renormalised over the draft
vocabulary, for losses that compare laws; `whole`, as it is in the full vocabulary and summing to less than one, for
those that speak of acceptance. Where both vocabularies are one the forms are equal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.schema.train import LossName, TrainConfig
from aerie.model.target import VocabWeights
from aerie.train.launch import are_many

Sums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count)


@dataclass(frozen=True)
class TargetLaw:
    """The target's law over a draft vocabulary, in its two forms."""

    log_p: Tensor  # [S, Vd], renormalised over the draft vocabulary
    log_mass: Tensor  # [S], the logarithm of the draft vocabulary's share of the full law; 0 where it is all of it
    slots: Tensor | None = None  # which of the S laws are meant, and in which order; None: all

    @classmethod
    def of_logits(cls, logits: Tensor, log_normaliser: Tensor | None = None) -> "TargetLaw":
        """From logits [S, Vd] and the log-sum-exp [S] of the full vocabulary (None: Vd is the full vocabulary)."""
        log_p = log_law(logits)
        if log_normaliser is None:
            return cls(log_p, log_p.new_zeros(log_p.shape[:1]))
        return cls(log_p, logits.float().logsumexp(-1) - log_normaliser)

    def at(self, slots: Tensor) -> "TargetLaw":
        """The laws of some slots [n]. Steps of an unroll look up the same law, which is exponentiated once for all."""
        return replace(self, slots=slots)

    @property
    def inside(self) -> Tensor:
        """log p [S, Vd], renormalised over the draft vocabulary."""
        return self._chosen(self.log_p)

    @property
    def share(self) -> Tensor:
        """p [S, Vd], renormalised over the draft vocabulary."""
        return self._chosen(self.log_p.exp())

    @property
    def whole(self) -> Tensor:
        """log p [S, Vd] as it is in the full vocabulary."""
        return self._chosen(self.log_p + self.log_mass[:, None])

    def _chosen(self, laws: Tensor) -> Tensor:
        return laws if self.slots is None else laws[self.slots]


def log_law(logits: Tensor) -> Tensor:
    """log q(v) for logits [S, V], in nats and float32."""
    return logits.float().log_softmax(-1)


def smooth_l1(predicted: Tensor, true: Tensor) -> Tensor:
    """[S] from features [S, D]: Smooth-L1 with beta 1, a mean over D (EAGLE, arXiv 2401.15077, section 4.1, L_reg)."""
    return F.smooth_l1_loss(predicted.float(), true.float(), reduction="none", beta=1.0).mean(-1)


def soft_cross_entropy(log_q: Tensor, p: Tensor) -> Tensor:
    """[S]: H(p, q) = -sum_v p(v) log q(v), in nats, of p itself (EAGLE, arXiv 2401.15077, section 4.1, L_cls)."""
    return -(p * log_q).sum(-1)


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: KL(p || q) = sum_v p(v) (log p(v) - log q(v)), in nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def jensen_shannon(log_q: Tensor, law: TargetLaw, config: TrainConfig) -> Tensor:
    """[S]: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (DistillSpec, arXiv 2310.08461)."""
    log_p, beta = law.inside, config.jsd_beta
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))  # [S, Vd]
    return beta * kl(log_m, log_p) + (1.0 - beta) * kl(log_m, log_q)


def acceptance(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: alpha = sum_v min(p(v), q(v)), a draft token's chance of acceptance (arXiv 2211.17192, theorem 3.5)."""
    return torch.minimum(log_q, log_p).exp().sum(-1)


def negative_log_alpha(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: -log alpha; p is whole. Source: LK losses (arXiv 2602.23881), likelihood form."""
    # From logarithms: laws without common mass, whose alpha is 0 in float32, have a gradient too.
    return -torch.minimum(log_q, log_p).logsumexp(-1)


def lk_hybrid(log_q: Tensor, law: TargetLaw, config: TrainConfig) -> Tensor:
    """[S]: lambda KL(p || q) + (1 - lambda) TV(p, q), lambda = exp(-eta alpha) (LK losses, arXiv 2602.23881)."""
    # The mix follows alpha but has no gradient of its own. KL is inside the draft vocabulary, alpha and TV are whole.
    alpha = acceptance(log_q, law.whole)
    mix = torch.exp(-config.lk_eta * alpha.detach())
    return mix * kl(log_q, law.inside) + (1.0 - mix) * (1.0 - alpha)


LOSSES: dict[LossName, Callable[[Tensor, TargetLaw, TrainConfig], Tensor]] = {  # losses [S] between log q and the law
    "soft_cross_entropy": lambda log_q, law, _: soft_cross_entropy(log_q, law.share),
    "kl": lambda log_q, law, _: kl(log_q, law.inside),
    "reverse_kl": lambda log_q, law, _: kl(law.inside, log_q),
    "jsd": jensen_shannon,
    # TV(p, q) = 1 - alpha (Leviathan, lemma 3.3): the target's mass outside the draft vocabulary counts as distance
    "total_variation": lambda log_q, law, _: 1.0 - acceptance(log_q, law.whole),
    "negative_log_alpha": lambda log_q, law, _: negative_log_alpha(log_q, law.whole),
    "lk_hybrid": lk_hybrid,
}


@torch.no_grad()
def drafted_law(states: Tensor, target: VocabWeights, ids: Tensor, chunk: int = 16384) -> tuple[TargetLaw, Tensor]:
    """The law of last_hidden states [S, D] at ascending target ids [Vd], and the likeliest token [S] of all V.

    Log-sum-exp and argmax are gathered from `chunk` columns at a time, in float32.
    """
    drafted = states.new_empty(states.shape[0], len(ids), dtype=torch.float32)  # [S, Vd]
    normaliser = states.new_full(states.shape[:1], float("-inf"), dtype=torch.float32)  # [S]
    best, choice = normaliser.clone(), torch.zeros_like(normaliser, dtype=torch.long)
    total = target.lm_head.shape[0]
    firsts = list(range(0, total, chunk))
    # Which of the ids lie in each chunk: they ascend, so those of a chunk stand together.
    borders = torch.searchsorted(ids, torch.tensor([*firsts, total], device=ids.device)).tolist()
    with torch.autocast(states.device.type, enabled=False):
        for number, first in enumerate(firsts):
            logits = target.logits(states, slice(first, first + chunk)).float()  # [S, chunk]
            normaliser = torch.logaddexp(normaliser, logits.logsumexp(-1))
            highest, place = logits.max(-1)
            choice = torch.where(highest > best, place + first, choice)  # of equals the first, as argmax has it
            best = torch.maximum(highest, best)
            inside = slice(borders[number], borders[number + 1])
            drafted[:, inside] = logits[:, ids[inside] - first]
    return TargetLaw.of_logits(drafted, normaliser), choice


Sum = Callable[..., tuple[Tensor, ...]]
Pieces = Sequence[tuple[Any, ...]]


def remade(sums: Sum, pieces: Pieces) -> Sum:
    """sums itself for one piece; else it is computed again in the backward pass, to hold the logits of one piece."""
    return sums if len(pieces) <= 1 else partial(checkpoint, sums, use_reentrant=False)


def added(sums: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What the pieces' sums add up to."""
    return sums[0] if len(sums) == 1 else tuple(torch.stack(column).sum(0) for column in zip(*sums, strict=True))


def _calls(count: int, device: torch.device) -> int:
    """How often every process has to call the LM head, of which this one's share needs `count` calls."""
    # ZeRO-3 gathers it at each call. Held-out rows are measured with whole copies, in each process as many as it has.
    if not (torch.is_grad_enabled() and are_many()):
        return count
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def in_chunks(columns: Sequence[Tensor], chunk: int) -> Pieces:
    """Columns [S, ...] cut into pieces of `chunk` slots."""
    pieces = list(zip(*(column.split(chunk) for column in columns), strict=True))
    missing = _calls(len(pieces), columns[0].device) - len(pieces)
    return pieces + [tuple(column[:0] for column in columns)] * missing


def by_target_state(states: Tensor, which: list[Tensor], columns: list[list[Tensor]], at_once: int) -> Pieces:
    """Pieces (states, which, *columns) with at most `at_once` of the target's states [S0, D].

    A state goes with all that is compared with it: which holds for each head or step the states [S_k] of its slots,
    each of the columns tensors [S_k, ...] beside them.
    """
    groups = _calls(-(-states.shape[0] // at_once), states.device)
    if groups <= 1:
        return [(states, which, *columns)]
    # A process with fewer states than another has empty pieces at the end.
    goals = [*states.split(at_once), *[states[:0]] * groups][:groups]
    # Slots are sorted by their state, so that those of a piece stand together and can be split off.
    orders = [place.argsort(stable=True) for place in which]
    sizes = [(place // at_once).bincount(minlength=groups).tolist() for place in which]
    cut = [
        [column[order].split(size) for column, order, size in zip(table, orders, sizes, strict=True)]
        for table in ([place % at_once for place in which], *columns)
    ]
    return [(goal, *([column[at] for column in table] for table in cut)) for at, goal in enumerate(goals)]


def likeliest(logits: Callable[[Tensor], Tensor], states: Tensor, chunk: int) -> Tensor:
    """argmax [S] of logits(states [S, D]), the logits of `chunk` slots at a time."""
    return torch.cat([logits(some).argmax(-1) for some in states.split(chunk)])


def chain_sums(hits: Tensor, alive: Tensor) -> Sums:
    """The sums of predicted tau - 1 (a mean over starts of sum_k prod_{j<=k} hit_j) and of the accuracy at each depth.

    hits and alive, float [depths, B, T-1]: where depth k drafts the target's likeliest token, and where it counts.
    """
    accuracies = {f"accuracy_at_{depth + 1}": (hits[depth].sum(), alive[depth].sum()) for depth in range(len(hits))}
    return {"chain": (hits.cumprod(0).sum(), alive[0].sum()), **accuracies}
