"""A draft length that follows what was accepted: longer after a cycle without a rejection, shorter after any other."""

from infer.stop import Level, Stop
from infer.stops.config import HeuristicConfig


class Heuristic(Stop):
    """Stops at gamma levels; a cycle that accepted them all makes gamma larger by 2, any other smaller by 1.

    Source: the schedules "heuristic" and "heuristic_transient" of transformers' assisted generation; SVIP
    (arXiv 2411.18462) caps gamma at 40.
    """

    def __init__(self, config: HeuristicConfig, levels: int) -> None:
        self.config = config
        self.levels = levels
        self.gamma = min(config.start, levels)

    def reset(self) -> None:
        if not self.config.across_prompts:
            self.gamma = min(self.config.start, self.levels)

    def ends(self, level: Level) -> bool:
        return level.depth >= self.gamma

    def learn(self, accepted: int, levels: int) -> None:
        grown = self.gamma + self.config.more if accepted == levels else self.gamma - self.config.fewer
        self.gamma = min(max(1, grown), self.levels)
