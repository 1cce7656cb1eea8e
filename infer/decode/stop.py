"""When to stop drafting deeper. A stop rule sees what was drafted and is asked before the next forward is paid.

To add a rule: its config in configs/schema/decode.py, its class and its line in STOPS here, and a test.
"""

from typing import Any

import torch
from torch import Tensor

from aerie.configs.schema.decode import (
    ConfidenceConfig,
    ConstantConfig,
    EntropyConfig,
    HeuristicConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    VoteConfig,
)
from aerie.infer.decode.tree import Level


class Stop:
    """Ends a tree's growth, by itself never before the shape's own last level (the constant rule).

    A rule depends on the draft and on past cycles alone, so that it cannot move the output's law. A token that was
    drawn stays in the draft: a rule that took it back after a look at it would bias the output.
    """

    def __init__(self, config: Any = None, levels: int = 2**31, nodes: int = 2**31) -> None:
        """levels and nodes (with the root) are the tree's."""
        self.config, self.levels, self.nodes = config or ConstantConfig(), levels, nodes
        self.reset()
        self.begin()

    def reset(self) -> None:
        """A new prompt: forgets what `learn` taught."""

    def begin(self) -> None:
        """A new tree."""

    def ends(self, level: Level) -> bool:
        """Whether this level is the last one. Asked once per level, but not at the shape's own last one."""
        return False

    def expands(self, level: Level) -> Tensor | None:
        """Which frontier nodes [f] are expanded, a boolean each; null: all. The others stay in the tree as leaves.

        Asked after `ends`, by dynamic trees.
        """
        return None

    def learn(self, accepted: int, levels: int) -> None:
        """How many tokens of a tree of this many levels were accepted."""


class Confidence(Stop):
    """Stops when q of the newest token is below the threshold; that token stays in the draft.

    On a tree the newest token is the best-ranked one of the level.
    Source: assistant_confidence_threshold of transformers, without its adaptation of the threshold.
    """

    config: ConfidenceConfig

    def ends(self, level: Level) -> bool:
        return float(level.confidence[level.frontier[:1]].exp()) < self.config.threshold


class Entropy(Stop):
    """Stops when sqrt(c * H(q)) > h: then 1 - sqrt(c * H(q)), which stands for the chance of acceptance, is too small.

    H is in nats, of the law that a token was chosen from: the rule sees laws, not tokens.
    Source: SVIP (arXiv 2411.18462), equations 6 and 7, algorithm 1. Its text for trees does not say whose entropy
    counts: `over` says it, and for one node a level all choices are the same.
    """

    config: EntropyConfig

    def ends(self, level: Level) -> bool:
        over = self.config.over
        if over == "per_node" and level.frontier.shape[0] > 1:
            return False  # `expands` decides node by node
        if over in ("top_path", "per_node"):
            law = level.log_q.index_select(0, level.rows[level.frontier[:1]])  # [1, Vd]
            return float(entropy(law)) > self.config.max_entropy
        entropies = entropy(level.log_q)[level.rows[level.frontier]]  # [f]
        if over == "minimum":
            return float(entropies.min()) > self.config.max_entropy
        return float((entropies * level.alive.softmax(-1)).sum()) > self.config.max_entropy

    def expands(self, level: Level) -> Tensor | None:
        if self.config.over != "per_node" or level.frontier.shape[0] == 1:
            return None
        return entropy(level.log_q)[level.rows[level.frontier]] <= self.config.max_entropy


def entropy(log_q: Tensor) -> Tensor:
    """The entropy in nats [n] of laws log q [n, Vd], in which -inf is allowed."""
    return torch.special.entr(log_q.exp()).sum(-1)


class Heuristic(Stop):
    """Stops at gamma levels; a cycle that accepted them all makes gamma larger by 2, any other smaller by 1.

    Source: the schedules "heuristic" and "heuristic_transient" of transformers' assisted generation; SVIP
    (arXiv 2411.18462) caps gamma at 40, which is the tree's `levels`.
    """

    config: HeuristicConfig
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
    """Stops at one of the depths `checks` when S, the summed survival of the frontier, is below the threshold.

    Between them nothing is read from the device. The paper's heuristic is log S.
    Source: Dynamic Depth Decoding (arXiv 2409.00142).
    """

    config: ProbabilitySumConfig

    def ends(self, level: Level) -> bool:
        return level.depth in self.config.checks and float(level.alive.exp().sum()) < self.config.threshold


class ExpectsLength(Stop):
    """A rule that knows the expected length of the tree so far: the sum of the largest nodes - 1 survivals.

    Those nodes are what reranking would keep. Source: E(A) of a tree, OPT-Tree (arXiv 2406.17276); the survival of a
    node stands for its chance to be accepted.
    """

    _best: Tensor | None = None  # survivals [at most nodes - 1]

    def begin(self) -> None:
        self._best = None

    def expected_length(self, level: Level) -> Tensor:
        """The sum [], once the candidates of this level are known."""
        survival = level.survival.exp()
        both = survival if self._best is None else torch.cat([self._best, survival])
        self._best = both.topk(min(self.nodes - 1, both.shape[0])).values
        return self._best.sum()


class MarginalGain(ExpectsLength):
    """Stops after a level that raised the expected length of the best nodes by no more than the threshold.

    OPT-Tree's frontier is as wide as its budget of drafted nodes: a dynamic tree with k = nodes - 1. In a narrower one
    the expected length is still that of the nodes which reranking keeps. The released code takes its decision on a
    level once the next one was drafted, and throws that one away: the same tree for one forward more.
    Source: OPT-Tree (arXiv 2406.17276), section 3, and its released code.
    """

    config: MarginalGainConfig

    def begin(self) -> None:
        super().begin()
        self._last = 0.0

    def ends(self, level: Level) -> bool:
        expected = float(self.expected_length(level))
        gain, self._last = expected - self._last, expected
        return gain <= self.config.threshold


class Vote(ExpectsLength):
    """Stops when enough signals agree: little survival mass, its second sharp decline, expected length reached.

    With S_d the summed survival of the frontier at depth d and S_0 = 1:
    probability: S_d < 0.15. momentum: S_d / S_{d-1} < 0.6, for the second time. expectation: d >= ceil(E_d), where
    E_d = bonus + S_1 + ... + S_d; without a bonus E_d never exceeds d and the signal is always on.
    The vote is taken on the frontier that is about to be expanded, before that forward is paid.
    Source: DEAGLE, equations 22 to 26 and section 3.4; VoteConfig names what the paper leaves open.
    """

    config: VoteConfig

    def begin(self) -> None:
        super().begin()
        self._mass = 1.0  # S of the level above
        self._tail = 0.0  # S_1 + ... + S_d
        self._declines = 0

    def ends(self, level: Level) -> bool:
        config, mass = self.config, level.alive.exp().sum()
        if config.over == "selected":  # one synchronisation for both
            both = torch.stack([mass, self.expected_length(level)]).tolist()
            new, tail = min(both[0], 1.0), min(both[1], float(level.depth))  # rounding must not exceed the bounds
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
    ConstantConfig: Stop,
    HeuristicConfig: Heuristic,
    EntropyConfig: Entropy,
    ConfidenceConfig: Confidence,
    VoteConfig: Vote,
    ProbabilitySumConfig: ProbabilitySum,
    MarginalGainConfig: MarginalGain,
}


def make_stop(config: Any, levels: int, nodes: int) -> Stop:
    """The stop rule of a tree of so many levels and nodes with the root."""
    return STOPS[type(config)](config, levels, nodes)
