"""Heads against plain formulas: EAGLE-3 and its switches, the draft vocabulary, Medusa and Hydra.

Heads on disk and new ones: bit-exact round trips, strict loading, sizes and positions of the
target.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.schema.heads import (
    BlockSection,
    Eagle1Section,
    Eagle3Section,
    HydraSection,
    MedusaSection,
    TargetConfig,
)
from aerie.model.checkpoint import (
    check_sizes,
    config_for,
    head_facts,
    load_head,
    new_head,
    position_warnings,
    save_head,
)
from aerie.model.heads.eagle import DraftVocabulary, Eagle3Head
from aerie.model.layers import Rotary, attend
from aerie.model.target import final_norm, load_vocab
from tests import tiny
from tests.model.formats import published
from tests.model.test_layers import LLAMA3


def expected_output(made: Eagle3Head, tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """(what is fed back [T, D], logits [T, Vd]) from the definition of the layer."""
    eps, layer = made.config.rms_norm_eps, made.midlayer

    def normed(x: Tensor, norm: torch.nn.Module) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight

    if made.config.fc_norm:  # each fused state alone
        pieces = zip(taps.split(32, dim=-1), made.fc_norm, strict=True)
        taps = torch.cat([normed(piece, norm) for piece, norm in pieces], dim=-1)
    h = taps @ made.fc.weight.T
    e = made.embed_tokens.weight[tokens]
    normed_h = normed(h, layer.hidden_norm)
    x = torch.cat([normed(e, layer.input_layernorm), normed_h], dim=-1)
    h = normed_h if made.config.norm_before_residual else h
    rotary = made.rotary.at(torch.arange(len(tokens)), len(tokens), x)
    q, k, v = layer.self_attn.project(x[None], rotary)
    h = h + layer.self_attn.o_proj(attend(q, k, v, None, None))[0]  # as in Llama: see test_layers
    x, mlp = normed(h, layer.post_attention_layernorm), layer.mlp
    h = (
        h
        + (F.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    )
    out = normed(h, made.norm)
    return out if made.config.norm_output else h, out @ made.lm_head.weight.T


NEAR = {"rtol": 1e-4, "atol": 1e-4}


def slots() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 320, (1, 7), generator=generator)
    return tokens, torch.randn(1, 7, 3 * 32, generator=generator), torch.arange(7)[None]


@torch.no_grad()
@pytest.mark.parametrize("flag", ["", "norm_before_residual", "norm_output", "fc_norm"])
def test_forward(flag: str) -> None:
    """The forward is the definition. infer/test_drafters.py and train/test_objectives.py compare
    the forwards over a cache and in the unroll with it."""
    made, (tokens, taps, positions) = published.eagle3(**{flag: True} if flag else {}), slots()
    fed_back = made(tokens, made.fuse(taps), positions)
    hidden, logits = expected_output(made, tokens[0], taps[0])
    torch.testing.assert_close(fed_back[0], hidden, **NEAR)
    torch.testing.assert_close(made.logits(fed_back)[0], logits, **NEAR)


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
    torch.testing.assert_close(block.fuse(taps), F.rms_norm(taps[..., -32:], [32], eps=1e-6))
    tiny.refused(
        "HEAD: mask_token_id: 320 is beyond TARGET's last token, 319",
        check_sizes,
        replace(block.config, mask_token_id=320),
        vocab,
        "HEAD",
        "TARGET",
    )
    tiny.refused(
        "HEAD: block_size: 257 is beyond TARGET's context, 256",
        check_sizes,
        replace(block.config, block_size=257),
        vocab,
        "HEAD",
        "TARGET",
        model.config,
    )


def test_most_frequent() -> None:
    """The most frequent tokens and forced ones are in; d2t holds offsets, t2d marks the tokens."""
    counts = np.array([0, 5, 2, 9, 2, 2, 0])
    for forced, expected in ((set(), [1, 2, 3]), ({6, 0}, [0, 3, 6])):  # ties go to the smaller id
        vocabulary = DraftVocabulary.most_frequent(counts, 3, forced)
        assert vocabulary.ids.tolist() == vocabulary.t2d.nonzero().flatten().tolist() == expected
        assert vocabulary.target_ids(torch.arange(3)).tolist() == expected
        assert vocabulary.d2t.tolist() == [token - at for at, token in enumerate(expected)]
        assert vocabulary.coverage(counts) == counts[expected].sum() / counts.sum()


# Medusa and Hydra: how they begin, what they compute.

CAPPED = replace(tiny.vocab(), bias=torch.linspace(-1, 1, 320), scale=0.5, softcap=6.0)


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


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("medusa", {"num_heads": 3, "num_layers": 2, "lm_head": "target"}),
        ("hydra", {"num_heads": 3, "num_layers": 3, "lm_head": "target"}),
        ("hydra", {"num_heads": 2, "num_layers": 2, "prefix_layer": True}),
    ],
)
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


VOCAB, TEXT = tiny.vocab(), tiny.llama().config
DEEP = {"num_hidden_layers": 3, "qk_norm": True, "fc_norm": True, "norm_output": True}
MADE: dict[str, tuple[str, dict[str, Any]]] = {  # kind, changes
    "eagle1": ("eagle1", {}),
    "eagle1, biased and deep": ("eagle1", {"bias": True, "num_hidden_layers": 2}),
    "eagle3": ("eagle3", {}),
    "eagle3.1, deep": ("eagle3", DEEP),
    "medusa": ("medusa", {"noise": 0.1, "lm_head": "target", "num_layers": 2}),
    "hydra": ("hydra", {"noise": 0.1, "prefix_layer": True}),
    "block": ("block", {"noise": 0.1, "markov_head": "gated", "markov_order": 2}),
}


def made_by(name: str) -> Any:
    kind, changes = MADE[name]
    return published.made(kind, **changes)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A round trip is bit exact with the recorded facts."""
    head = made_by(name).to(dtype)
    save_head(head, tmp_path, step=3)
    again = load_head(tmp_path, vocab=replace(VOCAB, embedding=VOCAB.embedding.to(dtype)))
    assert again.kind == head.kind and head_facts(tmp_path) == {"step": 3}
    published.same(head, again)
    assert (
        {p.requires_grad for p in again.embed_tokens.parameters()} == {False}
        if "eagle" in name
        else True
    )
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o044  # not the 0600 of safetensors


