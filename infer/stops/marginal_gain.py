"""Stopping when one more level adds too little to what the tree can be expected to yield (OPT-Tree)."""

from torch import Tensor

from infer.stop import Level, Stop
from infer.stops.config import MarginalGainConfig
from infer.stops.expected_length import ExpectedLength


class MarginalGain(Stop):
    """Stops after a level that raised the expected length of the best nodes by no more than the threshold.

    OPT-Tree's frontier is as wide as its budget of drafted nodes: a dynamic tree with k = nodes - 1. In a narrower one
    the expected length is still that of the nodes which reranking keeps. The released code takes its decision on a
    level once the next one was drafted, and throws that one away: the same tree for one forward more (`late`).
    Source: OPT-Tree (arXiv 2406.17276), section 3, and its released code.
    """

    def __init__(self, config: MarginalGainConfig, nodes: int) -> None:
        self.config = config
        self._expected = ExpectedLength(nodes - 1)
        self._last = 0.0
        self._ended = False

    def begin(self) -> None:
        self._expected.clear()
        self._last, self._ended = 0.0, False

    def ends(self, level: Level) -> bool:
        expected = float(self._expected.add(level.drafted))
        self._ended = expected - self._last <= self.config.threshold
        self._last = expected
        return self._ended and not self.config.late

    def declines(self, log_q: Tensor, above: Tensor) -> bool:
        return self._ended
