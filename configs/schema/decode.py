"""The stop rules as a recipe writes them: `stop: {rule: NAME, ...}`."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, model_validator

from aerie.configs.errors import UserError
from aerie.configs.read import STRICT, read_yaml, validate


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

    def __post_init__(self) -> None:
        if not (0.0 < self.c < inf and 0.0 <= self.h < inf):
            raise ValueError(f"c must be positive and h not negative, not c {self.c:g} and h {self.h:g}")

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

    Momentum is section 3.4's S_d / S_{d-1}: the ratio of equation 25 is at least 1 and would never vote. Equations 22
    and 26 without a bonus are at most the depth: expectation always votes, and deciding alone it is refused.
    """

    __pydantic_config__ = STRICT
    rule: Literal["vote"] = "vote"
    signals: tuple[Signal, ...] = ("probability", "momentum", "expectation")
    votes: int | None = None  # null: two, or one where there is one signal
    probability_threshold: float = 0.15
    momentum_threshold: float = 0.6
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
    """Whether a rule says which nodes grow."""
    return isinstance(stop, EntropyConfig) and stop.over == "per_node"


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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """levels, k and nodes with the root."""
        return self.length, 1, self.length + 1

    @property
    def text(self) -> str:
        matching = "" if self.matching == "transformers" else f", {self.matching} matching"
        shortest = "" if self.min_ngram == 1 else f", at least {self.min_ngram}"
        last = "" if self.match == "first" else f", the {self.match} match"
        return f"n-grams up to {self.longest_ngram}{shortest}, {self.length} tokens{matching}{last}"


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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """levels, k and nodes with root and passengers, when it is widest: with a full window, or on the way there."""
        rows, columns = self.ngram - 1, self.window
        warm_up = max((row + 1) * (columns + rows - 1 - row) for row in range(rows))
        return rows, self.guesses, max(rows * columns + rows * self.guesses, warm_up)

    @property
    def text(self) -> str:
        pool = ", pool from the text" if self.pool_from_text else ""
        return f"N {self.ngram}, W {self.window}, G {self.guesses}{pool}" + (f", seed {self.seed}" if self.seed else "")


GuessMethod = Literal["pld", "lookahead"]
Options = PromptLookupConfig | LookaheadConfig
SECTIONS: dict[GuessMethod, str] = {"pld": "lookup", "lookahead": "lookahead"}
OPTIONS: dict[str, type[Options]] = {"lookup": PromptLookupConfig, "lookahead": LookaheadConfig}


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The sections; null: nothing is set."""

    lookup: PromptLookupConfig | None = None
    lookahead: LookaheadConfig | None = None


Choice = tuple[int, ...]
PUBLISHED = Path(__file__).resolve().parent.parent / "trees"


@dataclass(frozen=True)
class _File:
    __pydantic_config__ = STRICT
    choices: tuple[Choice, ...]


def inline(config: TreeConfig) -> tuple[Choice, ...]:
    """The nodes of a static tree in level order, read from the file where the recipe names one.

    UserError names what makes them no tree, or a gap between siblings that are to be sampled.
    """
    assert config.choices is not None, "only a static tree has choices"
    source, choices = "tree.choices", config.choices
    if isinstance(choices, str):
        path = _file(config) or PUBLISHED / f"{choices}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in PUBLISHED.glob("*.yaml")))
            raise UserError(f"tree.choices: {choices}: no such file (published trees: {known})")
        values, lines = read_yaml(path)
        source, choices = f"{path}: choices", validate(values, _File, str(path), lines).choices
    return ordered(choices, source, config.children != "best")


def digests(configs: Iterable[TreeConfig | None]) -> dict[str, dict[str, str]]:
    """{"choices": file -> digest} of the files that trees name, which may change under their names; empty without."""
    named = {str(config.choices): file for config in configs if config and (file := _file(config)) is not None}
    return (
        {"choices": {name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in sorted(named.items())}}
        if named
        else {}
    )


def sized(config: TreeConfig) -> TreeConfig:
    """The configuration with the true levels, k and nodes of a static tree; any other as it is."""
    if config.shape != "static":
        return config
    choices = inline(config)
    return replace(
        config,
        levels=max(map(len, choices)),
        k=1 + max(max(choice) for choice in choices),
        nodes=1 + len(choices),
    )


def _file(config: TreeConfig) -> Path | None:
    """The file that a tree's choices name; null for a published tree, a list, and where there are none."""
    choices = config.choices
    return Path(choices) if isinstance(choices, str) and choices.endswith((".yaml", ".yml")) else None