def test_damaged_config(
    tmp_path: Path,
) -> None:
    """A head whose configuration is damaged or whose embedding is missing is refused."""
    for name, change, said in (
        ("eagle1", {"rope_theta": None}, "rope_theta: required"),
        ("eagle3", {"after_blocks": [4, 2, 5]}, "must ascend"),
        ("eagle3", {}, r"has no 'embed_tokens.weight', which is the target's"),
    ):
        save_head(made_by(name), tmp_path)
        place = tmp_path / "config.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
        tiny.refused(said, load_head, tmp_path)


@pytest.mark.parametrize(
    "section",
    (
        Eagle1Section(),
        Eagle3Section(),
        MedusaSection(),
        HydraSection(prefix_layer=True),
        BlockSection(mask_token_id=0),
    ),
    ids=lambda section: section.kind,
)
def test_seed(section: Any) -> None:
    """The same seed gives the same new head."""
    vocabulary = DraftVocabulary.of_ids(torch.arange(5, 105), 320)
    one, two, other = (
        new_head(section, TEXT, VOCAB, n, after_blocks=published.TAPS, vocabulary=vocabulary)
        for n in (1, 1, 2)
    )
    published.same(one, two)
    drawn = any(
        not value.equal(other.state_dict()[name]) for name, value in one.state_dict().items()
    )
    assert drawn == (section.kind != "medusa")
    if section.kind.startswith("eagle"):
        assert torch.equal(one.state_dict()["embed_tokens.weight"], VOCAB.embedding)


LONG = tiny.llama(
    rope_parameters={**LLAMA3, "rope_theta": 5e5}, max_position_embeddings=131072
).config


