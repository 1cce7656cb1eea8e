"""Targets, prompts and heads for the tests of decoding."""

from typing import Any

import torch
from torch import Tensor

from aerie.configs.schema.decode import ChainConfig, DynamicConfig, TreeConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposers import tree_proposer
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
