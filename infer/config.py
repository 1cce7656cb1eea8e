"""The sections `tree`, `calibrate` and `bench` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from model.errors import UserError
from model.recipe import STRICT

# eagle2 is EAGLE-1's head and eagle3 EAGLE-3's, both in a dynamic tree; eagle-chain is either head in a chain
Method = Literal["vanilla", "eagle2", "eagle3", "eagle-chain"]


@dataclass(frozen=True)
class TreeConfig:
    """How far and how wide to draft. Nodes count the root, as SafeAILab's total_token does."""

    __pydantic_config__ = STRICT
    shape: Literal["dynamic", "chain", "static"] = "dynamic"
    levels: int = 6  # draft depth; published EAGLE-2: 6, EAGLE-3: 8; a static tree has its own
    k: int = 10  # branching and frontier width of a dynamic tree
    nodes: int = 60  # verified nodes with the root
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


def default_tree(kind: str) -> TreeConfig:
    """The published tree for a kind of head: 6 levels for EAGLE-2, 8 for EAGLE-3; 60 nodes, k 10."""
    return TreeConfig(levels=8 if kind == "eagle3" else 6)


def method_of(kind: str, shape: str) -> Method:
    """The name of decoding with a kind of head in a tree of this shape."""
    if shape == "chain":
        return "eagle-chain"
    return "eagle3" if kind == "eagle3" else "eagle2"


def chosen(asked: Method | None, kind: str, tree: TreeConfig | None) -> tuple[Method, TreeConfig]:
    """The method and tree for a kind of head: those asked for, the usual ones for null.

    UserError for a method of another kind of head.
    """
    tree = tree or default_tree(kind)
    if asked == "eagle-chain":
        tree = TreeConfig(shape="chain", levels=tree.levels, nodes=tree.levels + 1)
    method = method_of(kind, tree.shape)
    if asked not in (None, method):
        raise UserError(
            f"--method {asked}: an {kind} head in a {tree.shape} tree is {method}; "
            f"give another --head or tree.shape, or leave --method out"
        )
    return method, tree


@dataclass(frozen=True)
class PromptsConfig:
    """Measuring prompts: Spec-Bench style questions {question_id, category, turns}, or lines of plain text."""

    __pydantic_config__ = STRICT
    path: str
    num_prompts: int | None = 80
    max_new_tokens: int = 512
    task: str | None = None  # null: the file's categories


@dataclass(frozen=True)
class BenchRow:
    """One row of the table: a method with its tree."""

    __pydantic_config__ = STRICT
    method: Method
    tree: TreeConfig = TreeConfig()


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
    rows: tuple[BenchRow, ...]
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
    tree: TreeConfig = TreeConfig()
    bins: int = 20
