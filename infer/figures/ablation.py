"""EAGLE-2's ablation (arXiv 2406.16858, table 3): trees with and without value, with and without reranking."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.table import sampling_text

KEYS = ("tree.rank", "tree.rerank")
NAMES = {
    ("confidence", False): "without both",
    ("confidence", True): "without value",
    ("survival", False): "without reranking",
    ("survival", True): "EAGLE-2",
}
# Vicuna 7B at temperature 0: (speedup, tau) on MT-bench and on GSM8K
PUBLISHED = {
    ("confidence", False): ((2.81, 3.92), (2.85, 3.93)),
    ("confidence", True): ((3.21, 4.39), (2.93, 3.96)),
    ("survival", False): ((3.48, 4.86), (3.50, 4.85)),
    ("survival", True): ((3.62, 4.98), (3.63, 4.97)),
}


@dataclass(frozen=True)
class Ablated:
    """One of the four trees: what was measured, a column for each family, and what was published."""

    name: str
    measured: tuple[dict[str, Any] | None, ...]
    published: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Ablation:
    """The table; families are methods with their heads and samplings."""

    families: tuple[str, ...]
    rows: tuple[Ablated, ...]


def ablation(sweeps: Sequence[dict[str, Any]]) -> Ablation | None:
    """The ablation that the points of sweeps over tree.rank or tree.rerank make; null without any."""
    points = [point for point in sweeps if point["key"] in KEYS and point["tree"] and "rerank" in point["tree"]]
    families: dict[tuple[str, str | None, str], dict[tuple[str, bool], dict[str, Any]]] = {}
    for point in points:
        family = (point["method"], point["head_path"] or point["head"], sampling_text(point))
        families.setdefault(family, {})[point["tree"]["rank"], point["tree"]["rerank"]] = point
    if not families:
        return None
    rows = [
        Ablated(name, tuple(family.get(cell) for family in families.values()), PUBLISHED[cell])
        for cell, name in NAMES.items()
        if any(cell in family for family in families.values())
    ]
    return Ablation(tuple(f"{method}, {head}, T {sampling}" for method, head, sampling in families), tuple(rows))
