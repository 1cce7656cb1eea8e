"""A recipe's `tree`, `calibrate`, `bench` and `tune`, and every method by its name with its published tree."""

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from pydantic import model_validator

from infer.guess_config import OPTIONS, SECTIONS, Guesses, GuessMethod, Options
from infer.stops.config import (
    ConfidenceConfig,
    ConstantConfig,
    EntropyConfig,
    HeuristicConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    StopConfig,
    VoteConfig,
    asks_below,
    beyond,
)
from infer.task_config import PromptsConfig as PromptsConfig
from model.recipe import STRICT


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
            raise ValueError("per_node, excluded and late need a shape that chooses its nodes: dynamic or chain")
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


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of one bench pass; temperature 0 is argmax."""

    __pydantic_config__ = STRICT
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < inf:
            raise ValueError(f"temperature must not be negative (0 is argmax), not {self.temperature:g}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 switches it off), not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is a share, more than 0 and at most 1, not {self.top_p:g}")


CONTEXT = "context"  # the sweep that contexts make


@dataclass(frozen=True)
class SweepConfig:
    """Rows measured once for each value of one setting; they go to `sweeps` of summary.json, never into its rows."""

    __pydantic_config__ = STRICT
    name: str
    vary: str  # a key of a row (tree.levels, tree.nodes, tree.k, method, head, lookup.length, ...), or temperature
    values: tuple[Any, ...]
    rows: tuple[MethodConfig, ...]
    sampling: tuple[SamplingConfig, ...] = ()  # empty: the bench's
    tasks: tuple[str, ...] = ()  # names; empty: all
    num_prompts: int | None = None  # the first ones of each task; null: all

    def __post_init__(self) -> None:
        if not self.values or not self.rows:
            raise ValueError("a sweep needs values and rows")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError("num_prompts must be at least 1")


@dataclass(frozen=True)
class BenchConfig:
    """What is measured: every row on every prompt, interleaved, in one process."""

    __pydantic_config__ = STRICT
    prompts: PromptsConfig
    rows: tuple[MethodConfig, ...]
    sampling: tuple[SamplingConfig, ...] = (SamplingConfig(),)
    warmup_prompts: int = 2
    reference: bool = True  # also time transformers' generate and the bare forwards
    overhead: bool = False  # also time each row's model forwards replayed bare, on a few prompts (overhead.json)
    cycles: bool = False  # also record every cycle with its nodes and levels (cycles.jsonl); speeds stay comparable
    by_task: bool = False  # summary.json has a row for each task; false: the tasks pooled (details.json has each)
    sweeps: tuple[SweepConfig, ...] = ()
    # context lengths (prompt and answer, ascending) that split the answers into a sweep of their own, as far as the
    # target goes: from the start to each, and between each and the one before (SVIP, tables 2 and 5, figures 5 and 6)
    contexts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not any(row.method == "vanilla" for row in self.rows):
            raise ValueError("rows must contain the vanilla row: speedup is measured against it")
        if not self.sampling or len(set(self.sampling)) < len(self.sampling):
            raise ValueError("sampling is a list of one or more different settings ([{temperature: 0.0}], for one)")
        if self.warmup_prompts < 0:
            raise ValueError(f"warmup_prompts must not be negative, not {self.warmup_prompts}")
        names = [sweep.name for sweep in self.sweeps]
        if len(set(names)) < len(names) or CONTEXT in names:
            raise ValueError(f"sweeps need names that differ, and {CONTEXT} is that of contexts")
        if list(self.contexts) != sorted(set(self.contexts)) or min(self.contexts, default=1) < 1:
            raise ValueError("contexts are lengths in tokens, ascending")


@dataclass(frozen=True)
class CalibrateConfig:
    """Decoding cycles on held-out prompts that show how confidence predicts acceptance."""

    __pydantic_config__ = STRICT
    prompts: PromptsConfig
    method: Method | None = None  # null: the usual one of the recipe's head
    tree: TreeChanges = TreeChanges()
    bins: int = 20
    temperature: float = 0.0  # of the decoding
    oracle_levels: int | None = None  # also draft this deep at every cycle: the oracle draft length; SVIP: 40
    ranks: int = 10  # a static tree: how many of a law's best tokens are tried where the tree is rebuilt from them
    nodes: int | None = None  # of the rebuilt tree, with the root; null: as many as the tree that it replaces

    def __post_init__(self) -> None:
        if self.tree.calibrated is not None:
            raise ValueError("calibrate measures the head's own confidence; leave tree.calibrated out")
        if self.temperature < 0 or (self.oracle_levels is not None and self.oracle_levels < 1):
            raise ValueError("calibrate needs temperature >= 0 and oracle_levels >= 1 (null: no oracle)")
        if min(self.bins, self.ranks) < 1 or (self.nodes is not None and self.nodes < 2):
            raise ValueError("calibrate: bins and ranks are at least 1, nodes (which count the root) at least 2")
