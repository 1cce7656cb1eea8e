"""Layouts are recognised by what lies there; whatever is no head, or a damaged one, is one clear sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.model.checkpoint import kind_of, load_head, save_head
from aerie.model.formats.layouts import WRITABLE, read_config, read_content
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import (
    EAGLE3,
    EAGLE3_CONFIG,
    TAPS,
    angelslim,
    safeailab_eagle1,
    safeailab_eagle3,
    specforge,
    speculators,
    tensors,
)


@pytest.mark.parametrize(
    ("make", "layout", "kind"),
    [
        (safeailab_eagle1, "safeailab", "eagle1"),
        (safeailab_eagle3, "safeailab", "eagle3"),
        (specforge, "sglang", "eagle3"),
        (angelslim, "sglang", "eagle3"),
        (speculators, "speculators", "eagle3"),
    ],
)
def test_every_published_layout_is_recognised(tmp_path: Path, make: Any, layout: str, kind: str) -> None:
    place = make(tmp_path / "head")
    found, _, content = read_content(place, TAPS)
    assert (found.name, content.kind) == (layout, kind)
    assert kind_of(read_config(place), place / "config.json") == kind


def test_our_own_layout_is_recognised_whatever_else_its_keys_look_like(tmp_path: Path) -> None:
    for name, head in (("one", tiny.head(tiny.ends().embedding)), ("three", published.eagle3())):
        save_head(head, tmp_path / name)
        assert read_content(tmp_path / name)[0].name == "aerie"
    assert set(WRITABLE) == {"safeailab", "sglang", "speculators"}


def test_the_first_layer_may_be_called_layers_0_in_any_layout(tmp_path: Path) -> None:
    state = {name.replace("midlayer.", "layers.0."): value for name, value in tensors(EAGLE3).items()}
    head = load_head(published.write(tmp_path / "head", EAGLE3_CONFIG, state), ends=tiny.ends(), after_blocks=TAPS)
    assert torch.equal(head.state_dict()["midlayer.hidden_norm.weight"], state["layers.0.hidden_norm.weight"])


def test_a_guess_is_said_and_a_head_that_says_all_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_head(published.eagle3(), tmp_path / "own")
    load_head(tmp_path / "own", ends=tiny.ends())
    load_head(safeailab_eagle1(tmp_path / "one"))
    assert capsys.readouterr().err == ""
    load_head(safeailab_eagle3(tmp_path / "three"), ends=tiny.ends(), after_blocks=TAPS)
    assert capsys.readouterr().err.endswith(
        "config.json: names no taps; [2, 4, 5] are taken (entries of hidden_states)\n"
    )


def damaged(directory: Path, damage: str) -> Path:
    """A published EAGLE-3 head with one thing wrong."""
    state, values = tensors(EAGLE3), dict(EAGLE3_CONFIG)
    if damage == "prefix":
        state = {f"draft_model.{name}": value for name, value in state.items()}
    elif damage == "missing":
        del state["fc.weight"]
    elif damage == "unexpected":
        state["midlayer.extra.weight"] = torch.zeros(2)
    elif damage == "shape":
        state["fc.weight"] = torch.zeros(32, 64)
    elif damage == "index table":
        state["d2t"] = state["d2t"] + torch.arange(107)
    elif damage == "one table":
        del state["t2d"]
    elif damage == "whole model":
        state, values = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}, {"model_type": "llama"}
    elif damage == "nothing known":
        state, values = {"weight": torch.zeros(2)}, {"model_type": "llama"}
    elif damage == "another kind":
        values["aerie_kind"] = "dflash"
    return published.write(directory, values, state, pickled=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("prefix", "missing 'd2t', 'fc.weight'.*unexpected 'draft_model.d2t'"),
        ("missing", "pytorch_model.bin: missing 'fc.weight'$"),
        ("unexpected", "unexpected 'midlayer.extra.weight'$"),
        ("shape", r"fc.weight has shape \[32, 64\], config.json says \[32, 96\]"),
        ("index table", "d2t holds offsets"),
        ("one table", "missing 't2d'"),
        ("whole model", "a whole language model and no draft head: a target, or a draft_lm"),
        ("nothing known", "nor one in a layout that it reads"),
        ("another kind", "aerie_kind is 'dflash'"),
    ],
)
def test_a_damaged_head_is_one_sentence_and_no_model(tmp_path: Path, damage: str, message: str) -> None:
    place = damaged(tmp_path / "head", damage)
    with pytest.raises(UserError, match=message) as caught:
        load_head(place, ends=tiny.ends(), after_blocks=TAPS)
    assert "\n" not in str(caught.value) and str(place) in str(caught.value)


def test_a_config_json_that_is_no_table_is_one_sentence(tmp_path: Path) -> None:
    place = damaged(tmp_path / "head", "none")
    (place / "config.json").write_text("[]")
    for call in (lambda: load_head(place), lambda: kind_of([], place / "config.json")):
        with pytest.raises(UserError, match="not a table of keys"):
            call()


def test_a_head_for_another_target_is_refused_before_it_takes_that_targets_embedding(tmp_path: Path) -> None:
    place = safeailab_eagle3(tmp_path / "head")
    with pytest.raises(UserError, match="belongs to another target: its hidden size is 32, that of the target is 48"):
        load_head(place, ends=tiny.ends(hidden_size=48), after_blocks=TAPS)
    with pytest.raises(UserError, match="its vocabulary is 320, that of the target is 400"):
        load_head(place, ends=tiny.ends(vocab_size=400), after_blocks=TAPS)
