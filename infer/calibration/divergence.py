"""How far confidence is from the target: what always holds between q, p, TV and KL, and what DEAGLE's bound adds to it.

Source: DEAGLE, section 3.2, equations 12 to 19.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.calibration.laws import LawArrays
from infer.records import FloatArray

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
