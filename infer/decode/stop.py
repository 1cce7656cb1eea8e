"""When to stop drafting deeper. To add a rule: its config in configs/schema/decode.py, and a class and a line here."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from aerie.configs.schema import decode as schema
from aerie.infer.decode.sampling import entropy
from aerie.infer.decode.tree import Level, Tree

Read = Callable[[Tensor], Sequence[Any]]  # [n] -> n numbers
StopRead = Literal["each", "late"]  # as DynamicConfig has it
Growing = tuple[
    Any, Callable[[], Tree]
]  # a level: whether the tree ends there (a bool or a tensor []), and that tree


def on_device(numbers: Tensor) -> tuple[Tensor, ...]:
    """n tensors [] that stay on the device; a rule computes with them as with numbers."""
    return numbers.double().unbind()


class Stop:
    """The constant rule: every tree ends at its last level. nodes: the tree's, with the root."""

    # A rule sees only the draft and past cycles, and drops no drawn token: anything else would bias the output.
    reads_only = (
        True  # `ends` needs on the host only what it reads of this tree; `expands` returns None
    )
    keeps_tree = (
        False  # stopping leaves the tree as it would be without, so the rule may see what was drawn
    )

    def __init__(self, config: Any = None, levels: int = 2**31, nodes: int = 2**31) -> None:
        self.config: Any = config or schema.ConstantConfig()
        self.levels, self.nodes = levels, nodes
        self.reset()
        self.begin()

    def reset(self) -> None:
        """Begins a prompt."""

    def begin(self, read: Read = Tensor.tolist) -> None:
        """Begins a tree; with read `on_device`, `ends` returns tensors [] and waits for nothing."""
        self._best: list[Tensor] = []  # see `best`
        self.read = read

    def ends(self, level: Level) -> Any:
        """Whether this level is the last one; asked before the next draft forward, but not at the tree's last level."""
        return False

    def expands(self, level: Level) -> Tensor | None:
        """Which frontier nodes [f] of a dynamic tree are expanded; None: all."""
        return None

    def learn(self, accepted: int, levels: int) -> None:
        """How many tokens of a tree of these levels were accepted."""

    def expected_length(self, level: Level) -> Tensor:
        """OPT-Tree's E(A) [1] (arXiv 2406.17276): the sum of the nodes - 1 largest survivals."""
        return self.best(level.survival.exp()).sum(0, keepdim=True)

    def best(self, survival: Tensor) -> Tensor:
        """The largest survivals [at most nodes - 1] of the levels so far and this one's [n], descending."""
        both = torch.cat([*self._best, survival])
        self._best = [both.topk(min(self.nodes - 1, both.shape[0])).values]
        return self._best[0]


class Confidence(Stop):
    """Stops when q of the level's best token is below transformers' assistant_confidence_threshold."""

    def ends(self, level: Level) -> Any:
        [chance] = self.read(level.confidence[level.frontier[:1]].exp())
        return chance < self.config.threshold


class Entropy(Stop):
    """Stops when sqrt(c * H(q)) > h (SVIP, arXiv 2411.18462, equations 6 and 7, algorithm 1)."""

    @property
    def reads_only(self) -> bool:  # type: ignore[override]
        return self.config.over != "per_node"

    def ends(self, level: Level) -> Any:
        # the paper does not say whose entropy counts on a tree
        over = self.config.over
        if over == "per_node" and level.frontier.shape[0] > 1:
            return False
        if over in ("top_path", "per_node"):
            law = level.log_q.index_select(0, level.rows[level.frontier[:1]])  # [1, Vd]
            [nats] = self.read(entropy(law.exp()))
            return nats > self.config.max_entropy
        entropies = entropy(level.log_q.exp())[level.rows[level.frontier]]  # [f]
        mean = (
            entropies.min()
            if over == "minimum"
            else (entropies * level.frontier_survival.softmax(-1)).sum()
        )
        [nats] = self.read(mean[None])
        return nats > self.config.max_entropy

    def expands(self, level: Level) -> Tensor | None:
        if self.config.over != "per_node" or level.frontier.shape[0] == 1:
            return None
        return entropy(level.log_q.exp())[level.rows[level.frontier]] <= self.config.max_entropy


