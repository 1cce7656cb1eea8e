"""What recorded cycles say: whether confidence predicts acceptance, DEAGLE's inequalities, SVIP's bounds, rejections.

Every function takes tables of a calibration (infer/measure/cycles.py) and returns a part of calibration.json or
analysis.json. q is the draft's law, p the target's, both at the same node; divergences and entropies are in nats.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import gamma

from aerie.infer.measure.record import FloatArray

SLACK = 1e-9  # rounding of sums over a vocabulary in float64


def reliability(confidence: FloatArray, acceptance: FloatArray, bins: int = 20) -> dict[str, Any]:
    """ECE, Brier score and the means of confidence and acceptance [n] in bins of equal width over [0, 1].

    An outcome is 1 with probability a, so the expected squared error of confidence c is c^2 - 2ca + a, which is
    (c - a)^2 where a is 0 or 1: figures at temperature 0 and above are on one scale.
    Source: EAGLE-2 (arXiv 2406.16858), section 3.2 and its figure of acceptance against confidence.
    """
    # the tolerance keeps float32 values such as 0.15 (stored as 0.15000001 or 0.1499999) on the side of their edge
    index = np.clip(np.floor(confidence * bins + 1e-6).astype(np.int64), 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    sums = [np.bincount(index, weights=values, minlength=bins) for values in (confidence, acceptance)]
    total = int(counts.sum())
    return {
        "nodes": total,
        "ece": float(abs(sums[0] - sums[1]).sum() / total) if total else None,
        "brier": mean(confidence**2 - 2.0 * confidence * acceptance + acceptance),
        "bins": [
            {
                "low": round(place / bins, 9),
                "high": round((place + 1) / bins, 9),
                "count": int(count),
                "confidence": float(sums[0][place] / count) if count else None,
                "acceptance": float(sums[1][place] / count) if count else None,
            }
            for place, count in enumerate(counts)
        ],
    }


def mean(values: Any) -> float | None:
    """The mean of an array or a column; null for an empty one."""
    return float(values.mean()) if len(values) else None


def by_depth(nodes: pd.DataFrame, cycles: pd.DataFrame) -> list[dict[str, Any]]:
    """Per depth d: reached nodes with their means, and how often a cycle's accepted length is at least d.

    `survived` is P(accepted length >= d) over all cycles; `conditional` is the same among cycles that got to d - 1.
    """
    rows: list[dict[str, Any]] = []
    for depth in range(1, int(max([0, *nodes.depth, *cycles.accepted])) + 1):
        here = nodes[nodes.depth == depth]
        before, survived = int((cycles.accepted >= depth - 1).sum()), int((cycles.accepted >= depth).sum())
        rows.append(
            {
                "depth": depth,
                "nodes": len(here),
                "confidence": mean(here.confidence),
                "acceptance": mean(here.acceptance),
                "cycles": before,
                "survived": survived / len(cycles) if len(cycles) else None,
                "conditional": survived / before if before else None,
            }
        )
    return rows


def held_out(prompts: pd.Series, seed: int = 0) -> NDArray[np.bool_]:
    """Which rows [n] are of the half of the prompts, by hash, on which a fit to the other half is judged."""
    chosen = [n for n in prompts.unique() if hashlib.sha256(f"{seed}:{n}".encode()).digest()[0] % 2 == 1]
    return np.asarray(prompts.isin(chosen), dtype=bool)


def summarise(
    nodes: pd.DataFrame, cycles: pd.DataFrame, temperature: float, bins: int = 20, seed: int = 0
) -> dict[str, Any]:
    """The content of calibration.json: reliability of all nodes and of the two halves of the prompts, and by depth."""

    def part(rows: pd.DataFrame) -> dict[str, Any]:
        values = reliability(rows.confidence.to_numpy(), rows.acceptance.to_numpy(), bins)
        return {"prompts": rows.prompt.nunique(), **values}

    chosen = held_out(nodes.prompt, seed)
    fit, other = part(nodes[~chosen]), part(nodes[chosen])
    is_whole = bool(fit["nodes"] and other["nodes"])
    difference = {name: other[name] - fit[name] if is_whole else None for name in ("ece", "brier")}
    return {
        "temperature": temperature,
        **part(nodes),
        "cycles": len(cycles),
        "by_depth": by_depth(nodes, cycles),
        "halves": {"seed": seed, "fit": fit, "held_out": other, "difference": difference},
    }


def curve(nodes: pd.DataFrame, bins: int) -> dict[str, Any]:
    """Means and reliability of some nodes (EAGLE-2, figure 6)."""
    values = reliability(nodes.confidence.to_numpy(), nodes.acceptance.to_numpy(), bins)
    return {"confidence": mean(nodes.confidence), "acceptance": mean(nodes.acceptance), **values}


def by_place(nodes: pd.DataFrame, most: int = 12) -> list[dict[str, Any]]:
    """The most visited places of the tree with the quartiles of the prompts' own means (EAGLE-2, figure 5)."""
    places = nodes.groupby("place")
    visited = places.size().sort_values(ascending=False, kind="stable")[:most].index
    rows = []
    for place in sorted(visited, key=lambda place: (place.count("."), [int(rank) for rank in place.split(".")])):
        here = places.get_group(place)
        quartiles = np.percentile(here.groupby("prompt").acceptance.mean(), (0, 25, 50, 75, 100))
        rows.append({"position": place, "acceptance": mean(here.acceptance), "quartiles": quartiles.tolist()})
    return rows


