"""Losses and measures of S slots, in float32 and nats: log q [S, Vd] is the draft's law, log p the target's."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.schema.heads import LossName, TrainConfig
from aerie.model.target import VocabWeights
from aerie.train.processes import world_size

SumsAndCounts = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count) of a mean
Totals = tuple[Tensor, ...]
Pieces = Sequence[tuple[Any, ...]]  # of each call, its arguments for some of the slots


@dataclass(frozen=True)
class TargetLaw:
    """The target's law over a draft vocabulary: `inside` it, for losses that compare laws; `whole`, for acceptance."""

    log_p: Tensor  # [S, Vd], renormalised over the draft vocabulary
    log_mass: Tensor  # [S], log of the draft vocabulary's share of the full law
    slots: Tensor | None = None  # [n], indices into the S laws, which unroll steps share; None: all

    @classmethod
    def of_logits(cls, logits: Tensor, log_normaliser: Tensor | None = None) -> "TargetLaw":
        """From logits [S, Vd] and the full vocabulary's log-sum-exp [S] (None: that of the logits)."""
        log_p = logits.float().log_softmax(-1)
        if log_normaliser is None:
            return cls(log_p, log_p.new_zeros(log_p.shape[:1]))
        return cls(log_p, logits.float().logsumexp(-1) - log_normaliser)

    @property
    def inside(self) -> Tensor:
        return self.log_p if self.slots is None else self.log_p[self.slots]

    @property
    def whole(self) -> Tensor:
        """log p [S, Vd] of the full law: sums to at most one."""
        laws = self.log_p + self.log_mass[:, None]
        return laws if self.slots is None else laws[self.slots]


def smooth_l1(predicted: Tensor, true: Tensor) -> Tensor:
    """[S] from features [S, D]: a mean over D (EAGLE, arXiv 2401.15077, section 4.1, L_reg)."""
    return F.smooth_l1_loss(predicted.float(), true.float(), reduction="none", beta=1.0).mean(-1)


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: KL(p || q)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def jensen_shannon(log_q: Tensor, law: TargetLaw, config: TrainConfig) -> Tensor:
    """[S]: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (DistillSpec, arXiv 2310.08461)."""
    log_p, beta = law.inside, config.jsd_beta
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))  # [S, Vd]
    return beta * kl(log_m, log_p) + (1.0 - beta) * kl(log_m, log_q)


def acceptance_rate(log_q: Tensor, log_p: Tensor) -> Tensor:
    """[S]: alpha = sum_v min(p(v), q(v)) (arXiv 2211.17192, theorem 3.5)."""
    return torch.minimum(log_q, log_p).exp().sum(-1)


def lk_hybrid(log_q: Tensor, law: TargetLaw, config: TrainConfig) -> Tensor:
    """[S]: lambda KL(p || q) + (1 - lambda) TV(p, q), lambda = exp(-eta alpha) (LK losses, arXiv 2602.23881)."""
    # The mix has no gradient. KL is within the draft vocabulary, alpha and TV are not.
    alpha = acceptance_rate(log_q, law.whole)
    mix = torch.exp(-config.lk_eta * alpha.detach())
    return mix * kl(log_q, law.inside) + (1.0 - mix) * (1.0 - alpha)


LOSSES: dict[
    LossName, Callable[[Tensor, TargetLaw, TrainConfig], Tensor]
] = {  # losses [S] between log q and the law
    # -sum_v p(v) log q(v) (EAGLE, arXiv 2401.15077, section 4.1, L_cls)
    "soft_cross_entropy": lambda log_q, law, _: -(law.inside.exp() * log_q).sum(-1),
    "kl": lambda log_q, law, _: kl(log_q, law.inside),
    "reverse_kl": lambda log_q, law, _: kl(law.inside, log_q),
    "jsd": jensen_shannon,
    # TV = 1 - alpha (arXiv 2211.17192, lemma 3.3): mass outside the draft vocabulary counts as distance.
    "total_variation": lambda log_q, law, _: 1.0 - acceptance_rate(log_q, law.whole),
    # LK losses' likelihood form (arXiv 2602.23881): has a gradient even if alpha is 0 in float32.
    "negative_log_alpha": lambda log_q, law, _: -torch.minimum(log_q, law.whole).logsumexp(-1),
    "lk_hybrid": lk_hybrid,
}


