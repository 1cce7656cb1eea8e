"""Every law that the head proposed on the accepted path, against the target's law at the same place."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.calibration.acceptance import acceptance
from infer.proposer import Cycle
from infer.records import FloatArray, IntArray
from infer.stops.entropy import entropy
from infer.watch import Growth


@dataclass(frozen=True)
class LawArrays:
    """n laws q below accepted nodes that drafted at least one child; y is the child that was proposed first.

    p and q are what verification sees: after the processors where children are drawn from q, else q as the head has it;
    at temperature 0 both are plain softmaxes. Divergences in nats.
    """

    prompt: IntArray  # [n]
    cycle: IntArray  # [n] number of the cycle in its prompt
    depth: IntArray  # [n] of y
    token: IntArray  # [n] y
    q: FloatArray  # [n] q(y)
    p: FloatArray  # [n] p(y)
    acceptance: FloatArray  # [n] the chance of y, 0 or 1 at temperature 0
    accepted: NDArray[np.bool_]  # [n] y is on the accepted path
    followed: NDArray[np.bool_]  # [n] some child is
    largest_gap: FloatArray  # [n] the largest |q(x) - p(x)| of the children x that were drafted
    top_q: FloatArray  # [n] q of its most probable token: DEAGLE's c
    agrees: NDArray[np.bool_]  # [n] that token is p's most probable one: DEAGLE's a
    tvd: FloatArray  # [n]
    kl_pq: FloatArray  # [n] KL(p || q); inf where the draft's vocabulary misses what p gives a chance
    kl_qp: FloatArray  # [n] KL(q || p); inf where a processor struck out what q gives a chance
    entropy: FloatArray  # [n] H(q)
    ranked: FloatArray  # [n, R] log q of the 1st, 2nd, 4th, 8th ... most probable token


FLAGS = ("accepted", "followed", "agrees")
INTEGERS = ("prompt", "cycle", "depth", "token")


class LawRecorder:
    """Called after each cycle of a watched decoder (infer/watch.py); `prompt` is the number of the prompt."""

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.prompt = 0
        self.cycle = 0
        self._rows: list[dict[str, Any]] = []

    def start(self, prompt: int) -> None:
        """The next prompt."""
        self.prompt, self.cycle = prompt, 0

    def __call__(self, cycle: Cycle) -> None:
        number, self.cycle = self.cycle, self.cycle + 1
        tree, verdict = cycle.tree, cycle.verdict
        families = _families(cycle)
        if not families:
            return
        nodes = list(families)
        laws = self.growth.laws()
        raw = torch.stack([laws[tuple(verdict.tokens[: verdict.path.index(node)])] for node in nodes])  # [M, Vd]
        log_q = raw if tree.proposal is None else cycle.sampler.log_law(raw)
        log_p = cycle.sampler.log_law(cycle.step.logits[nodes])
        columns = _columns(log_q.double().log_softmax(-1), log_p.double().log_softmax(-1), self.growth.target_ids())
        children = [[int(tree.tokens[child]) for child in families[node]] for node in nodes]
        chances, path = acceptance(cycle), set(verdict.path)
        for place, node in enumerate(nodes):
            first = families[node][0]
            self._rows.append(
                {
                    "prompt": self.prompt,
                    "cycle": number,
                    "depth": int(tree.depth[first]),
                    "token": children[place][0],
                    "acceptance": float(chances[first]),
                    "accepted": first in path,
                    "followed": any(child in path for child in families[node]),
                    **columns.row(place, children[place]),
                }
            )

    def arrays(self) -> LawArrays:
        """What was collected so far."""
        width = len(self._rows[0]["ranked"]) if self._rows else 0
        found: dict[str, Any] = {}
        for field in fields(LawArrays):
            kind = np.bool_ if field.name in FLAGS else np.int64 if field.name in INTEGERS else np.float64
            found[field.name] = np.array([row[field.name] for row in self._rows], dtype=kind)
        found["ranked"] = found["ranked"].reshape(len(self._rows), width)
        return LawArrays(**found)


@dataclass(frozen=True)
class _Columns:
    q: Tensor  # [M, V] zero where the draft has no word
    p: Tensor  # [M, V]
    values: dict[str, list[Any]]

    def row(self, place: int, children: Sequence[int]) -> dict[str, Any]:
        q, p = self.q[place, list(children)], self.p[place, list(children)]
        own = {"q": float(q[0]), "p": float(p[0]), "largest_gap": float((q - p).abs().max())}
        return {**own, **{name: values[place] for name, values in self.values.items()}}


def _columns(log_q: Tensor, log_p: Tensor, ids: Tensor) -> _Columns:
    """What is said of laws log q [M, Vd] over the target's ids [Vd], and log p [M, V]; both normalised, float64."""
    q_own, p_own = log_q.exp(), log_p.exp()[:, ids]  # [M, Vd]
    q = torch.zeros_like(log_p).index_copy_(1, ids, q_own)  # [M, V]
    p = log_p.exp()
    log_q_wide = torch.full_like(log_p, float("-inf")).index_copy_(1, ids, log_q)
    ranks = [2**power - 1 for power in range(log_q.shape[-1].bit_length()) if 2**power <= log_q.shape[-1]]
    values = {
        "top_q": q_own.max(-1).values,
        "agrees": ids[log_q.argmax(-1)] == log_p.argmax(-1),
        "tvd": 1.0 - torch.minimum(p_own, q_own).sum(-1).clamp(max=1.0),
        "kl_pq": torch.where(p > 0, p * (log_p - log_q_wide), 0.0).sum(-1).clamp(min=0.0),
        "kl_qp": torch.where(q_own > 0, q_own * (log_q - log_p[:, ids]), 0.0).sum(-1).clamp(min=0.0),
        "entropy": entropy(log_q),
        "ranked": log_q.sort(-1, descending=True).values[:, ranks],
    }
    return _Columns(q, p, {name: value.tolist() for name, value in values.items()})


def _families(cycle: Cycle) -> dict[int, list[int]]:
    """The drafted children of each accepted node that has some, in the order in which they were proposed."""
    tree, path = cycle.tree, set(cycle.verdict.path)
    rides = [False] * len(tree) if tree.passengers is None else tree.passengers.tolist()
    found: dict[int, list[int]] = {}
    for child, parent in list(enumerate(tree.parents.tolist()))[1:]:
        if parent in path and not rides[child]:
            found.setdefault(parent, []).append(child)
    return found
