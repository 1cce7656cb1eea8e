"""The expanded frontier of each level before reranking, against the text that the target then wrote.

Source: DEAGLE, section 3.3: survival stands for the chance of a whole branch (equation 21), S_d for that of reaching
depth d (equations 22 and 24).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.proposer import Cycle
from infer.records import FloatArray, IntArray
from infer.tree import Tree
from infer.watch import Growth, Path


@dataclass(frozen=True)
class FrontierArrays:
    """n nodes of the frontiers, those that reranking dropped included."""

    prompt: IntArray  # [n]
    depth: IntArray  # [n]
    survival: FloatArray  # [n] product of confidence along the branch
    accepted: NDArray[np.bool_]  # [n] the whole branch was what the target wrote


@dataclass(frozen=True)
class LevelArrays:
    """l drafted levels."""

    prompt: IntArray  # [l]
    cycle: IntArray  # [l] number of the cycle in its prompt
    depth: IntArray  # [l] d
    mass: FloatArray  # [l] S_d, the summed survival of the frontier
    held: NDArray[np.bool_]  # [l] one of the frontier's branches was accepted
    reached: NDArray[np.bool_]  # [l] the verified tree had d tokens accepted


@dataclass(frozen=True)
class _Level:
    prompt: int
    cycle: int
    position: int  # of the root in the text
    depth: int
    branches: list[tuple[Path, float]]  # with their survival
    accepted: int
    path: Path | None  # that was accepted; null: the text decides


class FrontierRecorder:
    """Called after each cycle of a watched decoder; `finish` takes the text that the branches are held against.

    Where the target chooses for itself (R0, R2) the text is a draw from its law whatever was drafted, so that a branch
    is in it with the branch's own chance, verified or not. Where children are drawn (R1, R3, R4) every node is in the
    tree, and its branch counts when it was accepted. Levels that reach beyond the text's end are left out.
    """

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.prompt = 0
        self.cycle = 0
        self._waiting: list[_Level] = []
        self._nodes: list[tuple[int, int, float, bool]] = []
        self._levels: list[tuple[int, int, int, float, bool, bool]] = []

    def start(self, prompt: int) -> None:
        """The next prompt."""
        self.prompt, self.cycle = prompt, 0

    def __call__(self, cycle: Cycle) -> None:
        number, self.cycle = self.cycle, self.cycle + 1
        if not cycle.tree.levels:
            return
        found = self.growth.frontiers(cycle.tree.levels)
        frontiers = (
            _whole_levels(cycle.tree)
            if found is None
            else [list(zip(paths, survival.exp().tolist(), strict=True)) for paths, survival in found]
        )
        accepted = cycle.verdict.accepted
        path = None if cycle.rule in ("R0", "R2") else tuple(cycle.verdict.tokens)
        self._waiting += [
            _Level(self.prompt, number, cycle.position, depth, branches, accepted, path)
            for depth, branches in enumerate(frontiers, start=1)
        ]

    def finish(self, text: list[int]) -> None:
        """The token ids of prompt and answer, once the answer is whole."""
        for level in self._waiting:
            if level.position + level.depth >= len(text):
                continue
            after = tuple(text[level.position + 1 : level.position + 1 + level.depth])
            written = after if level.path is None else level.path[: level.depth]
            inside = [branch == written for branch, _ in level.branches]
            self._nodes += [
                (level.prompt, level.depth, survival, accepted)
                for (_, survival), accepted in zip(level.branches, inside, strict=True)
            ]
            mass = min(1.0, sum(survival for _, survival in level.branches))  # rounding, not probability
            reached = level.accepted >= level.depth
            self._levels.append((level.prompt, level.cycle, level.depth, mass, any(inside), reached))
        self._waiting = []

    def nodes(self) -> FrontierArrays:
        prompt, depth, survival, accepted = _columns(self._nodes, 4)
        return FrontierArrays(
            prompt.astype(np.int64), depth.astype(np.int64), survival.clip(0.0, 1.0), accepted.astype(np.bool_)
        )

    def levels(self) -> LevelArrays:
        prompt, cycle, depth, mass, held, reached = _columns(self._levels, 6)
        return LevelArrays(
            prompt.astype(np.int64), cycle.astype(np.int64), depth.astype(np.int64), mass,
            held.astype(np.bool_), reached.astype(np.bool_),
        )  # fmt: skip


def _whole_levels(tree: Tree) -> list[list[tuple[Path, float]]]:
    """Every node of each drafted level with its survival, of a tree that is its own frontier."""
    paths: list[Path] = [()]
    tokens, parents, depth = tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist()
    survival = tree.survival.exp().tolist()
    levels: list[list[tuple[Path, float]]] = [[] for _ in range(tree.levels)]
    for node in range(1, len(tree)):
        paths.append((*paths[parents[node]], tokens[node]))
        levels[depth[node] - 1].append((paths[node], survival[node]))
    return levels


def _columns(rows: list[Any], width: int) -> list[FloatArray]:
    values = np.array(rows, dtype=np.float64).reshape(-1, width)
    return [values[:, column] for column in range(width)]