class LogNormaliser(torch.autograd.Function):
    """The log-sum-exp [S] of logits [S, V], and log q [S, V] without a gradient: half the memory of torch's own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Totals:
        log_q = logits.log_softmax(-1)
        ctx.save_for_backward(log_q)
        ctx.mark_non_differentiable(log_q)
        best = log_q.argmax(-1, keepdim=True)  # where the difference is exact
        return (logits.gather(-1, best) - log_q.gather(-1, best))[:, 0], log_q

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return ctx.saved_tensors[0].exp().mul_(gradients[0][:, None])


@torch.no_grad()
def drafted_law(
    states: Tensor, target: VocabWeights, ids: Tensor, chunk: int = 16384
) -> tuple[TargetLaw, Tensor]:
    """The law of states [S, D] at ascending ids [Vd] (on the host) and the likeliest tokens [S], in column chunks."""
    drafted = states.new_empty(states.shape[0], len(ids), dtype=torch.float32)  # [S, Vd]
    normaliser = states.new_full(states.shape[:1], float("-inf"), dtype=torch.float32)  # [S]
    best, choice = normaliser.clone(), torch.zeros_like(normaliser, dtype=torch.long)
    total = target.lm_head.shape[0]
    firsts = list(range(0, total, chunk))
    # Ids ascend, so those of a chunk stand together.
    borders = torch.searchsorted(ids, torch.tensor([*firsts, total])).tolist()
    with torch.autocast(states.device.type, enabled=False):
        for number, first in enumerate(firsts):
            logits = target.logits(states, slice(first, first + chunk)).float()  # [S, chunk]
            normaliser = torch.logaddexp(normaliser, logits.logsumexp(-1))
            highest, place = logits.max(-1)
            choice = torch.where(
                highest > best, place + first, choice
            )  # the first of equals, as argmax
            best = torch.maximum(highest, best)
            inside = slice(borders[number], borders[number + 1])
            columns = (ids[inside] - first).to(states.device, non_blocking=True)
            drafted[:, inside] = logits[:, columns]
    return TargetLaw.of_logits(drafted, normaliser), choice


def by_piece(
    totals: Callable[..., Totals],
    pieces: Pieces,
    once: Callable[..., tuple[Any, ...]] = lambda *piece: piece,
) -> Iterator[Totals]:
    """totals(*once(*piece)) of each piece. The backward pass starts with the last and recomputes all other totals."""
    # No check: a frozen LM head that ZeRO-3 has released looks empty until the backward pass gathers it.
    again = partial(checkpoint, totals, use_reentrant=False, determinism_check="none")
    earlier, last = (starmap(once, some) for some in (pieces[:-1], pieces[-1:]))
    return chain(starmap(again, earlier), starmap(totals, last))


def summed(parts: Sequence[Totals]) -> Totals:
    return tuple(torch.stack(column).sum(0) for column in zip(*parts, strict=True))


def _calls(count: int, device: torch.device) -> int:
    # ZeRO-3 gathers the LM head at each call, so every process must call it equally often. Evaluation has whole copies.
    if world_size() == 1 or not torch.is_grad_enabled():
        return count
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def in_chunks(columns: Sequence[Tensor], chunk: int) -> Pieces:
    """Columns [S, ...] in pieces of at most `chunk` slots, equally many in every process."""
    pieces = list(zip(*(column.split(chunk) for column in columns), strict=True))
    missing = _calls(len(pieces), columns[0].device) - len(pieces)
    return pieces + [tuple(column[:0] for column in columns)] * missing


def by_target_state(
    states: Tensor, which: list[Tensor], columns: list[list[Tensor]], at_once: int
) -> Pieces:
    """Pieces of at most `at_once` target states [S0, D], with each head's slots: `which` (host) and columns [S_k]."""
    groups = _calls(-(-states.shape[0] // at_once), states.device)
    if groups <= 1:
        return [(states, which, *columns)]
    # A process with fewer states than others ends in empty pieces.
    goals = [*states.split(at_once), *[states[:0]] * groups][:groups]
    orders = [place.argsort(stable=True) for place in which]
    sizes = [(place // at_once).bincount(minlength=groups).tolist() for place in which]
    cut = list[list[Sequence[Tensor]]]()
    for table in ([place % at_once for place in which], *columns):
        sorted_ = [
            x[order.to(x.device, non_blocking=True)] for x, order in zip(table, orders, strict=True)
        ]
        cut.append([x.split(size) for x, size in zip(sorted_, sizes, strict=True)])
    return [
        (goal, *([column[at] for column in table] for table in cut))
        for at, goal in enumerate(goals)
    ]


def argmax_in_chunks(logits: Callable[[Tensor], Tensor], states: Tensor, chunk: int) -> Tensor:
    """argmax [S] of logits(states [S, D]), `chunk` slots at a time."""
    return torch.cat([logits(some).argmax(-1) for some in states.split(chunk)])