def ordered(choices: Sequence[Choice], source: str, sampled: bool) -> tuple[Choice, ...]:
    """The choices in level order, siblings by rank; UserError (about source) when they are no tree.

    sampled: a node's child of rank r is then the token drawn r-th, and none of those drawn before it may be left out.
    """
    if not choices or () in choices:
        raise UserError(f"{source}: a tree has at least one path, and no empty one (the root is always there)")
    nodes = {(), *choices}
    if len(nodes) != len(choices) + 1:
        twice = next(choice for number, choice in enumerate(choices) if choice in choices[:number])
        raise UserError(f"{source}: {list(twice)} stands there twice; list each path once")
    for choice in choices:
        *above, rank = choice
        if rank < 0:
            raise UserError(f"{source}: {list(choice)} has a negative rank; ranks count from 0")
        if tuple(above) not in nodes:
            raise UserError(f"{source}: {list(choice)} is listed without its parent {above}; add the parent")
        if sampled and rank and (*above, rank - 1) not in nodes:
            raise UserError(
                f"{source}: {list(choice)} is listed without {[*above, rank - 1]}: leaving out a child that was drawn "
                f"would bias the output; list it too, or use children: best"
            )
    return tuple(sorted(choices, key=lambda choice: (len(choice), choice)))


def best_choices(accuracy: Sequence[Sequence[float]], num_choices: int) -> tuple[Choice, ...]:
    """The tree of num_choices drafted nodes with the most accepted tokens to expect, in level order.

    accuracy[depth][rank] is how often the child of this rank is the target's token, given that its parent was; depth 0
    is the root's children. Greedily adds the node with the largest product of accuracies along its path; fewer nodes
    when the table has no more. Source: Medusa (arXiv 2401.10774), section 2.3.3.
    """
    found: list[Choice] = []
    heap: list[tuple[float, int, Choice]] = []

    def offer(parent: Choice, chance: float) -> None:
        if len(parent) < len(accuracy):
            for rank, own in enumerate(accuracy[len(parent)]):
                if own > 0:
                    heapq.heappush(heap, (-chance * own, len(parent) + 1, (*parent, rank)))

    offer((), 1.0)
    while heap and len(found) < num_choices:
        chance, _, choice = heapq.heappop(heap)
        found.append(choice)
        offer(choice, -chance)
    return tuple(sorted(found, key=lambda choice: (len(choice), choice)))


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
    # survival is made of the head's own confidence, or as one of the fits of its calibrator.json (`calibrate`) maps it
    calibrated: Literal["temperature", "isotonic"] | None = None

    def __post_init__(self) -> None:
        if min(self.levels, self.k) < 1 or self.nodes < 2:
            raise ValueError("a tree needs levels >= 1, k >= 1 and nodes >= 2")
        if self.shape != "dynamic" and (self.rank != "survival" or not self.rerank):
            raise ValueError(f"rank and rerank belong to a dynamic tree, this shape is {self.shape}; leave them out")
        if self.shape not in ("dynamic", "chain") and asks_below(self.stop):
            raise ValueError("per_node needs a shape that chooses its nodes: dynamic or chain")
        if not self.rerank and self.nodes != self.k * self.levels + 1:
            raise ValueError(
                f"without reranking every level's k best are verified: set nodes to {self.k * self.levels + 1}"
            )
        if self.shape == "dynamic" and self.children not in (None, "best"):
            raise ValueError(
                f"a dynamic tree with children: {self.children} would bias the output, for reranking drops tokens that "
                f"were drawn; leave children out, or draw them in a static tree (method eagle; sps with shape: static)"
            )
        if self.shape == "chain" and self.children == "replaced":
            raise ValueError("a chain has no siblings to draw with replacement; use children: sampled")
        if (self.shape == "static") != (self.choices is not None):
            raise ValueError("choices are the nodes of shape: static; set both or neither (choices: eagle1, for one)")
        unreached = None if self.shape == "static" else beyond(self.stop, self.levels)  # its levels are its choices'
        if unreached is not None:
            raise ValueError(unreached)


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
    """What differs from a method's published tree; the keys are TreeConfig's, null: as published.

    A key that the method's tree does not read is refused (infer/methods.py). stop without a rule changes the method's.
    """

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
    calibrated: Literal["temperature", "isotonic"] | None = None


