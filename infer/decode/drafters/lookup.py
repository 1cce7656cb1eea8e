"""Guessed continuations as one tree: what guesses share is one node, and passengers ride beside them."""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.schema.decode import PromptLookupConfig
from aerie.infer.decode.proposer import Cycle
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.tree import Tree, ancestors, root_only


class Trie:
    """Collects guesses and passengers under a root in any order.

    The confidence of a guessed node is the share of its parent's guesses that pass through it, which is certainty for
    a single guess. Siblings of guesses differ, as rule R2 asks; those of passengers may not.
    """

    def __init__(self) -> None:
        self._tokens, self._parents, self._depth = [0], [0], [0]  # node 0 is the root, whose token `tree` is given
        self._guesses = [0]  # how many pass through each node; none through a passenger
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) of a guessed node

    def guess(self, tokens: Iterable[int]) -> None:
        """Adds one continuation of the root."""
        node = 0
        self._guesses[0] += 1
        for token in tokens:
            child = self._children.get((node, token))
            if child is None:
                child = self._children[node, token] = self._append(token, node)
            self._guesses[child] += 1
            node = child

    def ride(self, token: int, parent: int) -> int:
        """Adds a passenger below the root or another passenger; its number, for `ride` and for `tree`'s places."""
        return self._append(token, parent)

    def tree(self, root: Tensor) -> tuple[Tree, list[int]]:
        """The tree under root [1], in level order, and the place in it of each node by its number."""
        count = len(self._tokens)
        if count == 1:
            return root_only(root), [0]
        order = sorted(range(count), key=self._depth.__getitem__)
        places = [0] * count
        for place, node in enumerate(order):
            places[node] = place
        table = torch.tensor(
            [
                [self._tokens[node] for node in order],
                [places[self._parents[node]] for node in order],
                [self._depth[node] for node in order],
                [int(self._rides(node)) for node in order],
            ],
            device=root.device,
        )  # [4, N]
        laws = torch.tensor(
            [
                [self._share(node, self._parents[node]) for node in order],
                [self._share(node, 0) for node in order],
            ],
            device=root.device,
        )  # [2, N]
        parents = table[1]
        tree = Tree(
            tokens=torch.cat([root, table[0, 1:].to(root.dtype)]),
            parents=parents,
            depth=table[2],
            mask=ancestors(parents, max(self._depth)),
            confidence=laws[0],
            survival=laws[1],
            levels=max((self._depth[node] for node in self._children.values()), default=0),
            draft_forwards=0,
            passengers=table[3].bool() if len(self._children) + 1 < count else None,
        )
        return tree, places

    def _append(self, token: int, parent: int) -> int:
        self._tokens.append(token)
        self._parents.append(parent)
        self._depth.append(self._depth[parent] + 1)
        self._guesses.append(0)
        return len(self._tokens) - 1

    def _rides(self, node: int) -> bool:
        return node > 0 and self._guesses[node] == 0

    def _share(self, node: int, above: int) -> float:
        """log of the share of the guesses through `above` that pass through node; 0 for the root and passengers."""
        if node == 0 or self._rides(node):
            return 0.0
        return math.log(self._guesses[node] / self._guesses[above])


Text = NDArray[np.int64]


def continuation(text: Text, config: PromptLookupConfig, end_ids: frozenset[int] = frozenset()) -> list[int]:
    """At most config.length tokens that followed the longest n-gram which also ends the text [T]; perhaps none.

    They are cut before the first end token.
    Source: PromptLookupCandidateGenerator of transformers 5, after prompt-lookup-decoding.
    """
    for size in range(min(config.ngram, len(text) - 1), config.min_ngram - 1, -1):
        windows = sliding_window_view(text[:-1], size)  # [T - size, size], without the text's own end
        starts = np.flatnonzero((windows == text[-size:]).all(axis=1)) + size
        if len(starts):
            start = starts[0] if config.match == "first" else starts[-1]
            found: list[int] = text[start : start + config.length].tolist()
            return list(itertools.takewhile(lambda token: token not in end_ids, found))
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
