"""ZeRO on two CPU processes: heads and objectives as in one process, the same head at every stage."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its feature cache; wide enough for ZeRO-3 to shard fc, the MLP and the frozen embedding."""
    root = tmp_path_factory.mktemp("zero")
    tiny.target(root / "target", hidden_size=256, vocab_size=512, num_blocks=2)
    tiny.write_conversations(root / "train.jsonl", 80)
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.2},
        "tree": {"levels": 4},
        "train": {
            "max_steps": 8,
            "batch_size": 4,
            "learning_rate": 2e-3,
            "warmup_steps": 1,
            "log_every": 1,
            "eval_every": 4,
        },
    }
    path = tiny.recipe(root / "recipe.yaml", values)
    _run([sys.executable, "data/main.py", "features", "--config", str(path)])
    features = root / "run/features"
    for name in ("zero1", "zero3", "whole"):
        (root / name).mkdir()
        (root / name / "features").symlink_to(features)
    return path


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"}


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _launch(recipe: Path, stage: int, run: str, *words: str) -> list[str]:
    command = [
        str(BIN / "accelerate"),
        "launch",
        "--config_file",
        f"configs/accelerate/zero{stage}.yaml",
        "train/main.py",
    ]
    return [*command, "--config", str(recipe), "--run", str(recipe.parent / run), *words]


