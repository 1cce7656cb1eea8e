"""The speculators layout: read as RedHatAI publishes it, written with every key on which its readers disagree."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.model.checkpoint import load_head, save_head
from aerie.model.export import export
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.layers import KeyValueBuffer
from aerie.model.weights import read_tensors
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import EAGLE1, EAGLE3, TAPS, ends_facts, speculators, tensors

FLAVOURS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"qk_norm": True},
    {"num_hidden_layers": 3},
    {"after_blocks": (1, 3)},
    {"ids": torch.arange(320)},
]


def test_redhatais_head_loads_with_its_own_embedding_and_its_residual(tmp_path: Path) -> None:
    head = load_head(speculators(tmp_path / "head"), ends=tiny.ends(), after_blocks=TAPS)
    assert isinstance(head, Eagle3Head) and head.config.norm_before_residual and head.saves_embedding
    assert head.config.rope_theta == 5e5 and head.config.after_blocks == TAPS
    for name, value in tensors({**EAGLE3, "embed_tokens.weight": (320, 32)}, torch.bfloat16).items():
        assert torch.equal(head.state_dict()[name], value), name


def test_numbered_taps_are_entries_and_need_nobodys_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = speculators(tmp_path / "head", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    head = load_head(place, ends=tiny.ends(), after_blocks=TAPS)
    assert isinstance(head, Eagle3Head) and head.config.after_blocks == (1, 3, 4) and capsys.readouterr().err == ""


def test_a_residual_that_is_not_said_is_speculators_default_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = speculators(tmp_path / "head", {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    values = json.loads((place / "config.json").read_text())
    del values["norm_before_residual"]
    (place / "config.json").write_text(json.dumps(values))
    head = load_head(place, ends=tiny.ends())
    assert isinstance(head, Eagle3Head) and not head.config.norm_before_residual
    assert "vLLM takes true" in capsys.readouterr().err


def test_the_vocabulary_is_that_of_the_mask_where_an_early_export_wrote_another(tmp_path: Path) -> None:
    layer = {**published.SPECULATORS_CONFIG["transformer_layer_config"], "vocab_size": 107}
    head = load_head(
        speculators(tmp_path / "head", {"transformer_layer_config": layer}), ends=tiny.ends(), after_blocks=TAPS
    )
    assert head.config.vocab_size == 320


def test_an_early_eagle1_head_is_read_with_the_targets_embedding(tmp_path: Path) -> None:
    layer = {**published.EAGLE1_CONFIG, "num_key_value_heads": 4}
    values = {"speculators_model_type": "eagle", "transformer_layer_config": layer, "fusion_bias": True}
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    state = {
        theirs + name.removeprefix(ours): value
        for name, value in tensors(EAGLE1).items()
        for ours, theirs in names.items()
        if name.startswith(ours)
    }
    place = published.write(tmp_path / "head", {**values, "layernorms": False}, state)
    head = load_head(place, ends=tiny.ends())
    assert isinstance(head, Eagle1Head) and head.config.bias
    assert torch.equal(head.embed_tokens.weight, tiny.ends().embedding.half())
    assert torch.equal(head.fc.weight, tensors(EAGLE1)["fc.weight"])
    published.write(place, {**values, "layernorms": True}, state)
    with pytest.raises(UserError, match="a HASS head"):
        load_head(place, ends=tiny.ends())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; of speculators' heads"),
        ({"transformer_layer_config": None}, "has no transformer_layer_config"),
        ({"norm_before_fc": True}, "missing 'input_norm.weight'"),
    ],
)
def test_what_this_project_has_no_module_for_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_head(speculators(tmp_path / "head", changes), ends=tiny.ends(), after_blocks=TAPS)


@pytest.mark.parametrize("changes", FLAVOURS)
def test_every_flavour_comes_back_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    one = published.eagle3(**changes)
    save_head(one, tmp_path / "head", draft_vocabulary={"coverage": 0.9})
    export(tmp_path / "head", "speculators", tmp_path / "out", ends_facts())
    assert not any(name.startswith("midlayer.") for name in read_tensors(tmp_path / "out")[1])
    two = load_head(tmp_path / "out")
    assert two.config == one.config and two.state_dict().keys() == one.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


def test_every_key_on_which_readers_disagree_is_written(tmp_path: Path) -> None:
    save_head(published.eagle3(), tmp_path / "head")
    export(tmp_path / "head", "speculators", tmp_path / "out", ends_facts(max_positions=4096))
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = values["transformer_layer_config"]
    assert values["norm_before_residual"] is False and values["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert values["draft_vocab_size"] == 107 and layer["vocab_size"] == 320 and layer["model_type"] == "llama"
    assert layer["max_position_embeddings"] == 4096  # the target's: vLLM cannot draft beyond it
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0
    assert values["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert "embed_tokens.weight" in read_tensors(tmp_path / "out")[1]


def test_an_eagle1_head_is_refused_with_the_way_to_vllm(tmp_path: Path) -> None:
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "head")
    with pytest.raises(UserError, match="cannot carry an EAGLE-1 head; vLLM serves it from --to safeailab"):
        export(tmp_path / "head", "speculators", tmp_path / "out", ends_facts())


def test_the_residual_is_the_normed_feature_where_the_head_says_so() -> None:
    plain, normed = published.eagle3(), published.eagle3(norm_before_residual=True)
    for head in (plain, normed):
        head.midlayer.hidden_norm.weight.data.fill_(1.0)  # then the norm of the norm is the norm
    tokens, positions = torch.arange(5, 11)[None], torch.arange(6)[None]
    features = 3.0 * torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(2))
    found, expected = (
        normed(tokens, features, positions),
        plain(tokens, plain.midlayer.hidden_norm(features), positions),
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (plain(tokens, features, positions) - expected).abs().max() > 0.1


def test_one_norm_over_all_taps_comes_before_fc_where_the_head_says_so() -> None:
    head, taps = published.eagle3(norm_before_fc=True), torch.randn(4, 96)
    normed = taps * torch.rsqrt(taps.pow(2).mean(-1, keepdim=True) + 1e-6) * head.input_norm.weight
    torch.testing.assert_close(head.fuse(taps), head.fc(normed), rtol=1e-4, atol=1e-5)
    assert (head.fc(taps) - head.fuse(taps)).abs().max() > 0.1


@pytest.mark.parametrize(
    "changes", [{"norm_before_residual": True}, {"norm_before_residual": True, "num_hidden_layers": 2}]
)
def test_drafting_with_another_residual_is_the_forward_over_the_sequence(changes: dict[str, Any]) -> None:
    head, count = published.eagle3(**changes), 6
    tokens, positions = torch.arange(5, 5 + count)[None], torch.arange(count)[None]
    features = torch.randn(1, count, 32, generator=torch.Generator().manual_seed(2))
    expected = head(tokens, features, positions)
    sizes, like = head.config.sizes(), features
    buffers = [KeyValueBuffer.allocate(1, sizes, count, like) for _ in range(head.config.num_hidden_layers)]
    mask = torch.full((count, count), float("-inf")).triu_(1)[None, None]
    found = head.fused()(tokens, features, (0, count), mask, buffers)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
