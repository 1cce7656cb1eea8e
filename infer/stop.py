"""When to stop drafting deeper. A stop rule sees what was drafted and is asked before the next forward is paid."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Level:
    """One finished level: its frontier, about to be expanded, the best-ranked node first."""

    depth: int  # 1 for the root's children
    confidence: Tensor  # [k] log q
    survival: Tensor  # [k] log survival
    log_q: Tensor  # [rows, Vd] the laws that this level's candidates come from, one per expanded node
    above: Tensor  # [rows] log survival of those expanded nodes
    rows: Tensor  # [k] which of them each frontier node stands below
    candidates: Tensor | None = None  # [n] log survival of every node of this level; null: the frontier is all of it

    @property
    def drafted(self) -> Tensor:
        """Log survival [n] of every node of this level, in no order."""
        return self.survival if self.candidates is None else self.candidates


class Stop(Protocol):
    """Ends a tree's growth; must depend on nothing but the draft and past cycles, so that the output's law cannot move.

    A token that was drawn stays in the draft: a rule that took it back after a look at it would bias the output.
    """

    def reset(self) -> None:
        """A new prompt: forgets what `learn` taught."""
        return

    def begin(self) -> None:
        """A new tree."""
        return

    def ends(self, level: Level) -> bool:
        """Whether this level is the last one. Asked once per level, but not at the shape's own last one."""
        ...

    def expands(self, level: Level) -> Tensor | None:
        """Which frontier nodes [k] are expanded, a boolean each; null: all. The others stay in the tree as leaves.

        Asked after `ends`, by shapes that expand several nodes.
        """
        return None

    def declines(self, log_q: Tensor, above: Tensor) -> bool:
        """Whether nothing is drawn from laws log q [rows, Vd] whose forward was paid; above [rows] is as in Level.

        Asked before any of their tokens is chosen, never at the first level: a draft has one token at least.
        """
        return False

    def learn(self, accepted: int, levels: int) -> None:
        """How many tokens of a tree of this many levels were accepted."""
        return


@dataclass
class Constant(Stop):
    """Stops at a fixed depth: EAGLE-2's levels, or a chain's gamma."""

    levels: int

    def ends(self, level: Level) -> bool:
        return level.depth >= self.levels
