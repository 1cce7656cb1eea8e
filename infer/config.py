"""The sections `tree`, `calibrate` and `bench` of a recipe."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Discriminator

from model.recipe import STRICT

# infer/methods.py says what each one is
Method = Literal[
    "vanilla",
    "sps",
    "sps-heuristic",
    "sps-svip",
    "sps-confidence",
    "pld",
    "lookahead",
    "medusa",
    "hydra",
    "eagle",
    "eagle2",
    "eagle3",
    "eagle-chain",
    "deagle",
    "svip",
    "ddd",
    "opt-tree",
]


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
        if self.c <= 0 or self.h < 0:
            raise ValueError("c must be positive, and h not negative")
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
            raise ValueError("threshold is a probability")


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
    bonus: float = 1.0  # added to E_d, whose tau counts the target's own token; 0: the equations to the letter
    over: Literal["frontier", "selected"] = "frontier"  # the tail's nodes: each level's frontier, or the reranked tree

    def __post_init__(self) -> None:
        if not self.signals or len(set(self.signals)) < len(self.signals):
            raise ValueError("signals names one to three different signals")
        if not 1 <= self.needed <= len(self.signals):
            raise ValueError(f"votes must be between 1 and the number of signals, {len(self.signals)}")
        if min(self.declines, self.momentum_from) < 1:
            raise ValueError("declines and momentum_from are at least 1")
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


@dataclass(frozen=True)
class MarginalGainConfig:
    """OPT-Tree: what a level adds to the expected length. Its k is nodes - 1; its max_depth 10 verifies 9 levels."""

    __pydantic_config__ = STRICT
    rule: Literal["marginal_gain"] = "marginal_gain"
    threshold: float = 0.5  # expected tokens; its README, and 0.7 in its demonstration
    late: bool = False  # as its code: decided one forward later, whose level is thrown away; the same tree


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


def _asks_below(stop: StopConfig) -> bool:
    """Whether a rule is asked after `ends` too: which nodes grow, or whether laws already paid for are used."""
    if isinstance(stop, EntropyConfig):
        return stop.over == "per_node" or stop.token == "excluded"
    return isinstance(stop, MarginalGainConfig) and stop.late


@dataclass(frozen=True)
class TreeConfig:
    """How far and how wide to draft. Nodes count the root, as SafeAILab's total_token does."""

    __pydantic_config__ = STRICT
    shape: Literal["dynamic", "chain", "static"] = "dynamic"
    levels: int = 6  # draft depth, the deepest for every stop rule; a static tree has its own
    k: int = 10  # branching and frontier width of a dynamic tree
    nodes: int = 60  # verified nodes with the root
    stop: StopConfig = ConstantConfig()
    # EAGLE-2's ablations (table 3). Without value: nodes are ranked by their own confidence, and of all levels those
    # are kept whose confidence, and that of all their ancestors, is largest. Without reranking: every level's k
    # best are verified, k * levels + 1 nodes.
    rank: Literal["survival", "confidence"] = "survival"
    rerank: bool = True
    # how children are picked where the target samples; at temperature 0 always the most probable ones
    #   best: the most probable tokens (R2); dynamic trees know nothing else (EAGLE-2), Medusa and Hydra ask for it
    #   sampled: drawn from q under the target's processors, a chain's tokens (R1), siblings without replacement (R3)
    #   replaced: siblings drawn with replacement (R4, SpecInfer)
    #   null: best in a dynamic tree, else sampled (speculative sampling's chain, EAGLE-1's static tree)
    children: Literal["best", "sampled", "replaced"] | None = None
    # a static tree's nodes as paths of child ranks, [[0], [1], [0, 0], ...]; or a YAML file that lists them under
    # `choices`; or the name of a published one: eagle1 (25 nodes), medusa63
    choices: str | tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if min(self.levels, self.k) < 1 or self.nodes < 2:
            raise ValueError("a tree needs levels >= 1, k >= 1 and nodes >= 2")
        if self.shape != "dynamic" and (self.rank != "survival" or not self.rerank):
            raise ValueError(f"rank and rerank belong to a dynamic tree, this shape is {self.shape}; leave them out")
        if self.shape not in ("dynamic", "chain") and _asks_below(self.stop):
            raise ValueError("per_node, excluded and late need a shape that chooses its nodes: dynamic or chain")
        if not self.rerank and self.nodes != self.k * self.levels + 1:
            raise ValueError(
                f"without reranking every level's k best are verified: set nodes to {self.k * self.levels + 1}"
            )
        if self.shape == "dynamic" and self.children not in (None, "best"):
            raise ValueError(
                f"a dynamic tree with children: {self.children} would bias the output, for reranking drops tokens that "
                f"were drawn; use children: best, or shape: static"
            )
        if self.shape == "chain" and self.children == "replaced":
            raise ValueError("a chain has no siblings to draw with replacement; use children: sampled")
        if (self.shape == "static") != (self.choices is not None):
            raise ValueError("choices are the nodes of shape: static; set both or neither (choices: eagle1, for one)")


