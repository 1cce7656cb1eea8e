"""How to decode: a method, and changes to its published settings (METHODS)."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from aerie.configs.errors import UserError
from aerie.configs.read import (
    Many,
    Place,
    Section,
    Some,
    adapter,
    ascending,
    distinct,
    key,
    load_file,
)
from aerie.configs.schema.heads import KINDS, Share


class ConstantConfig(Section):
    """Every draft is as deep as the tree."""

    rule: Literal["constant"] = "constant"


class HeuristicConfig(Section):
    """transformers' rule: the number of accepted tokens decides the next draft's length."""

    rule: Literal["heuristic"] = "heuristic"
    start: PositiveInt = key("length of the first draft (SVIP's code)", default=5)
    more: PositiveInt = key("tokens added to the length after all were accepted", default=2)
    fewer: PositiveInt = key("tokens taken off otherwise, down to a length of one", default=1)


class EntropyConfig(Section):
    """SVIP stops when sqrt(c * H) > h, with q's entropy H in nats. Defaults are those of its code
    (the paper: c = 1)."""

    rule: Literal["entropy"] = "entropy"
    c: PositiveFloat = key("weight of q's entropy", default=0.15)
    h: NonNegativeFloat = key("the threshold (section 3.1)", default=0.3)

    @property
    def max_entropy(self) -> float:
        """The entropy in nats above which a draft ends."""
        return self.h**2 / self.c


class ConfidenceConfig(Section):
    """Stops after a token whose q is below the threshold."""

    rule: Literal["confidence"] = "confidence"
    threshold: Share = key(
        "the least q; transformers calls it assistant_confidence_threshold", default=0.4
    )


class VoteConfig(Section):
    """DEAGLE's vote. Momentum is S_d / S_{d-1}, as in section 3.4: that of equation 25 would never
    vote."""

    rule: Literal["vote"] = "vote"
    signals: Annotated[Some[Literal["probability", "momentum", "expectation"]], distinct] = key(
        "the signals that vote (table 4 tests each alone)",
        default=("probability", "momentum", "expectation"),
    )
    probability_threshold: Share = key(
        "probability votes when the summed survival is below this (section 4.1)", default=0.15
    )
    momentum_threshold: Share = key("a momentum below this is a decline (section 4.1)", default=0.6)
    declines: PositiveInt = key('momentum votes after this many declines ("two times")', default=2)
    bonus: NonNegativeFloat = key(
        "added to E_d. The 3 is 1 for the target's own token, and 2 because the extended code "
        "counts depths from 0 at the second level; table 4 needs that much. 0 gives equations "
        "22 and 26 as printed, where E_d is at most the depth",
        default=3.0,
    )

    def __post_init__(self) -> None:
        if self.signals == ("expectation",) and not self.bonus:
            raise ValueError("without a bonus the expectation always votes; set bonus above 0")

    @property
    def needed(self) -> int:
        """How many votes end a tree: two, or one if only one signal votes."""
        return min(2, len(self.signals))


class ProbabilitySumConfig(Section):
    """Dynamic Depth Decoding stops at one of these depths if the frontier's summed survival is
    low."""

    rule: Literal["probability_sum"] = "probability_sum"
    checks: Annotated[Some[PositiveInt], ascending] = key(
        "the depths at which the rule looks", default=(5, 7, 9)
    )
    threshold: Share = key(
        "the draft ends below this (DEAGLE's value; DDD tunes it per model)", default=0.15
    )


class MarginalGainConfig(Section):
    """OPT-Tree stops when a level adds too little expected length."""

    rule: Literal["marginal_gain"] = "marginal_gain"
    threshold: Annotated[float, Field(ge=0, lt=1)] = key(
        "the least gain, in expected tokens (its README)", default=0.5
    )


class ExactConfig(Section):
    """Stops when no deeper node could enter the tree, so the tree is the same as with all
    levels."""

    rule: Literal["exact"] = "exact"


# The first four suit chains and trees. The others judge by a tree's frontier.
StopConfig = Annotated[
    ConstantConfig
    | HeuristicConfig
    | EntropyConfig
    | ConfidenceConfig
    | VoteConfig
    | ProbabilitySumConfig
    | MarginalGainConfig
    | ExactConfig,
    Discriminator("rule"),
]
Choice = tuple[int, ...]  # a node of a static tree: the ranks of the children on its path
Fit = Literal["temperature", "isotonic"]
TREES = Path(__file__).resolve().parent.parent / "trees"  # published static trees


class ChoicesFile(Section):
    choices: Many[Choice]


# In every shape, `levels` is the limit under any stop rule, and `nodes` counts the root.
class _AnyShape(Section, kw_only=True):
    """A tree of any shape; a chain is one, too."""

    stop: StopConfig = key("the rule that ends a draft early", default=ConstantConfig())
    calibrated: Fit | None = key(
        "the fit of `aerie calibrate` that corrects confidences; null corrects none", default=None
    )


class ChainConfig(_AnyShape, kw_only=True):
    """A chain of `levels` tokens: drawn from q if the target samples (R1), or q's most probable."""

    shape: Literal["chain"] = "chain"
    levels: PositiveInt = key("the most drafted tokens", default=6)
    children: Literal["best", "sampled"] = key(
        "`sampled` draws tokens from q if the target samples; `best` takes q's most probable token",
        default="sampled",
    )
    k = 1  # a path does not branch

    @property
    def nodes(self) -> int:
        return self.levels + 1


