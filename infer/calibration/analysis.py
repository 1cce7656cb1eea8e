"""Every table of the calibration from what was recorded: the content of analysis.json."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.calibrate import brier, ece, reliability
from infer.calibration.branches import branch_reliability, level_reliability
from infer.calibration.divergence import deagle_bound, token_inequalities
from infer.calibration.entropy_bounds import PAPER_C, bounds, ratio_distribution, shares_by_c
from infer.calibration.laws import LawArrays
from infer.calibration.measure import Recording
from infer.calibration.oracle_length import summarise_oracle
from infer.calibration.positions import by_position
from infer.calibration.rejections import (
    divergence_before_rejection,
    entropy_by_outcome,
    sorted_laws,
    token_table,
)
from infer.records import CycleArrays

FILE = "analysis.json"
SCHEMA = 1


def analyse(recording: Recording, name: Callable[[int], str], bins: int = 20) -> dict[str, Any]:
    """The tables, JSON-ready; name gives a token id's text. A part is null where nothing was recorded for it."""
    nodes, laws = recording.nodes, recording.laws
    task_of = np.array(recording.tasks, dtype=np.str_)[nodes.prompt] if nodes.prompt.size else np.zeros(0, np.str_)
    depths = sorted({int(depth) for depth in nodes.depth})
    tasks = list(dict.fromkeys(recording.tasks))
    return {
        "schema": SCHEMA,
        "temperature": nodes.temperature,
        "prompts": len(recording.tasks),
        "cycles": int(nodes.accepted_length.size),
        "by_depth": [{"depth": depth, **_curve(nodes, nodes.depth == depth, bins)} for depth in depths],
        "by_task": [{"task": task, **_curve(nodes, task_of == task, bins)} for task in tasks],
        "positions": by_position(recording.positions),
        "branches": None if recording.frontier is None else branch_reliability(recording.frontier, bins),
        "levels": None if recording.levels is None else level_reliability(recording.levels, bins),
        "laws": None if laws is None or not laws.tvd.size else analyse_laws(laws, recording.tasks, name, bins),
        "oracle": None if recording.oracle is None else summarise_oracle(recording.oracle),
    }


def analyse_laws(laws: LawArrays, tasks: tuple[str, ...], name: Callable[[int], str], bins: int) -> dict[str, Any]:
    """What is said of laws alone: DEAGLE's inequalities, SVIP's bounds, and rejected tokens."""
    return {
        "inequalities": token_inequalities(laws),
        "deagle": deagle_bound(laws, bins),
        "bounds": [bounds(laws, c) for c in PAPER_C],
        "ratio": ratio_distribution(laws),
        "by_c": shares_by_c(laws),
        "entropy": entropy_by_outcome(laws, tasks),
        "before_rejection": divergence_before_rejection(laws),
        "sorted": sorted_laws(laws),
        "tokens": token_table(laws, name),
    }


def _curve(nodes: CycleArrays, here: NDArray[np.bool_], bins: int) -> dict[str, Any]:
    """Bins, ECE and Brier of some nodes (EAGLE-2, figure 6)."""
    confidence, acceptance = nodes.confidence[here], nodes.acceptance[here]
    table = reliability(confidence, acceptance, bins)
    return {
        "nodes": int(confidence.size),
        "confidence": float(confidence.mean()) if confidence.size else None,
        "acceptance": float(acceptance.mean()) if acceptance.size else None,
        "ece": ece(table),
        "brier": brier(confidence, acceptance),
        "bins": [asdict(item) for item in table],
    }
