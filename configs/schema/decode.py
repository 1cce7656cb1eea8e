"""How to decode: a method, and what differs from its published settings (METHODS)."""

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
    """transformers' draft length, which follows how many tokens were accepted."""

    rule: Literal["heuristic"] = "heuristic"
    start: PositiveInt = key("the first length (SVIP's code)", default=5)
    more: PositiveInt = key("tokens added if all were accepted", default=2)
    fewer: PositiveInt = key("tokens taken away otherwise, down to one", default=1)


class EntropyConfig(Section):
    """SVIP: stop when sqrt(c * H) > h, H in nats. Defaults as in its code (the paper: c = 1)."""

    rule: Literal["entropy"] = "entropy"
    c: PositiveFloat = key("weight of q's entropy", default=0.15)
    h: NonNegativeFloat = key("the threshold (section 3.1)", default=0.3)

    @property
    def max_entropy(self) -> float:
        return self.h**2 / self.c


class ConfidenceConfig(Section):
    """Stop after a token whose q is below the threshold."""

    rule: Literal["confidence"] = "confidence"
    threshold: Share = key("transformers' assistant_confidence_threshold", default=0.4)


class VoteConfig(Section):
    """DEAGLE's vote. Momentum is section 3.4's S_d / S_{d-1}: equation 25's would never vote."""

    rule: Literal["vote"] = "vote"
    signals: Annotated[Some[Literal["probability", "momentum", "expectation"]], distinct] = key(
        "the signals that vote (table 4 tests each alone)",
        default=("probability", "momentum", "expectation"),
    )
    probability_threshold: Share = key(
        "probability votes when the summed survival is below it (section 4.1)", default=0.15
    )
    momentum_threshold: Share = key("a ratio below it is a decline (section 4.1)", default=0.6)
    declines: PositiveInt = key('momentum votes after so many declines ("two times")', default=2)
    bonus: NonNegativeFloat = key(
        "added to E_d: 1 for the target's own token, and 2 because the extended code counts "
        "depths from 0 at the second level (table 4 needs that much); 0: equations 22 and 26 "
        "as printed, at most the depth",
        default=3.0,
    )

    def __post_init__(self) -> None:
        if self.signals == ("expectation",) and not self.bonus:
            raise ValueError("without a bonus the expectation always votes; raise bonus")

    @property
    def needed(self) -> int:
        """How many votes end a tree: two, or one where only one signal votes."""
        return min(2, len(self.signals))


class ProbabilitySumConfig(Section):
    """Dynamic Depth Decoding: stop at some depths if the frontier's summed survival is low."""

    rule: Literal["probability_sum"] = "probability_sum"
    checks: Annotated[Some[PositiveInt], ascending] = key(
        "the depths at which the rule looks", default=(5, 7, 9)
    )
    threshold: Share = key(
        "the draft ends below it (DEAGLE's; DDD tunes it per model)", default=0.15
    )


class MarginalGainConfig(Section):
    """OPT-Tree: stop when a level adds too little expected length."""

    rule: Literal["marginal_gain"] = "marginal_gain"
    threshold: Annotated[Share, Field(lt=1.0)] = key(
        "least gain, in expected tokens (its README)", default=0.5
    )


class ExactConfig(Section):
    """Stop when no deeper node could enter the tree: all levels would give the same one."""

    rule: Literal["exact"] = "exact"


# The first four suit chains and trees, the others trees alone: they judge by the frontier.
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


# Of every shape `levels` is the limit, whatever the stop rule, and `nodes` counts the root.
class _AnyShape(Section, kw_only=True):
    """A tree of any shape; a chain is one, too."""

    stop: StopConfig = key("when to end a draft early", default=ConstantConfig())
    calibrated: Fit | None = key(
        "corrects confidences by this fit of `aerie calibrate`", default=None
    )


