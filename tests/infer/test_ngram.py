"""Prompt lookup finds what transformers finds; lookahead has a naive run's window and pool."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from aerie.configs.schema.decode import LookaheadConfig, PromptLookupConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposers import GuessTree, Lookahead, continuation
from aerie.infer.decode.roles import Cycle
from aerie.model.target import Target
from tests.infer.draws import greedy, make_target
from tests.infer.laws import check_connected, node_paths

FEW: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_blocks": 2,
}  # few tokens, so that texts repeat
SETTINGS = {
    "published": LookaheadConfig(),
    "small": LookaheadConfig(ngram=3, window=3, guesses=2),
    "bigrams": LookaheadConfig(ngram=2, window=2, guesses=3, pool_from_text=True),
    "one column": LookaheadConfig(ngram=4, window=1, guesses=2, pool_from_text=True),
}


def test_guesses() -> None:
    trie = GuessTree()
    for guess in ((1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 2, 3)):
        trie.guess(guess)
    tree, _ = trie.tree(torch.tensor([9]))
    check_connected(tree)
    assert tree.tokens.tolist() == [9, 1, 5, 2, 2, 3, 4, 3]
    assert (
        tree.depth.tolist() == [0, 1, 1, 2, 2, 3, 3, 3]
        and tree.levels == 3
        and tree.passengers is None
    )
    shares = torch.tensor([1, 3 / 4, 1 / 4, 1, 1, 2 / 3, 1 / 3, 1])  # of the parent's guesses
    torch.testing.assert_close(tree.confidence, shares.log())
    torch.testing.assert_close(tree.survival, tree.mask.float() @ tree.confidence)


def test_matches() -> None:
    chance, ends, lengths = np.random.default_rng(0), frozenset({0, 1}), set()
    for _ in range(400):
        alphabet, size, length = (
            chance.integers(2, 12),
            int(chance.integers(1, 5)),
            int(chance.integers(1, 7)),
        )
        text = chance.integers(0, alphabet, chance.integers(1, 40))
        theirs = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor(sorted(ends)),
            num_output_tokens=length,
            max_matching_ngram_size=size,
            max_length=1000,
        ).get_candidates(torch.tensor(text)[None])[0][0, len(text) :]
        ours = continuation(text, PromptLookupConfig(ngram=size, length=length), ends)
        assert ours == theirs.tolist()
        lengths.add(len(ours))
    assert lengths == set(range(7))


class Naive:
    """Lookahead as in the paper's figure: each of the window's tokens by a plain forward."""

    def __init__(self, target: Target, text: list[int], config: LookaheadConfig) -> None:
        self.target, self.text, self.config = target, text, config
        width, generator = (
            config.window + config.ngram - 2,
            torch.Generator().manual_seed(0),
        )
        self.grid = [
            [text[int(place)] for place in torch.randint(len(text), (width,), generator=generator)]
        ]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.remember_text(len(text))
        self.text.append(self.next_token(text))
        self.remember_text(1)

    def next_token(self, text: list[int]) -> int:
        with torch.inference_mode():
            return int(self.target.model(torch.tensor([text])).logits[0, -1].argmax())

    def remember(self, ngram: list[int]) -> None:
        kept = self.pool.setdefault(ngram[0], [])
        if tuple(ngram[1:]) in kept:
            kept.remove(tuple(ngram[1:]))
        kept.append(tuple(ngram[1:]))
        if len(kept) > self.config.guesses:
            kept.pop(0)

    def remember_text(self, new: int) -> None:
        size = self.config.ngram
        for end in range(len(self.text) - new + 1, len(self.text) + 1):
            if self.config.pool_from_text and end >= size:
                self.remember(self.text[end - size : end])

    def column(self, number: int) -> list[int]:
        return [row[number] for row in self.grid]

    def cycle(self) -> int:
        """Takes one step; returns the number of tokens written."""
        text, rows = self.text, self.config.ngram - 1
        self.grid[0][0] = text[-1]
        diagonals = [
            text[:-1] + self.grid[0][:i] + self.column(i) for i in range(len(self.grid[0]))
        ]
        found = [self.next_token(diagonal) for diagonal in diagonals]
        full = len(self.grid) == rows
        guesses = self.pool.get(text[-1], []) if full else []
        answer: list[int] = []
        while len(answer) < rows and any(list(guess[: len(answer)]) == answer for guess in guesses):
            token = self.next_token(text + answer)
            if not any(list(guess[: len(answer) + 1]) == [*answer, token] for guess in guesses):
                break
            answer.append(token)
        answer.append(self.next_token(text + answer))
        if full:
            for i, token in enumerate(found):
                self.remember([*self.column(i), token])
            self.grid = [*self.grid[1:], found]
        else:
            self.grid = [row[1:] for row in [*self.grid, found]]
        self.text = text + answer
        self.remember_text(len(answer))
        return len(answer)


@pytest.mark.parametrize("name", SETTINGS)
def test_window_and_pool(name: str) -> None:
    """The naive algorithm's; no tree is wider than announced or deeper than what is left."""
    target, config, ids = make_target(**FEW), SETTINGS[name], torch.arange(5, 15).flip(0)[None]
    lookahead, naive, seen = Lookahead(config), Naive(target, ids[0].tolist(), config), []
    sizes, drafted, left = [], 0, 24 - 1

    def watch(cycle: Cycle) -> None:
        nonlocal drafted, left
        seen.append(
            (
                [[*row] for row in lookahead.window],
                {token: [*kept] for token, kept in lookahead.pool.items()},
            )
        )
        tree = cycle.tree
        check_connected(tree)
        riding = (
            torch.zeros(len(tree), dtype=torch.bool) if tree.passengers is None else tree.passengers
        )
        guessed = [
            path for path, rides in zip(node_paths(tree), riding.tolist(), strict=True) if not rides
        ]
        assert len(set(guessed)) == len(guessed)
        assert int(tree.depth[~riding].max()) == tree.levels <= max(left - 1, 0)
        assert not riding[cycle.verdict.path].any()
        sizes.append(len(tree))
        drafted, left = drafted + len(guessed) - 1, left - cycle.new_tokens

    ours = SpeculativeDecoder(target, lookahead).generate(
        ids, do_sample=False, max_new_tokens=24, on_cycle=watch
    )
    assert 0 < sum(ours.statistics.accepted) <= ours.statistics.draft_nodes == drafted
    assert config.window * (config.ngram - 1) < max(sizes) <= lookahead.max_nodes
    for number, (rows, pool) in enumerate(seen[:-1]):  # the limit may cut the last cycle
        naive.grid[0][0] = naive.text[-1]
        assert rows == naive.grid and pool == naive.pool
        assert naive.cycle() == ours.statistics.cycle_tokens[number]
    assert naive.text == ours.sequences[0, : len(naive.text)].tolist()


def test_context() -> None:
    target, ids = make_target(**FEW), torch.arange(5, 10)[None]
    context, deepest = ids.shape[1] + 16, []
    ours = SpeculativeDecoder(target, Lookahead(LookaheadConfig(), context)).generate(
        ids,
        do_sample=False,
        max_new_tokens=16,
        on_cycle=lambda cycle: deepest.append((cycle.position, int(cycle.tree.depth.max()))),
    )
    assert all(position + depth < context for position, depth in deepest)
    assert ours.sequences.tolist() == greedy(target, ids, 16)
    assert (
        deepest[0][1] == LookaheadConfig().window + LookaheadConfig().ngram - 3
    )  # at first there were passengers
