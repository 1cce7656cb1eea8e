"""Heads on disk: bit-exact round trips, and nothing loaded by luck."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict, validate
from aerie.configs.schema.recipe import Recipe
from aerie.configs.schema.target_and_head import Eagle1Section
from aerie.model.checkpoint import check_sizes, config_for, load_head, new_head, save_head
from aerie.model.layers import Rotary
from tests import tiny

# The published EAGLE-1 key list, without fc.bias (SafeAILab, EAGLE-LLaMA3-Instruct-8B).
PUBLISHED = {
    "embed_tokens.weight",
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    return tmp_path / "head"


def test_a_head_has_exactly_the_published_keys(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    assert set(state) == PUBLISHED
    assert state["fc.weight"].shape == (32, 64)


def test_with_bias_and_two_layers_the_second_has_its_input_norm() -> None:
    head = tiny.head(tiny.ends().embedding, bias=True, num_hidden_layers=2)
    extra = set(head.state_dict()) - PUBLISHED
    assert "fc.bias" in extra and "layers.1.input_layernorm.weight" in extra
    assert "layers.0.input_layernorm.weight" not in extra


def test_a_round_trip_is_bit_exact_and_readable_by_others(saved: Path) -> None:
    head, again = tiny.head(tiny.ends().embedding), load_head(saved)
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert again.config == head.config
    assert (saved / "model.safetensors").stat().st_mode & 0o044  # not the 0600 of safetensors


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "truncated", "config"])
def test_a_damaged_head_is_one_sentence_and_no_model(saved: Path, damage: str) -> None:
    weights = saved / "model.safetensors"
    state = load_file(weights)
    words = {
        "missing": "missing 'fc.weight'",
        "unexpected": "unexpected 'lm_head.weight'",
        "shape": "fc.weight has shape",
    }
    if damage == "missing":
        del state["fc.weight"]
    elif damage == "unexpected":
        state["lm_head.weight"] = torch.zeros(2, 2)
    elif damage == "shape":
        state["fc.weight"] = torch.zeros(32, 32)
    if damage in words:
        save_file(state, weights)
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        (saved / "config.json").write_text("{}")
    with pytest.raises(UserError, match=words.get(damage, "cannot read|lacks num_attention_heads")):
        load_head(saved)


def test_a_head_for_another_target_is_refused() -> None:
    head = tiny.head(tiny.ends().embedding)
    with pytest.raises(UserError, match="hidden size is 32, that of other is 64"):
        check_sizes(head.config, tiny.ends(hidden_size=64), "head", "other")
    with pytest.raises(UserError, match="vocabulary is 320, that of other is 400"):
        check_sizes(head.config, tiny.ends(vocab_size=400), "head", "other")


def test_a_new_head_spells_out_the_targets_rope_and_length() -> None:
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    text = tiny.llama(rope_parameters=scaling).config
    config = config_for(Eagle1Section(), text, tiny.ends())
    assert config.rope_theta == 500000.0 and config.max_position_embeddings == 256
    assert config.rope_scaling is not None and config.rope_scaling["rope_type"] == "llama3"
    plain = config_for(Eagle1Section(rope_theta=1e4, max_position_embeddings=64), text, tiny.ends())
    assert (plain.rope_theta, plain.rope_scaling, plain.max_position_embeddings) == (1e4, None, 64)


def test_a_warm_start_takes_the_other_heads_weights(saved: Path) -> None:
    head = new_head(Eagle1Section(init_from=str(saved)), tiny.llama().config, tiny.ends(), seed=9)
    assert torch.equal(head.fc.weight, load_head(saved).fc.weight)


def test_the_same_seed_gives_the_same_new_head() -> None:
    text = tiny.llama().config
    one, two, other = (new_head(Eagle1Section(), text, tiny.ends(), seed) for seed in (1, 1, 2))
    assert torch.equal(one.fc.weight, two.fc.weight) and not torch.equal(one.fc.weight, other.fc.weight)
    assert torch.equal(one.embed_tokens.weight, tiny.ends().embedding)


def test_config_json_carries_the_published_keys(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    for key in ("hidden_size", "num_key_value_heads", "rope_theta", "max_position_embeddings", "bias", "vocab_size"):
        assert key in config


def test_a_warm_start_of_eagle1_takes_the_recipes_positions_and_keeps_the_heads_where_it_names_none(
    tmp_path: Path,
) -> None:
    save_head(tiny.head(tiny.ends().embedding, rope_theta=5e5), tmp_path / "head")
    text, place = tiny.llama().config, str(tmp_path / "head")
    kept = new_head(Eagle1Section(init_from=place), text, tiny.ends(), 0)
    assert (kept.config.rope_theta, kept.config.max_position_embeddings) == (5e5, 256)
    asked = Eagle1Section(init_from=place, rope_theta=2e4, max_position_embeddings=512)
    changed = new_head(asked, text, tiny.ends(), 0)
    assert (changed.config.rope_theta, changed.config.max_position_embeddings) == (2e4, 512)
    x, at = torch.zeros(1, 1, 1), torch.tensor([[300]])
    assert torch.equal(changed.rotary.at(at, 301, x)[0], Rotary(2e4, None, 8, 512).at(at, 301, x)[0])
    with pytest.raises(UserError, match=r"head\.head_dim: the recipe asks 16"):
        new_head(Eagle1Section(init_from=place, head_dim=16), text, tiny.ends(), 0)


def section(**head: Any) -> Any:
    values = {"run": "r", "target": {"path": "t"}, "data": {"conversations": ["c.jsonl"]}, "head": head}
    return validate(values, Recipe, "r.yaml", {}).head


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_heads": 5}, "r.yaml: head.num_heads: unknown key"),
        ({"kind": "eagle1", "hidden_size": 32}, "head.hidden_size: unknown key"),
        ({"kind": "eagle3", "bias": True}, "head.bias: unknown key"),
        ({"kind": "eagle3", "draft_vocab_size": 0}, "head.draft_vocab_size: input should be greater than 0, not 0"),
        ({"kind": "eagle3", "head_dim": 7}, "head.head_dim: input should be a multiple of 2, not 7"),
        ({"kind": "eagle3", "init_from": "x", "lm_head_init": "target"}, "head: lm_head_init begins a new head"),
        ({"kind": "medusa", "prefix_layer": True}, "head.prefix_layer: unknown key"),
        ({"kind": "medusa", "num_heads": 0}, "head.num_heads: input should be greater than 0"),
        ({"kind": "hydra", "head_dim": 8}, "head: head_dim belongs to the prefix layer; set prefix_layer: true"),
        ({"kind": "draft_lm", "hidden_size": 8}, "head: a draft_lm trained from scratch needs intermediate_size, num_"),
        ({"kind": "eagel3"}, "head: unknown kind 'eagel3'; did you mean 'eagle3'?"),
    ],
)
def test_a_key_of_another_kind_and_a_size_of_no_head_are_one_line(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        section(**keys)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_head_without_a_kind_is_eagle1_and_is_written_out_with_it() -> None:
    assert section() == Eagle1Section() and section(head_dim=8) == Eagle1Section(head_dim=8)
    assert as_dict(section(kind="hydra", prefix_layer=True, head_dim=8))["kind"] == "hydra"
    assert section(**as_dict(section(kind="medusa", num_heads=3))).num_heads == 3
