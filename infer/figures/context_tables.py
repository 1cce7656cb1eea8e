"""Speedup and tau by context length (SVIP, arXiv 2411.18462, tables 2 and 5, figures 5 and 6), as tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.config import CONTEXT
from infer.contexts import SPANS
from infer.figures.lines import Line
from infer.table import label
from infer.variant import told_apart

# SVIP, table 2: speedup on MT-bench at temperature 1, cumulative or by bucket (it does not say)
PUBLISHED_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
PUBLISHED = {
    "Vicuna 7B, EAGLE-2": (2.70, 2.62, 2.52, 2.41, 2.43, 1.24),
    "Vicuna 7B, EAGLE-2 and SVIP": (2.80, 2.76, 2.71, 2.69, 2.75, 1.41),
    "Vicuna 13B, EAGLE-2": (2.95, 2.90, 2.83, 2.74, 2.71, 1.53),
    "Vicuna 13B, EAGLE-2 and SVIP": (2.94, 2.99, 2.93, 2.86, 2.79, 1.64),
}

# SVIP, table 5: the same, greedy, with Qwen2.5 14B and a draft of 0.5B
PUBLISHED_GREEDY_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 6144, 8192)
PUBLISHED_GREEDY = {
    "Qwen2.5 14B, 0.5B, constant": (1.05, 1.08, 1.15, 1.29, 1.44, 1.54, 1.60, 1.67),
    "Qwen2.5 14B, 0.5B, heuristic": (1.04, 1.06, 1.13, 1.32, 1.54, 1.72, 1.85, 1.97),
    "Qwen2.5 14B, 0.5B, SVIP": (1.30, 1.34, 1.42, 1.57, 1.74, 1.87, 1.98, 2.10),
}


@dataclass(frozen=True)
class Contexts:
    """Lines over the lengths, from the start and between a length and the one before; both in the same order."""

    lengths: tuple[int, ...]
    cumulative: tuple[Line, ...]
    bucket: tuple[Line, ...]


def chains_of(contexts: Contexts) -> list[Line]:
    """The buckets' lines of chains at the first sampling, with `draft_length`, tokens per cycle (SVIP, figure 6)."""
    chains = [line for line in contexts.bucket if line.points and line.points[0]["tree"]["shape"] == "chain"]
    return [
        Line(line.label, tuple({**p, "draft_length": p["draft_nodes"] / p["target_forwards"]} for p in line.points))
        for line in chains
        if line.points[0]["temperature"] == chains[0].points[0]["temperature"]
    ]


def context_tables(sweeps: Sequence[dict[str, Any]]) -> Contexts | None:
    """The rows of the context lengths that draft; null without any."""
    points = told_apart([point for point in sweeps if point["sweep"] == CONTEXT and point["tree"] is not None])
    if not points:
        return None
    names = dict.fromkeys(label(point, points) for point in points)
    found = {
        span: tuple(
            Line(name, tuple(p for p in points if p["span"] == span and label(p, points) == name)) for name in names
        )
        for span in SPANS
    }
    lengths = sorted({point["value"] for point in points})
    return Contexts(tuple(lengths), found["cumulative"], found["bucket"])
