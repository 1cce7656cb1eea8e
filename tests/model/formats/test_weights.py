"""Tensors on disk: whole or sharded, safetensors or pickles of tensors alone; anything else is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.model.formats.layouts import read_tensors, tensor_names, write_tensors
from tests.model.formats.published import sharded

STATE = {"a": torch.arange(600.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor([True, False])}


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_every_form_reads_back_bit_for_bit_and_a_view_without_what_it_views(
    tmp_path: Path, pickled: bool, shards: int
) -> None:
    expected = write_tensors(tmp_path, STATE, pickled) if shards == 1 else sharded(tmp_path, STATE, pickled)
    place, found = read_tensors(tmp_path)
    assert place == expected and tensor_names(tmp_path) == found.keys() == STATE.keys()
    for name, value in STATE.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    view = write_tensors(tmp_path, {"part": torch.zeros(100_000)[:10]}, pickled).stat()
    assert view.st_size < 10_000 and view.st_mode & 0o044  # readable by others


class Planted:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def test_a_pickle_with_code_in_it_is_refused_and_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for content, said in (({"a": Planted(trace)}, "more than tensors"), ({"state": {}}, "is no table of tensors")):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(UserError, match=said):
            read_tensors(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("kept", [0, 7, -200])
def test_a_truncated_file_is_one_sentence(tmp_path: Path, pickled: bool, kept: int) -> None:
    place = write_tensors(tmp_path, STATE, pickled)
    place.write_bytes(place.read_bytes()[:kept])
    with pytest.raises(UserError, match=rf"{place.name}: cannot read the weights: .*anew") as caught:
        read_tensors(tmp_path)
    assert "\n" not in str(caught.value)


def test_shards_that_lie_elsewhere_or_disagree_with_their_index_are_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path, STATE)
    table = json.loads(index.read_text())["weight_map"]
    for changed, said in (
        ({**table, "a": "../elsewhere.safetensors"}, "tensors to files beside it"),
        ({**table, "d": table["b"]}, "disagree about 'd'"),
        ({"a": table["a"]}, "disagree about 'c'"),
        ("model.safetensors", "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(UserError, match=said):
            read_tensors(tmp_path)
