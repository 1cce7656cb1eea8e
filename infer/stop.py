"""When to stop drafting deeper. A stop rule sees what was drafted and is asked before the next forward is paid."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Level:
    """One finished level: its frontier, about to be expanded."""

    depth: int  # 1 for the root's children
    confidence: Tensor  # [k] log q
    survival: Tensor  # [k] log survival, descending
    log_q: Tensor  # [rows, Vd] the laws that this level's candidates come from, one per expanded node
    above: Tensor  # [rows] log survival of those expanded nodes
    rows: Tensor  # [k] which of them each frontier node stands below


class Stop(Protocol):
    """Asked once per level; must depend on nothing but the draft, so that the output's law cannot move."""

    def reset(self) -> None:
        """A new prompt: forgets what `learn` taught."""
        ...

    def begin(self) -> None:
        """A new tree."""
        ...

    def ends(self, level: Level) -> bool: ...

    def learn(self, accepted: int, levels: int) -> None:
        """How many tokens of a tree of this many levels were accepted."""
        ...


@dataclass
class Constant:
    """Stops at a fixed depth: EAGLE-2's levels, or a chain's gamma."""

    levels: int

    def reset(self) -> None:
        return None

    def begin(self) -> None:
        return None

    def learn(self, accepted: int, levels: int) -> None:
        return None

    def ends(self, level: Level) -> bool:
        return level.depth >= self.levels
