"""When to stop drafting deeper. A stop rule sees what was drafted and is asked before the next forward is paid.

To add a rule: its config in configs/schema/decode.py, its class and its line in STOPS here, and a test.
"""

from typing import Any

import torch
from torch import Tensor

from aerie.configs.schema import decode as schema
from aerie.infer.decode.sampling import entropy
from aerie.infer.decode.tree import Level


class Stop:
    """Ends a tree's growth; by itself it is the constant rule, which leaves that to the shape's own last level."""

    # A rule depends on the draft and on past cycles alone, so that it cannot move the output's law. A token that was
    # drawn stays in the draft: a rule that took it back after a look at it would bias the output.
    def __init__(self, config: Any = None, levels: int = 2**31, nodes: int = 2**31) -> None:
        """levels and nodes (with the root) are the tree's."""
        self.config, self.levels, self.nodes = config or schema.ConstantConfig(), levels, nodes
        self.reset()
        self.begin()

    def reset(self) -> None:
        """A new prompt: forgets what `learn` taught."""

    def begin(self) -> None:
        """A new tree."""
        self._best: Tensor | None = None  # survivals [at most nodes - 1], for `expected_length`

    def ends(self, level: Level) -> bool:
        """Whether this level is the last one. Asked once per level, but not at the shape's own last one."""
        return False

    def expands(self, level: Level) -> Tensor | None:
        """Which frontier nodes [f] of a dynamic tree are expanded, the others stay as leaves; null: all."""
        return None

    def learn(self, accepted: int, levels: int) -> None:
        """How many tokens of a tree of this many levels were accepted."""

    def expected_length(self, level: Level) -> Tensor:
        """OPT-Tree's E(A) [] of the tree so far (arXiv 2406.17276): the sum of the nodes - 1 largest survivals."""
        # those nodes are what reranking would keep; survival stands for a node's chance to be accepted
        survival = level.survival.exp()
        both = survival if self._best is None else torch.cat([self._best, survival])
        self._best = both.topk(min(self.nodes - 1, both.shape[0])).values
        return self._best.sum()


class Confidence(Stop):
    """Stops when q of the newest token (on a tree, of the level's best-ranked one) is below the threshold."""

    config: schema.ConfidenceConfig

    # assistant_confidence_threshold of transformers, without its adaptation of the threshold
    def ends(self, level: Level) -> bool:
        return float(level.confidence[level.frontier[:1]].exp()) < self.config.threshold


class Entropy(Stop):
    """Stops when sqrt(c * H(q)) > h (SVIP, arXiv 2411.18462, equations 6 and 7, algorithm 1)."""

    config: schema.EntropyConfig

    # 1 - sqrt(c * H(q)) stands for the chance of acceptance. H is in nats, of the law that a token was chosen from: the
    # rule sees laws, not tokens. The paper does not say whose entropy counts on a tree; for one node a level all
    # choices of `over` are the same.
    def ends(self, level: Level) -> bool:
        over = self.config.over
        if over == "per_node" and level.frontier.shape[0] > 1:
            return False  # `expands` decides node by node
        if over in ("top_path", "per_node"):
            law = level.log_q.index_select(0, level.rows[level.frontier[:1]])  # [1, Vd]
            return float(entropy(law.exp())) > self.config.max_entropy
        entropies = entropy(level.log_q.exp())[level.rows[level.frontier]]  # [f]
        mean = entropies.min() if over == "minimum" else (entropies * level.alive.softmax(-1)).sum()
        return float(mean) > self.config.max_entropy

    def expands(self, level: Level) -> Tensor | None:
        if self.config.over != "per_node" or level.frontier.shape[0] == 1:
            return None
        return entropy(level.log_q.exp())[level.rows[level.frontier]] <= self.config.max_entropy


class Heuristic(Stop):
    """Stops at gamma levels, which grow by 2 when all were accepted and shrink by 1 otherwise (transformers)."""

    config: schema.HeuristicConfig
    gamma = 0

    # the schedules "heuristic" and "heuristic_transient"; SVIP caps gamma at 40, which is the tree's `levels`
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

    config: schema.ProbabilitySumConfig

    # the paper's heuristic is log S; between the checks nothing is read from the device
    def ends(self, level: Level) -> bool:
        return level.depth in self.config.checks and float(level.alive.exp().sum()) < self.config.threshold


class MarginalGain(Stop):
    """Stops after a level that raised the expected length by no more than the threshold (OPT-Tree, section 3)."""

    config: schema.MarginalGainConfig

    # OPT-Tree's frontier is as wide as its budget of drafted nodes: a dynamic tree with k = nodes - 1. The released
    # code decides about a level once the next one was drafted, and throws that one away: the same tree, a forward more.
    def begin(self) -> None:
        super().begin()
        self._last = 0.0

    def ends(self, level: Level) -> bool:
        expected = float(self.expected_length(level))
        gain, self._last = expected - self._last, expected
        return gain <= self.config.threshold


class Vote(Stop):
    """Stops when enough signals agree (DEAGLE, equations 22 to 26 and section 3.4)."""

    config: schema.VoteConfig

    # With S_d the summed survival of the frontier at depth d and S_0 = 1:
    #   probability: S_d < 0.15      momentum: S_d / S_{d-1} < 0.6, for the second time
    #   expectation: d >= ceil(E_d), E_d = bonus + S_1 + ... + S_d; without a bonus E_d never exceeds d: always on
    # The vote is taken on the frontier that is about to be expanded, before that forward is paid.
    def begin(self) -> None:
        super().begin()
        self._mass, self._tail = 1.0, 0.0  # S of the level above; S_1 + ... + S_d
        self._declines = 0

    def ends(self, level: Level) -> bool:
        config, mass = self.config, level.alive.exp().sum()
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
        # E_d is not rounded up: a whole number is at least E_d exactly when it is at least its ceiling
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