def level_table(frontier: pd.DataFrame, cycles: pd.DataFrame) -> list[dict[str, Any]]:
    """By depth d, among the cycles that drafted it: means of S_d (`mass`), `held` and `reached`; `expected` is E_d.

    `held`: one of the frontier's branches is what the target wrote. `reached`: the verified tree had d tokens accepted;
    reranking drops nodes of a frontier and keeps others, so it may be either side of `held`.
    Source: DEAGLE (equations 22 to 24).
    """
    levels = frontier.groupby(["prompt", "cycle", "depth"]).agg(mass=("survival", "sum"), held=("accepted", "any"))
    levels = levels.reset_index().merge(cycles[["prompt", "cycle", "accepted"]], on=["prompt", "cycle"])
    levels["mass"] = levels.mass.clip(upper=1.0)  # rounding, not probability
    levels["reached"] = levels.pop("accepted") >= levels.depth
    means: dict[str, Any] = {name: (name, "mean") for name in ("mass", "held", "reached")}
    table = levels.groupby("depth").agg(cycles=("mass", "size"), **means).reset_index()
    table["expected"] = table.mass.cumsum()
    return list(table.to_dict("records"))


def token_inequalities(laws: pd.DataFrame) -> dict[str, Any]:
    """Shares of laws in which |q(y) - p(y)| <= TV <= sqrt(KL(p||q) / 2) fails for a drafted y; theorems, so zero.

    `gap` is |q(y) - p(y)| of the child proposed first; the failures are counted over all drafted children.
    """
    bound = np.sqrt(laws.kl_pq / 2.0)
    return {
        "laws": len(laws),
        "gap_above_tv": mean(laws.largest_gap > laws.tvd + SLACK),
        "tv_above_bound": mean(laws.tvd > bound + SLACK),
        "gap": mean((laws.q - laws.p).abs()),
        "tv": mean(laws.tvd),
        "bound": mean(bound[np.isfinite(bound)]),
    }


def deagle_bound(laws: pd.DataFrame) -> dict[str, Any]:
    """How often equations 15 to 19 fail with DEAGLE's own alpha, which is whether argmax q is argmax p (8 to 10).

    alpha is 0 or 1 for one token: |alpha - c| against TV (17 and 19) and against sqrt(KL(p||q) / 2) (18 and 19, and
    with that KL as delta_cls also 15 and 16).
    """
    gap = (laws.agrees - laws.top_q).abs()
    return {
        "greedy_agreement": mean(laws.agrees),
        "above_tv": mean(gap > laws.tvd + SLACK),
        "above_bound": mean(gap > np.sqrt(laws.kl_pq / 2.0) + SLACK),
    }


