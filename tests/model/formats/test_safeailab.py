"""SafeAILab's layout: what config.json leaves unsaid is known, what the layout cannot carry is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import Eagle3Section
from aerie.model.checkpoint import load_head, new_head, save_head
from aerie.model.export import export
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.weights import read_tensors
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import EAGLE1, EAGLE3, TAPS, ends_facts, safeailab_eagle1, safeailab_eagle3, tensors


def loaded3(directory: Path, taps: tuple[int, ...] | None = TAPS) -> Eagle3Head:
    head = load_head(directory, ends=tiny.ends(), after_blocks=taps)
    assert isinstance(head, Eagle3Head)
    return head


def test_vicunas_eagle1_head_has_a_bias_because_config_json_does_not_speak_of_one(tmp_path: Path) -> None:
    head = load_head(safeailab_eagle1(tmp_path / "head"))
    assert isinstance(head, Eagle1Head) and head.config.bias and not head.config.qkv_bias
    assert head.config.num_key_value_heads == 4 and head.config.head_dim == 8
    assert head.config.rope_theta == 10000.0 and head.config.max_position_embeddings == 2048
    assert head.fc.weight.dtype == torch.float16
    for name, value in tensors(EAGLE1).items():
        assert torch.equal(head.state_dict()[name], value), name


@pytest.mark.parametrize(("values", "message"), [({}, 'has no "bias", which means true'), ({"bias": True}, "missing")])
def test_a_missing_bias_is_no_reason_to_go_without(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    state = {name: value for name, value in tensors(EAGLE1).items() if name != "fc.bias"}
    place = published.write(tmp_path / "head", {**published.EAGLE1_CONFIG, **values}, state)
    with pytest.raises(UserError, match=message):
        load_head(place)
    published.write(place, {**published.EAGLE1_CONFIG, "bias": False}, state)
    assert "fc.bias" not in load_head(place).state_dict()  # LLaMA-3's


def test_qwen2s_head_has_biases_in_its_attention_and_old_pickles_frequencies(tmp_path: Path) -> None:
    biases = {f"layers.0.self_attn.{name}_proj.bias": (32,) for name in "qkv"}
    state = {**tensors({**EAGLE1, **biases}), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    place = published.write(tmp_path / "head", {**published.EAGLE1_CONFIG, "qkv_bias": True}, state, pickled=True)
    head = load_head(place)
    assert isinstance(head, Eagle1Head) and head.config.qkv_bias
    for name in biases:
        assert torch.equal(head.state_dict()[name], state[name])


@pytest.mark.parametrize("pickled", [False, True])
def test_llamas_eagle3_head_reads_its_fifteen_keys_and_the_targets_embedding(tmp_path: Path, pickled: bool) -> None:
    place = safeailab_eagle3(tmp_path / "head", pickled=pickled)
    head = loaded3(place)
    assert len(EAGLE3) == 15
    for name, value in tensors(EAGLE3).items():
        assert torch.equal(head.state_dict()[name], value), name
    assert torch.equal(head.embed_tokens.weight, tiny.ends().embedding.half())
    assert head.config.rope_theta == 10000.0 and head.config.max_position_embeddings == 2048
    assert head.config.head_dim == 8 and head.config.after_blocks == TAPS and not head.saves_embedding
    with pytest.raises(UserError, match="which is the target's; load the head with its target"):
        load_head(place, after_blocks=TAPS)


def test_a_published_head_is_a_warm_start_with_its_own_rope(tmp_path: Path) -> None:
    place = safeailab_eagle3(tmp_path / "head")
    made = new_head(Eagle3Section(init_from=str(place)), tiny.llama().config, tiny.ends(), 0, after_blocks=TAPS)
    assert isinstance(made, Eagle3Head) and made.config.rope_theta == 10000.0
    longer = Eagle3Section(init_from=str(place), rope_theta=5e5, max_position_embeddings=4096)
    other = new_head(longer, tiny.llama().config, tiny.ends(), 0, after_blocks=TAPS)
    assert other.config.rope_theta == 5e5 and other.rotary.max_positions == 4096
    save_head(other, tmp_path / "saved")
    assert loaded3(tmp_path / "saved", None).config == other.config


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_theta": None, "rope_scaling": None}, 1e4, None),
    ],
)
def test_rope_is_read_from_either_generation_of_keys(
    tmp_path: Path, changes: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    config = loaded3(safeailab_eagle3(tmp_path / "head", changes)).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": "32"}, "hidden_size is '32'; it must be a positive whole number"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"rope_scaling": 4}, "rope_scaling is 4; it must be a table of keys or null"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"draft_vocab_size": 400}, "draft_vocab_size 400 is larger than vocab_size 320"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads no taps"),
        ({"intermediate_size": 96}, r"midlayer.mlp.gate_proj.weight has shape \[64, 32\], config.json says \[96, 32\]"),
    ],
)
def test_a_config_json_that_fits_no_head_is_one_sentence(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loaded3(safeailab_eagle3(tmp_path / "head", changes))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_written_back_every_published_tensor_is_the_same_bit_for_bit(tmp_path: Path, kind: str) -> None:
    make, shapes = {"eagle1": (safeailab_eagle1, EAGLE1), "eagle3": (safeailab_eagle3, EAGLE3)}[kind]
    done = export(make(tmp_path / "head"), "safeailab", tmp_path / "out", ends_facts())
    place, found = read_tensors(tmp_path / "out")
    assert place.name == "pytorch_model.bin" and done.num_tensors == len({*shapes, "embed_tokens.weight"})
    assert found.keys() == {*shapes, "embed_tokens.weight"}
    for name, value in tensors(shapes).items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "qk_norm"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_output": True}, "norm_output"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"after_blocks": (1, 4, 5)}, r"the taps \[1, 4, 5\]: SafeAILab's code reads always \[2, 4, 5\]"),
    ],
)
def test_what_safeailabs_code_would_misread_in_silence_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_head(published.eagle3(**changes), tmp_path / "head")
    with pytest.raises(UserError, match=rf"--to safeailab: cannot carry .*{message}"):
        export(tmp_path / "head", "safeailab", tmp_path / "out", ends_facts())
    assert not (tmp_path / "out").exists()


def test_what_safeailabs_code_or_vllm_stop_at_is_said(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    head = tiny.head(tiny.ends().embedding, bias=True, head_dim=16, rope_scaling=scaling)
    save_head(head, tmp_path / "head")
    notes = " | ".join(export(tmp_path / "head", "safeailab", tmp_path / "out", ends_facts()).notes)
    assert "rope_scaling 'llama3'" in notes and "head_dim 16" in notes and "vLLM has no fc.bias" in notes
