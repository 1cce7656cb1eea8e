"""Two CPU processes have the losses of one: every ZeRO stage and DDP, on rows that divide among them badly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aerie.data.batches import Order, collate
from aerie.data.cache import FeatureCache
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STEPS = 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose five rows make steps of one and two rows; wide enough for ZeRO-3 to shard the head."""
    root = tmp_path_factory.mktemp("uneven")
    tiny.target(root / "target", hidden_size=256, vocab_size=512, num_blocks=2)
    tiny.write_conversations(root / "train.jsonl", 5, seed=2)
    train = {"max_steps": STEPS, "epochs": STEPS, "batch_size": 1, "learning_rate": 2e-3, "warmup_steps": 1}
    values = {
        "run": str(root / "features-only"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.0},
        "tree": {"levels": 4},
        "train": {**train, "log_every": 1, "eval_every": 0},
    }
    path = tiny.recipe(root / "recipe.yaml", values)
    _run([sys.executable, "data/main.py", "features", "--config", str(path)])
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path) -> list[dict[str, Any]]:
    """The records of one process that takes the same rows a step."""
    words = ["--run", str(_run_directory(recipe, "alone")), "--train.accumulation", "2"]
    _run([sys.executable, "train/main.py", "--config", str(recipe), *words])
    return _losses(recipe, "alone")


def _run(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _run_directory(recipe: Path, name: str) -> Path:
    directory = recipe.parent / name
    directory.mkdir()
    (directory / "features").symlink_to(recipe.parent / "features-only" / "features")
    return directory


def _losses(recipe: Path, run: str) -> list[dict[str, Any]]:
    lines = (recipe.parent / run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def test_the_rows_are_as_uneven_as_they_should_be(recipe: Path) -> None:
    cache = FeatureCache.open(recipe.parent / "features-only" / "features").split("train")
    order = Order(cache.lengths, 0, batch_size=1, world_size=2)
    supervised = [
        [
            int(collate([cache[row] for row in part], part).supervised().sum())
            for rank in (0, 1)
            for part in order.parts(step, rank)
        ]
        for step in range(STEPS)
    ]
    assert sum(second == 0 for _, second in supervised) >= 4  # a process without rows
    assert sum(0 < second != first for first, second in supervised) >= 6  # and unlike ones


@pytest.mark.parametrize("launcher", ["zero0", "zero1", "zero2", "zero3", "torchrun"])
def test_two_processes_have_the_losses_of_one(recipe: Path, alone: list[dict[str, Any]], launcher: str) -> None:
    directory = _run_directory(recipe, launcher)
    words = ["train/main.py", "--config", str(recipe), "--run", str(directory)]
    if launcher == "torchrun":  # the bare -- keeps torchrun from taking --run for an abbreviation of its own --run-path
        _run([str(BIN / "torchrun"), "--nproc-per-node", "2", "--", *words])
    else:
        stage = launcher.removeprefix("zero")
        config = ["--config_file", f"configs/accelerate/zero{max(int(stage), 1)}.yaml", "--zero_stage", stage]
        _run([str(BIN / "accelerate"), "launch", *config, *words])
    provenance = json.loads((directory / "heads/eagle1/provenance.json").read_text())
    assert provenance["processes"] == 2  # what WORLD_SIZE asked for
    together = _losses(recipe, launcher)
    assert len(alone) == len(together) == STEPS
    for first, second in zip(alone, together, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        if launcher != "zero0":  # DeepSpeed clips there too, but does not tell the norm
            assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        assert second["learning_rate"] == first["learning_rate"]
    assert alone[-1]["loss"] < 0.9 * alone[0]["loss"]
