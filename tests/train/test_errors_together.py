"""A row that one of two CPU processes alone cannot read ends both alike, and the status tells it."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.data.batches import Order
from aerie.data.cache import FeatureCache
from tests import tiny
from tests.data.distill.faults import free_port

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("errors")
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 24)
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.3},
        "train": {"max_steps": 4, "batch_size": 2, "warmup_steps": 1, "eval_every": 2},
    }
    path = tiny.recipe(root / "recipe.yaml", values)
    command = [sys.executable, "data/main.py", "features", "--config", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_row_that_one_process_cannot_read_ends_all_with_the_same_code(recipe: Path, split: str) -> None:
    run = recipe.parent / split
    shutil.copytree(recipe.parent / "run/features", run / "features")
    _damage(run / "features", split)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "train/main.py", "--config", str(recipe), "--run", str(run)],
            cwd=ROOT,
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    first, second = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], first + second
    assert "error: train: another process failed" in first and "Traceback" not in first + second
    assert "does not match its checksum" in second, second
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["code"]) == ("failed", 2)


def _damage(directory: Path, split: str) -> None:
    """Flips a bit in the states of a row of the second step, or of the held-out rows, that rank 1 alone reads."""
    cache = FeatureCache.open(directory)
    rows = cache.split(split)
    number = rows.numbers[Order(rows.lengths, 0, 2, world_size=2).parts(1, rank=1)[0][0] if split == "train" else 1]
    shard, span = next((shard, span) for shard, span in enumerate(cache.shards) if number in span)
    path, before = directory / f"shard-{shard:05d}.safetensors", sum(cache.lengths[span.start : number])
    content = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    states = json.loads(content[8 : 8 + size])["last_hidden"]
    begin = 8 + size + states["data_offsets"][0]
    content[begin + before * states["shape"][1] * 4 + 2] ^= 0x10
    path.write_bytes(content)
