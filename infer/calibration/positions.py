"""Acceptance by place in the draft tree, prompt by prompt: how much one place's acceptance depends on the context.

Source: EAGLE-2 (arXiv 2406.16858), section 3.1 and figure 5, there for the fixed tree of EAGLE.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.calibration.acceptance import acceptance, asked
from infer.proposer import Cycle
from infer.records import FloatArray, IntArray
from infer.tree import Tree

MAX_PLACES = 12
QUARTILES = (0.0, 25.0, 50.0, 75.0, 100.0)


@dataclass(frozen=True)
class PositionArrays:
    """Drafted nodes whose parent was accepted."""

    prompt: IntArray  # [n]
    position: NDArray[np.str_]  # [n] ranks among siblings from the root down: "0", "1", "0.0", ...
    acceptance: FloatArray  # [n]


class PositionRecorder:
    """Called after each cycle; `prompt` is the number of the prompt being decoded."""

    def __init__(self) -> None:
        self.prompt = 0
        self._found: list[tuple[int, str, float]] = []

    def __call__(self, cycle: Cycle) -> None:
        places = positions(cycle.tree)
        chances = acceptance(cycle).tolist()
        for node in asked(cycle.tree, cycle.verdict.path).nonzero()[:, 0].tolist():
            self._found.append((self.prompt, places[node], chances[node]))

    def arrays(self) -> PositionArrays:
        return PositionArrays(
            prompt=np.array([prompt for prompt, _, _ in self._found], dtype=np.int64),
            position=np.array([place for _, place, _ in self._found], dtype=np.str_),
            acceptance=np.array([chance for _, _, chance in self._found], dtype=np.float64),
        )


def positions(tree: Tree) -> list[str]:
    """The place of each node [N]; the root's is empty. Siblings stand in the order in which they were proposed."""
    places, siblings = [""], [0] * len(tree)
    for parent in tree.parents.tolist()[1:]:
        rank = siblings[parent]
        siblings[parent] += 1
        places.append(f"{places[parent]}.{rank}" if places[parent] else str(rank))
    return places


def by_position(arrays: PositionArrays, most: int = MAX_PLACES) -> list[dict[str, Any]]:
    """The most visited places, shallow ones first: the mean acceptance, and the quartiles of the prompts' own means."""
    places, counts = np.unique(arrays.position, return_counts=True)
    chosen = [str(place) for place in places[np.argsort(-counts, kind="stable")[:most]]]
    rows = []
    for place in sorted(chosen, key=lambda place: (place.count("."), [int(rank) for rank in place.split(".")])):
        here = arrays.position == place
        prompts, chances = arrays.prompt[here], arrays.acceptance[here]
        means = [float(chances[prompts == prompt].mean()) for prompt in np.unique(prompts)]
        rows.append(
            {
                "position": place,
                "nodes": int(here.sum()),
                "acceptance": float(chances.mean()),
                "prompts": len(means),
                "by_prompt": means,
                "quartiles": [float(value) for value in np.percentile(means, QUARTILES)],
            }
        )
    return rows
