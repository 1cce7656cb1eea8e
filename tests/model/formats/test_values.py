"""Malformed values in config.json and in the tables: one clear line each, whatever looks at the head; never a guess."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.checkpoint import load_head, save_head
from aerie.model.export import export
from aerie.model.inspection import inspect_head, screen
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import TAPS, ends_facts
from tests.model.formats.test_multi_token import hydra


def looks(place: Path) -> list[str]:
    """What inspect, load and convert say of a head that none of them may take."""
    said = []
    try:
        said += inspect_head(place, ends_facts())["problems"]
        screen(inspect_head(place))
    except UserError as error:
        said.append(str(error))
    for act in (
        lambda: load_head(place, ends=tiny.ends(), after_blocks=TAPS),
        lambda: export(place, "speculators", place.parent / "out", ends_facts()),
    ):
        with pytest.raises(UserError) as caught:
            act()
        said.append(str(caught.value))
    assert not (place.parent / "out").exists() and all("\n" not in line for line in said)
    return said


@pytest.mark.parametrize("make", [published.safeailab_eagle3, published.specforge, published.speculators, "own"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", "32", "hidden_size is '32'; it must be a positive whole number"),
        ("intermediate_size", 64.0, "intermediate_size is 64.0; it must be a positive whole number"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1,000,000,000; no head has more than 1,024"),
        ("max_position_embeddings", 0, "max_position_embeddings is 0; it must be a positive whole number"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5'; it must be a positive number"),
        ("draft_vocab_size", "107", "draft_vocab_size is '107'"),
        ("norm_output", "false", "norm_output is 'false'; it must be true or false, without quotes"),
        ("rope_scaling", "linear", "rope_scaling is 'linear'; it must be a table of keys or null"),
        (
            "rope_scaling",
            {"rope_type": "llama3", "factor": 8.0},
            "of type 'llama3': lacks low_freq_factor",
        ),
        ("rope_scaling", {"type": "linear", "factor": "4"}, "rope_scaling of type 'linear': factor is '4', no number"),
    ],
)
def test_a_malformed_value_is_one_clear_line(tmp_path: Path, make: Any, name: str, value: Any, message: str) -> None:
    if make == "own":
        save_head(published.eagle3(), tmp_path / "head")
    else:
        make(tmp_path / "head", {"eagle_aux_hidden_state_layer_ids": list(TAPS)})
    place = tmp_path / "head" / "config.json"
    values = json.loads(place.read_text())
    inner = values.get("transformer_layer_config", {})
    (inner if name in inner else values)[name] = value
    place.write_text(json.dumps(values))
    for line in looks(tmp_path / "head"):
        assert message in line and str(place) in line, line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_config": "none"}, "eagle_config is 'none'; it must be a table of keys or null"),
        (
            {"eagle_config": {"use_aux_hidden_state": "false"}},
            "use_aux_hidden_state is 'false'; it must",
        ),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            "rope_theta is 500000 in config.json, 10000 in rope_parameters; the head was trained with one of them",
        ),
        ({"bias": "no"}, "bias is 'no'; it must be true or false"),
    ],
)
def test_malformed_options_are_one_clear_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make = published.safeailab_eagle1 if "bias" in changes else published.safeailab_eagle3
    for line in looks(make(tmp_path / "head", changes)):
        assert message in line, line


def test_a_null_bias_is_none_and_a_missing_one_is_there(tmp_path: Path) -> None:
    state = {name: value for name, value in published.tensors(published.EAGLE1).items() if name != "fc.bias"}
    place = published.write(tmp_path / "head", {**published.EAGLE1_CONFIG, "bias": None}, state)
    assert "fc.bias" not in load_head(place).state_dict()


def test_hydras_count_of_heads_must_fit_its_width(tmp_path: Path) -> None:
    for heads, message in (("4", "num_attention_heads is '4'"), (1000, "which does not fit the width 32")):
        with pytest.raises(UserError, match=message):
            load_head(hydra(tmp_path / str(heads), num_attention_heads=heads)[1])


def column(state: dict[str, Tensor]) -> None:
    state["d2t"] = state["d2t"][:, None]


def fractions(state: dict[str, Tensor]) -> None:
    state["d2t"] = state["d2t"].float() + 0.5


def lost_in_rounding(state: dict[str, Tensor]) -> None:
    state["d2t"] = torch.full_like(state["d2t"], float("nan"), dtype=torch.float32)


def three(state: dict[str, Tensor]) -> None:
    state["t2d"] = 3 * state["t2d"].int()


def quantised(state: dict[str, Tensor]) -> None:
    state["fc.weight"] = state["fc.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (column, r"d2t has shape [107, 1]"),
        (fractions, "d2t holds torch.float32 that are no whole numbers"),
        (lost_in_rounding, "d2t holds torch.float32 that are no whole numbers"),
        (three, "t2d holds other values than 0 and 1"),
        (quantised, "fc.weight holds int8: quantised heads are not read"),
    ],
)
def test_malformed_tables_and_quantised_weights_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    state = published.tensors(published.EAGLE3)
    damage(state)
    place = published.write(tmp_path / "head", published.EAGLE3_CONFIG, state, pickled=True)
    said = looks(place)
    assert any(message in line for line in said[:-2]) and message in said[-2] and message in said[-1]


def test_tables_of_other_types_that_say_the_same_are_taken(tmp_path: Path) -> None:
    state = published.tensors(published.EAGLE3)
    expected = (state["d2t"].clone(), state["t2d"].clone())
    state["d2t"], state["t2d"] = state["d2t"].float(), state["t2d"].to(torch.uint8)
    place = published.write(tmp_path / "head", published.EAGLE3_CONFIG, state, pickled=True)
    found = load_head(place, ends=tiny.ends(), after_blocks=TAPS).state_dict()
    assert torch.equal(found["d2t"], expected[0]) and torch.equal(found["t2d"], expected[1])