def test_sizes_of_target() -> None:
    """A new head spells out the target's RoPE length and flavour."""

    def facts(section: Any, text: Any, names: str, *taps_and_size: Any) -> list[Any]:
        return [
            getattr(config_for(section, text, VOCAB, *taps_and_size), name)
            for name in names.split()
        ]

    names = "rope_theta max_position_embeddings num_key_value_heads head_dim"
    assert facts(Eagle1Section(), LONG, names) == [5e5, 131072, 2, 8]
    assert facts(Eagle1Section(), LONG, "rope_scaling")[0]["rope_type"] == "llama3"
    moved = Eagle1Section(rope_theta=1e4, max_position_embeddings=64, num_attention_heads=2)
    assert facts(moved, LONG, f"{names} rope_scaling") == [1e4, 64, 2, 16, None]
    qwen, names = tiny.llama().config, "qk_norm hidden_size target_hidden_size draft_vocab_size"
    qwen.model_type = "qwen3"
    assert facts(Eagle3Section(), qwen, names, published.TAPS, 107) == [
        False,
        32,
        32,
        107,
    ]  # SGLang loads nothing else
    assert facts(Eagle3Section(qk_norm=None, hidden_size=16), qwen, names, published.TAPS, 107) == [
        True,
        16,
        32,
        107,
    ]
    config: Any = config_for(Eagle3Section(), LONG, VOCAB, published.TAPS, 320)
    assert position_warnings(config, LONG, "head") == []
    (warning,) = position_warnings(replace(config, rope_scaling=None), LONG, "head")
    assert "with scaling None" in warning
    tiny.refused(
        "num_attention_heads: 4 is no multiple of num_key_value_heads 3",
        config_for,
        Eagle1Section(num_key_value_heads=3),
        TEXT,
        VOCAB,
    )


def test_warm_start(
    tmp_path: Path,
) -> None:
    """A warm start takes weights and new positions and refuses another shape."""
    for name in ("eagle1", "eagle3", "eagle3.1, deep", "hydra"):
        save_head(made_by(name), tmp_path / name.partition(",")[0])
    names = ("eagle1", "eagle3", "eagle3.1", "hydra")
    one, three, normed, hydra = ({"init_from": str(tmp_path / name)} for name in names)
    asked: Any = Eagle1Section(**one, rope_theta=2e4, max_position_embeddings=512)
    kept, moved = (new_head(section, TEXT, VOCAB, 9) for section in (Eagle1Section(**one), asked))
    assert kept.config == made_by("eagle1").config
    assert new_head(
        Eagle3Section(**normed), TEXT, VOCAB, 9, after_blocks=published.TAPS
    ).config.fc_norm
    assert torch.equal(kept.state_dict()["fc.weight"], moved.state_dict()["fc.weight"])
    # type: ignore[type-var]
    assert moved.config == replace(kept.config, rope_theta=2e4, max_position_embeddings=512)
    # type: ignore[union-attr]
    x, at, rotary = torch.zeros(1, 1, 1), torch.tensor([[300]]), moved.rotary
    assert torch.equal(rotary.at(at, 301, x)[0], Rotary(moved.config).at(at, 301, x)[0])
    base = {
        "init_from": str(published.specforge(tmp_path / "published"))
    }  # 1e6, its target's is 1e4
    theirs: Any = new_head(Eagle3Section(**base), TEXT, VOCAB, 9, after_blocks=published.TAPS)
    assert theirs.config.rope_theta == 1e6
    table: list[tuple[Any, Any, str]] = [
        (
            Eagle3Section(**three, draft_vocab_size=64),
            published.TAPS,
            "head.draft_vocab_size: the recipe has 64, but .* has 107",
        ),
        (
            Eagle3Section(**three),
            (1, 4, 5),
            r"features.after_blocks: .* \(1, 4, 5\), .* has \(2, 4, 5\)",
        ),
        (
            Eagle3Section(**normed, fc_norm=False),
            published.TAPS,
            "head.fc_norm: the recipe has False, but .* has True; set it",
        ),
        (Eagle1Section(**three), (), "is of kind eagle3, but head.kind is eagle1"),
        (
            HydraSection(**hydra, prefix_layer=True, num_heads=3),
            (),
            "head.num_heads: the recipe has 3, but .* has 4; set it",
        ),
    ]
    for section, taps, said in table:
        tiny.refused(said, new_head, section, TEXT, VOCAB, 9, after_blocks=taps)
