"""Losses and measures of S slots, in float32 and nats.

log q [S, Vd] is the head's distribution over the draft vocabulary, and log p is the target's. The
code calls both laws.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, starmap
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from aerie.configs.errors import world_size
from aerie.configs.schema.heads import LossName, TrainConfig
from aerie.model.vocab_weights import VocabWeights

SumsAndCounts = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count) of a mean
P = TypeVar("P")  # a piece: some of the slots, with what is known about them
Sums = dict[str, Tensor]  # name -> sum over the slots of a piece


@dataclass(frozen=True)
class TargetLaw:
    """The target's law. `inside` covers the draft vocabulary, for losses that compare laws; `whole`
    the full vocabulary, for acceptance."""

    log_p: Tensor  # [S, Vd], renormalised over the draft vocabulary
    log_mass: Tensor  # [S], log of the draft vocabulary's share of the full law
    slots: Tensor | None = None  # [n], indices into the S laws, one per slot; None means all S

    @classmethod
    def of_logits(cls, logits: Tensor, log_normaliser: Tensor | None = None) -> "TargetLaw":
        """The law of logits [S, Vd]. log_normaliser [S] is the log-sum-exp over the full
        vocabulary; None if the logits cover it."""
        log_p = logits.float().log_softmax(-1)
        if log_normaliser is None:
            return cls(log_p, log_p.new_zeros(log_p.shape[:1]))
        return cls(log_p, logits.float().logsumexp(-1) - log_normaliser)

    @property
    def inside(self) -> Tensor:
        """log p [S, Vd] within the draft vocabulary; sums to one."""
        return self.log_p if self.slots is None else self.log_p[self.slots]

    @property
    def whole(self) -> Tensor:
        """log p [S, Vd] of the full law at the draft vocabulary's ids; sums to at most one."""
        laws = self.log_p + self.log_mass[:, None]
        return laws if self.slots is None else laws[self.slots]


def smooth_l1(predicted: Tensor, true: Tensor) -> Tensor:
    """The loss [S] of features [S, D], as a mean over D (EAGLE, arXiv 2401.15077, section 4.1,
    L_reg)."""
    return F.smooth_l1_loss(predicted.float(), true.float(), reduction="none", beta=1.0).mean(-1)


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(p || q) [S] of laws [S, V]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def jensen_shannon(log_q: Tensor, law: TargetLaw, config: TrainConfig) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) [S], with m = beta p + (1 - beta) q (DistillSpec,
    arXiv 2310.08461)."""
    log_p = law.inside
    beta = config.jsd_beta
    # In logarithms, m is finite even where p or q is 0 in float32.
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))  # [S, Vd]
    return beta * kl(log_m, log_p) + (1.0 - beta) * kl(log_m, log_q)


def acceptance_rate(log_q: Tensor, log_p: Tensor) -> Tensor:
    """alpha = sum_v min(p(v), q(v)) [S] (arXiv 2211.17192, theorem 3.5)."""
    return torch.minimum(log_q, log_p).exp().sum(-1)


def lk_hybrid(log_q: Tensor, law: TargetLaw, config: TrainConfig) -> Tensor:
    """lambda KL(p || q) + (1 - lambda) TV(p, q) [S], with lambda = exp(-eta alpha) (LK losses,
    arXiv 2602.23881)."""
    # lambda has no gradient. KL is within the draft vocabulary, alpha and TV use the whole law.
    alpha = acceptance_rate(log_q, law.whole)
    mix = torch.exp(-config.lk_eta * alpha.detach())
    return mix * kl(log_q, law.inside) + (1.0 - mix) * (1.0 - alpha)


LossFunction = Callable[[Tensor, TargetLaw, TrainConfig], Tensor]
LOSSES: dict[LossName, LossFunction] = {  # each gives [S] from log q and the target's law
    # -sum_v p(v) log q(v) (EAGLE, arXiv 2401.15077, section 4.1, L_cls)
    "soft_cross_entropy": lambda log_q, law, _: -(law.inside.exp() * log_q).sum(-1),
    "kl": lambda log_q, law, _: kl(log_q, law.inside),
    "reverse_kl": lambda log_q, law, _: kl(law.inside, log_q),
    "jsd": jensen_shannon,
    # TV = 1 - alpha (arXiv 2211.17192, lemma 3.3). Mass outside the draft vocabulary adds to it.
    "total_variation": lambda log_q, law, _: 1.0 - acceptance_rate(log_q, law.whole),
    # LK's likelihood loss (arXiv 2602.23881). It has a gradient even if alpha is 0 in float32.
    "negative_log_alpha": lambda log_q, law, _: -torch.minimum(log_q, law.whole).logsumexp(-1),
    "lk_hybrid": lk_hybrid,
}


class LogNormaliser(torch.autograd.Function):
    """The log-sum-exp [S] of logits [S, V], and log q [S, V] without a gradient. torch's own
    functions would take twice the memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        log_q = logits.log_softmax(-1)
        ctx.save_for_backward(log_q)
        ctx.mark_non_differentiable(log_q)
        # In every column, log-sum-exp = logit - log q. The largest logit loses no digits.
        best = log_q.argmax(-1, keepdim=True)  # [S, 1]
        return (logits.gather(-1, best) - log_q.gather(-1, best))[:, 0], log_q

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (log_q,) = ctx.saved_tensors
        return log_q.exp().mul_(gradients[0][:, None])  # the softmax, in place