CS = (0.02, 0.05, 0.1, 0.15, 0.18, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)
PAPER_CS = (0.15, 0.18)  # SVIP's released code; its figure 4
POINTS = 80  # of the curves of figure 4
LEAST_ENTROPY = 1e-6  # nats; below it the ratio is a quotient of rounding errors
CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192)  # tokens before a draft: edges of oracle lengths
EDGES = np.round(np.arange(0.0, 5.01, 0.25), 2).tolist()  # of the histogram of the ratio; its last bin is open


def acceptance_bounds(laws: pd.DataFrame, c: float) -> dict[str, Any]:
    """Means of beta = 1 - TV and of three lower bounds, how often each holds, and the curves of SVIP's figure 4.

    oracle: 1 - sqrt(KL(q||p) / 2) (Pinsker). approximation: 1 - sqrt(c H(q)). bretagnolle_huber:
    1 - sqrt(1 - exp(-KL(q||p))). A negative bound says nothing, so that the means are over bounds cut at 0. `tighter`
    is the share of laws where Pinsker's bound is above Bretagnolle-Huber's. A point of a curve is the mean of
    neighbours in the order of beta, of bounds cut at -1.
    """
    beta = 1.0 - laws.tvd.to_numpy()
    bounds = {
        "oracle": 1.0 - np.sqrt(laws.kl_qp.to_numpy() / 2.0),
        "approximation": 1.0 - np.sqrt(c * laws.entropy.to_numpy()),
        "bretagnolle_huber": 1.0 - np.sqrt(-np.expm1(-laws.kl_qp.to_numpy())),
    }
    parts = np.array_split(np.argsort(beta, kind="stable"), min(POINTS, len(beta)))
    return {
        "c": c,
        "acceptance": mean(beta),
        "means": {name: mean(values.clip(min=0.0)) for name, values in bounds.items()},
        "holds": {name: mean(beta >= values - SLACK) for name, values in bounds.items()},
        "tighter": mean(bounds["oracle"] > bounds["bretagnolle_huber"]),
        "curve": {
            name: [mean(values[part].clip(min=-1.0)) for part in parts]
            for name, values in {"acceptance": beta, **bounds}.items()
        },
    }


def entropy_ratio(laws: pd.DataFrame, cs: Sequence[float] = CS) -> dict[str, Any]:
    """The excess CE(q, p) / H(q) - 1 = KL(q||p) / H(q) of laws that have one (SVIP, section 2.2 and appendix C).

    ratio: its histogram, its Gamma fit, and the histogram expected of it. by_c: how often SVIP's approximation is below
    the oracle bound, and below beta itself; `conservative`: ratio <= 2c + 1 (equation 8); `gamma`: the same by the
    Gamma fit (equation 9); `holds`: beta >= 1 - sqrt(c H), of all laws; `bound`: its mean, cut at 0.
    """
    usable = laws[(laws.entropy >= LEAST_ENTROPY) & np.isfinite(laws.kl_qp)]
    excess = np.asarray(usable.kl_qp / usable.entropy)
    positive, fitted = excess[excess > 0], None
    if len(positive) > 1 and np.ptp(positive) > 0:
        shape, _, scale = gamma.fit(positive, floc=0)
        fitted = gamma(shape, scale=scale)
    return {
        "ratio": {
            "laws": len(excess),
            "gamma": fitted and {"alpha": shape, "beta": 1.0 / scale},
            "edges": EDGES,
            "counts": np.histogram(excess, bins=[*EDGES, np.inf])[0].tolist(),
            "expected": fitted and (np.diff([*fitted.cdf(EDGES), 1.0]) * len(excess)).tolist(),
        },
        "by_c": [
            {
                "c": c,
                "conservative": mean(excess <= 2.0 * c + SLACK),
                "gamma": fitted and float(fitted.cdf(2.0 * c)),
                "holds": mean(np.sqrt(c * laws.entropy) >= laws.tvd - SLACK),
                "bound": mean((1.0 - np.sqrt(c * laws.entropy)).clip(lower=0.0)),
            }
            for c in cs
        ],
    }


