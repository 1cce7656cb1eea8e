"""A training that is killed at its very end: the same command finishes it, and nothing half written stays."""

import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState

from aerie.configs.errors import exit_code
from aerie.data import main as data_main
from aerie.model.checkpoint import load_head
from aerie.model.storage import Stage
from aerie.train import main as train_main
from tests import tiny


class Killed(BaseException):
    """Ends a command as SIGKILL would: nothing catches it."""


def _call(monkeypatch: pytest.MonkeyPatch, main: Any, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["main.py", *map(str, words)])
    try:
        return exit_code(main)
    finally:
        PartialState._reset_state()


def test_a_training_killed_before_its_record_is_written_is_finished_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.target(tmp_path / "target")
    tiny.write_conversations(tmp_path / "train.jsonl", 24)
    recipe = tiny.recipe(
        tmp_path / "recipe.yaml",
        {
            "run": str(tmp_path / "run"),
            "threads": 1,
            "target": {"path": str(tmp_path / "target"), "dtype": "float32"},
            "data": {"conversations": [str(tmp_path / "train.jsonl")], "max_length": 128, "held_out": 0.3},
            "train": {"max_steps": 2, "batch_size": 4, "warmup_steps": 1, "eval_every": 0},
        },
    )
    assert _call(monkeypatch, data_main.main, "features", "--config", recipe) == 0
    head = tmp_path / "run/heads/eagle1"
    with monkeypatch.context() as patched:
        patched.setattr(Stage, "finish", lambda self, **facts: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            _call(monkeypatch, train_main.main, "--config", recipe)
    written = (head / "model.safetensors").read_bytes()
    (head / ".model.safetensors.7-0123abcd.tmp").write_bytes(written[:100])
    assert not (head / "provenance.json").exists()
    assert _call(monkeypatch, train_main.main, "--config", recipe) == 0
    assert _call(monkeypatch, train_main.main, "--config", recipe, "--is-whole") == 0
    assert load_head(head) and (head / "model.safetensors").read_bytes() == written
    assert [path.name for path in head.iterdir() if path.name.startswith(".")] == []
