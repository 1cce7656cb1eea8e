"""When to stop drafting deeper. To add a rule: its config in configs/schema/decode.py, and a class and a line here."""

from typing import Any

import torch
from torch import Tensor

from aerie.configs.schema import decode as schema
from aerie.infer.decode.sampling import entropy
from aerie.infer.decode.tree import Level


class Stop:
    """The constant rule, which leaves the end to the tree's last level; nodes count the root."""

    # it sees the draft and past cycles alone, and a token that was drawn stays: anything else would bias the output
    def __init__(self, config: Any = None, levels: int = 2**31, nodes: int = 2**31) -> None:
        self.config: Any = config or schema.ConstantConfig()
        self.levels, self.nodes = levels, nodes
        self.reset()
        self.begin()

    def reset(self) -> None:
        """A new prompt."""

    def begin(self) -> None:
        """A new tree."""
        self._best = torch.empty(0)  # survivals [at most nodes - 1], for `expected_length`

    def ends(self, level: Level) -> bool:
        """Whether this level is the last one; asked before the next forward is paid, but not at the last level."""
        return False

    def expands(self, level: Level) -> Tensor | None:
        """Which frontier nodes [f] of a dynamic tree are expanded; null: all."""
        return None

    def learn(self, accepted: int, levels: int) -> None:
        """How many tokens of a tree were accepted."""

    def expected_length(self, level: Level) -> Tensor:
        """OPT-Tree's E(A) [] (arXiv 2406.17276): the sum of the nodes - 1 largest survivals."""
        both = torch.cat([self._best.to(level.survival.device), level.survival.exp()])
        self._best = both.topk(min(self.nodes - 1, both.shape[0])).values
        return self._best.sum()


class Confidence(Stop):
    """Stops when q of the level's best token is below transformers' assistant_confidence_threshold."""

    def ends(self, level: Level) -> bool:
        return float(level.confidence[level.frontier[:1]].exp()) < self.config.threshold


class Entropy(Stop):
    """Stops when sqrt(c * H(q)) > h (SVIP, arXiv 2411.18462, equations 6 and 7, algorithm 1)."""

    def ends(self, level: Level) -> bool:
        # the paper does not say whose entropy counts on a tree
        over = self.config.over
        if over == "per_node" and level.frontier.shape[0] > 1:
            return False
        if over in ("top_path", "per_node"):
            law = level.log_q.index_select(0, level.rows[level.frontier[:1]])  # [1, Vd]
            return float(entropy(law.exp())) > self.config.max_entropy
        entropies = entropy(level.log_q.exp())[level.rows[level.frontier]]  # [f]
        mean = entropies.min() if over == "minimum" else (entropies * level.frontier_survival.softmax(-1)).sum()
        return float(mean) > self.config.max_entropy

    def expands(self, level: Level) -> Tensor | None:
        if self.config.over != "per_node" or level.frontier.shape[0] == 1:
            return None
        return entropy(level.log_q.exp())[level.rows[level.frontier]] <= self.config.max_entropy


class Heuristic(Stop):
    """Stops at gamma levels, by default 2 more when all were accepted and else 1 fewer (transformers)."""

    gamma = 0

    def reset(self) -> None:
        if not (self.gamma and self.config.across_prompts):
            self.gamma = min(self.config.start, self.levels)

    def ends(self, level: Level) -> bool:
        return level.depth >= self.gamma

    def learn(self, accepted: int, levels: int) -> None:
        grown = self.gamma + self.config.more if accepted == levels else self.gamma - self.config.fewer
        self.gamma = min(max(1, grown), self.levels)


class ProbabilitySum(Stop):
    """Stops at one of the depths `checks` when S, the frontier's summed survival, is low (DDD, arXiv 2409.00142)."""

    def ends(self, level: Level) -> bool:
        return level.depth in self.config.checks and float(level.frontier_survival.exp().sum()) < self.config.threshold


class MarginalGain(Stop):
    """Stops after a level that raised the expected length by no more than the threshold (OPT-Tree, section 3)."""

    def begin(self) -> None:
        super().begin()
        self._last = 0.0

    def ends(self, level: Level) -> bool:
        expected = float(self.expected_length(level))
        gain, self._last = expected - self._last, expected
        return gain <= self.config.threshold


class Vote(Stop):
    """Stops when enough signals agree (DEAGLE, equations 22 to 26, section 3.4).

    With S_d the summed survival of the frontier at depth d and S_0 = 1:
      probability: S_d < 0.15      momentum: S_d / S_{d-1} < 0.6, for the second time
      expectation: d >= ceil(E_d), E_d = bonus + S_1 + ... + S_d; without a bonus E_d never exceeds d: always on
    """

    def begin(self) -> None:
        super().begin()
        self._mass, self._tail = 1.0, 0.0  # S of the level above; S_1 + ... + S_d
        self._declines = 0

    def ends(self, level: Level) -> bool:
        config, mass = self.config, level.frontier_survival.exp().sum()
        if config.over == "selected":  # one synchronisation for both; rounding must not exceed 1 and the depth
            both = torch.stack([mass, self.expected_length(level)]).tolist()
            new, tail = min(both[0], 1.0), min(both[1], float(level.depth))
        else:
            new = min(float(mass), 1.0)
            tail = self._tail = self._tail + new
        if level.depth >= config.momentum_from:
            if new < config.momentum_threshold * self._mass:
                self._declines += 1
            elif config.consecutive:
                self._declines = 0
        self._mass = new
        expected = config.bonus + (new if config.expectation == "leaf_sum" else tail)
        votes = {
            "probability": new < config.probability_threshold,
            "momentum": self._declines >= config.declines,
            "expectation": level.depth >= expected,
        }
        return sum(votes[signal] for signal in config.signals) >= config.needed


STOPS: dict[type, type[Stop]] = {
    schema.ConstantConfig: Stop,
    schema.HeuristicConfig: Heuristic,
    schema.EntropyConfig: Entropy,
    schema.ConfidenceConfig: Confidence,
    schema.VoteConfig: Vote,
    schema.ProbabilitySumConfig: ProbabilitySum,
    schema.MarginalGainConfig: MarginalGain,
}