class Heuristic(Stop):
    """Stops at gamma levels, by default 2 more when all were accepted and else 1 fewer (transformers)."""

    reads_only = False
    gamma = 0

    def reset(self) -> None:
        if not (self.gamma and self.config.across_prompts):
            self.gamma = min(self.config.start, self.levels)

    def ends(self, level: Level) -> Any:
        return level.depth >= self.gamma

    def learn(self, accepted: int, levels: int) -> None:
        grown = (
            self.gamma + self.config.more if accepted == levels else self.gamma - self.config.fewer
        )
        self.gamma = min(max(1, grown), self.levels)


class ProbabilitySum(Stop):
    """Stops at one of the depths `checks` when S, the frontier's summed survival, is low (DDD, arXiv 2409.00142)."""

    def ends(self, level: Level) -> Any:
        if level.depth not in self.config.checks:
            return False
        [mass] = self.read(level.frontier_survival.exp().sum(0, keepdim=True))
        return mass < self.config.threshold


class MarginalGain(Stop):
    """Stops after a level that raised the expected length by no more than the threshold (OPT-Tree, section 3)."""

    def begin(self, read: Read = Tensor.tolist) -> None:
        super().begin(read)
        self._last = 0.0

    def ends(self, level: Level) -> Any:
        [expected] = self.read(self.expected_length(level))
        gain, self._last = expected - self._last, expected
        return gain <= self.config.threshold


class Exact(Stop):
    """Stops where no deeper node can be in the tree, as no node survives better than one above it."""

    keeps_tree = True

    def ends(self, level: Level) -> Any:
        chosen = self.best(level.survival)
        if chosen.shape[0] < self.nodes - 1:
            return False
        best, last = self.read(torch.stack([level.frontier_survival[0], chosen[-1]]))
        return best <= last  # of equals the shallower are in the tree


class Vote(Stop):
    """Stops when enough signals agree (DEAGLE, equations 22 to 26, section 3.4).

    With S_d the summed survival of the frontier at depth d and S_0 = 1:
      probability: S_d < 0.15      momentum: S_d / S_{d-1} < 0.6, for the second time
      expectation: d >= ceil(E_d), E_d = bonus + S_1 + ... + S_d; without a bonus E_d never exceeds d: always on
    """

    def begin(self, read: Read = Tensor.tolist) -> None:
        super().begin(read)
        self._mass, self._tail = 1.0, 0.0  # S of the level above; S_1 + ... + S_d
        self._declines = 0

    def ends(self, level: Level) -> Any:
        # rounding must not pass 1 and the depth
        config, mass = (
            self.config,
            level.frontier_survival.exp().sum(0, keepdim=True).clamp_(max=1.0),
        )
        if config.over == "selected":  # one synchronisation for both
            new, tail = self.read(
                torch.cat([mass, self.expected_length(level).clamp_(max=level.depth)])
            )
        else:
            [new] = self.read(mass)
            tail = self._tail = self._tail + new
        if level.depth >= config.momentum_from:
            declined = new < config.momentum_threshold * self._mass
            self._declines = (
                declined * (self._declines + 1) if config.consecutive else self._declines + declined
            )
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
    schema.ExactConfig: Exact,
}


def last_of(levels: Iterable[Growing]) -> Tree:
    """The tree that ends where its rule says so; an answer in a tensor is read while the next level runs."""
    before = cast(Any, None)
    for ends, finish in levels:
        if before is not None and before[0]():
            return replace(tree := before[1](), draft_forwards=tree.draft_forwards + 1)
        before = (promise(ends), finish) if isinstance(ends, Tensor) else None
        if ends is True:
            break
    return finish()


def promise(answer: Tensor) -> Callable[[], bool]:
    """Begins to copy a boolean [] to the host; the function returned waits for it alone, not for later launches."""
    if not answer.is_cuda:
        return lambda: bool(answer)
    held = torch.empty_like(answer, device="cpu", pin_memory=True).copy_(answer, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> bool:
        event.synchronize()
        return bool(held)

    return read
