"""The stop rules as a recipe writes them: `stop: {rule: NAME, ...}`."""

from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from pydantic import Discriminator

from model.recipe import STRICT


@dataclass(frozen=True)
class ConstantConfig:
    """Every tree has the tree's `levels`."""

    __pydantic_config__ = STRICT
    rule: Literal["constant"] = "constant"


@dataclass(frozen=True)
class HeuristicConfig:
    """A length that follows what was accepted (transformers). The cap is the tree's `levels`; SVIP: 40."""

    __pydantic_config__ = STRICT
    rule: Literal["heuristic"] = "heuristic"
    start: int = 5  # SVIP's code; transformers starts at num_assistant_tokens
    more: int = 2  # transformers: when all was accepted
    fewer: int = 1  # transformers: otherwise, down to one token
    across_prompts: bool = False  # true: transformers' "heuristic", which keeps the length; else "heuristic_transient"

    def __post_init__(self) -> None:
        if min(self.start, self.more, self.fewer) < 1:
            raise ValueError("start, more and fewer are at least 1")


@dataclass(frozen=True)
class EntropyConfig:
    """SVIP: stop when sqrt(c * H) > h, H in nats. Its released code has the defaults; c: 1 is the paper's text."""

    __pydantic_config__ = STRICT
    rule: Literal["entropy"] = "entropy"
    c: float = 0.15
    h: float = 0.3
    # Whose entropy counts on a tree (SVIP is silent): the best path's; the frontier's mean, weighted by survival; its
    # minimum (all must be uncertain); or each node's own, which is then not expanded while others are.
    over: Literal["top_path", "value_weighted", "minimum", "per_node"] = "top_path"
    # excluded: algorithm 1 to the letter, which looks at the next law, pays its forward, and draws nothing from it
    token: Literal["kept", "excluded"] = "kept"

    def __post_init__(self) -> None:
        if not (0.0 < self.c < inf and 0.0 <= self.h < inf):
            raise ValueError(f"c must be positive and h not negative, not c {self.c:g} and h {self.h:g}")
        if self.over == "per_node" and self.token == "excluded":
            raise ValueError("over: per_node leaves uncertain nodes as leaves, their tokens are kept; leave token out")

    @property
    def max_entropy(self) -> float:
        """The entropy in nats above which the rule stops: 0.6 by default, 0.09 by the paper's text."""
        return self.h**2 / self.c


@dataclass(frozen=True)
class ConfidenceConfig:
    """Stop below a token with a smaller q than this (transformers' assistant_confidence_threshold)."""

    __pydantic_config__ = STRICT
    rule: Literal["confidence"] = "confidence"
    threshold: float = 0.4  # transformers; its levels (num_assistant_tokens) are 20

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold is a probability, between 0 and 1, not {self.threshold:g}")


Signal = Literal["probability", "momentum", "expectation"]


