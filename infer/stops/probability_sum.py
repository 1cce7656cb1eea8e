"""Stopping when little probability is left on the frontier, looked at now and then (Dynamic Depth Decoding)."""

from infer.stop import Level, Stop
from infer.stops.config import ProbabilitySumConfig


class ProbabilitySum(Stop):
    """Stops at one of the depths `checks` when S, the summed survival of the frontier, is below the threshold.

    Between them nothing is read from the device. The paper's heuristic is log S.
    Source: Dynamic Depth Decoding (arXiv 2409.00142).
    """

    def __init__(self, config: ProbabilitySumConfig) -> None:
        self.config = config

    def ends(self, level: Level) -> bool:
        return level.depth in self.config.checks and float(level.survival.exp().sum()) < self.config.threshold
