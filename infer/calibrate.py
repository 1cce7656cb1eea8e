"""How a draft head's confidence predicts acceptance: reliability, ECE, Brier, by depth and by half of the prompts."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from infer.records import CycleArrays, FloatArray


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
