"""Lookahead decoding: the target guesses for itself, in a Jacobi window that rides along with each verification.

Source: Lookahead decoding (arXiv 2402.02057), section 3; window, pool and warm-up are those of the published code.
"""

import torch
from torch import Tensor

from aerie.configs.schema.decode import LookaheadConfig
from aerie.infer.decode.drafters.lookup import Trie
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Cycle, Proposer
from aerie.infer.decode.tree import Tree

Ngram = tuple[int, ...]


class Pool:
    """The last `size` different continuations seen after each token, oldest first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._after: dict[int, dict[Ngram, None]] = {}

    def add(self, ngram: Ngram) -> None:
        """Remembers ngram[1:] after ngram[0], as the newest."""
        kept = self._after.setdefault(ngram[0], {})
        kept.pop(ngram[1:], None)
        kept[ngram[1:]] = None
        if len(kept) > self._size:
            del kept[next(iter(kept))]

    def after(self, token: int) -> list[Ngram]:
        return list(self._after.get(token, ()))


class Window:
    """N - 1 rows of W guessed tokens, oldest first: row l, column i stands l + i places after the root, which is 0, 0.

    Row 0 is a text that the root begins. A token further down continues row 0 up to its own column, and then its
    column: the argmax below a column is its next token, so each forward is one Jacobi step on W trajectories at once.
    It begins as one row of W + N - 2 random tokens; as long as it is not full, each forward adds a row and takes the
    first column away.
    """

    def __init__(self, row: list[int], config: LookaheadConfig) -> None:
        self.rows = [row]
        self._num_rows = config.ngram - 1

    @property
    def full(self) -> bool:
        return len(self.rows) == self._num_rows

    @property
    def reach(self) -> int:
        """How far below the root its last token stands."""
        return len(self.rows) + len(self.rows[0]) - 2

    def board(self, trie: Trie, root: int) -> list[int]:
        """Its tokens as passengers under the root token; the numbers of the newest row's."""
        first = self.rows[0]
        first[0] = root
        newest = [0]
        for token in first[1:]:
            newest.append(trie.ride(token, newest[-1]))
        for row in self.rows[1:]:
            newest = [trie.ride(token, node) for token, node in zip(row, newest, strict=True)]
        return newest

    def advance(self, following: list[int]) -> list[Ngram]:
        """Takes in the argmax below each column; the n-grams that are finished now, one for each column."""
        rows = [*self.rows, following]
        if self.full:
            self.rows = rows[1:]
            return list(zip(*rows, strict=True))
        self.rows = [row[1:] for row in rows]
        return []


class Lookahead(Proposer):
    """Guesses the n-grams that followed the root's token in the window's trajectories, up to `guesses` of them.

    The window moves on by one place a cycle however many tokens were accepted, and guesses are verified once it is
    full; both as published. Guesses that begin alike share nodes. All N - 1 tokens of a guess can be accepted, and the
    bonus token on top. The window takes argmaxes at any temperature: a guess bears on the speed, not on the law.
    """

    def __init__(self, config: LookaheadConfig, context: int | None = None) -> None:
        """context is the number of positions that the target has; where the window would pass it, it is left out."""
        self.config, self._context = config, context or 2**31
        self.max_nodes = config.sizes[2]
        self._pool, self._window = Pool(config.guesses), Window([], config)
        self._newest: list[int] = []  # rows of the last tree that the window's next tokens are read from
        self._text: list[int] = []

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        config, self._text = self.config, prompt.tolist()
        generator = torch.Generator().manual_seed(config.seed)
        chosen = torch.randint(len(self._text), (config.window + config.ngram - 2,), generator=generator)
        self._window = Window([self._text[place] for place in chosen.tolist()], config)
        self._pool, self._newest = Pool(config.guesses), []
        self._read(len(self._text))

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        # the window rides along as passengers; guesses are n-grams that once followed this token
        trie, token = Trie(), self._text[-1]
        newest: list[int] = []
        if len(self._text) + self._window.reach <= self._context:
            newest = self._window.board(trie, token)
        if self._window.full:
            for guess in self._pool.after(token):
                trie.guess(guess[:max_levels])
        tree, places = trie.tree(root)
        self._newest = [places[node] for node in newest]
        return tree

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        new = tokens[-1:].tolist() if cycle is None else [*cycle.verdict.tokens, cycle.verdict.bonus]
        if cycle is not None and self._newest:
            # the argmax below each column of the newest row is the window's next row
            for ngram in self._window.advance(cycle.step.logits[self._newest].argmax(-1).tolist()):
                self._pool.add(ngram)
        self._newest = []
        self._text += new
        self._read(len(new))

    def _read(self, new: int) -> None:
        """The pool takes the n-grams that end in one of the text's last `new` tokens, where it is asked to."""
        if self.config.pool_from_text:
            size = self.config.ngram
            for end in range(max(len(self._text) - new, size - 1), len(self._text)):
                self._pool.add(tuple(self._text[end + 1 - size : end + 1]))
