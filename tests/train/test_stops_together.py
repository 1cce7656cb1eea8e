"""Two CPU processes that are stopped go on bit for bit, under ZeRO and under DDP, and not as another number."""

import json
import os
import re
import shutil
import signal
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
STEPS = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its feature cache; wide enough for ZeRO-3 to shard fc, the MLP and the frozen embedding."""
    root = tmp_path_factory.mktemp("together")
    tiny.target(root / "target", hidden_size=256, vocab_size=512, num_blocks=2)
    tiny.write_conversations(root / "train.jsonl", 40)
    train = {"max_steps": STEPS, "epochs": STEPS, "batch_size": 4, "learning_rate": 2e-3, "warmup_steps": 1}
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.2},
        "tree": {"levels": 4},
        "train": {**train, "log_every": 1, "eval_every": 40, "save_every": 7},
    }
    path = tiny.recipe(root / "recipe.yaml", values)
    assert run([sys.executable, "data/main.py", "features", "--config", str(path)]).returncode == 0
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )


def command(recipe: Path, launcher: str, name: str) -> list[str]:
    """The command of two processes in a run directory of its own."""
    directory = recipe.parent / name
    if not directory.exists():
        directory.mkdir()
        (directory / "features").symlink_to(recipe.parent / "run/features")
    words = ["train/main.py", "--config", str(recipe), "--run", str(directory)]
    if launcher == "torchrun":
        return [str(BIN / "torchrun"), "--nproc-per-node", "2", "--", *words]
    return [str(BIN / "accelerate"), "launch", "--config_file", f"configs/accelerate/{launcher}.yaml", *words]


def stopped(words: list[str], number: signal.Signals) -> None:
    """Sends a signal to the launcher, which passes it on, or SIGKILL to both processes too, soon after step 8."""
    child = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if re.match(rf"step 8/{STEPS} ", line):
            for process in [child.pid, *(below(child.pid) if number == signal.SIGKILL else [])]:
                os.kill(process, number)
            break
    child.communicate(timeout=300)


def below(process: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [number for child in children for number in (int(child), *below(int(child)))]


def results(directory: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The head, and the records without their clocks."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    clocks = ("data_wait_share", "tokens_per_s", "step_ms", "peak_memory_gib")
    kept = [{key: value for key, value in record.items() if key not in clocks} for record in records]
    return load_file(directory / "heads/eagle1/model.safetensors"), kept


@pytest.mark.parametrize(
    ("launcher", "number", "state"),
    [
        ("zero1", signal.SIGKILL, "running"),
        ("zero2", signal.SIGINT, "interrupted"),
        ("zero3", signal.SIGKILL, "running"),
        ("torchrun", signal.SIGTERM, "requeue"),
    ],
)
def test_two_stopped_processes_go_on_bit_for_bit(
    recipe: Path, launcher: str, number: signal.Signals, state: str
) -> None:
    whole, cut = recipe.parent / f"{launcher}-whole", recipe.parent / f"{launcher}-cut"
    done = run(command(recipe, launcher, whole.name))
    assert done.returncode == 0, done.stdout + done.stderr
    stopped(command(recipe, launcher, cut.name), number)
    assert json.loads((cut / "status.json").read_text())["state"] == state
    alone = run([sys.executable, "train/main.py", "--config", str(recipe), "--run", str(cut)])
    assert (
        alone.returncode == 2 and "saved by 2 processes, now there are 1; go on with --num_processes 2" in alone.stderr
    )
    again = run(command(recipe, launcher, cut.name))
    assert again.returncode == 0 and "going on from step" in again.stdout, again.stdout + again.stderr
    (head, records), (expected, wanted) = results(cut), results(whole)
    assert all(head[name].equal(value) for name, value in expected.items())
    assert records == wanted
    shutil.rmtree(cut)
