"""What the draft's entropy says of acceptance: SVIP's bounds, its entropy ratio, and how often c keeps its promise.

With beta = sum min(p, q), the chance that a token drawn from q is accepted:
  oracle bound           1 - sqrt(KL(q||p) / 2)        equations 3 and 4 (Pinsker)
  approximation          1 - sqrt(c H(q))              equation 6
  Bretagnolle-Huber      1 - sqrt(1 - exp(-KL(q||p)))  equation 12
The entropy ratio is CE(q, p) / H(q) = 1 + KL(q||p) / H(q), which SVIP calls gamma.
Source: SVIP (arXiv 2411.18462), section 2.2, appendices B and C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, gammainc

from infer.calibration.laws import LawArrays
from infer.records import FloatArray

CS = (0.02, 0.05, 0.1, 0.15, 0.18, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)
PAPER_C = (0.15, 0.18)  # SVIP's released code; its figure 4
POINTS = 80  # of the curves of figure 4
SLACK = 1e-9
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
        "acceptance": _mean(beta),
        "means": {name: _mean(values.clip(min=0.0)) for name, values in found.items()},
        "holds": {name: _mean((beta >= values - SLACK).astype(np.float64)) for name, values in found.items()},
        "tighter": _mean((found["oracle"] > found["bretagnolle_huber"]).astype(np.float64)),
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
        "mean": _mean(excess),
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
                "conservative": _mean((ratio <= 2.0 * c + 1.0 + SLACK).astype(np.float64)),
                "gamma": None if fitted is None else fitted.below(2.0 * c),
                "holds": _mean((beta >= bound - SLACK).astype(np.float64)),
                "bound": _mean(bound.clip(min=0.0)),
            }
        )
    return rows


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None
