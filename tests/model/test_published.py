"""EAGLE-3 heads as others publish them: what config.json leaves unsaid is spelt out, or asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint import kind_of, load_head, new_head, save_head
from model.config import HeadConfig
from model.errors import UserError
from model.heads.eagle3 import Eagle3Head
from tests import tiny
from tests.model.test_eagle3 import PUBLISHED, TAPS, head

CONFIG = {  # the keys of the published config.json, and no others
    "architectures": ["LlamaForCausalLM"],
    "draft_vocab_size": 107,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 320,
}


def published(directory: Path, pickled: bool = False, changes: dict[str, Any] | None = None) -> Path:
    """A head directory as SafeAILab publishes it."""
    directory.mkdir()
    state = {name: value.clone() for name, value in head().state_dict().items() if name in PUBLISHED}
    if pickled:
        torch.save(state, directory / "pytorch_model.bin")
    else:
        save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, **(changes or {})}))
    return directory


@pytest.mark.parametrize("pickled", [False, True])
def test_a_published_head_is_a_warm_start_with_its_own_rope(tmp_path: Path, pickled: bool) -> None:
    place = published(tmp_path / "head", pickled)
    config = HeadConfig(kind="eagle3", init_from=str(place))
    made = new_head(config, tiny.llama().config, tiny.ends(), 0, after_blocks=TAPS)
    assert isinstance(made, Eagle3Head)
    for name in PUBLISHED:
        assert torch.equal(made.state_dict()[name], head().state_dict()[name]), name
    assert torch.equal(made.embed_tokens.weight, tiny.ends().embedding)
    assert made.config.rope_theta == 10000.0 and made.config.max_position_embeddings == 2048
    assert made.config.head_dim == 8 and made.config.after_blocks == TAPS
    longer = HeadConfig(kind="eagle3", init_from=str(place), rope_theta=5e5, max_position_embeddings=4096)
    other = new_head(longer, tiny.llama().config, tiny.ends(), 0, after_blocks=TAPS)
    assert (other.config.rope_theta, other.config.max_position_embeddings) == (5e5, 4096)
    assert other.rotary.max_positions == 4096
    save_head(other, tmp_path / "saved")
    assert kind_of(json.loads((tmp_path / "saved" / "config.json").read_text()), tmp_path) == "eagle3"


def test_a_published_heads_taps_are_taken_from_whoever_knows_the_target(tmp_path: Path) -> None:
    numbered = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}  # SGLang's numbering of (2, 4, 5)
    place = published(tmp_path / "head", changes=numbered)
    assert restored_with(place, TAPS).config.after_blocks == TAPS
    for taps in (None, (1, 4, 5)):
        with pytest.raises(UserError, match="is not certain"):
            restored_with(place, taps)


def restored_with(directory: Path, taps: tuple[int, ...] | None) -> Eagle3Head:
    loaded = load_head(directory, ends=tiny.ends(), after_blocks=taps)
    assert isinstance(loaded, Eagle3Head)
    return loaded


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
    config = restored_with(published(tmp_path / "head", changes=changes), TAPS).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_another_residual_and_another_project_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="norm_before_residual is true"):
        restored_with(published(tmp_path / "head", changes={"norm_before_residual": True}), TAPS)
    foreign: list[Any] = [{"model_type": "llama"}, {"aerie_kind": "lookahead", "draft_vocab_size": 4}, []]
    for values in foreign:
        with pytest.raises(UserError, match="not a head of this project"):
            kind_of(values, tmp_path / "config.json")