@dataclass(frozen=True)
class VoteConfig:
    """DEAGLE's vote. Thresholds are the paper's; where its text and its equations differ, both readings are here.

    Two literal readings are degenerate. Equation 25 (old_over_new) is at least 1: momentum never votes. Equations 22
    and 26 without a bonus are at most the depth: expectation always votes. A rule that they decide alone is refused.
    """

    __pydantic_config__ = STRICT
    rule: Literal["vote"] = "vote"
    signals: tuple[Signal, ...] = ("probability", "momentum", "expectation")
    votes: int | None = None  # null: two, or one where there is one signal
    probability_threshold: float = 0.15
    momentum_threshold: float = 0.6
    momentum: Literal["new_over_old", "old_over_new"] = "new_over_old"  # section 3.4, or equation 25
    momentum_from: int = 1  # the first depth with a ratio; 1: the root's S is 1; 2: S_2 / S_1 is the first
    declines: int = 2  # "two times"
    consecutive: bool = False  # whether these must be levels in a row
    expectation: Literal["tail_sum", "leaf_sum"] = "tail_sum"  # equations 22 and 23, or 26 (a constant depth, nearly)
    # Added to E_d: the target's own token, and 2 because the code that the paper extends counts its loop over depths
    # from 0 at the second level. Its table 4 needs that much: the expectation alone leaves 8 levels as they are. 1: the
    # target's token alone; 0: the equations to the letter.
    bonus: float = 3.0
    over: Literal["frontier", "selected"] = "frontier"  # the tail's nodes: each level's frontier, or the reranked tree

    def __post_init__(self) -> None:
        if not self.signals or len(set(self.signals)) < len(self.signals):
            raise ValueError("signals names one to three different signals")
        if not 1 <= self.needed <= len(self.signals):
            raise ValueError(f"votes must be between 1 and the number of signals, {len(self.signals)}")
        if min(self.declines, self.momentum_from) < 1:
            raise ValueError("declines and momentum_from are at least 1")
        for name in ("probability_threshold", "momentum_threshold"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is a share, between 0 and 1, not {getattr(self, name):g}")
        if not 0.0 <= self.bonus < inf:
            raise ValueError(f"bonus is a number of tokens, not negative, not {self.bonus:g}")
        if self.needed <= ("expectation" in self.signals and self.bonus <= 0):
            raise ValueError("without a bonus the expectation always votes: every tree would end at its first level")
        if self.needed > len(self.signals) - ("momentum" in self.signals and self.momentum == "old_over_new"):
            raise ValueError("old_over_new is at least 1: momentum never votes, and no tree would end before `levels`")

    @property
    def needed(self) -> int:
        """How many signals end a tree."""
        return min(2, len(self.signals)) if self.votes is None else self.votes


@dataclass(frozen=True)
class ProbabilitySumConfig:
    """Dynamic Depth Decoding: the frontier's summed survival, looked at now and then. The paper's `levels` are 11."""

    __pydantic_config__ = STRICT
    rule: Literal["probability_sum"] = "probability_sum"
    checks: tuple[int, ...] = (5, 7, 9)  # depths
    threshold: float = 0.15  # tuned per model in the paper (as its logarithm); this one is DEAGLE's

    def __post_init__(self) -> None:
        if not self.checks or min(self.checks) < 1 or list(self.checks) != sorted(set(self.checks)):
            raise ValueError("checks are depths, in ascending order")
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold is a sum of probabilities, between 0 and 1, not {self.threshold:g}")


@dataclass(frozen=True)
class MarginalGainConfig:
    """OPT-Tree: what a level adds to the expected length. Its k is nodes - 1; its max_depth 10 verifies 9 levels."""

    __pydantic_config__ = STRICT
    rule: Literal["marginal_gain"] = "marginal_gain"
    threshold: float = 0.5  # expected tokens; its README, and 0.7 in its demonstration
    late: bool = False  # as its code: decided one forward later, whose level is thrown away; the same tree

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold < 1.0:
            raise ValueError(f"threshold is less than the one token that a level can add, not {self.threshold:g}")


StopConfig = Annotated[
    ConstantConfig
    | HeuristicConfig
    | EntropyConfig
    | ConfidenceConfig
    | VoteConfig
    | ProbabilitySumConfig
    | MarginalGainConfig,
    Discriminator("rule"),
]


def asks_below(stop: StopConfig) -> bool:
    """Whether a rule is asked after `ends` too: which nodes grow, or whether laws already paid for are used."""
    if isinstance(stop, EntropyConfig):
        return stop.over == "per_node" or stop.token == "excluded"
    return isinstance(stop, MarginalGainConfig) and stop.late


def beyond(stop: StopConfig, levels: int) -> str | None:
    """What a rule asks for that a draft of so many levels never reaches; null: nothing."""
    if isinstance(stop, HeuristicConfig) and stop.start > levels:
        return f"stop.start {stop.start} is deeper than the cap of {levels} levels; lower stop.start to {levels}"
    if isinstance(stop, ProbabilitySumConfig) and stop.checks[0] >= levels:
        return (
            f"stop.checks {list(stop.checks)} are never reached, for a draft of {levels} levels ends there by itself; "
            f"check at a smaller depth"
        )
    if isinstance(stop, VoteConfig) and stop.signals == ("momentum",):
        late = {"momentum_from": stop.momentum_from, "declines": stop.declines}
        name = next((name for name, depth in late.items() if depth >= levels), None)
        if name is not None:
            return f"stop.{name} {late[name]} is never reached, for a draft ends at {levels} levels by itself"
    return None
