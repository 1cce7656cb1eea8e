"""Stop rules: after each level of a draft, a rule says whether that level is the last one.

A new rule needs its settings in configs/schema/decode.py (a class, and a member of StopConfig), its
class and a row of STOPS here, and its name in docs/methods.md. `aerie keys --markdown` then updates
docs/recipes.md.

A rule may look only at the draft and at past cycles, and it must not drop a drawn token. Anything
else would bias the answers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aerie.configs.schema import decode as schema
from aerie.infer.decode.sampling import entropy
from aerie.infer.decode.tree import Level

# How a rule reads the numbers [n] that it computes with. `Tensor.tolist` waits for the device and
# gives floats. `on_device` gives tensors [], and the rule's answer is then a tensor, too.
Read = Callable[[Tensor], Sequence[Any]]


def on_device(numbers: Tensor) -> tuple[Tensor, ...]:
    # float64, like Python's floats, so that both ways of reading end a tree at the same level
    return numbers.double().unbind()


class Stop:
    """The constant rule: every tree ends at its last level. It is the base class of the others."""

    # `ends` needs nothing on the host but what `self.read` returns.
    reads_only = True
    # A stop never changes the finished tree, so the rule may see drawn tokens.
    keeps_tree = False

    def __init__(self, config: Any = None, levels: int = 2**31, nodes: int = 2**31) -> None:
        """levels, nodes: the most that a tree may have, its root among the nodes."""
        self.config: Any = config or schema.ConstantConfig()
        self.levels = levels
        self.nodes = nodes
        self.reset()
        self.begin()

    def reset(self) -> None:
        """Begins a prompt."""

    def begin(self, read: Read = Tensor.tolist) -> None:
        """Begins a tree."""
        self.read = read

    def ends(self, level: Level) -> Any:
        """Whether this level is the last one: a bool, or a boolean tensor [] if `on_device` reads.

        Asked before the next level's forward, and not at the deepest level that the tree may have.
        """
        return False

    def learn(self, accepted: int, levels: int) -> None:
        """Takes how many tokens of a tree with this many levels were accepted."""


class Heuristic(Stop):
    """transformers' schedule: it adds `more` levels if all was accepted, else takes off `fewer`."""

    reads_only = False  # gamma, the number of levels, is kept on the host

    def reset(self) -> None:
        self.gamma = min(self.config.start, self.levels)

    def ends(self, level: Level) -> Any:
        return level.depth >= self.gamma

    def learn(self, accepted: int, levels: int) -> None:
        change = self.config.more if accepted == levels else -self.config.fewer
        self.gamma = min(max(1, self.gamma + change), self.levels)


class Confidence(Stop):
    """Ends where q of the level's best token is below transformers' confidence threshold."""

    def ends(self, level: Level) -> Any:
        # the frontier is sorted, best first
        best = level.frontier[:1]
        [q] = self.read(level.confidence[best].exp())
        return q < self.config.threshold


class Entropy(Stop):
    """Ends where sqrt(c H(q)) > h (SVIP, arXiv 2411.18462, equations 6 and 7, algorithm 1).

    The paper does not say whose entropy counts on a tree. This rule takes the distribution that
    gave the level's best node.
    """

    def ends(self, level: Level) -> Any:
        best = level.frontier[:1]
        log_q = level.log_q.index_select(0, level.rows[best])  # [1, Vd]
        [nats] = self.read(entropy(log_q.exp()))
        return nats > self.config.max_entropy


class ProbabilitySum(Stop):
    """Ends at a depth in `checks` if S_d is low (Dynamic Depth Decoding, arXiv 2409.00142).

    S_d is the frontier's summed survival.
    """

    def ends(self, level: Level) -> Any:
        if level.depth not in self.config.checks:
            return False
        [mass] = self.read(summed_survival(level))
        return mass < self.config.threshold


class Vote(Stop):
    """Ends where enough of three signals vote for it (DEAGLE, equations 22 to 26, section 3.4).

    S_d is the summed survival of the frontier at depth d, and S_0 = 1. A signal votes if
      probability   S_d is low
      momentum      S_d / S_{d-1} was low `declines` times
      expectation   d >= E_d, with E_d = bonus + S_1 + ... + S_d. Without a bonus E_d never exceeds
                    d, so this signal always votes.
    """

    def begin(self, read: Read = Tensor.tolist) -> None:
        super().begin(read)
        self._mass_above = 1.0  # S_{d-1}
        self._total = 0.0  # S_1 + ... + S_d
        self._declines = 0

    def ends(self, level: Level) -> Any:
        config = self.config
        # rounding must not lift S_d above 1, nor E_d without a bonus above d
        [mass] = self.read(summed_survival(level).clamp_(max=1.0))
        # no `+=`, which would change a tensor that an earlier level's graph wrote
        self._total = self._total + mass
        self._declines = self._declines + (mass < config.momentum_threshold * self._mass_above)
        self._mass_above = mass
        votes = {
            "probability": mass < config.probability_threshold,
            "momentum": self._declines >= config.declines,
            "expectation": level.depth >= config.bonus + self._total,
        }
        return sum(votes[signal] for signal in config.signals) >= config.needed


def summed_survival(level: Level) -> Tensor:
    """The frontier's summed survival [1]: S_d of DEAGLE and DDD."""
    return level.frontier_survival.exp().sum(0, keepdim=True)


class BestSoFar(Stop):
    """Keeps the largest survivals of all levels so far."""

    def begin(self, read: Read = Tensor.tolist) -> None:
        super().begin(read)
        self._largest: list[Tensor] = []  # the result of the last call, if there was one

    def best(self, survival: Tensor) -> Tensor:
        """The nodes - 1 largest survivals so far, descending; survival [n] is this level's."""
        survivals = torch.cat([*self._largest, survival])
        num_best = min(self.nodes - 1, survivals.shape[0])
        self._largest = [survivals.topk(num_best).values]
        return self._largest[0]


class MarginalGain(BestSoFar):
    """Ends after a level that raised the expected length by too little (OPT-Tree, section 3).

    E(A), the expected length, is the sum of the nodes - 1 largest survivals (arXiv 2406.17276).
    """

    def begin(self, read: Read = Tensor.tolist) -> None:
        super().begin(read)
        self._expected_above = 0.0

    def ends(self, level: Level) -> Any:
        [expected] = self.read(self.best(level.survival.exp()).sum(0, keepdim=True))
        gain = expected - self._expected_above
        self._expected_above = expected
        return gain <= self.config.threshold


class Exact(BestSoFar):
    """Ends where no deeper node can join the tree, because none survives better than its parent."""

    keeps_tree = True

    def ends(self, level: Level) -> Any:
        chosen = self.best(level.survival)
        # the tree is not full yet
        if chosen.shape[0] < self.nodes - 1:
            return False
        next_best, last_chosen = self.read(torch.stack([level.frontier_survival[0], chosen[-1]]))
        return next_best <= last_chosen  # of equals, the tree takes the shallower


STOPS: dict[type, type[Stop]] = {
    schema.ConstantConfig: Stop,
    schema.HeuristicConfig: Heuristic,
    schema.EntropyConfig: Entropy,
    schema.ConfidenceConfig: Confidence,
    schema.VoteConfig: Vote,
    schema.ProbabilitySumConfig: ProbabilitySum,
    schema.MarginalGainConfig: MarginalGain,
    schema.ExactConfig: Exact,
}
