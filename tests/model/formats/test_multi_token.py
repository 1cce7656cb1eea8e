"""Medusa's and Hydra's published heads: their files read back as the very head, and nothing by luck."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.checkpoint import load_head, save_head
from aerie.model.export import export
from aerie.model.heads.multi_token import HydraHead, MedusaHead
from aerie.model.inspection import inspect_head, screen
from tests import tiny
from tests.model.formats.published import ends_facts

MEDUSA_CONFIG = {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
HYDRA_CONFIG = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "hydra_head_arch": "prefix-mlp",
    "hydra_num_heads": 4,
    "hydra_num_layers": 2,
    "num_attention_heads": 4,  # ours: the published file leaves it to the target
}


def write(directory: Path, name: str, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(state, directory / name)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def medusa(directory: Path, layers: int = 1, **changes: Any) -> tuple[MedusaHead, Path]:
    """A head and its directory as FasterDecoding publishes it."""
    head: Any = tiny.multi_token_head("medusa", tiny.ends(), noise=0.2, num_layers=layers)
    own = head.state_dict()
    state = {f"{i}.{layers}.weight": own[f"laws.lm_heads.{i}.weight"] for i in range(4)}
    for i in range(4):
        for j in range(layers):
            for part in ("weight", "bias"):
                state[f"{i}.{j}.linear.{part}"] = own[f"branches.{i}.blocks.{j}.linear.{part}"]
    assert len(state) == len(own)
    return head, write(directory, "medusa_lm_head.pt", {**MEDUSA_CONFIG, "medusa_num_layers": layers, **changes}, state)


def hydra(directory: Path, **changes: Any) -> tuple[HydraHead, Path]:
    """A Hydra++ head and its directory as zankner publishes it: dropout between blocks, an unread embedding."""
    head: Any = tiny.multi_token_head("hydra", tiny.ends(), noise=0.2, num_layers=2, prefix_layer=True)
    state = {"prefix_embeding_layer.embed_tokens.weight": torch.zeros(320, 32)}
    for name, value in head.state_dict().items():
        pieces = name.split(".")
        if pieces[0] == "branches":
            part = {"linear": "linear", "projection": "res_connection"}[pieces[4]]
            state[f"hydra_mlp.{pieces[1]}.{1 + 2 * int(pieces[3])}.{part}.{pieces[5]}"] = value
        elif pieces[0] == "laws":
            state[f"hydra_lm_head.{pieces[2]}.1.{pieces[3]}"] = value
        else:
            rest = ".".join(pieces[1:])
            state[f"prefix_embeding_layer.{rest if rest == 'norm.weight' else f'layers.0.{rest}'}"] = value
    return head, write(directory, "hydra_lm_head.pt", {**HYDRA_CONFIG, **changes}, state)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_published_medusa_head_is_the_very_head(tmp_path: Path, layers: int) -> None:
    head, place = medusa(tmp_path / "head", layers)
    loaded = load_head(place, ends=tiny.ends())
    assert isinstance(loaded, MedusaHead) and (loaded.config.num_heads, loaded.config.num_layers) == (4, layers)
    features = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(features), head(features))
    assert inspect_head(place)["layout"] == "medusa" and f"4 heads of {layers} block(s)" in screen(inspect_head(place))


def test_a_published_hydra_head_is_the_very_head(tmp_path: Path) -> None:
    head, place = hydra(tmp_path / "head")
    loaded = load_head(place, ends=tiny.ends())
    assert isinstance(loaded, HydraHead) and loaded.config.prefix_layer and loaded.config.lm_head_bias
    assert loaded.state_dict().keys() == head.state_dict().keys()
    features = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    state, embeddings = loaded.prefix(features, (0, 5))[0], torch.randn(5, 64)
    assert torch.equal(state, head.prefix(features, (0, 5))[0])
    assert torch.equal(loaded.step(1, state, embeddings), head.step(1, state, embeddings))


def test_counts_are_those_of_the_weights_and_a_config_json_that_lags_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_head(medusa(tmp_path / "head", medusa_num_heads=2)[1])
    assert isinstance(loaded, MedusaHead) and loaded.config.num_heads == 4
    assert "medusa_num_heads is 2, the weights have 4" in capsys.readouterr().err


def test_a_prefix_layer_without_a_count_of_heads_is_vicunas_or_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='add "num_attention_heads" of the target'):
        load_head(hydra(tmp_path / "head", num_attention_heads=None)[1])


@pytest.mark.parametrize("changes", [{"grounded_heads": False}, {"hidden_state_offset": 1}])
def test_heads_that_do_not_read_the_drafted_tokens_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="such heads are not supported"):
        load_head(hydra(tmp_path / "head", **changes)[1])


@pytest.mark.parametrize("make", [medusa, hydra])
@pytest.mark.parametrize(("damage", "message"), [("missing", "missing"), ("unexpected", "unexpected 'extra.weight'")])
def test_a_damaged_head_is_one_sentence_and_no_model(tmp_path: Path, make: Any, damage: str, message: str) -> None:
    place = make(tmp_path / "head")[1]
    file = next(place.glob("*.pt"))
    state = torch.load(file)
    if damage == "missing":
        del state[next(name for name in state if name.endswith("linear.bias"))]
    else:
        state["extra.weight"] = torch.zeros(2)
    torch.save(state, file)
    with pytest.raises(UserError, match=message):
        load_head(place)


def test_no_layout_of_eagle_heads_takes_them(tmp_path: Path) -> None:
    save_head(medusa(tmp_path / "head")[0], tmp_path / "own")
    for to in ("safeailab", "sglang", "speculators"):
        with pytest.raises(UserError, match="servers' layouts carry EAGLE heads, and this is a medusa head"):
            export(tmp_path / "own", to, tmp_path / "out", ends_facts())
