"""A plan's yes is true: heads of every RoPE take a step, and servers build the table they had."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from aerie.configs.read import validate
from aerie.configs.schema.heads import (
    BlockSection,
    Eagle1Section,
    Eagle1Train,
    Eagle3Section,
    HydraSection,
    Train,
)
from aerie.model.checkpoint import rope_notes, rope_of
from aerie.model.formats.content import read_rope, write_sizes
from aerie.model.layers import Rotary
from aerie.train.rehearsal import planned_config, rehearse_head
from tests import tiny

ORIGINAL = 64
FACTORS = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
}
NEEDED: dict[str, str] = {
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings",
    "longrope": "short_factor long_factor original_max_position_embeddings factor",
    "default": "",
}


def target_config(rope_type: str, partial: float, **more: Any) -> LlamaConfig:
    rope = {key: FACTORS[key] for key in NEEDED.get(rope_type, "factor").split()}
    rope |= {"rope_type": rope_type, "rope_theta": 5e5, "partial_rotary_factor": partial, **more}
    config: LlamaConfig = tiny.llama().config
    config.rope_parameters = rope
    return config


@pytest.mark.parametrize("partial", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
def test_a_head_of_every_rope_learns(rope_type: str, partial: float) -> None:
    """Every RoPE of transformers' registry, whole or of a part of each attention head."""
    config = target_config(rope_type, partial)
    head: Any = planned_config(Eagle1Section(), config, ())
    rehearse_head(head, Eagle1Train())
    is_kept = rope_type in ("linear", "llama3", "yarn")
    assert head.rope_theta == 5e5
    assert (head.rope_scaling or {}).get("rope_type") == (rope_type if is_kept else None)
    is_other = partial != 1.0 or not (is_kept or rope_type == "default")
    assert bool(rope_notes(config)) == is_other


@pytest.mark.parametrize("kind", ["eagle3", "hydra", "block"])
def test_heads_with_layers_learn_beside_yarn_of_a_part(kind: str) -> None:
    section: Any = {
        "eagle3": Eagle3Section(num_attention_heads=3, num_key_value_heads=1, head_dim=10),
        "hydra": HydraSection(prefix_layer=True),
        "block": BlockSection(block_size=4),
    }[kind]
    settings = validate({"kind": kind}, Train, "train", {})
    rehearse_head(planned_config(section, target_config("yarn", 0.5), (1, 2)), settings)


def test_a_form_that_cannot_learn_is_named() -> None:
    config: Any = planned_config(Eagle1Section(), tiny.llama().config, ())
    tiny.refused(
        "eagle1 head of this form cannot take a training step",
        rehearse_head,
        replace(config, num_key_value_heads=3),
        Eagle1Train(),
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_factor": 1.25},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mrope_section": [1, 1, 2], "truncate": False},
        {"factor": None},
    ],
    ids=str,
)
def test_servers_build_the_table_that_was_trained(more: dict[str, Any]) -> None:
    """vLLM and SGLang read neither attention_factor nor mscale of YaRN, but attn_factor."""
    config = target_config("yarn", 0.5, **more)
    head: Any = planned_config(Eagle1Section(), config, ())
    target: Any = SimpleNamespace(text_config=config)
    values, _ = write_sizes(head, target)
    rope = values["rope_parameters"]
    assert not rope.keys() & {"partial_rotary_factor", "mrope_section", "mscale"}
    trained = LlamaRotaryEmbedding(whole(config, more)).attention_scaling
    assert Rotary(head).scale == pytest.approx(trained)
    of_server = rope.get("attn_factor", 1.0) * (0.1 * math.log(rope["factor"]) + 1.0)
    assert of_server == pytest.approx(trained)
    assert read_rope(values, Path("config.json")) == (head.rope_theta, head.rope_scaling)
    of_server_alone = {key: value for key, value in rope.items() if key != "attention_factor"}
    _, scaling = read_rope(
        {**values, "rope_scaling": None, "rope_parameters": of_server_alone}, Path("c")
    )
    assert Rotary(replace(head, rope_scaling=scaling)).scale == pytest.approx(trained)


def whole(config: LlamaConfig, more: dict[str, Any]) -> LlamaConfig:
    rope = {**FACTORS, **more, "rope_type": "yarn", "rope_theta": 5e5}
    return LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope
    )


def test_a_head_has_the_base_of_full_attention() -> None:
    """Gemma-3 has a base per kind of layer, and linear scaling in its full attention."""
    layers = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    config = Gemma3TextConfig(rope_parameters=layers)
    assert rope_of(config) == (1e6, {"rope_type": "linear", "factor": 8.0})
    (note,) = rope_notes(config)
    assert "one RoPE per kind of layer" in note and "linear, base 1,000,000" in note
    config.rope_parameters = {"main": {"rope_type": "default", "rope_theta": 3e4}}
    assert rope_of(config) == (3e4, None)


def test_a_published_head_that_rotates_a_part_is_refused() -> None:
    tiny.refused(
        "partial_rotary_factor is",
        read_rope,
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        Path("config.json"),
    )


def test_a_plan_inside_a_job_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes its step in one process, also where a launcher will start several."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = planned_config(Eagle1Section(), target_config("default", 1.0), ())
    rehearse_head(config, Eagle1Train())
