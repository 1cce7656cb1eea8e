"""What rejected tokens look like from the draft's side: their entropy, their laws, and which tokens they are.

Source: SVIP (arXiv 2411.18462), section 2.1 (figure 3, table 1) and table 4.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.calibration.laws import LawArrays
from infer.records import FloatArray

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
            "kl": _mean(np.array(values)[np.isfinite(values)]),
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
        "acceptance": _mean(laws.acceptance[here]),
        "accepted": _mean(laws.entropy[here & laws.accepted]),
        "rejected": _mean(laws.entropy[here & ~laws.accepted]),
    }


def _token_row(token: int | None, text: str, laws: LawArrays, here: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        "token": token,
        "text": text,
        "count": int(here.sum()),
        "entropy": _mean(laws.entropy[here]),
        "acceptance": _mean(laws.acceptance[here]),
    }


def _column_means(values: FloatArray) -> list[float | None]:
    if not values.shape[0]:
        return [None] * values.shape[1]
    with np.errstate(invalid="ignore"):
        means = values.mean(0)
    return [float(mean) if np.isfinite(mean) else None for mean in means]


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None
