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
    shape: Literal["dynamic", "chain"] = "dynamic"
    levels: int = 6  # draft depth; published EAGLE-2: 6, EAGLE-3: 8
    k: int = 10  # branching and frontier width of a dynamic tree
    nodes: int = 60  # verified nodes with the root

    def __post_init__(self) -> None:
        if min(self.levels, self.k) < 1 or self.nodes < 2:
            raise ValueError("a tree needs levels >= 1, k >= 1 and nodes >= 2")


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
