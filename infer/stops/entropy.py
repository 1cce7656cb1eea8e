"""Stopping where the draft's own law is uncertain (SVIP)."""

import torch
from torch import Tensor

from infer.stop import Level, Stop
from infer.stops.config import EntropyConfig


class Entropy(Stop):
    """Stops when sqrt(c * H(q)) > h: then 1 - sqrt(c * H(q)), which stands for the chance of acceptance, is too small.

    H is in nats, of the law that a token was chosen from. The rule sees laws, not tokens, so that even without the
    uncertain token (`excluded`) the output keeps its law.
    Source: SVIP (arXiv 2411.18462), equations 6 and 7, algorithm 1. Its text for trees does not say whose entropy
    counts: `over` says it, and for one node a level all choices are the same.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config
        self._top_only = config.over in ("top_path", "per_node")  # per node, while there is but one

    def ends(self, level: Level) -> bool:
        if self.config.token == "excluded" or (self.config.over == "per_node" and level.rows.shape[0] > 1):
            return False
        if self._top_only:
            return self._uncertain(entropy(level.log_q.index_select(0, level.rows[:1])), level.survival)
        return self._uncertain(entropy(level.log_q)[level.rows], level.survival)

    def expands(self, level: Level) -> Tensor | None:
        if self.config.over != "per_node" or level.rows.shape[0] == 1:
            return None
        return entropy(level.log_q)[level.rows] <= self.config.max_entropy

    def declines(self, log_q: Tensor, above: Tensor) -> bool:
        if self.config.token == "kept":
            return False
        return self._uncertain(entropy(log_q[:1] if self._top_only else log_q), above)

    def _uncertain(self, entropies: Tensor, log_value: Tensor) -> bool:
        """One verdict on the entropies [n] of nodes with these log survivals [n]; one synchronisation."""
        match self.config.over:
            case "value_weighted":
                found = (entropies * log_value.softmax(-1)).sum()
            case "minimum":
                found = entropies.min()
            case _:
                found = entropies[0]
        return float(found) > self.config.max_entropy


def entropy(log_q: Tensor) -> Tensor:
    """The entropy in nats [n] of laws log q [n, Vd], in which -inf is allowed."""
    return torch.special.entr(log_q.exp()).sum(-1)
