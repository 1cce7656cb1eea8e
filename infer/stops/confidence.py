"""Stopping below a token that the draft itself found unlikely."""

from infer.stop import Level, Stop
from infer.stops.config import ConfidenceConfig


class Confidence(Stop):
    """Stops when q of the newest token is below the threshold; that token stays in the draft.

    On a tree the newest token is the best-ranked one of the level.
    Source: assistant_confidence_threshold of transformers, without its adaptation of the threshold.
    """

    def __init__(self, config: ConfidenceConfig) -> None:
        self.config = config

    def ends(self, level: Level) -> bool:
        return float(level.confidence[0].exp()) < self.config.threshold
