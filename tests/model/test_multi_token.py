"""Medusa and Hydra heads: how they begin, what they compute, how they are stored."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.target_and_head import HeadKind
from aerie.model.checkpoint import load_head, save_head
from aerie.model.layers import KeyValueBuffer
from tests import tiny

VOCAB = tiny.vocab()
CAPPED = replace(VOCAB, bias=torch.linspace(-1, 1, 320), scale=0.5, softcap=6.0)
SHAPES: list[tuple[HeadKind, dict[str, Any]]] = [
    ("medusa", {"num_heads": 3, "num_layers": 2, "lm_head": "target"}),
    ("hydra", {"num_heads": 3, "num_layers": 3, "lm_head": "target"}),
    ("hydra", {"num_heads": 2, "num_layers": 2, "prefix_layer": True}),
]


def _features(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("keys", [{"num_layers": 3}, {"lm_head": "target"}], ids=str)
def test_a_new_medusa_head_has_the_targets_own_law_for_every_token(keys: dict[str, Any], tmp_path: Path) -> None:
    features, own = _features(2, 5), CAPPED.logits(_features(2, 5))
    new, moved = (tiny.multi_token_head("medusa", CAPPED, noise, **keys) for noise in (0.0, 0.01))
    save_head(new, tmp_path)
    again = load_head(tmp_path, vocab=CAPPED)
    new.laws.vocab = moved.laws.vocab = CAPPED
    for head, expected in ((new, True), (again, True), (moved, False)):
        assert {row.equal(own) for row in head(features)} == {expected} and len(head(features)) == 4


def test_a_new_hydra_head_begins_with_the_targets_lm_heads_and_its_blocks_as_their_projections() -> None:
    head = tiny.multi_token_head("hydra", CAPPED, num_layers=2)
    state, embeddings = _features(6), torch.cat([_features(6), 2 * _features(6)], dim=-1)
    projection = head.branches[1].blocks[0].projection
    expected = CAPPED.logits(projection(torch.cat([state, embeddings], dim=-1)))
    assert head.step(1, state, embeddings).equal(expected)
    bound = (3 * 32) ** -0.5
    assert 0.95 * bound < projection.weight.abs().max() <= bound


def _by_hand(weights: dict[str, Tensor], head: Any, index: int, x: Tensor) -> Tensor:
    """Logits of one branch, from the names of its weights alone."""
    for layer in range(head.config.num_layers):
        prefix = f"branches.{index}.blocks.{layer}"
        kept = x
        if f"{prefix}.projection.weight" in weights:
            kept = x @ weights[f"{prefix}.projection.weight"].T + weights[f"{prefix}.projection.bias"]
        added = x @ weights[f"{prefix}.linear.weight"].T + weights[f"{prefix}.linear.bias"]
        x = kept + added * torch.sigmoid(added)
    weight, bias = CAPPED.lm_head, CAPPED.bias
    if head.config.lm_head == "own":
        weight, bias = (weights[f"laws.lm_heads.{index}.{name}"] for name in ("weight", "bias"))
    return 6.0 * torch.tanh(0.5 * (x @ weight.T + bias) / 6.0)


@pytest.mark.parametrize(("kind", "keys"), SHAPES)
def test_every_law_is_what_its_weights_say(kind: HeadKind, keys: dict[str, Any]) -> None:
    head = tiny.multi_token_head(kind, CAPPED, noise=0.2, **keys)
    head.laws.vocab, weights, features = CAPPED, dict(head.state_dict()), _features(5)
    embeddings = torch.randn(5, head.config.num_heads * 32, generator=torch.Generator().manual_seed(4))
    for index in range(head.config.num_heads):
        known = embeddings[:, : (index + 1) * 32]
        given = features if kind == "medusa" else torch.cat([features, known], dim=-1)
        found = head(features)[index] if kind == "medusa" else head.step(index, features, known)
        expected = _by_hand(weights, head, index, given)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_prefix_layer_over_a_buffer_is_the_one_over_the_whole_sequence() -> None:
    head, features = tiny.multi_token_head("hydra", VOCAB, noise=0.2, prefix_layer=True), _features(1, 9)
    buffers = [KeyValueBuffer.allocate(1, head.config, 16, features)]
    with torch.no_grad():
        whole, pieces = head.prefix(features, (0, 9)), []
        for first, stop in ((0, 4), (4, 5), (5, 9)):
            mask = torch.full((stop - first, stop), float("-inf")).triu_(first + 1)[None, None]
            pieces.append(head.prefix(features[:, first:stop], (first, stop), mask, buffers))
            buffers[0].length = stop
        assert (torch.cat(pieces, dim=1) - whole).abs().max() < 1e-5
        buffers[0].length = 0
        assert (head.prefix(features[:, 8:], (8, 9), mask[..., -1:, -1:], buffers) - whole[:, 8:]).abs().max() > 1e-2
