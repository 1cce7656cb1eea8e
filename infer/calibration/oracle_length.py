"""The oracle draft length by context length, and the upper bound that always drafting it would be."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.calibration.oracle import OracleArrays

CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192)


def by_context(arrays: OracleArrays, edges: Sequence[int] = CONTEXTS) -> list[dict[str, Any]]:
    """Per bucket of the root's place in the text (previous edge, edge]: oracle and proposed lengths.

    `variance` is that of the oracle length (figure 1), `delta` the mean of proposed minus oracle (figure 7b), and
    `censored` the share of cycles whose oracle length may be longer than the cap. Source: SVIP (arXiv 2411.18462).
    """
    rows, low = [], 0
    for edge in (*edges, None):
        here = arrays.position > low if edge is None else (arrays.position > low) & (arrays.position <= edge)
        if here.any():
            rows.append({"above": low, "up_to": edge, **_statistics(arrays, here)})
        low = edge or low
    return rows


def upper_bound(arrays: OracleArrays) -> dict[str, Any]:
    """The policy's row, and that of an oracle which drafts exactly what will be accepted, at the same cycle starts.

    tau counts the bonus token and cycles that were cut by an answer's end in full, so it is above a bench's own tau.
    The oracle's is the most that any rule for the length of this draft can reach: its drafts are never refused, and a
    cycle in which nothing would be accepted drafts nothing.
    """
    proposed, accepted, oracle = (
        values.astype(np.float64) for values in (arrays.proposed, arrays.accepted, arrays.oracle)
    )
    if not proposed.size:
        return {"cycles": 0, "policy": None, "oracle": None}
    return {
        "cycles": int(proposed.size),
        "policy": {
            "tau": float(accepted.mean()) + 1.0,
            "levels": float(proposed.mean()),
            "wasted_levels": float((proposed - accepted).mean()),
        },
        "oracle": {"tau": float(oracle.mean()) + 1.0, "levels": float(oracle.mean()), "wasted_levels": 0.0},
    }


def summarise_oracle(arrays: OracleArrays) -> dict[str, Any]:
    """Everything that is said of the oracle."""
    everything = np.ones(arrays.oracle.size, dtype=bool)
    longest = int(arrays.oracle.max(initial=0))
    return {
        "all": _statistics(arrays, everything) if everything.size else None,
        "lengths": np.bincount(arrays.oracle, minlength=longest + 1).tolist(),
        "by_context": by_context(arrays),
        "upper_bound": upper_bound(arrays),
    }


def _statistics(arrays: OracleArrays, here: NDArray[np.bool_]) -> dict[str, Any]:
    oracle, proposed = arrays.oracle[here], arrays.proposed[here]
    return {
        "cycles": int(here.sum()),
        "oracle": float(oracle.mean()),
        "variance": float(oracle.var()),
        "proposed": float(proposed.mean()),
        "delta": float((proposed - oracle).mean()),
        "censored": float((oracle >= arrays.cap[here]).mean()),
    }
