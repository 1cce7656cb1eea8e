"""How a draft head's confidence predicts acceptance: reliability, ECE, Brier, by depth and by half of the prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import digamma, gammainc
from torch import Tensor

from aerie.infer.decode.proposer import Cycle
from aerie.infer.decode.stop import entropy
from aerie.infer.decode.tree import Tree
from aerie.infer.measure.cycles import Growth, Path, acceptance, asked
from aerie.infer.measure.record import CycleArrays, FloatArray, IntArray


@dataclass(frozen=True)
class Bin:
    """One bin [low, high) of confidence (the last one closed); the means are None where count is 0."""

    low: float
    high: float
    count: int
    confidence: float | None
    acceptance: float | None


def reliability(confidence: FloatArray, acceptance: FloatArray, bins: int = 20) -> list[Bin]:
    """Mean confidence and mean acceptance in bins of equal width over [0, 1].

    Source: EAGLE-2 (arXiv 2406.16858), section 3.2 and its figure of acceptance against confidence.
    """
    # the tolerance keeps float32 values such as 0.15 (stored as 0.15000001 or 0.1499999) on the side of their edge
    index = np.clip(np.floor(confidence * bins + 1e-6).astype(np.int64), 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    confidences = np.bincount(index, weights=confidence, minlength=bins)
    acceptances = np.bincount(index, weights=acceptance, minlength=bins)
    return [
        Bin(
            low=round(position / bins, 9),
            high=round((position + 1) / bins, 9),
            count=int(count),
            confidence=float(confidences[position] / count) if count else None,
            acceptance=float(acceptances[position] / count) if count else None,
        )
        for position, count in enumerate(counts)
    ]


def ece(bins: Sequence[Bin]) -> float | None:
    """Expected calibration error: |mean confidence - mean acceptance| averaged over the nodes; None without nodes."""
    total = sum(item.count for item in bins)
    if not total:
        return None
    gaps = (
        item.count * abs(item.confidence - item.acceptance)
        for item in bins
        if item.confidence is not None and item.acceptance is not None
    )
    return float(sum(gaps) / total)


def brier(confidence: FloatArray, acceptance: FloatArray) -> float | None:
    """Expected squared error of confidence against the accept-or-reject outcome; None without nodes.

    An outcome is 1 with probability a = acceptance, so the expectation is c^2 - 2ca + a, which is (c - a)^2 for
    a in {0, 1}: the figures of T = 0 and T > 0 are on one scale.
    """
    if not confidence.size:
        return None
    return float(np.mean(confidence**2 - 2.0 * confidence * acceptance + acceptance))


def by_depth(arrays: CycleArrays) -> list[dict[str, Any]]:
    """Per depth d: reached nodes with their means, and how often a cycle's accepted length is at least d.

    `survived` is P(accepted length >= d) over all cycles; `conditional` is the same among cycles that got to d - 1.
    """
    deepest = int(max(arrays.depth.max(initial=0), arrays.accepted_length.max(initial=0)))
    num_cycles = arrays.accepted_length.size
    rows: list[dict[str, Any]] = []
    for depth in range(1, deepest + 1):
        at_depth = arrays.depth == depth
        nodes = int(at_depth.sum())
        before = int((arrays.accepted_length >= depth - 1).sum())
        survived = int((arrays.accepted_length >= depth).sum())
        rows.append(
            {
                "depth": depth,
                "nodes": nodes,
                "confidence": float(arrays.confidence[at_depth].mean()) if nodes else None,
                "acceptance": float(arrays.acceptance[at_depth].mean()) if nodes else None,
                "cycles": before,
                "survived": survived / num_cycles if num_cycles else None,
                "conditional": survived / before if before else None,
            }
        )
    return rows


def is_held_out(prompt: int, seed: int = 0) -> bool:
    """True for the half of the prompts, by hash, on which a calibration that was fitted on the other half is judged."""
    return hashlib.sha256(f"{seed}:{prompt}".encode()).digest()[0] % 2 == 1


def summarise(arrays: CycleArrays, bins: int = 20, seed: int = 0) -> dict[str, Any]:
    """The content of calibration.json: temperature, ece, brier, bins, by_depth and the two halves of the prompts."""
    everything = np.ones(arrays.prompt.shape, dtype=bool)  # [n]
    held_out_prompts = [int(prompt) for prompt in np.unique(arrays.prompt) if is_held_out(int(prompt), seed)]
    held_out = np.isin(arrays.prompt, held_out_prompts)  # [n]
    fit_half = _statistics(arrays, ~held_out, bins)
    held_out_half = _statistics(arrays, held_out, bins)
    whole = _statistics(arrays, everything, bins)
    return {
        "temperature": arrays.temperature,
        "ece": whole["ece"],
        "brier": whole["brier"],
        "bins": whole["bins"],
        "nodes": whole["nodes"],
        "prompts": whole["prompts"],
        "cycles": int(arrays.accepted_length.size),
        "by_depth": by_depth(arrays),
        "halves": {
            "seed": seed,
            "fit": fit_half,
            "held_out": held_out_half,
            "difference": {name: _difference(held_out_half[name], fit_half[name]) for name in ("ece", "brier")},
        },
    }


def _statistics(arrays: CycleArrays, chosen: np.ndarray[Any, np.dtype[np.bool_]], bins: int) -> dict[str, Any]:
    confidence, acceptance = arrays.confidence[chosen], arrays.acceptance[chosen]
    table = reliability(confidence, acceptance, bins)
    return {
        "prompts": int(np.unique(arrays.prompt[chosen]).size),
        "nodes": int(confidence.size),
        "ece": ece(table),
        "brier": brier(confidence, acceptance),
        "bins": [asdict(item) for item in table],
    }


def _difference(held_out: float | None, fit: float | None) -> float | None:
    return None if held_out is None or fit is None else held_out - fit


def branch_reliability(nodes: FrontierArrays, bins: int = 20) -> dict[str, Any]:
    """Bins, ECE and Brier of survival as the chance of a whole branch. Source: DEAGLE, equations 20 and 21."""
    outcome = nodes.accepted.astype(np.float64)
    table = reliability(nodes.survival, outcome, bins)
    return {
        "nodes": int(outcome.size),
        "ece": ece(table),
        "brier": brier(nodes.survival, outcome),
        "bins": [asdict(item) for item in table],
    }


def level_reliability(levels: LevelArrays, bins: int = 20) -> dict[str, Any]:
    """S_d as the chance that the frontier of depth d holds what the target writes: by depth, and in bins.

    `held` is that share; `reached` the share of cycles whose verified tree had d tokens accepted: reranking drops nodes
    of the frontier and keeps others that no frontier had room for, so it may be either side of `held`. Both are among
    the cycles that drafted depth d. `expected` is E_d, the sum of S_d so far, and `mean_reached` that of `reached`.
    Source: DEAGLE (equations 22 to 24).
    """
    outcome = levels.held.astype(np.float64)
    table = reliability(levels.mass, outcome, bins)
    rows, expected, tail = [], 0.0, 0.0
    for depth in range(1, int(levels.depth.max(initial=0)) + 1):
        here = levels.depth == depth
        if not here.any():
            continue
        mass, reached = float(levels.mass[here].mean()), float(levels.reached[here].mean())
        expected, tail = expected + mass, tail + reached
        rows.append(
            {
                "depth": depth,
                "cycles": int(here.sum()),
                "mass": mass,
                "held": float(outcome[here].mean()),
                "reached": reached,
                "expected": expected,
                "mean_reached": tail,
            }
        )
    return {
        "levels": int(outcome.size),
        "ece": ece(table),
        "brier": brier(levels.mass, outcome),
        "bins": [asdict(item) for item in table],
        "by_depth": rows,
    }


SLACK = 1e-9  # rounding of sums over a vocabulary in float64


def pinsker(kl: FloatArray) -> FloatArray:
    """sqrt(KL / 2), the bound on total variation."""
    return np.asarray(np.sqrt(kl / 2.0))


def token_inequalities(laws: LawArrays) -> dict[str, Any]:
    """Shares of laws in which |q(y) - p(y)| <= TV <= sqrt(KL(p||q) / 2) fails for a drafted y; theorems, so zero.

    `gap` is |q(y) - p(y)| of the child proposed first; the failures are counted over all drafted children.
    """
    bound = pinsker(laws.kl_pq)
    return {
        "laws": int(laws.tvd.size),
        "gap_above_tv": _share(laws.largest_gap > laws.tvd + SLACK),
        "tv_above_bound": _share(laws.tvd > bound + SLACK),
        "bound_vacuous": _share(bound >= 1.0),
        "bound_infinite": _share(np.isinf(bound)),
        "gap": _mean(np.abs(laws.q - laws.p)),
        "tv": _mean(laws.tvd),
        "bound": _mean(bound[np.isfinite(bound)]),
    }


def deagle_bound(laws: LawArrays, bins: int = 20) -> dict[str, Any]:
    """How often equations 15 to 19 fail with DEAGLE's own alpha, which is whether argmax q is argmax p (8 to 10).

    Per token alpha is 0 or 1: |alpha - c| against TV (17 and 19, first step) and against sqrt(KL(p||q) / 2) (18 and 19,
    last step). On average alpha is the share of agreement among tokens of about the same c: |alpha - c| of each bin
    of confidence against the bin's mean of either. Equations 15 and 16 bound the same gap by a number that no
    measurement gives (delta_cls) and that stands for the same KL: they fail wherever the last step does if that number
    is the KL of the token.
    """
    alpha, bound = laws.agrees.astype(np.float64), pinsker(laws.kl_pq)
    gap = np.abs(alpha - laws.top_q)
    rows = []
    index = np.clip(np.floor(laws.top_q * bins + 1e-6).astype(np.int64), 0, bins - 1)
    for place in np.unique(index):
        here = index == place
        c, a, tv, limit = (float(v[here].mean()) for v in (laws.top_q, alpha, laws.tvd, bound))
        rows.append(
            {
                "low": place / bins,
                "high": (place + 1) / bins,
                "count": int(here.sum()),
                "confidence": c,
                "agreement": a,
                "tv": tv,
                "bound": limit if np.isfinite(limit) else None,
                "above_tv": abs(a - c) > tv + SLACK,
                "above_bound": abs(a - c) > limit + SLACK,
            }
        )
    counts = np.array([row["count"] for row in rows], dtype=np.float64)
    return {
        "laws": int(gap.size),
        "greedy_agreement": _mean(alpha),
        "confidence": _mean(laws.top_q),
        "above_tv": _share(gap > laws.tvd + SLACK),
        "above_bound": _share(gap > bound + SLACK),
        "above_tv_where_agreed": _share((gap > laws.tvd + SLACK)[laws.agrees]),
        "above_tv_where_not": _share((gap > laws.tvd + SLACK)[~laws.agrees]),
        "bins": rows,
        "tokens_in_bins_above_tv": _weighted([row["above_tv"] for row in rows], counts),
        "tokens_in_bins_above_bound": _weighted([row["above_bound"] for row in rows], counts),
    }


def _share(condition: NDArray[np.bool_]) -> float | None:
    return float(condition.mean()) if condition.size else None


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None


def _weighted(flags: list[bool], counts: FloatArray) -> float | None:
    return float(np.average(np.array(flags, dtype=np.float64), weights=counts)) if flags else None


CS = (0.02, 0.05, 0.1, 0.15, 0.18, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)
PAPER_C = (0.15, 0.18)  # SVIP's released code; its figure 4
POINTS = 80  # of the curves of figure 4
SLACK_entropy_bounds = 1e-9
LEAST_ENTROPY = 1e-6  # nats; below it the ratio is a quotient of rounding errors
HISTOGRAM = tuple(np.round(np.arange(0.0, 5.01, 0.25), 2).tolist())


@dataclass(frozen=True)
class Gamma:
    """The Gamma law of ratio - 1 with shape alpha and rate beta (equation 9)."""

    alpha: float
    beta: float

    def below(self, value: float) -> float:
        """P(X <= value)."""
        return float(gammainc(self.alpha, self.beta * value))


def oracle_bound(kl_qp: FloatArray) -> FloatArray:
    """1 - sqrt(KL(q||p) / 2) [n]; negative where it says nothing."""
    return np.asarray(1.0 - np.sqrt(kl_qp / 2.0))


def approximation(entropy: FloatArray, c: float) -> FloatArray:
    """1 - sqrt(c H(q)) [n]."""
    return np.asarray(1.0 - np.sqrt(c * entropy))


def bretagnolle_huber(kl_qp: FloatArray) -> FloatArray:
    """1 - sqrt(1 - exp(-KL(q||p))) [n], never negative."""
    return np.asarray(1.0 - np.sqrt(-np.expm1(-kl_qp)))


def bounds(laws: LawArrays, c: float) -> dict[str, Any]:
    """Means of beta and of the three bounds, how often each holds, and the curves of figure 4.

    A point of a curve is the mean of neighbours in the order of beta, of bounds cut at -1.

    `tighter` is the share of tokens where Pinsker's bound is above Bretagnolle-Huber's; the means of both are over
    bounds cut at 0, which is all that a negative one says.
    """
    beta = 1.0 - laws.tvd
    found = {
        "oracle": oracle_bound(laws.kl_qp),
        "approximation": approximation(laws.entropy, c),
        "bretagnolle_huber": bretagnolle_huber(laws.kl_qp),
    }
    parts = np.array_split(np.argsort(beta, kind="stable"), min(POINTS, beta.size)) if beta.size else []
    return {
        "c": c,
        "laws": int(beta.size),
        "acceptance": _mean_entropy_bounds(beta),
        "means": {name: _mean_entropy_bounds(values.clip(min=0.0)) for name, values in found.items()},
        "holds": {
            name: _mean_entropy_bounds((beta >= values - SLACK_entropy_bounds).astype(np.float64))
            for name, values in found.items()
        },
        "tighter": _mean_entropy_bounds((found["oracle"] > found["bretagnolle_huber"]).astype(np.float64)),
        "curve": {
            name: [float(values[part].clip(min=-1.0).mean()) for part in parts]
            for name, values in {"acceptance": beta, **found}.items()
        },
    }


def entropy_ratio(laws: LawArrays) -> FloatArray:
    """CE(q, p) / H(q) [m] of the laws with a finite one and an entropy that can be divided by."""
    usable = (laws.entropy >= LEAST_ENTROPY) & np.isfinite(laws.kl_qp)
    return np.asarray(1.0 + laws.kl_qp[usable] / laws.entropy[usable])


def fit_gamma(excess: FloatArray) -> Gamma | None:
    """The most likely Gamma law of values [m] > 0 (ratio - 1); null for fewer than two different ones.

    Shape alpha solves log(alpha) - digamma(alpha) = log(mean) - mean(log), and the rate is alpha / mean.
    """
    values = excess[excess > 0]
    if values.size < 2 or np.ptp(values) == 0:
        return None
    mean = float(values.mean())
    gap = float(np.log(mean) - np.log(values).mean())
    alpha = float(brentq(lambda a: np.log(a) - digamma(a) - gap, 1e-6, 1e9))
    return Gamma(alpha, alpha / mean)


def ratio_distribution(laws: LawArrays) -> dict[str, Any]:
    """Quantiles and histogram of ratio - 1, and its Gamma fit with the expected histogram (equation 9, appendix C)."""
    excess = entropy_ratio(laws) - 1.0
    fitted = fit_gamma(excess)
    edges = list(HISTOGRAM)
    counts = np.histogram(excess, bins=[*edges, np.inf])[0] if excess.size else np.zeros(len(edges), dtype=np.int64)
    expected = None
    if fitted is not None:
        below = [fitted.below(edge) for edge in edges] + [1.0]
        expected = (np.diff(below) * excess.size).tolist()
    return {
        "laws": int(excess.size),
        "left_out": int(laws.entropy.size - excess.size),
        "mean": _mean_entropy_bounds(excess),
        "quantiles": {q: float(np.quantile(excess, float(q))) for q in ("0.1", "0.5", "0.9")} if excess.size else None,
        "gamma": None if fitted is None else {"alpha": fitted.alpha, "beta": fitted.beta},
        "edges": edges,  # the last bin is open
        "counts": counts.tolist(),
        "expected": expected,
    }


def shares_by_c(laws: LawArrays, cs: Sequence[float] = CS) -> list[dict[str, Any]]:
    """For each c: how often the approximation is below the oracle bound, and below beta itself; and its mean.

    `conservative`: ratio <= 2c + 1 (equation 8), of the laws with a ratio; `gamma`: the same by the Gamma fit
    (equation 9); `holds`: beta >= 1 - sqrt(c H), of all laws; `bound`: the mean, cut at 0.
    """
    ratio = entropy_ratio(laws)
    fitted = fit_gamma(ratio - 1.0)
    beta = 1.0 - laws.tvd
    rows = []
    for c in cs:
        bound = approximation(laws.entropy, c)
        rows.append(
            {
                "c": c,
                "conservative": _mean_entropy_bounds(
                    (ratio <= 2.0 * c + 1.0 + SLACK_entropy_bounds).astype(np.float64)
                ),
                "gamma": None if fitted is None else fitted.below(2.0 * c),
                "holds": _mean_entropy_bounds((beta >= bound - SLACK_entropy_bounds).astype(np.float64)),
                "bound": _mean_entropy_bounds(bound.clip(min=0.0)),
            }
        )
    return rows


def _mean_entropy_bounds(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None


@dataclass(frozen=True)
class FrontierArrays:
    """n nodes of the frontiers, those that reranking dropped included."""

    prompt: IntArray  # [n]
    depth: IntArray  # [n]
    survival: FloatArray  # [n] product of confidence along the branch
    accepted: NDArray[np.bool_]  # [n] the whole branch was what the target wrote


@dataclass(frozen=True)
class LevelArrays:
    """l drafted levels."""

    prompt: IntArray  # [l]
    cycle: IntArray  # [l] number of the cycle in its prompt
    depth: IntArray  # [l] d
    mass: FloatArray  # [l] S_d, the summed survival of the frontier
    held: NDArray[np.bool_]  # [l] one of the frontier's branches was accepted
    reached: NDArray[np.bool_]  # [l] the verified tree had d tokens accepted


@dataclass(frozen=True)
class _Level:
    prompt: int
    cycle: int
    position: int  # of the root in the text
    depth: int
    branches: list[tuple[Path, float]]  # with their survival
    accepted: int
    path: Path | None  # that was accepted; null: the text decides


class FrontierRecorder:
    """Called after each cycle of a watched decoder; `finish` takes the text that the branches are held against.

    Where the target chooses for itself (R0, R2) the text is a draw from its law whatever was drafted, so that a branch
    is in it with the branch's own chance, verified or not. Where children are drawn (R1, R3, R4) every node is in the
    tree, and its branch counts when it was accepted. Levels that reach beyond the text's end are left out.
    """

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.prompt = 0
        self.cycle = 0
        self._waiting: list[_Level] = []
        self._nodes: list[tuple[int, int, float, bool]] = []
        self._levels: list[tuple[int, int, int, float, bool, bool]] = []

    def start(self, prompt: int) -> None:
        """The next prompt."""
        self.prompt, self.cycle = prompt, 0

    def __call__(self, cycle: Cycle) -> None:
        number, self.cycle = self.cycle, self.cycle + 1
        if not cycle.tree.levels:
            return
        found = self.growth.frontiers(cycle.tree.levels)
        frontiers = (
            _whole_levels(cycle.tree)
            if found is None
            else [list(zip(paths, survival.exp().tolist(), strict=True)) for paths, survival in found]
        )
        accepted = cycle.verdict.accepted
        path = None if cycle.rule in ("R0", "R2") else tuple(cycle.verdict.tokens)
        self._waiting += [
            _Level(self.prompt, number, cycle.position, depth, branches, accepted, path)
            for depth, branches in enumerate(frontiers, start=1)
        ]

    def finish(self, text: list[int]) -> None:
        """The token ids of prompt and answer, once the answer is whole."""
        for level in self._waiting:
            if level.position + level.depth >= len(text):
                continue
            after = tuple(text[level.position + 1 : level.position + 1 + level.depth])
            written = after if level.path is None else level.path[: level.depth]
            inside = [branch == written for branch, _ in level.branches]
            self._nodes += [
                (level.prompt, level.depth, survival, accepted)
                for (_, survival), accepted in zip(level.branches, inside, strict=True)
            ]
            mass = min(1.0, sum(survival for _, survival in level.branches))  # rounding, not probability
            reached = level.accepted >= level.depth
            self._levels.append((level.prompt, level.cycle, level.depth, mass, any(inside), reached))
        self._waiting = []

    def nodes(self) -> FrontierArrays:
        prompt, depth, survival, accepted = _columns(self._nodes, 4)
        return FrontierArrays(
            prompt.astype(np.int64), depth.astype(np.int64), survival.clip(0.0, 1.0), accepted.astype(np.bool_)
        )

    def levels(self) -> LevelArrays:
        prompt, cycle, depth, mass, held, reached = _columns(self._levels, 6)
        return LevelArrays(
            prompt.astype(np.int64), cycle.astype(np.int64), depth.astype(np.int64), mass,
            held.astype(np.bool_), reached.astype(np.bool_),
        )  # fmt: skip


def _whole_levels(tree: Tree) -> list[list[tuple[Path, float]]]:
    """Every node of each drafted level with its survival, of a tree that is its own frontier."""
    paths: list[Path] = [()]
    tokens, parents, depth = tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist()
    survival = tree.survival.exp().tolist()
    levels: list[list[tuple[Path, float]]] = [[] for _ in range(tree.levels)]
    for node in range(1, len(tree)):
        paths.append((*paths[parents[node]], tokens[node]))
        levels[depth[node] - 1].append((paths[node], survival[node]))
    return levels


def _columns(rows: list[Any], width: int) -> list[FloatArray]:
    values = np.array(rows, dtype=np.float64).reshape(-1, width)
    return [values[:, column] for column in range(width)]


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
        columns = _columns_laws(
            log_q.double().log_softmax(-1), log_p.double().log_softmax(-1), self.growth.target_ids()
        )
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


def _columns_laws(log_q: Tensor, log_p: Tensor, ids: Tensor) -> _Columns:
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


MAX_PLACES = 12
QUARTILES = (0.0, 25.0, 50.0, 75.0, 100.0)


@dataclass(frozen=True)
class PositionArrays:
    """Drafted nodes whose parent was accepted."""

    prompt: IntArray  # [n]
    position: NDArray[np.str_]  # [n] ranks among siblings from the root down: "0", "1", "0.0", ...
    acceptance: FloatArray  # [n]


class PositionRecorder:
    """Called after each cycle; `prompt` is the number of the prompt being decoded."""

    def __init__(self) -> None:
        self.prompt = 0
        self._found: list[tuple[int, str, float]] = []

    def __call__(self, cycle: Cycle) -> None:
        places = positions(cycle.tree)
        chances = acceptance(cycle).tolist()
        for node in asked(cycle.tree, cycle.verdict.path).nonzero()[:, 0].tolist():
            self._found.append((self.prompt, places[node], chances[node]))

    def arrays(self) -> PositionArrays:
        return PositionArrays(
            prompt=np.array([prompt for prompt, _, _ in self._found], dtype=np.int64),
            position=np.array([place for _, place, _ in self._found], dtype=np.str_),
            acceptance=np.array([chance for _, _, chance in self._found], dtype=np.float64),
        )


def positions(tree: Tree) -> list[str]:
    """The place of each node [N]; the root's is empty. Siblings stand in the order in which they were proposed."""
    places, siblings = [""], [0] * len(tree)
    for parent in tree.parents.tolist()[1:]:
        rank = siblings[parent]
        siblings[parent] += 1
        places.append(f"{places[parent]}.{rank}" if places[parent] else str(rank))
    return places