class StaticConfig(_AnyShape, kw_only=True):
    """A tree whose form is fixed before drafting."""

    shape: Literal["static"] = "static"
    choices: Place | tuple[Choice, ...] = key(
        "paths of child ranks [[0], [1], [0, 0], ...], a YAML file with such paths under "
        "`choices`, or the name of a published tree"
    )
    children: Literal["best", "sampled"] = key(
        "`sampled` draws children without replacement if the target samples (R3); `best` takes "
        "q's most probable tokens (R2)",
        default="sampled",
    )

    def __post_init__(self) -> None:
        assert self.paths  # reading the paths checks the choices

    @property
    def file(self) -> Path | None:
        is_file = isinstance(self.choices, str) and self.choices.endswith((".yaml", ".yml"))
        return Path(str(self.choices)) if is_file else None

    @cached_property
    def paths(self) -> tuple[Choice, ...]:
        """The nodes in level order, siblings by rank; ValueError if the choices are no tree."""
        choices = self.choices
        source = "tree.choices"
        if isinstance(choices, str):
            path = self.file or TREES / f"{choices}.yaml"
            if not path.is_file():
                known = ", ".join(sorted(file.stem for file in TREES.glob("*.yaml")))
                raise ValueError(f"{source}: {choices}: no such file (published trees: {known})")
            choices = load_file(path, ChoicesFile, []).choices
            source = f"{path}: choices"
        nodes = {(), *choices}
        if not choices or len(nodes) != len(choices) + 1 or min(map(min, choices)) < 0:
            rules = "at least one path, each once and none empty, of ranks that count from 0"
            raise ValueError(f"{source}: list {rules}")
        for *parent, rank in choices:
            fault = f"{source}: {[*parent, rank]} is listed without"
            if tuple(parent) not in nodes:
                raise ValueError(f"{fault} its parent {parent}; add the parent")
            # The child of rank r is the token drawn r-th, so no earlier draw may be left out.
            if self.children == "sampled" and rank and (*parent, rank - 1) not in nodes:
                fix = "which would bias the output; list it too, or use children: best"
                raise ValueError(f"{fault} {[*parent, rank - 1]}, {fix}")
        return tuple(sorted(choices, key=lambda choice: (len(choice), choice)))

    @property
    def levels(self) -> int:
        return max(map(len, self.paths))

    @property
    def k(self) -> int:
        return 1 + max(map(max, self.paths))

    @property
    def nodes(self) -> int:
        return 1 + len(self.paths)


class DynamicConfig(_AnyShape, kw_only=True):
    """EAGLE-2's tree, of q's most probable tokens or of drawn tokens."""

    shape: Literal["dynamic"] = "dynamic"
    levels: PositiveInt = key(
        "greatest depth of the tree; the root has depth 0 (EAGLE-2, appendix A: 6)", default=6
    )
    k: PositiveInt = key("children per node, and width of the frontier", default=10)
    nodes: Annotated[int, Field(ge=2)] = key(
        "number of verified nodes, the root included", default=60
    )
    children: Literal["best", "sampled"] = key(
        "`best` takes q's most probable tokens (R2); `sampled` draws them if the target samples "
        "(R3)",
        default="best",
    )
    rank: Literal["survival", "confidence"] = key(
        "the value that ranks nodes; `confidence` is EAGLE-2's ablation (table 3)",
        default="survival",
    )
    rerank: bool = key(
        "false verifies the k best nodes of every level, k * levels + 1 in all (table 3)",
        default=True,
    )
    stop_read: Literal["each", "late"] = key(
        "when to read `stop`: before each level, or `late`, while the next level runs. The tree "
        "is the same",
        default="each",
    )

    def __post_init__(self) -> None:
        if isinstance(self.stop, ProbabilitySumConfig) and self.stop.checks[0] >= self.levels:
            raise ValueError(
                f"stop.checks {list(self.stop.checks)} are never reached in {self.levels} levels; "
                f"start them below {self.levels}"
            )
        if self.children == "sampled" and self.rank != "survival":
            # A later draw could expand a node that pushes an earlier draw out of the tree.
            raise ValueError(
                "children: sampled with rank: confidence would bias the output; use rank: survival"
            )
        if isinstance(self.stop, ExactConfig) and not (self.rank == "survival" and self.rerank):
            raise ValueError("stop.rule: exact needs rank: survival and rerank: true")
        if not self.rerank:  # all these nodes are verified, so caches need room for them
            object.__setattr__(self, "nodes", self.k * self.levels + 1)

    @property
    def is_ablated(self) -> bool:
        return self.rank == "confidence" or not self.rerank


