"""A drafter that is always right or always wrong, as told, so that edge cases need no luck."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.roles import TreeProposer
from aerie.infer.measure.lossless import GreedyReference

SURE = 60.0  # nats; with infinity the entropy would be NaN


class Steered:
    """Runs a drafter, and makes its laws sure of the answer's next token, or of any other token.

    The drafter's own laws stay for tokens outside its vocabulary, and after the answers.
    """

    def __init__(self, drafter: Any, known: Sequence[GreedyReference], right: bool) -> None:
        self._drafter, self._right = drafter, right
        vocabulary = getattr(getattr(drafter, "head", None), "vocabulary", None)
        self._ids = (
            None if vocabulary is None else vocabulary.t2d.nonzero()[:, 0]
        )  # not read from d2t
        self._answers = {tuple(ids[0].tolist()): answer for ids, answer in known}
        self._answer: list[int] = []
        self._place = self._level = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def reset(self, prompt: Tensor, *rest: Any) -> None:
        self._answer, self._place = self._answers[tuple(prompt.tolist())], 0
        self._drafter.reset(prompt, *rest)

    def commit(self, tokens: Tensor, features: Tensor, last: Any = None) -> None:
        self._place += (
            len(tokens) if self._place else 1
        )  # first come the prompt's tokens and one new one
        self._drafter.commit(tokens, features, last)

    def start(self) -> Tensor:
        self._level = 0
        return self._steer(self._drafter.start())

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._steer(self._drafter.step(tokens, parents))

    def _steer(self, log_q: Tensor) -> Tensor:
        place = self._place + self._level
        if place >= len(self._answer):
            return log_q
        ids = torch.arange(log_q.shape[-1]) if self._ids is None else self._ids
        told = torch.where(ids == self._answer[place], SURE if self._right else -SURE, 0.0)
        return (log_q + told).log_softmax(-1)


def steered(
    decoder: SpeculativeDecoder, known: Sequence[GreedyReference], right: bool
) -> SpeculativeDecoder:
    """The decoder, whose drafter now always guesses these answers right, or always wrong."""
    assert isinstance(decoder.proposer, TreeProposer)
    decoder.proposer.drafter = Steered(decoder.proposer.drafter, known, right)
    return decoder
