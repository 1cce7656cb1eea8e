"""Heads on disk and new ones: bit-exact round trips, strict loading, sizes and positions of the
target."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import (
    BlockSection,
    Eagle1Section,
    Eagle3Section,
    HydraSection,
    MedusaSection,
)
from aerie.model.checkpoint import (
    config_for,
    head_facts,
    load_head,
    new_head,
    position_warnings,
    save_head,
)
from aerie.model.heads.eagle import DraftVocabulary
from aerie.model.layers import Rotary
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import TAPS, same
from tests.model.test_layers import LLAMA3

VOCAB, TEXT = tiny.vocab(), tiny.llama().config
MADE: dict[str, Callable[[], Any]] = {
    "eagle1": lambda: tiny.head(VOCAB.embedding),
    "eagle1, biased and deep": lambda: tiny.head(VOCAB.embedding, bias=True, num_hidden_layers=2),
    "eagle3": lambda: tiny.eagle3_head(VOCAB.embedding, after_blocks=TAPS),
    "eagle3.1, deep": lambda: tiny.eagle3_head(
        VOCAB.embedding,
        after_blocks=TAPS,
        num_hidden_layers=3,
        qk_norm=True,
        fc_norm=True,
        norm_output=True,
    ),
    "medusa": lambda: tiny.multi_token_head(
        "medusa", VOCAB, noise=0.1, lm_head="target", num_layers=2
    ),
    "hydra": lambda: tiny.multi_token_head("hydra", VOCAB, noise=0.1, prefix_layer=True),
    "block": lambda: tiny.multi_token_head(
        "block", VOCAB, noise=0.1, markov_head="gated", markov_order=2
    ),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A round trip is bit exact with the recorded facts."""
    head = MADE[name]().to(dtype)
    save_head(head, tmp_path, step=3)
    again = load_head(tmp_path, vocab=replace(VOCAB, embedding=VOCAB.embedding.to(dtype)))
    assert again.kind == head.kind and head_facts(tmp_path) == {"step": 3}
    same(head, again)
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
        save_head(MADE[name](), tmp_path)
        place = tmp_path / "config.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
        with pytest.raises(UserError, match=said):
            load_head(tmp_path)


SECTIONS: Any = (Eagle1Section(), Eagle3Section(), MedusaSection(), HydraSection(prefix_layer=True))
SECTIONS += (BlockSection(mask_token_id=0),)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.kind)
def test_seed(section: Any) -> None:
    """The same seed gives the same new head."""
    vocabulary = DraftVocabulary.of_ids(torch.arange(5, 105), 320)
    one, two, other = (
        new_head(section, TEXT, VOCAB, n, after_blocks=TAPS, vocabulary=vocabulary)
        for n in (1, 1, 2)
    )
    same(one, two)
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
    assert facts(Eagle3Section(), qwen, names, TAPS, 107) == [
        False,
        32,
        32,
        107,
    ]  # SGLang loads nothing else
    assert facts(Eagle3Section(qk_norm=None, hidden_size=16), qwen, names, TAPS, 107) == [
        True,
        16,
        32,
        107,
    ]
    config: Any = config_for(Eagle3Section(), LONG, VOCAB, TAPS, 320)
    assert position_warnings(config, LONG, "head") == []
    (warning,) = position_warnings(replace(config, rope_scaling=None), LONG, "head")
    assert "with scaling None" in warning
    with pytest.raises(
        UserError, match="num_attention_heads 4 is no multiple of num_key_value_heads 3"
    ):
        config_for(Eagle1Section(num_key_value_heads=3), TEXT, VOCAB)


def test_warm_start(
    tmp_path: Path,
) -> None:
    """A warm start takes weights and new positions and refuses another shape."""
    for name in ("eagle1", "eagle3", "eagle3.1, deep", "hydra"):
        save_head(MADE[name](), tmp_path / name.partition(",")[0])
    names = ("eagle1", "eagle3", "eagle3.1", "hydra")
    one, three, normed, hydra = ({"init_from": str(tmp_path / name)} for name in names)
    asked: Any = Eagle1Section(**one, rope_theta=2e4, max_position_embeddings=512)
    kept, moved = (new_head(section, TEXT, VOCAB, 9) for section in (Eagle1Section(**one), asked))
    assert kept.config == MADE["eagle1"]().config
    assert new_head(Eagle3Section(**normed), TEXT, VOCAB, 9, after_blocks=TAPS).config.fc_norm
    assert torch.equal(kept.state_dict()["fc.weight"], moved.state_dict()["fc.weight"])
    # type: ignore[type-var]
    assert moved.config == replace(kept.config, rope_theta=2e4, max_position_embeddings=512)
    # type: ignore[union-attr]
    x, at, rotary = torch.zeros(1, 1, 1), torch.tensor([[300]]), moved.rotary
    assert torch.equal(rotary.at(at, 301, x)[0], Rotary(moved.config).at(at, 301, x)[0])
    base = {
        "init_from": str(published.specforge(tmp_path / "published"))
    }  # 1e6, its target's is 1e4
    theirs: Any = new_head(Eagle3Section(**base), TEXT, VOCAB, 9, after_blocks=TAPS)
    assert theirs.config.rope_theta == 1e6
    table: list[tuple[Any, Any, str]] = [
        (
            Eagle3Section(**three, draft_vocab_size=64),
            TAPS,
            "head.draft_vocab_size: the recipe asks 64, .* has 107",
        ),
        (
            Eagle3Section(**three),
            (1, 4, 5),
            r"features.after_blocks: .* \(1, 4, 5\), .* has \(2, 4, 5\)",
        ),
        (
            Eagle3Section(**normed, fc_norm=False),
            TAPS,
            "head.fc_norm: the recipe asks False, .* has True; set it",
        ),
        (Eagle1Section(**three), (), "is an eagle3 head, the recipe asks for eagle1"),
        (
            HydraSection(**hydra, prefix_layer=True, num_heads=3),
            (),
            "head.num_heads: .* asks 3, .* has 4; set it",
        ),
    ]
    for section, taps, said in table:
        with pytest.raises(UserError, match=said):
            new_head(section, TEXT, VOCAB, 9, after_blocks=taps)