def by_position(arrays: PositionArrays, most: int = MAX_PLACES) -> list[dict[str, Any]]:
    """The most visited places, shallow ones first: the mean acceptance, and the quartiles of the prompts' own means."""
    places, counts = np.unique(arrays.position, return_counts=True)
    chosen = [str(place) for place in places[np.argsort(-counts, kind="stable")[:most]]]
    rows = []
    for place in sorted(chosen, key=lambda place: (place.count("."), [int(rank) for rank in place.split(".")])):
        here = arrays.position == place
        prompts, chances = arrays.prompt[here], arrays.acceptance[here]
        means = [float(chances[prompts == prompt].mean()) for prompt in np.unique(prompts)]
        rows.append(
            {
                "position": place,
                "nodes": int(here.sum()),
                "acceptance": float(chances.mean()),
                "prompts": len(means),
                "by_prompt": means,
                "quartiles": [float(value) for value in np.percentile(means, QUARTILES)],
            }
        )
    return rows


BEFORE = 4  # tokens before a rejected one (figure 3a)
MOST_TOKENS = 12
LEAST_COUNT = 5


def entropy_by_outcome(laws: LawArrays, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Mean entropy of accepted and of rejected tokens for each task and over all; tasks[prompt] names the task."""
    names = np.array(tasks, dtype=np.str_)[laws.prompt] if laws.prompt.size else np.zeros(0, dtype=np.str_)
    rows = [_outcomes("all", laws, np.ones(laws.prompt.size, dtype=bool))]
    if len(set(tasks)) > 1:
        rows += [_outcomes(task, laws, names == task) for task in dict.fromkeys(tasks)]
    return rows


def divergence_before_rejection(laws: LawArrays) -> list[dict[str, Any]]:
    """Mean KL(q||p) at a cycle's rejected token (offset 0) and at the four before it in the same cycle (figure 3a).

    Infinite ones, which only a processor or a smaller vocabulary makes, are counted and left out of the mean.
    """
    found: dict[int, list[float]] = {-offset: [] for offset in range(BEFORE + 1)}
    rows = {(p, c, d): kl for p, c, d, kl in zip(laws.prompt, laws.cycle, laws.depth, laws.kl_qp, strict=True)}
    for place in np.flatnonzero(~laws.followed):
        for offset in range(BEFORE + 1):
            key = (laws.prompt[place], laws.cycle[place], laws.depth[place] - offset)
            if key in rows:
                found[-offset].append(float(rows[key]))
    return [
        {
            "offset": offset,
            "laws": len(values),
            "infinite": int(np.isinf(values).sum()),
            "kl": _mean_rejections(np.array(values)[np.isfinite(values)]),
        }
        for offset, values in sorted(found.items())
    ]


def sorted_laws(laws: LawArrays) -> dict[str, Any]:
    """Mean log q of the most probable tokens by rank, where the first child was accepted and where not (figure 3b)."""
    ranks = [2**power for power in range(laws.ranked.shape[1])]
    return {
        "ranks": ranks,
        "accepted": _column_means(laws.ranked[laws.accepted]),
        "rejected": _column_means(laws.ranked[~laws.accepted]),
    }


def token_table(laws: LawArrays, name: Callable[[int], str], most: int = MOST_TOKENS) -> list[dict[str, Any]]:
    """All tokens, then the hardest and the easiest drafted ones by mean acceptance, with their mean entropy (table 4).

    Only tokens that were drafted LEAST_COUNT times; ties go to the more frequent token.
    """
    rows = [_token_row(None, "all tokens", laws, np.ones(laws.token.size, dtype=bool))]
    tokens, counts = np.unique(laws.token, return_counts=True)
    frequent = [int(token) for token, count in zip(tokens, counts, strict=True) if count >= LEAST_COUNT]
    table = [_token_row(token, name(token), laws, laws.token == token) for token in frequent]
    table.sort(key=lambda row: (row["acceptance"], -row["count"], row["token"]))
    if len(table) > most:
        half = most // 2
        easiest = sorted(table, key=lambda row: (-row["acceptance"], -row["count"], row["token"]))[: most - half]
        table = table[:half] + [row for row in reversed(easiest) if row not in table[:half]]
    return rows + table


def _outcomes(task: str, laws: LawArrays, here: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        "task": task,
        "laws": int(here.sum()),
        "acceptance": _mean_rejections(laws.acceptance[here]),
        "accepted": _mean_rejections(laws.entropy[here & laws.accepted]),
        "rejected": _mean_rejections(laws.entropy[here & ~laws.accepted]),
    }


def _token_row(token: int | None, text: str, laws: LawArrays, here: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        "token": token,
        "text": text,
        "count": int(here.sum()),
        "entropy": _mean_rejections(laws.entropy[here]),
        "acceptance": _mean_rejections(laws.acceptance[here]),
    }


def _column_means(values: FloatArray) -> list[float | None]:
    if not values.shape[0]:
        return [None] * values.shape[1]
    with np.errstate(invalid="ignore"):
        means = values.mean(0)
    return [float(mean) if np.isfinite(mean) else None for mean in means]


def _mean_rejections(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None
