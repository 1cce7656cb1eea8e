"""Makes the proposer of a settled row; holds the headless ones, prompt lookup and lookahead."""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from aerie.configs.schema.decode import (
    LookaheadConfig,
    MethodConfig,
    PromptLookupConfig,
    TreeConfig,
)
from aerie.infer.decode.calibrator import calibrate_of
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.roles import (
    UNBOUNDED,
    Calibrate,
    Cycle,
    Drafter,
    Proposer,
    Traits,
    TreeProposer,
    unchanged,
)
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.tree import Path, Tree, ancestors, root_only
from aerie.model.kv_cache import KeptRows
from aerie.model.target_files import context_of


def make_proposer(heads: LoadedHeads, row: MethodConfig, head: str | None) -> Proposer | None:
    """The proposer of a row whose tree fits its head (see `check_levels`); None: vanilla."""
    if row.tree is not None:
        assert head is not None
        return tree_proposer(heads.of(head), row.tree, calibrate_of(row.tree.calibrated, head))
    if isinstance(row.options, LookaheadConfig):
        target = heads.target
        # No passenger may stand where LongRoPE switches its factors.
        return Lookahead(row.options, target.rope_switch or context_of(target.config))
    return None if row.options is None else PromptLookup(row.options)


def tree_proposer(
    drafter: Drafter, tree: TreeConfig, calibrate: Calibrate = unchanged
) -> TreeProposer:
    return TreeProposer(drafter, make_shape(tree, calibrate))


Name = Path | int  # a node's name: the path of a guessed node, the number of a passenger


class Node(NamedTuple):
    token: int
    depth: int
    parent: Name


class GuessTree:
    """Builds a tree of guesses, which share their beginnings, and of passengers."""

    def __init__(self) -> None:
        self._nodes: dict[Name, Node] = {(): Node(0, 0, ())}
        self._counts: Counter[Name] = Counter()  # how many guesses pass through each node

    def guess(self, tokens: Sequence[int]) -> None:
        self._counts[()] += 1
        for depth, token in enumerate(tokens, start=1):
            # Guesses that begin alike share nodes.
            path = tuple(tokens[:depth])
            self._nodes[path] = Node(token, depth, path[:-1])
            self._counts[path] += 1

    def ride(self, token: int, parent: Name) -> Name:
        """Adds a passenger, which is never accepted, below a node; returns the passenger's name."""
        # no path, because a passenger may repeat the path of a guess
        name = len(self._nodes)
        self._nodes[name] = Node(token, self._nodes[parent].depth + 1, parent)
        return name

    def tree(self, root: Tensor) -> tuple[Tree, dict[Name, int]]:
        """The tree under root [1], and each node's index in it."""
        # level by level, as `Tree` wants it; within a level in the order of addition
        names = sorted(self._nodes, key=lambda name: self._nodes[name].depth)
        index = {name: number for number, name in enumerate(names)}
        if len(names) == 1:
            return root_only(root), index
        rows = []
        for name in names:
            node = self._nodes[name]
            rows.append((node.token, index[node.parent], node.depth, name not in self._counts))
        # one copy to the device for all columns
        tokens, parents, depth, rides = torch.tensor(rows, device=root.device).unbind(1)  # [N] each
        rides[0] = 0
        # Only the device knows the root's token.
        tokens = torch.cat([root, tokens[1:].to(root.dtype)])
        shares = torch.tensor([self._log_shares(name) for name in names], device=root.device)
        confidence, survival = shares.unbind(1)  # [N] each
        mask = ancestors(parents, self._nodes[names[-1]].depth)
        # Only guesses count: no path through a passenger is accepted.
        levels = max((self._nodes[name].depth for name in self._counts), default=0)
        has_passengers = any(isinstance(name, int) for name in names)
        passengers = rides.bool() if has_passengers else None
        tree = Tree(
            tokens, parents, depth, mask, confidence, survival, levels, 0, passengers=passengers
        )
        return tree, index

    def _log_shares(self, name: Name) -> tuple[float, float]:
        """The log share of its parent's guesses that pass through a node, and of all guesses."""
        if name not in self._counts:
            return 0.0, 0.0
        count = self._counts[name]
        of_parent = count / self._counts[self._nodes[name].parent]
        return math.log(of_parent), math.log(count / self._counts[()])


def continuation(
    text: NDArray[np.int64], config: PromptLookupConfig, end_ids: Collection[int] = ()
) -> list[int]:
    """The tokens that followed an earlier copy of the text's final n-gram, up to an end token.

    Like transformers' PromptLookupCandidateGenerator, it takes the longest n-gram that has a copy,
    and the first copy.
    """
    # The text without its last token must have room for the n-gram.
    for size in range(min(config.ngram, len(text) - 1), 0, -1):
        ngrams = sliding_window_view(text[:-1], size)  # [n, size]
        # where the copies end and their continuations begin
        starts = np.flatnonzero((ngrams == text[-size:]).all(axis=1)) + size
        if len(starts):
            start = starts[0]
            tokens = text[start : start + config.length].tolist()
            return list(itertools.takewhile(lambda token: token not in end_ids, tokens))
    return []


