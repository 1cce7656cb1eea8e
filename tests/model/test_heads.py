"""Heads against plain formulas: EAGLE-3 and its switches, the draft vocabulary, Medusa and
Hydra."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import BlockSection, Eagle3Section, TargetConfig
from aerie.model.checkpoint import check_sizes, load_head, new_head, save_head
from aerie.model.heads.block import BlockHead
from aerie.model.heads.eagle import DraftVocabulary, Eagle3Head
from aerie.model.layers import attend
from aerie.model.target import final_norm, load_vocab
from tests import tiny
from tests.model.formats.published import eagle3


def expected_output(made: Eagle3Head, tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """(output before the final norm [T, D], logits [T, Vd]) from the definition of the layer."""
    eps, layer = made.config.rms_norm_eps, made.midlayer

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    h = taps @ made.fc.weight.T
    e = made.embed_tokens.weight[tokens]
    normed_h = normed(h, layer.hidden_norm.weight)
    x = torch.cat([normed(e, layer.input_layernorm.weight), normed_h], dim=-1)
    h = normed_h if made.config.norm_before_residual else h
    q, k, v = layer.self_attn.project(
        x[None], made.rotary.at(torch.arange(len(tokens)), len(tokens), x)
    )
    h = h + layer.self_attn.o_proj(attend(q, k, v, None, None))[0]  # as in Llama: see test_layers
    x = normed(h, layer.post_attention_layernorm.weight)
    gate, up, down = (
        getattr(layer.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj")
    )
    h = h + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return h, normed(h, made.norm.weight) @ made.lm_head.weight.T


NEAR = {"rtol": 1e-4, "atol": 1e-4}


def slots() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 320, (1, 7), generator=generator)
    return tokens, torch.randn(1, 7, 3 * 32, generator=generator), torch.arange(7)[None]


@torch.no_grad()
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_forward(norm_before_residual: bool) -> None:
    """The forward is the definition. infer/test_heads.py and train/test_objectives.py compare the
    forwards over a cache and in the unroll with it."""
    made, (tokens, taps, positions) = eagle3(norm_before_residual=norm_before_residual), slots()
    whole = made(tokens, made.fuse(taps), positions)
    hidden, logits = expected_output(made, tokens[0], taps[0])
    torch.testing.assert_close(whole[0], hidden, **NEAR)
    torch.testing.assert_close(made.logits(whole)[0], logits, **NEAR)


@torch.no_grad()
def test_eagle31_norms() -> None:
    """Norm output feeds back the normed state and fc norm norms each fused feature alone."""
    plain, normed, made = eagle3(), eagle3(norm_output=True), eagle3(fc_norm=True)
    normed.load_state_dict(plain.state_dict())
    tokens, taps, positions = slots()
    before, after = (one(tokens, one.fuse(taps), positions) for one in (plain, normed))
    torch.testing.assert_close(after, plain.norm(before))
    torch.testing.assert_close(normed.logits(after), plain.logits(before))
    assert not torch.allclose(after, before, atol=1e-2)
    weights = [made.state_dict()[f"fc_norm.{i}.weight"] for i in range(3)]
    pieces = [
        F.rms_norm(taps[..., 32 * i : 32 * i + 32], (32,), weights[i], 1e-6) for i in range(3)
    ]
    torch.testing.assert_close(made.fuse(taps), torch.cat(pieces, dim=-1) @ made.fc.weight.T)
    assert {
        f"fc_norm.{i}.weight" for i in range(3)
    } == made.state_dict().keys() - plain.state_dict().keys()


@torch.no_grad()
def test_start_from_target(
    tmp_path: Path,
) -> None:
    """A head begun at the target gives the target's logits of its highest tap where its layer adds
    nothing. lm_head(norm(tap)) of the last block's output, over the draft vocabulary; a new layer
    adds little to it."""
    model = tiny.llama()
    model.model.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path)
    config, vocabulary = (
        TargetConfig(str(tmp_path)),
        DraftVocabulary.of_ids(torch.arange(5, 320, 2), 320),
    )
    vocab, outputs = replace(load_vocab(config)[1], final_norm=final_norm(config)), []
    section = Eagle3Section(lm_head_init="target", norm_init="target", fc_init="highest_tap")
    made, other = (
        new_head(one, model.config, vocab, 1, after_blocks=(0, 1, 3), vocabulary=vocabulary)
        for one in (section, Eagle3Section())
    )
    assert isinstance(made, Eagle3Head)
    moved = {
        name
        for name, value in made.state_dict().items()
        if not value.equal(other.state_dict()[name])
    }
    assert moved == {"lm_head.weight", "norm.weight", "fc.weight"}
    tokens, taps, positions = slots()
    model.model.norm.register_forward_hook(lambda _, given, __: outputs.append(given[0]))
    logits = model(tokens).logits[..., 5::2]
    x = made.fuse(torch.cat([taps[..., :64], outputs[0]], dim=-1))
    torch.testing.assert_close(x, outputs[0])
    new = made.logits(made(tokens, x, positions))
    assert 1e-4 < (new - logits).norm() / logits.norm() < 0.2 and new.argmax(-1).equal(
        logits.argmax(-1)
    )
    made.midlayer.self_attn.o_proj.weight.zero_()
    made.midlayer.mlp.down_proj.weight.zero_()
    torch.testing.assert_close(made.logits(made(tokens, x, positions)), logits, **NEAR)
    normed = replace(section, fc_norm=True, norm_output=True)
    made = new_head(normed, model.config, vocab, 1, after_blocks=(0, 1, 3), vocabulary=vocabulary)
    entering = made.fuse(torch.cat([taps[..., :64], outputs[0]], dim=-1))
    fed_back = made(tokens, entering, positions)
    torch.testing.assert_close(entering.norm(), fed_back.norm(), rtol=0.02, atol=0)
    begun = BlockSection(fc_init="highest_tap", mask_token_id=319)
    block = new_head(begun, model.config, vocab, 1, after_blocks=(0, 1, 3))
    assert isinstance(block, BlockHead)
    torch.testing.assert_close(block.fuse(taps), F.rms_norm(taps[..., -32:], [32], eps=1e-6))
    with pytest.raises(
        UserError, match="HEAD: mask_token_id: 320 is beyond TARGET's last token, 319"
    ):
        check_sizes(replace(block.config, mask_token_id=320), vocab, "HEAD", "TARGET")
    with pytest.raises(UserError, match="HEAD: block_size: 257 is beyond TARGET's context, 256"):
        check_sizes(replace(block.config, block_size=257), vocab, "HEAD", "TARGET", model.config)


def test_most_frequent() -> None:
    """The most frequent tokens and forced ones are in."""
    counts = np.array([0, 5, 2, 9, 2, 2, 0])
    for forced, expected in ((set(), [1, 2, 3]), ({6, 0}, [0, 3, 6])):  # ties go to the smaller id
        vocabulary = DraftVocabulary.most_frequent(counts, 3, forced)
        assert vocabulary.ids.tolist() == expected
        assert vocabulary.coverage(counts) == counts[expected].sum() / counts.sum()


def test_d2t() -> None:
    """D2t holds offsets, and t2d marks the same tokens."""
    vocabulary = DraftVocabulary.of_ids(torch.tensor([9, 2, 5]), 12)
    assert vocabulary.d2t.tolist() == [2, 4, 7]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [2, 5, 9]
    assert vocabulary.target_ids(torch.tensor([[2, 0], [1, 1]])).tolist() == [[9, 2], [5, 5]]


# Medusa and Hydra: how they begin, what they compute.

CAPPED = replace(tiny.vocab(), bias=torch.linspace(-1, 1, 320), scale=0.5, softcap=6.0)
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {"num_heads": 3, "num_layers": 2, "lm_head": "target"}),
    ("hydra", {"num_heads": 3, "num_layers": 3, "lm_head": "target"}),
    ("hydra", {"num_heads": 2, "num_layers": 2, "prefix_layer": True}),
]


def _features(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("keys", [{"num_layers": 3}, {"lm_head": "target"}], ids=str)
def test_new_medusa(keys: dict[str, Any], tmp_path: Path) -> None:
    """A new Medusa head has the target's own law for every token."""
    features, own = _features(2, 5), CAPPED.logits(_features(2, 5))
    new, moved = (tiny.multi_token_head("medusa", CAPPED, noise, **keys) for noise in (0.0, 0.01))
    save_head(new, tmp_path)
    again = load_head(tmp_path, vocab=CAPPED)
    new.laws.vocab = moved.laws.vocab = CAPPED
    for head, expected in ((new, True), (again, True), (moved, False)):
        assert {row.equal(own) for row in head(features)} == {expected} and len(head(features)) == 4