class ChainConfig(_AnyShape, kw_only=True):
    """`levels` tokens in a row: drawn from q if the target samples (R1), or q's most probable."""

    shape: Literal["chain"] = "chain"
    levels: PositiveInt = key("drafted tokens, at most", default=6)
    children: Literal["best", "sampled"] = key(
        "sampled: drawn from q if the target samples; best: q's most probable", default="sampled"
    )
    k = 1  # a path does not branch

    @property
    def nodes(self) -> int:
        return self.levels + 1


class StaticConfig(_AnyShape, kw_only=True):
    """A tree whose form is fixed before drafting."""

    shape: Literal["static"] = "static"
    choices: Place | tuple[Choice, ...] = key(
        "paths of child ranks [[0], [1], [0, 0], ...], a YAML file with them under `choices`, "
        "or a published tree"
    )
    children: Literal["best", "sampled"] = key(
        "sampled: drawn without replacement if the target samples (R3); best: q's most "
        "probable (R2)",
        default="sampled",
    )

    def __post_init__(self) -> None:
        assert self.paths  # which checks the choices

    @property
    def file(self) -> Path | None:
        is_file = isinstance(self.choices, str) and self.choices.endswith((".yaml", ".yml"))
        return Path(str(self.choices)) if is_file else None

    @cached_property
    def paths(self) -> tuple[Choice, ...]:
        """The nodes in level order, siblings by rank; ValueError for choices that are no tree."""
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
            # the child of rank r is the token drawn r-th, so no earlier draw may be left out
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
    """EAGLE-2's tree of q's most probable tokens, or of drawn tokens."""

    shape: Literal["dynamic"] = "dynamic"
    levels: PositiveInt = key(
        "greatest depth; the root has depth 0 (EAGLE-2, appendix A: 6)", default=6
    )
    k: PositiveInt = key("children per node, frontier width", default=10)
    nodes: Annotated[int, Field(ge=2)] = key("verified nodes, the root included", default=60)
    children: Literal["best", "sampled"] = key(
        "q's most probable (R2), or drawn if the target samples (R3)", default="best"
    )
    rank: Literal["survival", "confidence"] = key(
        "confidence: EAGLE-2's ablation (table 3)", default="survival"
    )
    rerank: bool = key(
        "false (table 3): verify every level's k best, k * levels + 1 nodes", default=True
    )
    stop_read: Literal["each", "late"] = key(
        "when to read `stop`: before each level, or late, once the next level runs. The tree "
        "is the same",
        default="each",
    )

    def __post_init__(self) -> None:
        if isinstance(self.stop, ProbabilitySumConfig) and self.stop.checks[0] >= self.levels:
            raise ValueError(
                f"stop.checks {list(self.stop.checks)} are never reached in {self.levels} levels"
            )
        if self.children == "sampled" and self.rank != "survival":
            # a later draw could have a node expanded that pushes an earlier one out of the tree
            raise ValueError(
                "children: sampled with rank: confidence would bias the output; use rank: survival"
            )
        if isinstance(self.stop, ExactConfig) and not (self.rank == "survival" and self.rerank):
            raise ValueError("stop.rule: exact needs rank: survival and rerank: true")
        if not self.rerank:  # however it is made, its caches have room for all of them
            object.__setattr__(self, "nodes", self.k * self.levels + 1)

    @property
    def is_ablated(self) -> bool:
        return self.rank == "confidence" or not self.rerank


TreeConfig = Annotated[ChainConfig | StaticConfig | DynamicConfig, Discriminator("shape")]


def choice_digests(trees: Iterable[Any]) -> dict[str, dict[str, str]]:
    """{"choices": {file: digest}} of the files that trees name."""
    choices = {}
    for tree in trees:
        if isinstance(tree, StaticConfig) and tree.file:
            choices[str(tree.file)] = hashlib.sha256(tree.file.read_bytes()).hexdigest()[:16]
    return {"choices": dict(sorted(choices.items()))} if choices else {}