def entropy_by_outcome(laws: pd.DataFrame, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Mean entropy of accepted and of rejected tokens over all and for each task; tasks[prompt] names the task."""
    task_of = laws.prompt.map(dict(enumerate(tasks)))
    parts = {"all": laws, **{task: laws[task_of == task] for task in dict.fromkeys(tasks) if len(set(tasks)) > 1}}
    return [
        {
            "task": task,
            "laws": len(part),
            "accepted": mean(part.entropy[part.accepted]),
            "rejected": mean(part.entropy[~part.accepted]),
        }
        for task, part in parts.items()
    ]


def divergence_before_rejection(laws: pd.DataFrame, most: int = 4) -> list[dict[str, Any]]:
    """Mean KL(q||p) at a cycle's rejected token (offset 0) and at the tokens before it in the cycle (SVIP, figure 3a).

    Infinite ones, which only a processor or a smaller vocabulary makes, are left out of the mean.
    """
    kl = laws.set_index(["prompt", "cycle", "depth"]).kl_qp
    rejected = laws[~laws.followed]
    rows = []
    for offset in range(-most, 1):
        values = kl.reindex(pd.MultiIndex.from_arrays([rejected.prompt, rejected.cycle, rejected.depth + offset]))
        rows.append({"offset": offset, "kl": mean(values[np.isfinite(values)])})
    return rows


def sorted_laws(laws: pd.DataFrame) -> dict[str, Any]:
    """Mean log q of the 1st, 2nd, 4th ... token where the first child was accepted and where not (SVIP, figure 3b)."""
    ranked = np.stack(laws.ranked.to_list())
    means: dict[str, Any] = {"ranks": [2**power for power in range(ranked.shape[1])]}
    for name, rows in (("accepted", laws.accepted), ("rejected", ~laws.accepted)):
        columns = ranked[np.asarray(rows)].T
        means[name] = [mean(column) if np.isfinite(column).all() else None for column in columns]
    return means


def token_table(
    laws: pd.DataFrame, name: Callable[[int], str], most: int = 12, least_count: int = 5
) -> list[dict[str, Any]]:
    """All tokens, then the hardest and the easiest drafted ones by mean acceptance, with their entropy (SVIP, table 4).

    Only tokens that were drafted first least_count times; ties go to the more frequent token.
    """
    means = {key: (key, "mean") for key in ("entropy", "acceptance")}
    table = laws.groupby("token").agg(count=("token", "size"), **means).reset_index()
    table = table[table["count"] >= least_count].sort_values("count", ascending=False, kind="stable")
    hardest = table.nsmallest(most // 2, "acceptance")
    easiest = table.drop(hardest.index).nlargest(most - most // 2, "acceptance")
    rows = [{**row, "text": name(row["token"])} for row in pd.concat([hardest, easiest[::-1]]).to_dict("records")]
    totals = {"count": len(laws), "entropy": mean(laws.entropy), "acceptance": mean(laws.acceptance)}
    return [{"token": None, "text": "all tokens", **totals}, *rows]


def oracle_summary(cycles: pd.DataFrame) -> dict[str, Any] | None:
    """What the cycles that drafted say of the oracle: their columns are position, levels, accepted, oracle and cap.

    by_context: per bucket of the root's place in the text. `variance` is that of the oracle length (figure 1), `delta`
    the mean of proposed minus oracle (figure 7b), and `censored` the share of cycles whose oracle length may be longer
    than the cap.
    Source: SVIP (arXiv 2411.18462), section 2.1 and figures 1 and 7b.
    """
    drafted = cycles.dropna(subset="oracle")
    if drafted.empty:
        return None

    def lengths(here: pd.DataFrame) -> dict[str, Any]:
        return {
            "cycles": len(here),
            "oracle": mean(here.oracle),
            "variance": float(here.oracle.var(ddof=0)),
            "delta": mean(here.levels - here.oracle),
            "censored": mean(here.oracle >= here.cap),
        }

    edges = {float(edge): edge for edge in CONTEXTS}  # the last bucket has none
    buckets = drafted.groupby(pd.cut(drafted.position, [0, *CONTEXTS, np.inf]), observed=True)
    return {
        "all": lengths(drafted),
        "by_context": [
            {"above": int(bucket.left), "up_to": edges.get(bucket.right), **lengths(here)} for bucket, here in buckets
        ],
    }
