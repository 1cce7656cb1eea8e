"""Targets, prompts and heads for the tests of decoding; drafters that are steered."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aerie.configs.schema.decode import ChainConfig, DynamicConfig, TreeConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposers import tree_proposer
from aerie.infer.measure.lossless import GreedyReference
from aerie.model.heads import DRAFT_MODELS
from aerie.model.target import Target
from tests import tiny

TREES = {
    "small": DynamicConfig(levels=3, k=3, nodes=8),
    "wide": DynamicConfig(levels=5, k=6, nodes=40),
    "chain": ChainConfig(levels=4),
}


def make_target(**changes: Any) -> Target:
    return Target(tiny.llama(**{"eos_token_id": None, **changes}), TargetConfig(path="tiny"))


def make_head(target: Target, kind: str = "eagle1", **changes: Any) -> Any:
    """A random head whose drafts depend on every input."""
    if kind in ("medusa", "hydra", "block"):
        return tiny.multi_token_head(kind, target.vocab, noise=0.3, **changes).eval()
    make = tiny.head if kind == "eagle1" else tiny.eagle3_head
    return make(target.vocab.embedding.float(), **{"scale": 8.0, **changes}).eval()


def decoder_of(
    target: Target, tree: TreeConfig | None, kind: str = "eagle1", **changes: Any
) -> SpeculativeDecoder:
    """A decoder with a random head, or with the target as its own draft LM; no tree: vanilla."""
    if tree is None:
        return SpeculativeDecoder(target)
    head = target if kind == "draft_lm" else make_head(target, kind, **changes).to(target.device)
    return SpeculativeDecoder(target, tree_proposer(DRAFT_MODELS[kind].drafter(head, target), tree))


def prompts(count: int, vocab: int = 320) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, vocab, (1, 3 + 2 * n), generator=generator) for n in range(count)]


def greedy(target: Target, ids: Tensor, new: int) -> list[list[int]]:
    """The texts that transformers' generate writes."""
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
    )
    return list(out.tolist())


SURE = 60.0  # nats; with infinity the entropy would be NaN


class Steered:
    """Runs a drafter, and makes its laws sure of the answer's next token, or of any other token.

    The drafter's own laws stay for tokens outside its vocabulary, and after the answers.
    """

    def __init__(self, drafter: Any, known: Sequence[GreedyReference], right: bool) -> None:
        self._drafter = drafter
        self._nats = SURE if right else -SURE
        self._answers = {tuple(ids[0].tolist()): answer for ids, answer in known}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def reset(self, prompt: Tensor, *rest: Any) -> None:
        self._answer, self._place = self._answers[tuple(prompt.tolist())], 0
        self._drafter.reset(prompt, *rest)

    def commit(self, tokens: Tensor, features: Tensor, last: Any = None) -> None:
        # first come the prompt's tokens and one new one
        self._place += len(tokens) if self._place else 1
        self._drafter.commit(tokens, features, last)

    def start(self) -> Tensor:
        self._level = 0
        return self._steer(self._drafter.start())

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._steer(self._drafter.step(tokens, parents))

    def _steer(self, log_q: Tensor) -> Tensor:
        wanted = self._answer[self._place + self._level :][:1]
        vocabulary = getattr(getattr(self._drafter, "head", None), "vocabulary", None)
        ids = torch.arange(log_q.shape[-1])
        if vocabulary is not None:
            ids = vocabulary.t2d.nonzero()[:, 0]  # not read from d2t
        told = torch.where(torch.isin(ids, torch.tensor(wanted)), self._nats, 0.0)
        return (log_q + told).log_softmax(-1)


def steered(
    decoder: SpeculativeDecoder, known: Sequence[GreedyReference], right: bool
) -> SpeculativeDecoder:
    """The decoder, whose drafter now always guesses these answers right, or always wrong."""
    decoder.proposer.drafter = Steered(decoder.proposer.drafter, known, right)
    return decoder