def _losses(recipe: Path, run: str) -> list[dict[str, Any]]:
    lines = (recipe.parent / run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def _head(recipe: Path, run: str) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(recipe.parent / run / "heads/eagle1/model.safetensors")
    return loaded


@pytest.fixture(scope="module")
def zero1(recipe: Path) -> Path:
    _run(_launch(recipe, 1, "zero1"))
    return recipe


@pytest.mark.parametrize(
    ("kind", "stage", "words"),
    [
        ("medusa", 2, ("--train.law_weight", "0.5")),
        ("hydra", 3, ("--head.num_layers", "2", "--head.prefix_layer", "true", "--train.dropout", "0.2")),
    ],
)
def test_two_processes_train_medusa_and_hydra_heads_as_one_does(
    recipe: Path, kind: str, stage: int, words: tuple[str, ...]
) -> None:
    # chunks so small that processes need different numbers of them, and must call the LM heads equally often
    common = ("--head.kind", kind, "--train.loss_chunk_slots", "48", "--train.max_steps", "5", *words)
    for launcher in ("one", "two"):
        run = f"{kind}-{stage}-{launcher}"
        (recipe.parent / run).mkdir()
        (recipe.parent / run / "features").symlink_to(recipe.parent / "run/features")
        single = [sys.executable, "train/main.py", "--config", str(recipe), "--run", str(recipe.parent / run), *common]
        pair = _launch(recipe, stage, run, *common)
        _run([*single, "--train.accumulation", "2"] if launcher == "one" else pair)
    alone, together = (_losses(recipe, f"{kind}-{stage}-{launcher}") for launcher in ("one", "two"))
    assert len(alone) == len(together) == 5
    for first, second in zip(alone, together, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        assert second["accuracy_at_2"] == pytest.approx(first["accuracy_at_2"], abs=0.02)
    assert alone[-1]["loss"] < alone[0]["loss"]


def test_a_head_saved_under_zero3_equals_the_one_saved_under_zero1(zero1: Path) -> None:
    _run(_launch(zero1, 3, "zero3"))
    first, second = _head(zero1, "zero1"), _head(zero1, "zero3")
    assert first.keys() == second.keys() and first["fc.weight"].dtype == torch.float32
    for name, value in first.items():
        assert second[name].shape == value.shape
        assert (second[name] - value).abs().max() < 1e-5, name


def test_gradient_clipping_of_the_recipe_reaches_deepspeed(zero1: Path) -> None:
    # Adam forgets a constant factor, but not one that puts the gradient far below its eps of 1e-8
    _run(_launch(zero1, 1, "whole", "--train.clip_norm", "1e-9", "--train.max_steps", "4"))
    moved = [
        (_head(zero1, run)["fc.weight"] - _initial(zero1)["fc.weight"]).abs().max().item() for run in ("whole", "zero1")
    ]
    assert moved[0] < 0.2 * moved[1]


def _initial(recipe: Path) -> dict[str, torch.Tensor]:
    directory = recipe.parent / "initial"
    if not directory.exists():
        words = ["--config", str(recipe), "--run", str(recipe.parent / "zero1"), "--plan", "--init-to", str(directory)]
        _run([sys.executable, "train/main.py", *words])
    loaded: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return loaded


@pytest.mark.parametrize("launcher", ["zero3", "torchrun"])
def test_eagle3_online_on_two_processes_has_the_losses_of_one(tmp_path: Path, launcher: str) -> None:
    tiny.target(tmp_path / "target", hidden_size=128, vocab_size=512, num_blocks=7)
    tiny.write_conversations(tmp_path / "train.jsonl", 60)
    train = {"max_steps": 5, "batch_size": 4, "learning_rate": 2e-3, "warmup_steps": 1, "log_every": 1, "eval_every": 0}
    values = {
        "run": str(tmp_path / "one"),
        "threads": 1,
        "target": {"path": str(tmp_path / "target"), "dtype": "float32"},
        "data": {"conversations": [str(tmp_path / "train.jsonl")], "max_length": 128, "held_out": 0.2},
        "features": {"mode": "online"},
        "head": {"kind": "eagle3", "draft_vocab_size": 256},
        "tree": {"levels": 4},
        # chunks so small that processes need different numbers of them, and must call the LM head equally often
        "train": {**train, "unroll_steps": 3, "loss_chunk_slots": 48, "gradient_checkpointing": True},
    }
    recipe = tiny.recipe(tmp_path / "recipe.yaml", values)
    _run([sys.executable, "train/main.py", "--config", str(recipe), "--train.accumulation", "2"])
    words = ["--train.measure_prompts", "3", "--train.measure_new_tokens", "8"]
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--", "train/main.py", "--config", str(recipe)]
    torchrun = [*command, "--run", str(tmp_path / launcher), *words]
    _run(_launch(recipe, 3, launcher, *words) if launcher == "zero3" else torchrun)
    alone, together = _losses(recipe, "one"), _losses(recipe, launcher)
    assert len(alone) == len(together) == 5
    for first, second in zip(alone, together, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        assert second["accuracy_at_1"] == pytest.approx(first["accuracy_at_1"], abs=0.02)
    assert "tau" in json.loads((tmp_path / launcher / "heads/eagle3/config.json").read_text())["aerie"]


@pytest.mark.parametrize(("stage", "share"), [(2, 0.5), (3, 0.0)])
def test_a_draft_lm_distilled_on_two_processes_has_the_losses_of_one(tmp_path: Path, stage: int, share: float) -> None:
    tiny.target(tmp_path / "target", hidden_size=128, vocab_size=512, num_blocks=2)
    tiny.write_conversations(tmp_path / "train.jsonl", 60)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 256}
    train = {"max_steps": 5, "batch_size": 4, "learning_rate": 2e-3, "warmup_steps": 1, "log_every": 1, "eval_every": 0}
    values = {
        "run": str(tmp_path / "one"),
        "threads": 1,
        "target": {"path": str(tmp_path / "target"), "dtype": "float32"},
        "data": {"conversations": [str(tmp_path / "train.jsonl")], "max_length": 128, "held_out": 0.2},
        "features": {"mode": "online"},
        "head": {"kind": "draft_lm", **sizes},
        "train": {**train, "distill": "jsd", "on_policy": share, "loss_chunk_slots": 48},
    }
    recipe = tiny.recipe(tmp_path / "recipe.yaml", values)
    _run([sys.executable, "train/main.py", "--config", str(recipe), "--train.accumulation", "2"])
    _run(_launch(recipe, stage, "two"))
    alone, together = _losses(recipe, "one"), _losses(recipe, "two")
    assert len(alone) == len(together) == 5
    for first, second in zip(alone, together, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["distill"] == pytest.approx(first["distill"], rel=1e-3)
    if stage == 3:
        done = subprocess.run(
            _launch(recipe, 3, "refused", "--train.on_policy", "0.5"),
            cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode != 0 and "train.on_policy: ZeRO-3 keeps no whole draft LM" in done.stderr
