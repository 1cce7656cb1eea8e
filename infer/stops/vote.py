"""Stopping by a vote of three signals on the survival of the frontier (DEAGLE)."""

import torch

from infer.stop import Level, Stop
from infer.stops.config import VoteConfig
from infer.stops.expected_length import ExpectedLength


class Vote(Stop):
    """Stops when enough signals agree: little survival mass, its second sharp decline, expected length reached.

    With S_d the summed survival of the frontier at depth d and S_0 = 1:
    probability: S_d < 0.15. momentum: S_d / S_{d-1} < 0.6, for the second time. expectation: d >= ceil(E_d), where
    E_d = bonus + S_1 + ... + S_d; without a bonus E_d never exceeds d and the signal is always on.
    The vote is taken on the frontier that is about to be expanded, before that forward is paid.
    Source: DEAGLE, equations 22 to 26 and section 3.4; VoteConfig names what the paper leaves open.
    """

    def __init__(self, config: VoteConfig, nodes: int) -> None:
        self.config = config
        self._selected = ExpectedLength(nodes - 1)
        self.begin()

    def begin(self) -> None:
        self._selected.clear()
        self._mass = 1.0  # S of the level above
        self._tail = 0.0  # sum of S so far
        self._declines = 0

    def ends(self, level: Level) -> bool:
        mass, selected = self._read(level)
        self._tail += mass
        self._count_decline(level.depth, mass)
        on = {
            "probability": mass < self.config.probability_threshold,
            "momentum": self._declines >= self.config.declines,
            "expectation": level.depth >= self._expected_length(mass, selected),
        }
        self._mass = mass
        return sum(on[signal] for signal in self.config.signals) >= self.config.needed

    def _read(self, level: Level) -> tuple[float, float]:
        """S_d, and the expected length of the nodes that reranking would keep; one synchronisation.

        Rounding must not carry them above what they cannot exceed, 1 and the depth.
        """
        mass = level.survival.exp().sum()
        if self.config.over == "frontier":
            return min(float(mass), 1.0), 0.0
        mass, selected = torch.stack([mass, self._selected.add(level.drafted)]).tolist()
        return min(mass, 1.0), min(selected, float(level.depth))

    def _count_decline(self, depth: int, mass: float) -> None:
        if depth < self.config.momentum_from:
            return
        old, new = self._mass, mass
        ratio = (new, old) if self.config.momentum == "new_over_old" else (old, new)
        if ratio[0] < self.config.momentum_threshold * ratio[1]:
            self._declines += 1
        elif self.config.consecutive:
            self._declines = 0

    def _expected_length(self, mass: float, selected: float) -> float:
        """E_d. It is not rounded up: a whole number is at least E_d exactly when it is at least its ceiling."""
        if self.config.expectation == "leaf_sum":
            return self.config.bonus + mass
        return self.config.bonus + (self._tail if self.config.over == "frontier" else selected)
