"""Prompt lookup: the text's last tokens stood somewhere before; what followed them there is the guess."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from infer.guess_config import PromptLookupConfig
from infer.proposer import Cycle
from infer.sampling import Sampler
from infer.tree import Tree
from infer.trie import Trie

Text = NDArray[np.int64]


def continuation(text: Text, config: PromptLookupConfig, end_ids: frozenset[int] = frozenset()) -> list[int]:
    """At most config.length tokens that followed the longest n-gram which also ends the text [T]; perhaps none.

    transformers takes what follows however short it is, and cuts it before the first end token. The original wants
    `length` tokens that begin before the text's last n-gram, and looks for end tokens nowhere.
    Source: PromptLookupCandidateGenerator of transformers 5; the function in the README of prompt-lookup-decoding.
    """
    for size in range(min(config.longest_ngram, len(text) - 1), config.min_ngram - 1, -1):
        windows = sliding_window_view(text[:-1], size)  # [T - size, size], without the text's own end
        starts = np.flatnonzero((windows == text[-size:]).all(axis=1)) + size
        if config.matching == "original":
            starts = starts[(starts + config.length <= len(text)) & (starts < len(text) - size)]
        if len(starts):
            start = starts[0] if config.match == "first" else starts[-1]
            found: list[int] = text[start : start + config.length].tolist()
            if config.matching == "transformers":
                ends = [place for place, token in enumerate(found) if token in end_ids]
                found = found[: ends[0]] if ends else found
            return found
    return []


class PromptLookup:
    """Guesses what followed the same n-gram earlier in prompt and answer; no guess: plain decoding."""

    max_positions = 2**31
    after_blocks: tuple[int, ...] = ()

    def __init__(self, config: PromptLookupConfig) -> None:
        self.config = config
        self._text = np.zeros(0, dtype=np.int64)
        self._length = 0
        self._end_ids: frozenset[int] = frozenset()

    @property
    def max_nodes(self) -> int:
        return self.config.length + 1

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        self._text = np.zeros(capacity, dtype=np.int64)
        self._length = 0
        self._append(prompt.cpu().numpy())
        self._end_ids = sampler.decoding.eos_token_ids

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        found = continuation(self._text[: self._length], self.config, self._end_ids)
        trie = Trie()
        trie.guess(found[:max_levels])
        return trie.tree(root)[0]

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        if cycle is None:
            self._append(tokens[-1:].cpu().numpy())
        else:  # the verdict is on the host already
            self._append(np.array([*cycle.verdict.tokens, cycle.verdict.bonus]))

    def _append(self, tokens: Text) -> None:
        self._text[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)