@dataclass(frozen=True)
class TypicalConfig:
    """Medusa's typical acceptance, in place of a lossless rule where tokens are sampled. NOT lossless.

    Token x is accepted where p(x) > min(epsilon, delta exp(-H(p))). Source: Medusa (arXiv 2401.10774), section 2.3.1.
    """

    __pydantic_config__ = STRICT
    epsilon: float = 0.09  # published
    delta: float = 0.3  # published: the square root of epsilon

    def __post_init__(self) -> None:
        if not (0.0 <= self.epsilon < 1.0 and self.delta >= 0.0):
            raise ValueError("typical acceptance needs 0 <= epsilon < 1 and delta >= 0")


@dataclass(frozen=True)
class TreeChanges:
    """What differs from a method's published tree; the keys are TreeConfig's, null: as published."""

    __pydantic_config__ = STRICT
    shape: Literal["dynamic", "chain", "static"] | None = None
    levels: int | None = None
    k: int | None = None
    nodes: int | None = None
    stop: StopConfig | None = None
    rank: Literal["survival", "confidence"] | None = None
    rerank: bool | None = None
    children: Literal["best", "sampled", "replaced"] | None = None
    choices: str | tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class PromptsConfig:
    """Measuring prompts: Spec-Bench style questions {question_id, category, turns}, or lines of plain text."""

    __pydantic_config__ = STRICT
    path: str
    num_prompts: int | None = 80
    max_new_tokens: int = 512
    task: str | None = None  # null: the file's categories


@dataclass(frozen=True)
class PromptLookupConfig:
    """Prompt lookup; the published settings are those of transformers 5 and of prompt-lookup-decoding's README.

    matching: 'transformers' accepts any continuation and cuts it before an end token; 'original' wants all `length`
    tokens, from a place before the text's last n-gram.
    """

    __pydantic_config__ = STRICT
    matching: Literal["transformers", "original"] = "transformers"
    ngram: int | None = None  # the longest that is looked up; null: 2 for transformers' matching, 3 for the original
    min_ngram: int = 1
    length: int = 10  # drafted tokens
    match: Literal["first", "last"] = "first"  # of the places with that n-gram; both take the first

    @property
    def longest_ngram(self) -> int:
        published = 2 if self.matching == "transformers" else 3
        return published if self.ngram is None else self.ngram

    def __post_init__(self) -> None:
        if min(self.min_ngram, self.length) < 1 or self.longest_ngram < self.min_ngram:
            raise ValueError("prompt lookup needs ngram >= min_ngram >= 1 and length >= 1")


@dataclass(frozen=True)
class LookaheadConfig:
    """Lookahead decoding (arXiv 2402.02057); (N, W, G) = (5, 7, 7) are the published code's."""

    __pydantic_config__ = STRICT
    ngram: int = 5  # N: a guess has N - 1 tokens, the window N - 1 rows
    window: int = 7  # W: the window's columns
    guesses: int = 7  # G: n-grams kept for each first token, and verified at once
    pool_from_text: bool = False  # the pool also holds the n-grams of prompt and answer (POOL_FROM_PROMPT there)
    seed: int = 0  # of the window's first tokens, drawn from the prompt; theirs differ from run to run

    def __post_init__(self) -> None:
        if self.ngram < 2 or min(self.window, self.guesses) < 1:
            raise ValueError("lookahead needs ngram >= 2, window >= 1 and guesses >= 1")


@dataclass(frozen=True)
class MethodConfig:
    """One way of decoding: a method by its name, and what differs from its published form."""

    __pydantic_config__ = STRICT
    method: Method
    tree: TreeChanges = TreeChanges()
    head: str | None = None  # a head's directory or Hub id; null: the run's own of a kind that the method drafts with
    lookup: PromptLookupConfig = PromptLookupConfig()  # of pld
    lookahead: LookaheadConfig = LookaheadConfig()
    typical: TypicalConfig | None = None  # in place of a lossless rule where tokens are sampled: NOT lossless


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of one bench pass; temperature 0 is argmax."""

    __pydantic_config__ = STRICT
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class BenchConfig:
    """What is measured: every row on every prompt, interleaved, in one process."""

    __pydantic_config__ = STRICT
    prompts: PromptsConfig
    rows: tuple[MethodConfig, ...]
    sampling: tuple[SamplingConfig, ...] = (SamplingConfig(),)
    warmup_prompts: int = 2
    reference: bool = True  # also time transformers' generate and the bare forwards

    def __post_init__(self) -> None:
        if not any(row.method == "vanilla" for row in self.rows):
            raise ValueError("rows must contain the vanilla row: speedup is measured against it")


@dataclass(frozen=True)
class CalibrateConfig:
    """Decoding cycles on held-out prompts that show how confidence predicts acceptance."""

    __pydantic_config__ = STRICT
    prompts: PromptsConfig
    method: Method | None = None  # null: the usual one of the recipe's head
    tree: TreeChanges = TreeChanges()
    bins: int = 20
