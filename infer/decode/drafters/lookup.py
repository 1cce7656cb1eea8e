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
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Cycle, Proposer
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
            # what guesses share is one node: siblings differ, as rule R2 asks
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
        rides = [node > 0 and not self._guesses[node] for node in range(count)]
        columns = (self._tokens, [places[parent] for parent in self._parents], self._depth, rides)
        table = torch.tensor(
            [[int(column[node]) for node in order] for column in columns], device=root.device
        )  # [4, N]
        # log of the share of the guesses through the parent, and through the root, that pass through a node
        above = (self._parents, [0] * count)
        shares = [[0.0 if rides[n] or not n else self._share(n, up[n]) for n in order] for up in above]
        confidence, survival = torch.tensor(shares, device=root.device)  # [N] each
        tree = Tree(
            tokens=torch.cat([root, table[0, 1:].to(root.dtype)]),
            parents=table[1],
            depth=table[2],
            mask=ancestors(table[1], max(self._depth)),
            confidence=confidence,
            survival=survival,
            levels=max((self._depth[node] for node in self._children.values()), default=0),
            draft_forwards=0,
            passengers=table[3].bool() if any(rides) else None,
        )
        return tree, places

    def _append(self, token: int, parent: int) -> int:
        self._tokens.append(token)
        self._parents.append(parent)
        self._depth.append(self._depth[parent] + 1)
        self._guesses.append(0)
        return len(self._tokens) - 1

    def _share(self, node: int, above: int) -> float:
        return math.log(self._guesses[node] / self._guesses[above])


Text = NDArray[np.int64]


def continuation(text: Text, config: PromptLookupConfig, end_ids: frozenset[int] = frozenset()) -> list[int]:
    """At most config.length tokens that followed the longest n-gram which also ends the text [T]; perhaps none.

    They are cut before the first end token.
    Source: PromptLookupCandidateGenerator of transformers 5, after prompt-lookup-decoding.
    """
    for size in range(min(config.ngram, len(text) - 1), config.min_ngram - 1, -1):
        # the longest n-gram decides; of its places the leftmost, as transformers takes it
        windows = sliding_window_view(text[:-1], size)  # [T - size, size], without the text's own end
        starts = np.flatnonzero((windows == text[-size:]).all(axis=1)) + size
        if len(starts):
            start = starts[0] if config.match == "first" else starts[-1]
            tokens: list[int] = text[start : start + config.length].tolist()
            return list(itertools.takewhile(lambda token: token not in end_ids, tokens))
    return []


class PromptLookup(Proposer):
    """Guesses what followed the same n-gram earlier in prompt and answer; no guess: plain decoding."""

    def __init__(self, config: PromptLookupConfig) -> None:
        self.config = config
        self.max_nodes = config.length + 1
        self._text, self._length = np.zeros(0, dtype=np.int64), 0
        self._end_ids: frozenset[int] = frozenset()

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        self._text, self._length = np.zeros(capacity, dtype=np.int64), 0
        self._append(prompt.cpu().numpy())
        self._end_ids = sampler.decoding.eos_token_ids

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        trie = Trie()
        trie.guess(continuation(self._text[: self._length], self.config, self._end_ids)[:max_levels])
        return trie.tree(root)[0]

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        if cycle is None:
            self._append(tokens[-1:].cpu().numpy())
        else:  # the verdict is on the host already
            self._append(np.array([*cycle.verdict.tokens, cycle.verdict.bonus]))

    def _append(self, tokens: Text) -> None:
        self._text[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)
