"""Lookahead's window and pool are those of a naive run without cache or mask, and its guesses cost no exactness."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import LookaheadConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.lookahead import Lookahead
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Cycle
from aerie.model.target import Target
from tests import tiny
from tests.infer.test_shape import check_connected

SETTINGS = {
    "published": LookaheadConfig(),
    "small": LookaheadConfig(ngram=3, window=3, guesses=2),
    "bigrams": LookaheadConfig(ngram=2, window=2, guesses=3, pool_from_text=True),
    "one column": LookaheadConfig(ngram=4, window=1, guesses=2, pool_from_text=True),
}


def make_target(**changes: Any) -> Target:
    """Few tokens, so that it repeats itself."""
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_blocks": 2, "eos_token_id": None, **changes}
    return Target(tiny.llama(**sizes), TargetConfig(path="tiny"))


def prompts(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, 24, (1, 2 + n), generator=generator) for n in range(count)]


def greedy(target: Target, ids: Tensor, new: int) -> list[int]:
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    answer: list[int] = out[0].tolist()
    return answer


class Naive:
    """Lookahead as the paper draws it: every token of the window from a forward of its own over a plain text."""

    def __init__(self, target: Target, text: list[int], config: LookaheadConfig) -> None:
        self.target, self.text, self.config = target, text, config
        generator = torch.Generator().manual_seed(config.seed)
        width = config.window + config.ngram - 2
        places = torch.randint(len(text), (width,), generator=generator)
        self.grid = [[text[int(place)] for place in places]]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        if config.pool_from_text:
            self.remember_text(len(text))
        self.text.append(self.next_token(text))
        if config.pool_from_text:
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
            if end >= size:
                self.remember(self.text[end - size : end])

    def column(self, number: int) -> list[int]:
        return [row[number] for row in self.grid]

    def cycle(self) -> int:
        """One step; how many tokens it wrote."""
        text, rows = self.text, self.config.ngram - 1
        self.grid[0][0] = text[-1]
        diagonals = [text[:-1] + self.grid[0][:i] + self.column(i) for i in range(len(self.grid[0]))]
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
        if self.config.pool_from_text:
            self.remember_text(len(answer))
        return len(answer)


@pytest.mark.parametrize("name", SETTINGS)
def test_window_and_pool_are_those_of_the_naive_algorithm(name: str) -> None:
    target, ids, config = make_target(), prompts(9)[-1], SETTINGS[name]
    lookahead, naive = Lookahead(config), Naive(target, prompts(9)[-1][0].tolist(), config)
    seen: list[tuple[list[list[int]], dict[int, list[tuple[int, ...]]]]] = []

    def watch(_: Cycle) -> None:
        pool = {token: list(kept) for token, kept in lookahead._pool._after.items()}
        seen.append(([list(row) for row in lookahead._window.rows], pool))

    ours = SpeculativeDecoder(target, lookahead).generate(ids, do_sample=False, max_new_tokens=24, on_cycle=watch)
    assert sum(ours.statistics.accepted) > 0
    for number, (rows, pool) in enumerate(seen[:-1]):  # the last cycle may be cut
        naive.grid[0][0] = naive.text[-1]
        assert rows == naive.grid and pool == naive.pool
        assert naive.cycle() == ours.statistics.cycle_tokens[number]
    assert naive.text == ours.sequences[0, : len(naive.text)].tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_trees_keep_their_promises(name: str) -> None:
    """Connected, no wider than announced, no deeper than what is left, siblings that can be accepted differ."""
    target, lookahead, written = make_target(), Lookahead(SETTINGS[name]), [1]
    sizes = []

    def watch(cycle: Cycle) -> None:
        tree = cycle.tree
        check_connected(tree)
        riding = torch.zeros(len(tree), dtype=torch.bool) if tree.passengers is None else tree.passengers
        guessed = [(int(tree.parents[n]), int(tree.tokens[n])) for n in range(1, len(tree)) if not riding[n]]
        assert len(set(guessed)) == len(guessed)
        assert int(tree.depth[~riding].max()) == tree.levels <= max(20 - written[0] - 1, 0)
        assert not set(cycle.verdict.path) & set(riding.nonzero().flatten().tolist())
        sizes.append(len(tree))
        written[0] += len(cycle.verdict.path)

    SpeculativeDecoder(target, lookahead).generate(prompts(9)[-1], do_sample=False, max_new_tokens=20, on_cycle=watch)
    assert max(sizes) <= lookahead.max_nodes
    assert max(sizes) > SETTINGS[name].window * (SETTINGS[name].ngram - 1)


def test_the_window_never_passes_the_targets_context() -> None:
    target, ids = make_target(), prompts(4)[-1]
    context = ids.shape[1] + 16
    positions = []
    start = ids.shape[1]

    def watch(cycle: Cycle) -> None:
        positions.append(start + int(cycle.tree.depth.max()))

    decoder = SpeculativeDecoder(target, Lookahead(LookaheadConfig(), context))
    ours = decoder.generate(ids, do_sample=False, max_new_tokens=16, on_cycle=watch)
    written = 0
    for first, tokens in zip(positions, ours.statistics.cycle_tokens, strict=True):
        assert first + written < context
        written += tokens
    assert ours.sequences[0].tolist() == greedy(target, ids, 16)
    assert max(positions) - start == LookaheadConfig().window + LookaheadConfig().ngram - 3  # it did ride at first


def test_window_rows_are_no_drafts() -> None:
    target, trees = make_target(), []
    decoder = SpeculativeDecoder(target, Lookahead(LookaheadConfig()))
    ids = torch.arange(5, 13)[None]
    statistics = decoder.generate(
        ids, do_sample=False, max_new_tokens=24, on_cycle=lambda cycle: trees.append(cycle.tree)
    ).statistics
    riding = sum(0 if tree.passengers is None else int(tree.passengers.sum()) for tree in trees)
    assert riding > 0 and statistics.draft_nodes == sum(len(tree) - 1 for tree in trees) - riding
    assert statistics.draft_nodes >= sum(statistics.accepted)
