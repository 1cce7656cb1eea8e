"""The GPU's benchmark runs on a CPU, too."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests import gpu
from tests.tiny import call


def test_features_training_and_decoding_are_timed_and_their_memory_is_planned(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        "torch.compile", partial(torch.compile, backend="eager")
    )  # needs no compiler
    assert call(gpu, "--device", "cpu", "--tiny", "--out", tmp_path) == 0
    rows = {row["what"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]}
    eager = [f"decode {method}, eager" for method in ("vanilla", "eagle2", "eagle3", "block-tree")]
    decoding = [*eager, "decode vanilla, compiled", "decode eagle3, compiled"]
    training = [f"{kind} training" for kind in ("eagle1", "eagle3", "block")]
    assert [*rows] == ["features with taps", *training, *decoding]
    assert all(row["tokens_per_s"] > 0 and row["ms"] > 0 for row in rows.values())
    for row in (rows[what] for what in decoding):
        assert {*row["cycle_ms"]} == {"draft", "verify", "commit", "other"}
        assert row["kernels"] > 0 and 0 < row["bandwidth"] < 1
    assert capsys.readouterr().out.count("decode eagle3, compiled") == 1
