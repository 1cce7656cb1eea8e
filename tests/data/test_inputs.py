"""Laws of what a stage counts as its inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.inputs import changed_since, feature_inputs, sampled_digest, state_inputs, target_inputs
from aerie.model.storage import digest
from tests import tiny

Inputs = Callable[..., dict[str, Any]]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.target(tmp_path / "target")


@pytest.fixture
def inputs(target: Path, tmp_path: Path) -> Inputs:
    tiny.write_conversations(tmp_path / "rows/one.jsonl", 8)

    def make(**features: Any) -> dict[str, Any]:
        data = DataConfig(conversations=(str(tmp_path / "rows"),))
        return feature_inputs(TargetConfig(path=str(target)), data, FeaturesConfig(**features))

    return make


def test_weights_taps_and_dtypes_decide_the_states_and_texts_only_the_rows(
    target: Path, inputs: Inputs, tmp_path: Path
) -> None:
    before = inputs()
    assert digest(inputs(batch_tokens=64, shuffle_shards=2)) == digest(before)
    for change in ({"after_blocks": (1,)}, {"dtype": "bfloat16"}, {"storage": "int8"}):
        assert digest(state_inputs(inputs(**change))) != digest(state_inputs(before))
    texts = (target / "chat_template.jinja", tmp_path / "rows/one.jsonl", tmp_path / "rows/two.jsonl")
    for path in texts:
        earlier = inputs()
        path.write_text((path.read_text() if path.exists() else "") + " ")
        assert digest(inputs()) != digest(earlier) and digest(state_inputs(inputs())) == digest(state_inputs(before))
    weights = target / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert digest(state_inputs(inputs())) != digest(state_inputs(before))


def test_a_change_deep_in_a_large_file_is_seen_without_reading_it_all(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    before = sampled_digest(weights)
    weights.write_bytes(bytes(2 << 20) + b"x" * (1 << 14) + bytes((1 << 20) - (1 << 14)))
    assert sampled_digest(weights) != before


def test_an_absent_target_or_template_is_refused_by_name_and_a_hub_id_is_its_own_identity(target: Path) -> None:
    with pytest.raises(UserError, match=r"gone: no such target directory"):
        target_inputs(TargetConfig(path=str(target.parent / "gone")))
    with pytest.raises(UserError, match=r"target.chat_template: gone.jinja: no such file"):
        target_inputs(TargetConfig(path=str(target), chat_template="gone.jinja"))
    hub = TargetConfig(path="owner/name", revision="v1")
    assert target_inputs(hub) == {"path": "owner/name", "revision": "v1", "dtype": "auto"}


def test_what_changed_since_a_cache_was_made_is_named_and_what_is_not_here_is_no_change(
    target: Path, inputs: Inputs
) -> None:
    made_of = inputs()
    now, conversations = target_inputs(TargetConfig(path=str(target))), made_of["conversations"]
    assert changed_since(made_of, now, conversations) is None
    assert changed_since(made_of, {**now, "files": {}}, {}) is None  # another machine
    assert changed_since(made_of, {**now, "path": "other", "files": {"config.json": "x"}}, conversations) is None
    assert changed_since(made_of, now, {**conversations, "new.jsonl": "x"}) == "new.jsonl"
    assert changed_since(made_of, {**now, "chat_template": "x"}, conversations) == "target.chat_template"
    changed = {**now, "files": {**now["files"], "tokenizer.json": "x"}}
    assert changed_since(made_of, changed, conversations) == "tokenizer.json"
