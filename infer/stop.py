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


class Stop(Protocol):
    """Asked once per level; must depend on nothing but the draft, so that the output's law cannot move."""

    def reset(self) -> None: ...

    def ends(self, level: Level) -> bool: ...


@dataclass
class Constant:
    """Stops at a fixed depth: EAGLE-2's levels, or a chain's gamma."""

    levels: int

    def reset(self) -> None:
        return None

    def ends(self, level: Level) -> bool:
        return level.depth >= self.levels
