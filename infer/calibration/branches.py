"""Survival against the acceptance of whole branches, and S_d against the empirical P(accepted >= d)."""

from dataclasses import asdict
from typing import Any

import numpy as np

from infer.calibrate import brier, ece, reliability
from infer.calibration.frontier import FrontierArrays, LevelArrays


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
