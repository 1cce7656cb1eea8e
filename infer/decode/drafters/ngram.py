"""Guessing without a draft model: prompt lookup, and lookahead decoding with its Jacobi window."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.schema.decode import LookaheadConfig, PromptLookupConfig
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Cycle, Proposer
from aerie.infer.decode.tree import Path, Tree, ancestors, root_only

Ngram = tuple[int, ...]
Name = Path | int


class Trie:
    # guesses are named by their paths, passengers by numbers
    def __init__(self) -> None:
        self._guesses: Counter[Path] = Counter()  # how many pass through each path
        self._nodes: dict[Name, tuple[int, int, Name]] = {(): (0, 0, ())}  # token, depth and parent

    def guess(self, tokens: Sequence[int]) -> None:
        self._guesses.update(tuple(tokens[:count]) for count in range(len(tokens) + 1))

    def ride(self, token: int, parent: Name) -> Name:
        self._nodes[len(self._nodes)] = token, self._nodes[parent][1] + 1, parent
        return len(self._nodes) - 1

    def tree(self, root: Tensor) -> tuple[Tree, dict[Name, int]]:
        """The tree under root [1], and the place in it of each node."""
        guesses: Counter[Any] = self._guesses
        nodes = self._nodes | {path: (path[-1], len(path), path[:-1]) for path in guesses if path}
        order = sorted(nodes, key=lambda name: nodes[name][1])
        places = {name: place for place, name in enumerate(order)}
        if len(order) == 1:
            return root_only(root), places
        columns = [(nodes[n][0], places[nodes[n][2]], nodes[n][1], n not in guesses) for n in order]
        tokens, parents, depth, rides = torch.tensor(columns, device=root.device).unbind(1)  # [N] each
        rides[0] = 0
        counts = [(guesses[n], guesses[nodes[n][2]], guesses[()]) if n in guesses else (1, 1, 1) for n in order]
        shares = [(math.log(through / parent), math.log(through / all_)) for through, parent, all_ in counts]
        confidence, survival = torch.tensor(shares, device=root.device).unbind(1)
        tokens, mask = torch.cat([root, tokens[1:].to(root.dtype)]), ancestors(parents, nodes[order[-1]][1])
        levels, passengers = max(map(len, guesses), default=0), rides.bool() if len(self._nodes) > 1 else None
        return Tree(tokens, parents, depth, mask, confidence, survival, levels, 0, passengers=passengers), places


def continuation(
    text: NDArray[np.int64], config: PromptLookupConfig, end_ids: frozenset[int] = frozenset()
) -> list[int]:
    """What followed the longest n-gram that ends the text, as transformers' PromptLookupCandidateGenerator has it."""
    for size in range(min(config.ngram, len(text) - 1), config.min_ngram - 1, -1):
        starts = np.flatnonzero((sliding_window_view(text[:-1], size) == text[-size:]).all(axis=1)) + size
        if len(starts):
            start = starts[0] if config.match == "first" else starts[-1]
            return [*itertools.takewhile(lambda t: t not in end_ids, text[start : start + config.length].tolist())]
    return []


class PromptLookup(Proposer):
    def __init__(self, config: PromptLookupConfig) -> None:
        self.config, self.max_nodes = config, config.length + 1

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        self._text, self._length = np.zeros(capacity, dtype=np.int64), len(prompt)
        self._text[: self._length] = prompt.cpu().numpy()
        self._end_ids = sampler.decoding.eos_token_ids

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        trie = Trie()
        trie.guess(continuation(self._text[: self._length], self.config, self._end_ids)[:max_levels])
        return trie.tree(root)[0]

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        new = written(tokens, cycle)
        self._text[self._length : self._length + len(new)] = new
        self._length += len(new)


def written(tokens: Tensor, cycle: Cycle | None) -> list[int]:
    return tokens[-1:].tolist() if cycle is None else [*cycle.verdict.tokens, cycle.verdict.bonus]


class Lookahead(Proposer):
    # Lookahead decoding (arXiv 2402.02057, section 3); window, pool and warm-up are those of the published code
    # The window has N - 1 rows of W tokens: row l, column i stands l + i places after the root, which is 0, 0. A token
    # continues row 0 up to its column, and then its column. Until it is full, each forward takes the first column away.
    def __init__(self, config: LookaheadConfig, context: int | None = None) -> None:
        self.config, self._context, self.max_nodes = config, context or 2**31, config.sizes[2]

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        config, self._text = self.config, prompt.tolist()
        generator = torch.Generator().manual_seed(config.seed)
        chosen = torch.randint(len(self._text), (config.window + config.ngram - 2,), generator=generator)
        self.window: list[list[int]] = [[self._text[place] for place in chosen.tolist()]]
        self.pool: dict[int, dict[Ngram, None]] = {}  # the last different continuations of each token, oldest first
        self._newest: list[int] = []  # nodes of the last tree that the window's next tokens are read from
        self._read(len(self._text))

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        trie, token, first = Trie(), self._text[-1], self.window[0]
        newest: list[Any] = []
        # passengers: row 0 is a line below the root, the other rows stand below its columns; none passes the context
        if len(self._text) + len(self.window) + len(first) - 2 <= self._context:
            first[0], newest = token, [()]
            for guessed in first[1:]:
                newest.append(trie.ride(guessed, newest[-1]))
            for row in self.window[1:]:
                newest = [trie.ride(guessed, node) for guessed, node in zip(row, newest, strict=True)]
        if len(self.window) == self.config.ngram - 1:
            for guess in self.pool.get(token, ()):
                trie.guess(guess[:max_levels])
        tree, places = trie.tree(root)
        self._newest = [places[node] for node in newest]
        return tree

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        if cycle is not None and self._newest:
            rows = [*self.window, cycle.step.logits[self._newest].argmax(-1).tolist()]
            if len(rows) == self.config.ngram:
                self.window = rows[1:]
                for ngram in zip(*rows, strict=True):
                    self._add(ngram)
            else:
                self.window = [row[1:] for row in rows]
        self._newest = []
        new = written(tokens, cycle)
        self._text += new
        self._read(len(new))

    def _read(self, new: int) -> None:
        if self.config.pool_from_text:
            size = self.config.ngram
            for end in range(max(len(self._text) - new, size - 1), len(self._text)):
                self._add(tuple(self._text[end + 1 - size : end + 1]))

    def _add(self, ngram: Ngram) -> None:
        kept = self.pool.setdefault(ngram[0], {})
        kept.pop(ngram[1:], None)
        kept[ngram[1:]] = None
        if len(kept) > self.config.guesses:
            del kept[next(iter(kept))]