TreeConfig = Annotated[ChainConfig | StaticConfig | DynamicConfig, Discriminator("shape")]


def choice_digests(trees: Iterable[Any]) -> dict[str, dict[str, str]]:
    """{"choices": {file: digest}} for the files that static trees name; {} if none names a file."""
    choices = {}
    for tree in trees:
        if isinstance(tree, StaticConfig) and tree.file:
            choices[str(tree.file)] = hashlib.sha256(tree.file.read_bytes()).hexdigest()[:16]
    return {"choices": dict(sorted(choices.items()))} if choices else {}


class PromptLookupConfig(Section):
    """Prompt lookup as in transformers 5: drafts what followed the first copy of the last
    n-gram."""

    ngram: PositiveInt = key(
        "length of the longest n-gram (transformers' default; prompt-lookup-decoding: 3)", default=2
    )
    length: PositiveInt = key("the most drafted tokens", default=10)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(levels, k, nodes with the root)."""
        return self.length, 1, self.length + 1

    @property
    def text(self) -> str:
        return f"n-grams up to {self.ngram}, {self.length} tokens"


class LookaheadConfig(Section):
    """Lookahead decoding (arXiv 2402.02057). N, W and G have their published values."""

    ngram: Annotated[int, Field(ge=2)] = key(
        "N: a guess has N - 1 tokens, and the window N - 1 rows", default=5
    )
    window: PositiveInt = key("W: columns of the window", default=7)
    guesses: PositiveInt = key(
        "G: n-grams kept for each first token; one forward pass verifies all of them", default=7
    )
    pool_from_text: bool = key(
        "whether the n-grams of prompt and answer join the pool (its POOL_FROM_PROMPT)",
        default=False,
    )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(levels, k, nodes). nodes counts the root and the window's tokens, also while the window
        fills."""
        rows, columns = self.ngram - 1, self.window
        warm_up = max((row + 1) * (columns + rows - 1 - row) for row in range(rows))
        return rows, self.guesses, max(rows * columns + rows * self.guesses, warm_up)

    @property
    def text(self) -> str:
        more = ", pool from the text" * self.pool_from_text
        return f"N {self.ngram}, W {self.window}, G {self.guesses}{more}"


Options = PromptLookupConfig | LookaheadConfig
OPTIONS: dict[str, type[Options]] = {"lookup": PromptLookupConfig, "lookahead": LookaheadConfig}


@dataclass
class Published:
    """A method as its paper describes it."""

    tree: dict[str, Any] | None = None  # keys of its TreeConfig
    options: str | None = None  # the section with its settings, if it grows no tree
    heads: tuple[str, ...] = ()  # the kinds of head with which it drafts


def _tree(shape: str, size: Any, rule: str = "constant", **more: Any) -> Published:
    size_key = "choices" if shape == "static" else "levels"
    return Published({"shape": shape, size_key: size, "stop": {"rule": rule}, **more})


METHODS: dict[str, Published] = {
    "vanilla": Published(),
    # SVIP (arXiv 2411.18462) has the constant of 5 and the caps of 40, transformers that of 20.
    "sps": _tree("chain", 5),
    "sps-heuristic": _tree("chain", 40, "heuristic"),
    "sps-svip": _tree("chain", 40, "entropy"),
    "sps-confidence": _tree("chain", 20, "confidence"),
    "pld": Published(options="lookup"),
    "lookahead": Published(options="lookahead"),
    "medusa": _tree("static", "medusa63", children="best"),
    "hydra": _tree("static", "medusa63", children="best"),
    "block-tree": _tree("dynamic", 7),
    "block-chain": _tree("chain", 7),
    "eagle": _tree("static", "eagle1"),
    "eagle2": _tree("dynamic", 6),
    "eagle3": _tree("dynamic", 8),
    "eagle-chain": _tree("chain", 5),
    # Rules that end the tree of EAGLE-2 or EAGLE-3: DEAGLE (section 4.1), SVIP (table 2), DDD (at
    # most 11 levels), OPT-Tree.
    "deagle": _tree("dynamic", 8, "vote"),
    "svip": _tree("dynamic", 8, "entropy"),
    "ddd": _tree("dynamic", 11, "probability_sum"),
    "opt-tree": _tree("dynamic", 9, "marginal_gain", k=59),
}
for _kind, _section in KINDS.items():
    for _method in _section.methods:
        METHODS[_method].heads += (_kind,)
