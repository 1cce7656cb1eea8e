"""No two tensors of a file become one: a head is read whole or not at all."""

from pathlib import Path

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.model.checkpoint import load_head
from aerie.model.inspection import inspect_head
from tests import tiny
from tests.model.formats import published
from tests.model.formats import test_multi_token as multi_token


@pytest.mark.parametrize("share", [1, 2])
def test_a_file_with_two_first_layers_is_refused(tmp_path: Path, share: int) -> None:
    state = published.tensors(published.EAGLE3)
    names = sorted(name for name in state if name.startswith("midlayer."))
    both = {name.replace("midlayer.", "layers.0."): state[name] + 1 for name in names[: len(names) // share]}
    if share == 2:  # each key once, in one spelling or the other
        state = {name: value for name, value in state.items() if name.replace("midlayer.", "layers.0.") not in both}
    place = published.write(tmp_path / "head", published.EAGLE3_CONFIG, {**state, **both}, pickled=True)
    for read in (lambda: load_head(place, ends=tiny.ends(), after_blocks=published.TAPS), lambda: inspect_head(place)):
        with pytest.raises(
            UserError, match=r"pytorch_model\.bin: has 'midlayer\..*two names of the head's first layer"
        ):
            read()


@pytest.mark.parametrize("layout", ["eagle", "medusa", "hydra"])
def test_two_tensors_that_would_be_one_are_refused(tmp_path: Path, layout: str) -> None:
    if layout == "eagle":
        state = {**published.tensors(published.EAGLE1), "fusion_fc.weight": torch.zeros(32, 64)}
        place = published.write(
            tmp_path / "head", {**published.SPECULATORS_CONFIG, "speculators_model_type": "eagle"}, state
        )
    else:
        state, place = {"medusa": multi_token.medusa, "hydra": multi_token.hydra}[layout](tmp_path / "head")
        odd = {"medusa": "branches.0.blocks.0.linear.bias", "hydra": "branches.0.blocks.0.linear.bias"}[layout]
        weights = place / f"{layout}_lm_head.pt"
        torch.save({**torch.load(weights, weights_only=True), odd: torch.zeros(32)}, weights)
    with pytest.raises(UserError, match="are the same tensor of a head by two names"):
        load_head(place, ends=tiny.ends())
