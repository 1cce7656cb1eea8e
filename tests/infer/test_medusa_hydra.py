"""Drafting with heads for each future token: laws in the right places, and what the target writes alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import ChainConfig, DynamicConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.multi_token import HydraDrafter, MedusaDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import drafting
from aerie.infer.decode.shape import Drafter, Drafting, make_shape
from aerie.model.layers import Attention, KeyValueBuffer, Rotary
from aerie.model.target import Target
from tests import tiny

HEADS, WIDTH, VOCAB = 4, 32, 320
TREES = {
    "dynamic": DynamicConfig(levels=4, k=3, nodes=12),
    "chain": ChainConfig(levels=4),
}


@dataclass(frozen=True)
class Config:
    num_heads: int = HEADS
    prefix_layer: bool = False
    max_position_embeddings: int = 256
    hidden_size: int = WIDTH
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = WIDTH // 4
    rope_theta: float = 10000.0
    rope_scaling: None = None


class Medusa(nn.Module):
    """Four linear heads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.weights = torch.randn(HEADS, VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))

    def forward(self, features: Tensor) -> Tensor:
        return torch.stack([features @ weight.T for weight in self.weights])


class Hydra(nn.Module):
    """Four linear heads over state and embeddings; with a prefix layer, attention makes the state."""

    def __init__(self, prefix_layer: bool) -> None:
        super().__init__()
        self.config = Config(prefix_layer=prefix_layer)
        generator = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(VOCAB, (i + 2) * WIDTH, generator=generator) for i in range(HEADS)]
        self.attention = Attention(self.config, WIDTH)
        for parameter in self.attention.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.rotary = Rotary(self.config)

    def prefix(
        self,
        features: Tensor,
        span: tuple[int, int],
        mask: Tensor | None = None,
        buffers: Sequence[KeyValueBuffer] = (),
    ) -> Tensor:
        if not self.config.prefix_layer:
            return features
        rope = self.rotary.between(*span, features)
        return features + self.attention(features, rope, mask, buffers[0] if buffers else None)

    def step(self, index: int, state: Tensor, embeddings: Tensor) -> Tensor:
        return torch.cat([state, embeddings], dim=-1) @ self.weights[index].T


def make_target() -> Target:
    return Target(tiny.llama(eos_token_id=None), TargetConfig(path="tiny"))


def make_drafter(kind: str, target: Target) -> Drafter:
    return MedusaDrafter(Medusa()) if kind == "medusa" else HydraDrafter(Hydra(kind == "hydra++"), target)


def prompts(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, VOCAB, (1, 3 + 2 * n), generator=generator) for n in range(count)]


def greedy(target: Target, ids: Tensor, new: int) -> list[int]:
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    answer: list[int] = out[0].tolist()
    return answer


def test_medusas_heads_run_once_a_tree_and_hydras_once_a_level() -> None:
    target, ids, seen = make_target(), prompts(3)[-1], {}
    for kind, forwards in (("medusa", 1), ("hydra", None)):
        counts: list[tuple[int, int]] = []
        decoder = SpeculativeDecoder(
            target, Drafting(make_drafter(kind, target), make_shape(TREES["dynamic"]), forwards_per_tree=forwards)
        )
        decoder.generate(
            ids,
            do_sample=False,
            max_new_tokens=8,
            on_cycle=lambda cycle, counts=counts: counts.append((cycle.tree.levels, cycle.tree.draft_forwards)),  # type: ignore[misc]
        )
        seen[kind] = set(counts)
    assert seen["medusa"] >= {(4, 1), (3, 1), (0, 0)}  # at last nothing is drafted
    assert seen["hydra"] >= {(4, 4), (3, 3), (0, 0)}


def test_medusas_laws_are_its_rows_for_every_parent() -> None:
    head, generator = Medusa(), torch.Generator().manual_seed(3)
    features = torch.randn(6, WIDTH, generator=generator)
    drafter = MedusaDrafter(head)
    drafter.commit(torch.arange(6), features)
    rows = head(features[-1:]).log_softmax(-1)
    for _ in range(2):  # start begins anew
        torch.testing.assert_close(drafter.start(), rows[0])
        torch.testing.assert_close(drafter.step(torch.tensor([3, 4]), torch.tensor([0, 0])), rows[1].expand(2, -1))
        deeper = drafter.step(torch.tensor([5, 6, 7]), torch.tensor([1, 1, 0]))
        torch.testing.assert_close(deeper, rows[2].expand(3, -1))


def test_hydras_law_of_a_node_is_that_of_its_own_path() -> None:
    target, ids = make_target(), prompts(3)[-1][0]
    head, embedding = Hydra(prefix_layer=True), target.vocab.embedding
    drafter = HydraDrafter(head, target)
    with torch.inference_mode():
        features = target.features(ids[None]).last_hidden[0]
        drafter.reset(ids, 64)
        drafter.commit(torch.cat([ids[1:], torch.tensor([9])]), features)
        drafter.start()
        drafter.step(torch.tensor([11, 12, 13]), torch.tensor([0, 0, 0]))
        both = drafter.step(torch.tensor([21, 22]), torch.tensor([2, 0]))
        state = head.prefix(features[None], (0, len(ids)))[0, -1:]
        for row, path in enumerate([(9, 13, 21), (9, 11, 22)]):
            alone = head.step(2, state, embedding[list(path)].reshape(1, -1)).log_softmax(-1)
            torch.testing.assert_close(both[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_the_prefix_layer_sees_true_features_of_accepted_tokens_only() -> None:
    """After any number of cycles its law equals that of a drafter that was handed the whole text at once."""
    target, ids = make_target(), prompts(3)[-1]
    drafter = make_drafter("hydra++", target)
    assert isinstance(drafter, HydraDrafter)
    decoder = SpeculativeDecoder(target, Drafting(drafter, make_shape(TREES["dynamic"])))
    generation = decoder.generate(ids, do_sample=False, max_new_tokens=24)
    text, kept = generation.sequences[0], drafter._length
    assert kept > ids.shape[1]
    with torch.inference_mode():
        features = target.features(generation.sequences).last_hidden[0]
        fresh = HydraDrafter(drafter.head, target)
        fresh.reset(ids[0], 256)
        fresh.commit(text[1 : kept + 1], features[:kept])
        torch.testing.assert_close(drafter.start(), fresh.start(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_tree_deeper_than_the_heads_is_refused(kind: str) -> None:
    target = make_target()
    with pytest.raises(UserError, match=r"is 5 levels deep, and the head has 4 heads"):
        drafting(make_drafter(kind, target), ChainConfig(levels=5))