# kind of head -> its usual method
USUAL = {kind: section.methods[0] for kind, section in KINDS.items()}
if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[tuple(METHODS)]


def completed(method: Any, changes: Any) -> Any:
    """A method's published tree with a recipe's changes. A changed shape has its own defaults.

    None for a method that grows no tree, and for an unknown method, which the key `method` reports.
    """
    if method not in METHODS:
        return None
    if not isinstance(changes or {}, dict):
        return changes
    changes = {name: value for name, value in (changes or {}).items() if value is not None}
    published = METHODS[method].tree
    if published is None:
        if changes:
            raise ValueError(f"tree: {method} grows no tree; leave it out")
        return None
    if changes.get("shape", published["shape"]) != published["shape"]:
        return changes
    if isinstance(changes.get("stop"), dict):
        changes["stop"] = published["stop"] | changes["stop"]
    if method == "opt-tree" and isinstance(changes.get("nodes"), int):
        changes.setdefault("k", changes["nodes"] - 1)  # the frontier is as wide as the budget
    return published | changes


def fitted(tree: Any, method: str, most: int, where: str, head: str) -> Any:
    """The TreeConfig, at most as deep as its head drafts.

    Cuts the method's default depth; raises UserError if any other depth is too great. where and
    head are what the error names.
    """
    if tree.levels <= most:
        return tree
    if tree.levels == (METHODS[method].tree or {}).get("levels"):
        return replace(tree, levels=most)
    fix = "give tree.choices of at most" if tree.shape == "static" else "set tree.levels to"
    raise UserError(
        f"{where}: is {tree.levels} levels deep, and {head} drafts at most {most}; {fix} {most}"
    )


def published_tree(method: str, **changes: Any) -> Any:
    """The TreeConfig of a method; None if it grows no tree."""
    return adapter(TreeConfig | None).validate_python(completed(method, changes))


class MethodConfig(Section):
    """What decodes. Its tree is complete: the published one with the changes."""

    method: Method = key(
        "the name of a method; it drafts as published unless a key below changes it"
    )
    tree: TreeConfig | None = key("changes to the method's tree", default=None)
    head: Place | None = key(
        "a directory or Hub id of a head; null takes the run's own", default=None
    )
    lookup: PromptLookupConfig | None = key("settings of method pld", default=None)
    lookahead: LookaheadConfig | None = key("settings of method lookahead", default=None)

    @classmethod
    def of(cls, method: str, head: str | None = None, **changes: Any) -> "MethodConfig":
        """The published method with changes to its tree."""
        return cls(method, published_tree(method, **changes), head)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return values | {"tree": completed(values.get("method"), values.get("tree"))}

    def __post_init__(self) -> None:
        for section in OPTIONS:
            if getattr(self, section) is not None and METHODS[self.method].options != section:
                raise ValueError(f"{section}: {self.method} does not read it; leave it out")

    @property
    def options(self) -> Options | None:
        section = METHODS[self.method].options
        return None if section is None else getattr(self, section) or OPTIONS[section]()


class ServedConfig(Section):
    """A row that an OpenAI-compatible server of the target answers, such as vLLM or SGLang."""

    method: Literal["served"] = key("the server drafts in the way in which it was started")
    url: Annotated[str, Field(pattern="^https?://")] = key(
        "the server's base URL, such as http://host:8000/v1"
    )
    name: Annotated[str, Field(min_length=1)] = key("the row's name in tables", default="server")
    model: str | None = key(
        "the target's name on the server; null takes the only one there", default=None
    )
    at_once: Annotated[Many[PositiveInt], ascending] = key(
        "after asking one by one, the bench also keeps this many requests under way at once; "
        "empty leaves that out",
        default=(8, 32),
    )
    timeout_s: PositiveFloat = key("the longest that a request may take", default=600.0)
    extra_body: dict[str, Any] = key("fields that go with every request", default_factory=dict)
    head = None  # the server has its own
    tree = None


BenchRow = Annotated[MethodConfig | ServedConfig, Discriminator("method")]
