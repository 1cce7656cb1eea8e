"""Tensors on disk: whole or sharded, safetensors or pickles of tensors alone; anything else is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.weights import read_tensors, tensor_names, write_tensors


def state() -> dict[str, Tensor]:
    return {"a": torch.arange(600.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor([True, False])}


def sharded(directory: Path, pickled: bool) -> Path:
    """Two shards and their index."""
    suffix, base = (".bin", "pytorch_model") if pickled else (".safetensors", "model")
    table = {"a": f"{base}-00001-of-00002{suffix}", "b": f"{base}-00002-of-00002{suffix}"}
    table["c"] = table["b"]
    for shard in set(table.values()):
        part = {name: value for name, value in state().items() if table[name] == shard}
        if pickled:
            torch.save(part, directory / shard)
        else:
            save_file(part, directory / shard)
    index = directory / f"{base}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return index


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_every_form_reads_back_bit_for_bit(tmp_path: Path, pickled: bool, shards: int) -> None:
    expected = write_tensors(tmp_path, state(), pickled) if shards == 1 else sharded(tmp_path, pickled)
    place, found = read_tensors(tmp_path)
    assert place == expected and tensor_names(tmp_path) == found.keys() == state().keys()
    for name, value in state().items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)


def test_a_view_is_written_without_what_it_views(tmp_path: Path) -> None:
    for pickled in (False, True):
        place = write_tensors(tmp_path, {"part": torch.zeros(100_000)[:10]}, pickled)
        assert place.stat().st_size < 10_000
        assert place.stat().st_mode & 0o044  # readable by others


class Planted:
    """A pickle that would run a command."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def test_a_pickle_with_code_in_it_is_refused_and_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"a": torch.zeros(2), "code": Planted(trace)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="more than tensors, which is never loaded"):
        read_tensors(tmp_path)
    assert not trace.exists()
    torch.save({"state": {"a": torch.zeros(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="is no table of tensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 7, -200])
def test_a_truncated_file_is_one_sentence(tmp_path: Path, name: str, kept: int) -> None:
    place = write_tensors(tmp_path, state(), pickled=name.endswith("bin"))
    place.write_bytes(place.read_bytes()[:kept])
    with pytest.raises(UserError, match=rf"{name}: cannot read the weights: .*fetch (the file|it) anew") as caught:
        read_tensors(tmp_path)
    assert "\n" not in str(caught.value) and "Errno" not in str(caught.value)


def test_shards_that_lie_elsewhere_are_missing_or_disagree_are_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path, pickled=False)
    values = json.loads(index.read_text())
    shard = values["weight_map"]["b"]
    cases = [
        ({**values["weight_map"], "a": "../elsewhere.safetensors"}, "files beside it; refused"),
        ({**values["weight_map"], "d": shard}, "disagree about 'd'"),
        ({"b": shard}, "disagree about 'c'"),
        ("model.safetensors", "has no weight_map"),
    ]
    for table, message in cases:
        index.write_text(json.dumps({"weight_map": table}))
        with pytest.raises(UserError, match=message):
            read_tensors(tmp_path)
