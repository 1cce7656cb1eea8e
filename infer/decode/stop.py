"""When to stop drafting deeper. A stop rule sees what was drafted and is asked before the next forward is paid."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aerie.configs.schema.decode import (
    ConfidenceConfig,
    EntropyConfig,
    HeuristicConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    TreeConfig,
    VoteConfig,
)


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


class Confidence(Stop):
    """Stops when q of the newest token is below the threshold; that token stays in the draft.

    On a tree the newest token is the best-ranked one of the level.
    Source: assistant_confidence_threshold of transformers, without its adaptation of the threshold.
    """

    def __init__(self, config: ConfidenceConfig) -> None:
        self.config = config

    def ends(self, level: Level) -> bool:
        return float(level.confidence[0].exp()) < self.config.threshold


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


class ExpectedLength:
    """The sum of the `nodes` largest survivals of all levels: those nodes are what reranking would keep.

    Source: E(A) of a tree, OPT-Tree (arXiv 2406.17276); the survival of a node stands for its chance to be accepted.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._best: Tensor | None = None

    def clear(self) -> None:
        """A new tree."""
        self._best = None

    def add(self, log_survival: Tensor) -> Tensor:
        """The sum, a scalar, once the nodes [n] of one more level are known."""
        survival = log_survival.exp()
        every = survival if self._best is None else torch.cat([self._best, survival])
        self._best = every.topk(min(self.nodes, every.shape[0])).values
        return self._best.sum()


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


class ProbabilitySum(Stop):
    """Stops at one of the depths `checks` when S, the summed survival of the frontier, is below the threshold.

    Between them nothing is read from the device. The paper's heuristic is log S.
    Source: Dynamic Depth Decoding (arXiv 2409.00142).
    """

    def __init__(self, config: ProbabilitySumConfig) -> None:
        self.config = config

    def ends(self, level: Level) -> bool:
        return level.depth in self.config.checks and float(level.survival.exp().sum()) < self.config.threshold


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


def make_stop(tree: TreeConfig) -> Stop:
    """The stop rule of a tree. Whatever the rule, the tree's `levels` are the deepest."""
    match tree.stop:
        case HeuristicConfig() as config:
            return Heuristic(config, tree.levels)
        case EntropyConfig() as config:
            return Entropy(config)
        case ConfidenceConfig() as config:
            return Confidence(config)
        case VoteConfig() as config:
            return Vote(config, tree.nodes)
        case ProbabilitySumConfig() as config:
            return ProbabilitySum(config)
        case MarginalGainConfig() as config:
            return MarginalGain(config, tree.nodes)
        case _:
            return Constant(tree.levels)
