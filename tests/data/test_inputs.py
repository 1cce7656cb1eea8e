"""Laws of what a stage counts as its inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.inputs import changed_since, feature_inputs, sampled_digest, state_inputs, target_inputs
from aerie.model.storage import digest
from tests import tiny


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.target(tmp_path / "target")


@pytest.fixture
def inputs(target: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    rows = tiny.write_conversations(tmp_path / "rows.jsonl", 8)

    def make(**features: Any) -> dict[str, Any]:
        data = DataConfig(conversations=(str(rows),))
        return feature_inputs(TargetConfig(path=str(target)), data, FeaturesConfig(**features))

    return make


def test_equal_inputs_are_equal(inputs: Callable[..., dict[str, Any]]) -> None:
    assert digest(inputs()) == digest(inputs())


def test_a_changed_weight_in_the_middle_of_the_target_changes_the_inputs(
    target: Path, inputs: Callable[..., dict[str, Any]]
) -> None:
    before = inputs()
    weights = load_file(target / "model.safetensors")
    weights["model.layers.2.self_attn.q_proj.weight"] = -weights["model.layers.2.self_attn.q_proj.weight"].clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    assert digest(inputs()) != digest(before)
    assert digest(state_inputs(inputs())) != digest(state_inputs(before))


def test_a_change_deep_in_a_large_file_is_seen_without_reading_it_all(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    before = sampled_digest(weights)
    weights.write_bytes(bytes(2 << 20) + b"x" * (1 << 14) + bytes((1 << 20) - (1 << 14)))
    assert sampled_digest(weights) != before


def test_a_changed_conversation_changes_the_inputs_but_not_what_decides_the_states(
    tmp_path: Path, inputs: Callable[..., dict[str, Any]]
) -> None:
    before = inputs()
    tiny.write_conversations(tmp_path / "rows.jsonl", 9)
    assert digest(inputs()) != digest(before)
    assert digest(state_inputs(inputs())) == digest(state_inputs(before))


def test_batch_size_is_no_input_but_taps_and_dtype_are(inputs: Callable[..., dict[str, Any]]) -> None:
    assert digest(inputs(batch_tokens=64)) == digest(inputs())
    for change in ({"after_blocks": (1,)}, {"dtype": "bfloat16"}):
        assert digest(state_inputs(inputs(**change))) != digest(state_inputs(inputs()))


def test_a_changed_tokenizer_or_template_changes_the_inputs(
    target: Path, inputs: Callable[..., dict[str, Any]]
) -> None:
    before = inputs()
    template = target / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert digest(inputs()) != digest(before)


def test_an_absent_target_or_template_file_is_refused_by_name(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UserError, match=r"gone: no such target directory"):
        target_inputs(TargetConfig(path=str(tmp_path / "gone")))
    with pytest.raises(UserError, match=r"target.chat_template: .*gone.jinja: no such file"):
        target_inputs(TargetConfig(path=str(target), chat_template=str(tmp_path / "gone.jinja")))


def test_a_hub_id_is_its_own_identity() -> None:
    assert target_inputs(TargetConfig(path="owner/name", revision="v1")) == {
        "path": "owner/name",
        "revision": "v1",
        "dtype": "auto",
    }


def test_what_changed_since_a_cache_was_made_is_named_and_what_is_not_here_is_no_change(
    target: Path, inputs: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    made_of = inputs()
    now = target_inputs(TargetConfig(path=str(target)))
    conversations = made_of["conversations"]
    assert changed_since(made_of, now, conversations) is None
    assert changed_since(made_of, {**now, "files": {}}, {}) is None  # another machine
    assert changed_since(made_of, {**now, "path": "other", "files": {"config.json": "x"}}, conversations) is None
    assert changed_since(made_of, now, {**conversations, "new.jsonl": "x"}) == "new.jsonl"
    assert changed_since(made_of, {**now, "chat_template": "x"}, conversations) == "target.chat_template"
    tokenizer = target / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    changed = target_inputs(TargetConfig(path=str(target)))
    assert changed_since(made_of, changed, conversations) == "tokenizer.json"