@torch.no_grad()
def drafted_law(
    states: Tensor, target: VocabWeights, ids: Tensor, chunk: int = 16384
) -> tuple[TargetLaw, Tensor]:
    """The target's law of states [S, D] at the ascending ids [Vd], which are on the host, and its
    most likely tokens [S]. Reads the vocabulary `chunk` columns at a time."""
    # Logits of 128k columns for every slot would not fit, so the loop keeps running results.
    drafted = states.new_empty(states.shape[0], len(ids), dtype=torch.float32)  # [S, Vd]
    normaliser = states.new_full(states.shape[:1], float("-inf"), dtype=torch.float32)  # [S]
    best = normaliser.clone()  # [S], the highest logit so far
    choice = torch.zeros_like(normaliser, dtype=torch.long)  # [S], its token
    total = target.lm_head.shape[0]
    # The ids ascend, so those in chunk n are ids[borders[n] : borders[n + 1]].
    borders = torch.searchsorted(ids, torch.tensor([*range(0, total, chunk), total])).tolist()
    with torch.autocast(states.device.type, enabled=False):
        for first, inside in zip(
            range(0, total, chunk), starmap(slice, pairwise(borders)), strict=True
        ):
            logits = target.logits(states, slice(first, first + chunk)).float()  # [S, chunk]
            normaliser = torch.logaddexp(normaliser, logits.logsumexp(-1))
            highest, column = logits.max(-1)
            # Among equal logits the first one counts, as in argmax.
            choice = torch.where(highest > best, column + first, choice)
            best = torch.maximum(highest, best)
            columns = (ids[inside] - first).to(states.device, non_blocking=True)
            drafted[:, inside] = logits[:, columns]
    return TargetLaw.of_logits(drafted, normaliser), choice


# --- pieces: the laws of few slots at a time ---


class Piece(NamedTuple):
    """Some of the target's states, with all slots whose laws come from them. k counts unroll steps,
    heads, or positions of a block."""

    states: Tensor  # [s, D]
    which: list[Tensor]  # per k [n_k], on the host: for each slot, the index of its state
    columns: list[list[Tensor]]  # per column and k [n_k, ...]: more about the slots

    @classmethod
    def of_own_states(cls, states: Tensor, *columns: Tensor) -> "Piece":
        """A piece in which every slot has a state of its own."""
        return cls(states, [torch.arange(len(states))], [[column] for column in columns])


def by_piece(
    sums_of: Callable[[Any], Sums],
    pieces: list[P],
    prepare: Callable[[P], Any] = lambda piece: piece,
) -> Iterator[Sums]:
    """Yields sums_of(prepare(piece)) for each piece.

    Only the last piece keeps its laws, because the backward pass starts there. For all other pieces
    the backward pass runs sums_of again, but never `prepare`.
    """
    # The determinism check must be off: an LM head that ZeRO-3 has released looks empty until the
    # backward pass gathers it.
    recomputed = partial(checkpoint, sums_of, use_reentrant=False, determinism_check="none")
    earlier = map(recomputed, map(prepare, pieces[:-1]))
    return chain(earlier, map(sums_of, map(prepare, pieces[-1:])))


def added(parts: list[Sums]) -> Sums:
    """The sums over all pieces."""
    totals = {}
    for name in parts[0]:
        totals[name] = torch.stack([part[name] for part in parts]).sum(0)
    return totals


def _agreed_count(count: int, device: torch.device) -> int:
    """The largest count of any process. ZeRO-3 gathers the LM head at each call, so every process
    must call it equally often. Evaluation has complete copies, and keeps the count."""
    # A plan rehearses a step in one process, even if the job will have several.
    is_alone = world_size() == 1 or not torch.distributed.is_initialized()
    if is_alone or not torch.is_grad_enabled():
        return count
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def by_target_state(slots: Piece, at_once: int) -> list[Piece]:
    """The slots in pieces of at most `at_once` target states. Every process gets equally many
    pieces."""
    device = slots.states.device
    # Rounded up: the last piece may be smaller.
    count = _agreed_count(-(-slots.states.shape[0] // at_once), device)
    if count <= 1:
        return [slots]
    # A process with fewer states than others gets empty pieces at the end.
    parts = [*slots.states.split(at_once), *[slots.states[:0]] * count]
    pieces = [Piece(states, [], [[] for _ in slots.columns]) for states in parts[:count]]
    for k, which in enumerate(slots.which):
        # In the order of their states, the slots of a piece are neighbours.
        order = which.argsort(stable=True)
        sizes = (which // at_once).bincount(minlength=count).tolist()
        within = (which % at_once)[order]  # in each piece, states count from 0
        for piece, numbers in zip(pieces, within.split(sizes), strict=True):
            piece.which.append(numbers)
        order = order.to(device, non_blocking=True)
        for number, column in enumerate(slots.columns):
            for piece, rows in zip(pieces, column[k][order].split(sizes), strict=True):
                piece.columns[number].append(rows)
    return pieces


def argmax_in_chunks(logits: Callable[[Tensor], Tensor], states: Tensor, chunk: int) -> Tensor:
    """The argmax [S] of logits(states [S, D]), which are computed for `chunk` slots at a time."""
    return torch.cat([logits(part).argmax(-1) for part in states.split(chunk)])