class PromptLookupConfig(Section):
    """Prompt lookup as in transformers 5: what followed the first copy of the last n-gram."""

    ngram: PositiveInt = key(
        "the longest (transformers' default; prompt-lookup-decoding: 3)", default=2
    )
    length: PositiveInt = key("drafted tokens, at most", default=10)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(levels, k, nodes with the root)."""
        return self.length, 1, self.length + 1

    @property
    def text(self) -> str:
        return f"n-grams up to {self.ngram}, {self.length} tokens"


class LookaheadConfig(Section):
    """Lookahead decoding (arXiv 2402.02057); N, W, G as published."""

    ngram: Annotated[int, Field(ge=2)] = key(
        "N: a guess has N - 1 tokens, the window N - 1 rows", default=5
    )
    window: PositiveInt = key("W: the window's columns", default=7)
    guesses: PositiveInt = key("G: n-grams kept per first token, all verified at once", default=7)
    pool_from_text: bool = key(
        "also pool n-grams of prompt and answer (its POOL_FROM_PROMPT)", default=False
    )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(levels, k, nodes with root and the window's tokens, also while the window fills)."""
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
    """A method as its paper has it."""

    tree: dict[str, Any] | None = None  # TreeConfig's keys
    options: str | None = None  # its section, if it grows no tree
    heads: tuple[str, ...] = ()  # the kinds of head that list it


def _tree(shape: str, size: Any, rule: str = "constant", **more: Any) -> Published:
    size_key = "choices" if shape == "static" else "levels"
    return Published({"shape": shape, size_key: size, "stop": {"rule": rule}, **more})


METHODS: dict[str, Published] = {
    "vanilla": Published(),
    # a constant of 5 and caps of 40 are SVIP's (arXiv 2411.18462), 20 is transformers'
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
    # rules that end the tree of EAGLE-2 or EAGLE-3: DEAGLE (section 4.1), SVIP (table 2), DDD (at
    # most 11 levels), OPT-Tree
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
    """A method's published tree with a recipe's changes; another shape has its own defaults.

    None for a method that grows no tree, or that is unknown: `method` is reported for that.
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
        changes.setdefault("k", changes["nodes"] - 1)  # its frontier is as wide as its budget
    return published | changes


def fitted(tree: Any, method: str, most: int, where: str, head: str) -> Any:
    """A TreeConfig no deeper than its head drafts.

    Cuts the method's default depth; UserError for any other depth.
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
    """What decodes. Its tree is whole: a recipe's row and `of` start with the published one."""

    method: Method = key("its tree and options are the published ones unless set below")
    tree: TreeConfig | None = key("changes to the method's tree", default=None)
    head: Place | None = key("a directory or Hub id; null: the run's own", default=None)
    lookup: PromptLookupConfig | None = key("for method pld", default=None)
    lookahead: LookaheadConfig | None = key("for method lookahead", default=None)

    @classmethod
    def of(cls, method: str, head: str | None = None, **changes: Any) -> "MethodConfig":
        """The published method, with changes to its tree."""
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
    """A row that an OpenAI-compatible server of the target answers: vLLM, SGLang."""

    method: Literal["served"] = key("the server drafts as it was started to")
    url: Annotated[str, Field(pattern="^https?://")] = key(
        "its base URL, such as http://host:8000/v1"
    )
    name: Annotated[str, Field(min_length=1)] = key("the row's name in tables", default="server")
    model: str | None = key("its name on the server; null: the only one", default=None)
    at_once: Annotated[Many[PositiveInt], ascending] = key(
        "then also this many requests at once; empty: only one by one", default=(8, 32)
    )
    timeout_s: PositiveFloat = key("the longest that a request may take", default=600.0)
    extra_body: dict[str, Any] = key("sent with every request", default_factory=dict)
    head = None  # the server's own
    tree = None


BenchRow = Annotated[MethodConfig | ServedConfig, Discriminator("method")]