class PromptLookup(Proposer):
    """Prompt lookup: drafts a chain that it copies from the text."""

    levels = None

    def __init__(self, config: PromptLookupConfig) -> None:
        self.config = config
        self.max_nodes = config.length + 1

    def traits(self, decoding: Decoding) -> Traits:
        return Traits("anything")

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        self._length = len(prompt)
        # an array that `learn` writes into: a list would be converted in every cycle
        self._text = np.zeros(len(kept.positions), dtype=np.int64)  # room for the answer as well
        self._text[: self._length] = prompt.cpu().numpy()
        self._end_ids = sampler.decoding.eos_token_ids

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        guess = continuation(self._text[: self._length], self.config, self._end_ids)
        guesses = GuessTree()
        guesses.guess(guess[:max_levels])
        return guesses.tree(root)[0]

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        length = self._length + len(new)
        self._text[self._length : length] = new
        self._length = length


class Lookahead(Proposer):
    """Lookahead decoding (arXiv 2402.02057, section 3); all sizes as in the published code.

    The window has N - 1 rows of W tokens. Row l, column i stands l + i places after the root, which
    is row 0, column 0. A token sees row 0 up to its own column, and the tokens above it there:

        row 0   root  b     c          row 0 is a chain below the root
        row 1   d     e     f          d below the root, e below b, f below c
        row 2   g     h     i          g below d, h below e, i below f

    The target's choices after the last row become the next row. During the warm-up, while the
    window is not full, each forward drops column 0; later it drops row 0. The full window's columns
    join the pool of n-grams. Those n-grams that begin with the last token are the guesses, which
    the same forward verifies.
    """

    is_chain = False
    levels = None

    def __init__(self, config: LookaheadConfig, context: int | None = None) -> None:
        """context: the most tokens of prompt, answer and window together."""
        self.config = config
        self._context = context or UNBOUNDED
        self.max_nodes = config.sizes[2]

    def traits(self, decoding: Decoding) -> Traits:
        return Traits("anything")

    def reset(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> None:
        config = self.config
        self._text: list[int] = prompt.tolist()
        # random tokens of the prompt, as in the published code, but the same in every run
        generator = torch.Generator().manual_seed(0)
        # W columns, and one more for each row of the warm-up, as each drops a column
        width = config.window + config.ngram - 2
        indices = torch.randint(len(self._text), (width,), generator=generator)
        self.window = [[self._text[index] for index in indices.tolist()]]
        # by token: the different n-grams that continued it last, the oldest first
        self.pool: dict[int, dict[Path, None]] = {}
        # the last tree's nodes after which the target chooses the window's next row
        self._last_row: list[int] = []
        self._pool_text(len(self._text))

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        guesses = GuessTree()
        token = self._text[-1]
        first, *rows = self.window
        names: list[Name] = []
        # All passengers must fit the context.
        if len(self._text) + len(rows) + len(first) - 1 <= self._context:
            # Row 0, column 0 is the root, which changes with every cycle.
            first[0] = token
            names.append(())
            for passenger in first[1:]:
                names.append(guesses.ride(passenger, names[-1]))
            for row in rows:  # each token below the one above it in its column
                names = [guesses.ride(*pair) for pair in zip(row, names, strict=True)]
        if len(self.window) == self.config.ngram - 1:  # the window is full
            for guess in self.pool.get(token, ()):
                # The pool's n-grams lack their first token, which is the root.
                guesses.guess(guess[:max_levels])
        tree, index = guesses.tree(root)
        self._last_row = [index[name] for name in names]
        return tree

    def learn(self, new: list[int], cycle: Cycle | None) -> None:
        if cycle is not None and self._last_row:
            # what the target writes after the last row, one token a column
            row = cycle.step.logits[self._last_row].argmax(-1).tolist()
            rows = [*self.window, row]
            if len(rows) == self.config.ngram:
                # The window was full: its columns are n-grams now, and row 0 leaves.
                self.window = rows[1:]
                for ngram in zip(*rows, strict=True):
                    self._add(ngram)
            else:  # warm-up: the root leaves, and with it column 0
                self.window = [row[1:] for row in rows]
        self._last_row = []
        self._text += new
        self._pool_text(len(new))

    def _pool_text(self, num_new: int) -> None:
        """Adds the n-grams that end with one of the text's last tokens."""
        if not self.config.pool_from_text:
            return
        size = self.config.ngram
        # Earlier calls pooled the n-grams that end before.
        first = max(len(self._text) - num_new + 1, size)
        for end in range(first, len(self._text) + 1):
            self._add(tuple(self._text[end - size : end]))

    def _add(self, ngram: tuple[Any, ...]) -> None:
        continuations = self.pool.setdefault(ngram[0], {})
        continuations.pop(ngram[1:], None)  # it becomes the newest
        continuations[ngram[1:]] = None
        if len(continuations) > self.config.guesses:
            # A dict keeps its order: its first entry has gone unseen for longest.
            del continuations[next(iter(continuations))]
