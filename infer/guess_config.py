"""Methods that guess without a head and its laws: their names, and the sections of a recipe's method that set them."""

from dataclasses import dataclass
from typing import Literal

from model.recipe import STRICT


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