Method = Literal[
    "vanilla",
    "sps",
    "sps-heuristic",
    "sps-svip",
    "sps-confidence",
    GuessMethod,
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
class Published:
    """A method as its source has it. heads: the kinds that it drafts with, none: it needs no head; tree: null where it
    guesses without one.

    sps is the method of a draft LM in any tree, as medusa and hydra are of theirs; eagle that of EAGLE heads in a
    static one.
    """

    heads: tuple[str, ...] = ()
    tree: TreeConfig | None = None
    shapes: tuple[str, ...] = ()  # that its tree may have instead of its own
    options: str | None = None  # the section of its settings, for a method that guesses


EAGLE = ("eagle1", "eagle3")
MEDUSA_TREE = TreeConfig(shape="static", choices="medusa63", children="best")
METHODS: dict[Method, Published] = {
    "vanilla": Published(),
    # a constant of 5 and caps of 40 are SVIP's (arXiv 2411.18462), 20 is transformers'
    "sps": Published(("draft_lm",), TreeConfig(shape="chain", levels=5), shapes=("dynamic", "static")),
    "sps-heuristic": Published(("draft_lm",), TreeConfig(shape="chain", levels=40, stop=HeuristicConfig())),
    "sps-svip": Published(("draft_lm",), TreeConfig(shape="chain", levels=40, stop=EntropyConfig())),
    "sps-confidence": Published(("draft_lm",), TreeConfig(shape="chain", levels=20, stop=ConfidenceConfig())),
    **{name: Published(options=section) for name, section in SECTIONS.items()},
    "medusa": Published(("medusa",), MEDUSA_TREE, shapes=("dynamic", "chain")),
    "hydra": Published(("hydra",), MEDUSA_TREE, shapes=("dynamic", "chain")),
    "eagle": Published(EAGLE, TreeConfig(shape="static", choices="eagle1")),
    "eagle2": Published(("eagle1",), TreeConfig(levels=6)),
    "eagle3": Published(("eagle3",), TreeConfig(levels=8)),
    "eagle-chain": Published(EAGLE, TreeConfig(shape="chain", levels=5)),
    # rules that end the tree of EAGLE-2 or EAGLE-3: DEAGLE (section 4.1), SVIP (table 2), DDD (max 11), OPT-Tree
    "deagle": Published(EAGLE, TreeConfig(levels=8, stop=VoteConfig())),
    "svip": Published(EAGLE, TreeConfig(levels=8, stop=EntropyConfig())),
    "ddd": Published(EAGLE, TreeConfig(levels=11, stop=ProbabilitySumConfig())),
    "opt-tree": Published(EAGLE, TreeConfig(levels=9, k=59, stop=MarginalGainConfig())),
}
USUAL: dict[str, Method] = {
    "eagle1": "eagle2",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "hydra": "hydra",
    "draft_lm": "sps",
}
TUNABLE = ("eagle1", "eagle3", "draft_lm")  # whose trees `tune` searches; a static one comes from `calibrate`
FREE: tuple[Method, ...] = ("eagle-chain", "eagle")  # any stop rule keeps the name


def name_rule(tree: Any, method: Any) -> Any:
    """A recipe's `tree` with the rule of the method in a `stop` that names none: its keys change that rule."""
    stop = tree.get("stop") if isinstance(tree, dict) else None
    published = METHODS[method].tree if method in METHODS else None
    if not isinstance(stop, dict) or "rule" in stop or published is None or published.stop.rule == "constant":
        return tree
    return {**tree, "stop": {"rule": published.stop.rule, **stop}}


@dataclass(frozen=True)
class MethodConfig(Guesses):
    """One way of decoding: a method by its name, and what differs from its published form."""

    __pydantic_config__ = STRICT
    method: Method
    tree: TreeChanges = TreeChanges()
    head: str | None = None  # a head's directory or Hub id; null: the run's own of a kind that the method drafts with
    typical: TypicalConfig | None = None  # in place of a lossless rule where tokens are sampled: NOT lossless

    @model_validator(mode="before")
    @classmethod
    def _name_rule(cls, values: Any) -> Any:
        if isinstance(values, dict) and "tree" in values:
            return {**values, "tree": name_rule(values["tree"], values.get("method"))}
        return values

    @property
    def options(self) -> Options | None:
        """What a method that guesses is set to, its published settings where nothing is set; null for any other."""
        section = METHODS[self.method].options
        return None if section is None else getattr(self, section) or OPTIONS[section]()


__all__ = ["METHODS", "USUAL", "check_kind", "tree_of", "usual_method", "usual_tree"]

NOTHING = TreeChanges()
OF_OTHER_SHAPES = {
    "chain": ("k", "nodes", "rank", "rerank", "choices"),
    "static": ("levels", "k", "nodes", "rank", "rerank"),
    "dynamic": ("choices",),
}
INSTEAD = {  # of a key that a shape does not read
    "chain": "a chain has tree.levels",
    "static": "a static tree is its tree.choices",
    "dynamic": "method eagle drafts a static tree",
}


def usual_method(kind: str) -> Method:
    """How a head of this kind usually decodes; UserError for a kind that does not."""
    if kind not in USUAL:
        raise UserError(f"a head of kind {kind!r} does not draft; kinds that do: {', '.join(USUAL)}")
    return USUAL[kind]


def usual_tree(kind: str, changes: TreeChanges = NOTHING) -> TreeConfig:
    """The tree of a kind of head's usual method with a recipe's changes, a static one with its true size."""
    tree = tree_of(MethodConfig(usual_method(kind), changes), "recipe")
    assert tree is not None, "every head has a tree"
    return sized(tree)


def tree_of(asked: MethodConfig, place: str) -> TreeConfig | None:
    """The method's published tree with what the recipe changes of it; null for a method that grows none.

    UserError, which names the place in the recipe, for a key that the method or its shape does not read, and where the
    changes make another method of it: a rule that no method of that shape has keeps the name of a constant one.
    """
    published = METHODS[asked.method].tree
    changes = _set(asked.tree)
    _require_read(asked, changes, place)
    if published is None:
        return None
    shape = changes.get("shape", published.shape)
    _require_of_shape(asked.method, shape, changes, place)
    if shape == published.shape:
        _require_own_rule(asked.method, published, changes, place)
    else:
        published = TreeConfig(shape=shape, choices=changes.get("choices"))
    if changes.get("rerank") is False and "nodes" not in changes:
        changes["nodes"] = changes.get("k", published.k) * changes.get("levels", published.levels) + 1
    if asked.method == "opt-tree" and "nodes" in changes and "k" not in changes:
        changes["k"] = changes["nodes"] - 1  # its frontier is as wide as its budget
    try:
        tree = replace(published, **changes)
        unreached = beyond(tree.stop, sized(tree).levels)
    except ValueError as error:
        raise UserError(f"{place}: tree: {error}") from error
    except UserError as error:  # of the tree's choices
        raise UserError(f"{place}: {error}") from error
    if unreached is not None:
        raise UserError(f"{place}: tree: {unreached}")
    return tree


def check_kind(method: Method, kind: str, place: str) -> None:
    """UserError, which names the place, when the method does not draft with this kind of head."""
    heads = METHODS[method].heads
    if kind in heads:
        return
    if not heads:
        raise UserError(f"{place}: {method} needs no head; leave it out")
    article = "an" if kind[0] in "aeiou" else "a"
    raise UserError(
        f"{place}: {method} drafts with {' or '.join(heads)}, and this is {article} {kind} head; "
        f"give another head, or method {USUAL.get(kind, 'vanilla')}"
    )


def _require_read(asked: MethodConfig, changes: dict[str, Any], place: str) -> None:
    """UserError for a section of the method's settings that it has no use for."""
    published = METHODS[asked.method]
    if published.tree is None and changes:
        keys = ", ".join(f"tree.{key}" for key in changes)
        instead = f" (its settings are in {published.options})" if published.options else ""
        raise UserError(
            f"{place}: {keys}: {asked.method} grows no tree; leave {'it' if len(changes) == 1 else 'them'} out{instead}"
        )
    for section in OPTIONS:
        if section != published.options and getattr(asked, section) is not None:
            owner = next(name for name, each in METHODS.items() if each.options == section)
            raise UserError(f"{place}: {section}: {asked.method} does not read it; leave it out, or use method {owner}")
    if asked.typical is not None and asked.method == "vanilla":
        raise UserError(f"{place}: typical: judges drafted tokens, and vanilla drafts none; leave it out")


def _require_of_shape(method: Method, shape: str, changes: dict[str, Any], place: str) -> None:
    """UserError for a shape that the method does not draft, and for a key that a tree of this shape does not read."""
    published = METHODS[method]
    assert published.tree is not None
    if shape not in (published.tree.shape, *published.shapes):
        named: dict[str, Method] = {"chain": "eagle-chain", "static": "eagle", "dynamic": "eagle2"}
        other = f", or use method {named[shape]}" if {*published.heads} & {*METHODS[named[shape]].heads} else ""
        raise UserError(
            f"{place}: tree.shape: {method} drafts a {_tree(published.tree.shape)}, not a {_tree(shape)}; "
            f"leave it out{other}"
        )
    unread = [key for key in OF_OTHER_SHAPES[shape] if key in changes]
    if unread:
        raise UserError(
            f"{place}: tree.{unread[0]}: {method} drafts a {_tree(shape)}, which has none; leave it out "
            f"({INSTEAD[shape]})"
        )
    if shape == "static" and published.tree.choices is None and "choices" not in changes:
        raise UserError(f"{place}: tree.choices: a static tree needs its nodes; name a file of them, or eagle1")


def _require_own_rule(method: Method, published: TreeConfig, changes: dict[str, Any], place: str) -> None:
    """UserError for a stop rule that makes another method of it."""
    rule = changes["stop"].rule if "stop" in changes else published.stop.rule
    if rule == published.stop.rule or method in FREE:
        return
    heads = {*METHODS[method].heads}
    others = [name for name, each in METHODS.items() if heads & {*each.heads} and _alike(each.tree, published, rule)]
    if others or published.stop.rule != "constant":
        fix = f"that is method {' or '.join(others)}" if others else f"leave tree.stop.rule {published.stop.rule}"
        raise UserError(f"{place}: {method} with the stop rule {rule}: {fix}")


def _tree(shape: str) -> str:
    return "chain" if shape == "chain" else f"{shape} tree"


def _set(changes: TreeChanges) -> dict[str, Any]:
    values = {field.name: getattr(changes, field.name) for field in fields(changes)}
    return {name: value for name, value in values.items() if value is not None}


def _alike(one: TreeConfig | None, other: TreeConfig, rule: str) -> bool:
    """Whether a tree is of the other's shape, with this stop rule."""
    return one is not None and one.stop.rule == rule and one.shape == other.shape
