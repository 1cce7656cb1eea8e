"""The benchmark of a GPU runs on a CPU, too."""

import json
import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from tests import gpu


def test_features_training_and_decoding_are_timed_and_their_memory_is_planned(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    try:
        assert gpu.main() == 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    rows = {row["what"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]}
    decoding = ["decode vanilla", "decode eagle2", "decode eagle3"]
    assert [*rows] == ["features with taps", "eagle1 training", "eagle3 training", *decoding]
    assert all(row["tokens_per_s"] > 0 and row["ms"] > 0 for row in rows.values())
    assert all({*rows[what]["cycle_ms"]} == {"draft", "verify", "commit", "other"} for what in decoding)
    assert capsys.readouterr().out == (tmp_path / "gpu.md").read_text()
