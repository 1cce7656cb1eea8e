"""SGLang's layout: read from SpecForge and AngelSlim, written so that SGLang's own defaults do no harm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.model.checkpoint import load_head, save_head
from aerie.model.export import export
from aerie.model.formats.sglang import CHECKED, sglang_numbers
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.weights import read_tensors
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import EAGLE1, EAGLE3, TAPS, angelslim, ends_facts, specforge, tensors


def test_specforges_and_angelslims_heads_load_with_every_tensor(tmp_path: Path) -> None:
    for make in (specforge, angelslim):
        head = load_head(make(tmp_path / make.__name__), ends=tiny.ends(), after_blocks=TAPS)
        assert isinstance(head, Eagle3Head) and head.config.rope_theta == 1e6
        for name, value in tensors(EAGLE3, torch.bfloat16).items():
            assert torch.equal(head.state_dict()[name], value), name


def test_an_eagle1_head_for_sglang_has_the_bias_that_its_file_has(tmp_path: Path) -> None:
    values = {**published.EAGLE1_CONFIG, "architectures": ["LlamaForCausalLMEagle"], "bias": False}
    head = load_head(published.write(tmp_path / "head", values, tensors(EAGLE1)))
    assert isinstance(head, Eagle1Head) and head.config.bias


def test_a_head_without_a_bias_gets_zeros_and_comes_back_without(tmp_path: Path) -> None:
    one = tiny.head(tiny.ends().embedding)
    save_head(one, tmp_path / "head", step=3)
    notes = export(tmp_path / "head", "sglang", tmp_path / "out", ends_facts()).notes
    assert any("fc.bias of zeros" in note for note in notes)
    written, values = read_tensors(tmp_path / "out")[1], json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle"] and values["bias"] is False
    assert torch.equal(written["fc.bias"], torch.zeros(32)) and values["aerie"]["step"] == 3
    two = load_head(tmp_path / "out")
    assert two.config == one.config and "fc.bias" not in two.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    save_head(tiny.head(tiny.ends().embedding, bias=True), tmp_path / "biased")
    export(tmp_path / "biased", "sglang", tmp_path / "out2", ends_facts())
    assert "fc.bias" in load_head(tmp_path / "out2").state_dict()  # zeros too, but the head's own


@pytest.mark.parametrize(
    ("taps", "numbers"), [((2, 4, 5), None), ((2, 3, 6), [1, 2, 5]), ((3, 4, 5), [2, 3, 4]), ((1, 4, 5), [0, 3, 4])]
)
def test_taps_are_numbered_as_sglang_counts_them_and_its_versions_are_named(
    tmp_path: Path, taps: tuple[int, ...], numbers: list[int] | None
) -> None:
    save_head(published.eagle3(after_blocks=taps), tmp_path / "head")
    done = export(tmp_path / "head", "sglang", tmp_path / "out", ends_facts())
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["aerie"]["made_for"] == f"SGLang {CHECKED}"
    assert any(f"made for SGLang {CHECKED}: the taps {list(taps)}" in note for note in done.notes)
    found = values.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    assert found == numbers and values["after_blocks"] == list(taps)
    if numbers is not None:  # SGLang's rule for a Llama
        assert [k + 1 for k in numbers] == list(taps)
    del values["after_blocks"], values["tap_convention"]  # as SGLang reads it, so do we
    (tmp_path / "out" / "config.json").write_text(json.dumps(values))
    head = load_head(tmp_path / "out", ends=tiny.ends(), after_blocks=TAPS)
    assert isinstance(head, Eagle3Head) and head.config.after_blocks == taps
    export(tmp_path / "out", "speculators", tmp_path / "vllm", ends_facts(), after_blocks=taps)
    assert "made_for" not in json.loads((tmp_path / "vllm" / "config.json").read_text())["aerie"]


@pytest.mark.parametrize(
    ("architecture", "taps", "numbers", "versions"),
    [
        ("LlamaForCausalLM", (2, 16, 29), None, "0.5.10 to 0.5.23"),
        ("UnheardOfForCausalLM", (2, 16, 29), None, "0.5.10 to 0.5.23"),
        ("UnheardOfForCausalLM", (2, 10, 20), [1, 9, 19], "0.5.10 to 0.5.23"),  # one is added by every rule
        ("Qwen3ForCausalLM", (8, 16, 24), [7, 15, 23], "0.5.10 to 0.5.23"),
        ("DeepseekV3ForCausalLM", (8, 16, 24), [8, 16, 24], "0.5.13 to 0.5.23"),  # earlier ones add one
        ("DeepseekV3ForCausalLM", (2, 10, 20), [1, 9, 19], "0.5.10 to 0.5.23"),
    ],
)
def test_the_numbers_depend_on_the_targets_architecture(
    architecture: str, taps: tuple[int, ...], numbers: list[int] | None, versions: str
) -> None:
    found = sglang_numbers(taps, (2, 16, 29), (architecture,))
    assert (found.values, found.versions) == (numbers, versions)


@pytest.mark.parametrize(
    ("architecture", "taps", "message"),
    [
        ("UnheardOfForCausalLM", (8, 16, 24), "no rule known for UnheardOfForCausalLM; serve it with vLLM"),
        ("DeepseekV3ForCausalLM", (1, 16, 24), "one is added to what begins with 1; serve it with vLLM"),
        ("LlamaForCausalLM", (0, 16, 24), "SGLang has no number for the embedding; serve it with vLLM"),
    ],
)
def test_taps_that_sglang_has_no_numbers_for_are_refused(
    architecture: str, taps: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        sglang_numbers(taps, (2, 16, 29), (architecture,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "qk_norm"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"after_blocks": (0, 4, 5)}, "SGLang has no number for the embedding"),
    ],
)
def test_what_sglang_would_misread_in_silence_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_head(published.eagle3(**changes), tmp_path / "head")
    with pytest.raises(UserError, match=rf"--to sglang: cannot carry .*{message}"):
        export(tmp_path / "head", "sglang", tmp_path / "out", ends_facts())


@pytest.mark.parametrize("to", ["sglang", "speculators"])
def test_an_eagle_3_1_head_keeps_its_norms_and_its_feedback_and_the_version_that_knows_them_is_named(
    tmp_path: Path, to: str
) -> None:
    one = published.eagle3(fc_norm=True, norm_output=True)
    save_head(one, tmp_path / "head")
    done = export(tmp_path / "head", to, tmp_path / "out", ends_facts())
    two = load_head(tmp_path / "out")
    assert isinstance(two, Eagle3Head) and two.config == one.config and two.config.fc_norm and two.config.norm_output
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert {"fc_norm.0.weight", "fc_norm.2.weight"} <= read_tensors(tmp_path / "out")[1].keys()
    assert (to == "sglang") == any("fc_norm (EAGLE-3.1) is known to SGLang from 0.5.12 on" in n for n in done.notes)


@pytest.mark.parametrize("make", [specforge, angelslim])
def test_written_back_every_tensor_of_specforges_and_angelslims_is_the_same_bit_for_bit(
    tmp_path: Path, make: Any
) -> None:
    export(make(tmp_path / "head"), "sglang", tmp_path / "out", ends_facts())
    found = read_tensors(tmp_path / "out")[1]
    assert found.keys() == {*EAGLE3, "embed_tokens.weight"}
    for name, value in tensors(EAGLE3, torch.bfloat16).items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and "target_hidden_size" not in values
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e6