def _by_hand(weights: dict[str, Tensor], head: Any, index: int, x: Tensor) -> Tensor:
    """Logits of one branch, from the names of its weights alone."""
    for layer in range(head.config.num_layers):
        prefix = f"branches.{index}.blocks.{layer}"
        kept = x
        if f"{prefix}.projection.weight" in weights:
            kept = (
                x @ weights[f"{prefix}.projection.weight"].T + weights[f"{prefix}.projection.bias"]
            )
        added = x @ weights[f"{prefix}.linear.weight"].T + weights[f"{prefix}.linear.bias"]
        x = kept + added * torch.sigmoid(added)
    weight, bias = CAPPED.lm_head, CAPPED.bias
    if head.config.lm_head == "own":
        weight, bias = (weights[f"laws.lm_heads.{index}.{name}"] for name in ("weight", "bias"))
    return 6.0 * torch.tanh(0.5 * (x @ weight.T + bias) / 6.0)


@pytest.mark.parametrize(("kind", "keys"), SHAPES)
def test_multi_token_laws(kind: str, keys: dict[str, Any]) -> None:
    """Every law is what its weights say."""
    head = tiny.multi_token_head(kind, CAPPED, noise=0.2, **keys)
    head.laws.vocab, weights, features = CAPPED, dict(head.state_dict()), _features(5)
    embeddings = torch.randn(
        5, head.config.num_heads * 32, generator=torch.Generator().manual_seed(4)
    )
    for index in range(head.config.num_heads):
        known = embeddings[:, : (index + 1) * 32]
        given = features if kind == "medusa" else torch.cat([features, known], dim=-1)
        found = head(features)[index] if kind == "medusa" else head.step(index, features, known)
        expected = _by_hand(weights, head, index, given)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
