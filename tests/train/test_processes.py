"""Two CPU processes have the losses of one, under ZeRO 1 to 3 and torchrun; stopped they go on bit for bit.

Each start of DeepSpeed takes ten seconds, so one run is asked for several laws.
"""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from aerie.data.batches import Order, collate
from aerie.data.cache import FeatureCache
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STEPS = 8
CLOCKS = ("data_wait_share", "tokens_per_s", "step_ms", "peak_memory_gib")
# Chunks so small that processes need different numbers of them, and must call the LM heads equally often.
SMALL = {"loss_chunk_slots": 48}
LM = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 256}
# name -> (launcher, head, train, what else is asked of the two processes)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "eagle1": ("zero1", {"kind": "eagle1"}, {}, ()),
    "eagle1-ddp": ("torchrun", {"kind": "eagle1"}, {}, ()),
    "medusa": ("zero2", {"kind": "medusa"}, {"law_weight": 0.5, **SMALL}, ()),
    "hydra": ("zero3", {"kind": "hydra", "prefix_layer": True}, {"dropout": 0.2, **SMALL}, ()),
    "eagle3": (
        "zero3",
        {"kind": "eagle3", "draft_vocab_size": 256},
        {"unroll_steps": 3, "gradient_checkpointing": True, **SMALL},
        ("--train.measure_prompts", "3", "--train.measure_new_tokens", "8"),
    ),
    "draft_lm": ("zero2", {"kind": "draft_lm", **LM}, {"distill": "jsd", "on_policy": 0.5, **SMALL}, ()),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and a target wide enough for ZeRO-3 to shard a head's matrices and the frozen embedding."""
    directory = tmp_path_factory.mktemp("processes")
    tiny.target(directory / "target", hidden_size=128, vocab_size=512, num_blocks=7)
    # Seven rows make steps of two and of one: in these a process has no rows.
    tiny.write_conversations(directory / "train.jsonl", 9, seed=2)
    return directory


def write_recipe(root: Path, name: str, head: dict[str, Any], train: dict[str, Any], **features: Any) -> Path:
    rates = {"learning_rate": 2e-3, "warmup_steps": 1, "log_every": 1, "eval_every": 0}
    values = {
        "run": str(root / name),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.25},
        "features": {"mode": "online", **features},
        "head": head,
        "train": {"max_steps": STEPS, "epochs": STEPS, "batch_size": 1, **rates, **train},
    }
    return tiny.recipe(root / f"{name}.yaml", values)


def command(launcher: str, recipe: Path, *words: str) -> list[str]:
    script = ["train/main.py", "--config", str(recipe), *words]
    if launcher == "one":
        return [sys.executable, *script]
    if launcher == "torchrun":  # the bare -- keeps torchrun from taking --run for an abbreviation of its own --run-path
        return [str(BIN / "torchrun"), "--nproc-per-node", "2", "--", *script]
    return [str(BIN / "accelerate"), "launch", "--config_file", f"configs/accelerate/{launcher}.yaml", *script]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"}


def run(words: list[str], code: int = 0) -> str:
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def records(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_losses_of_one(root: Path, name: str) -> None:
    launcher, head, train, words = CASES[name]
    recipe = write_recipe(root, name, head, train)
    together = root / f"{name}-{launcher}"
    run(command("one", recipe, "--train.accumulation", "2"))
    run(command(launcher, recipe, "--run", str(together), *words))
    pairs = [[record for record in records(place) if "loss" in record] for place in (root / name, together)]
    assert len(pairs[0]) == STEPS
    for first, second in zip(*pairs, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        assert second["learning_rate"] == first["learning_rate"]
    output = together / "heads" / head["kind"]
    assert json.loads((output / "provenance.json").read_text())["processes"] == 2  # what WORLD_SIZE asked for
    one, two = (load_file(place / "heads" / head["kind"] / "model.safetensors") for place in (root / name, together))
    assert one.keys() == two.keys() and all((two[key] - value).abs().max() < 1e-4 for key, value in one.items())
    assert "--train.measure_prompts" not in words or json.loads((output / "config.json").read_text())["aerie"]["tau"]


def test_the_rows_are_as_uneven_as_they_should_be(root: Path) -> None:
    recipe = write_recipe(root, "cached", {"kind": "eagle1"}, {}, mode="cached")
    run([sys.executable, "data/main.py", "features", "--config", str(recipe)])
    cache = FeatureCache.open(root / "cached/features").split("train")
    order = Order(cache.lengths, 0, batch_size=1, world_size=2)
    parts = [[part for rank in (0, 1) for part in order.parts(step, rank)] for step in range(STEPS)]
    slots = [[int(collate([cache[row] for row in part], part).supervised().sum()) for part in step] for step in parts]
    assert sum(second == 0 for _, second in slots) >= 2  # a process without rows
    assert sum(0 < second != first for first, second in slots) >= 4  # and unlike ones


def test_clipping_reaches_deepspeed_and_on_policy_rows_are_refused_by_zero3(root: Path) -> None:
    # Adam forgets a constant factor, but not one that puts the gradient far below its eps of 1e-8.
    recipe, moved = write_recipe(root, "clipped", {"kind": "eagle1"}, {"max_steps": 2}), []
    for norm in ("1e-9", "1.0"):
        output = root / f"clipped-{norm}"
        run(command("zero1", recipe, "--run", str(output), "--train.clip_norm", norm, "--train.eval_every", "1"))
        moved.append(load_file(output / "heads/eagle1/model.safetensors")["fc.weight"])
    start = tiny_initial(root, recipe)
    assert (moved[0] - start).abs().max() < 0.2 * (moved[1] - start).abs().max()
    _, head, train, _ = CASES["draft_lm"]
    said = run(command("zero3", write_recipe(root, "refused", head, train)), code=1)
    assert "train.on_policy: ZeRO-3 keeps no whole draft LM" in said


def tiny_initial(root: Path, recipe: Path) -> Any:
    """fc of the untrained head."""
    run(
        command(
            "one", recipe, "--run", str(root / "initial"), "--train.learning_rate", "1e-30", "--train.max_steps", "1"
        )
    )
    return load_file(root / "initial/heads/eagle1/model.safetensors")["fc.weight"]


def below(process: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [number for child in children for number in (int(child), *below(int(child)))]


def stopped(words: list[str], number: signal.Signals) -> None:
    """Sends a signal to the launcher, which passes it on, or SIGKILL to both processes too, soon after step 8."""
    child = subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        if re.match(r"step 8/", line):
            for process in [child.pid, *(below(child.pid) if number == signal.SIGKILL else [])]:
                os.kill(process, number)
            break
    child.communicate(timeout=300)


@pytest.mark.parametrize(
    ("launcher", "number", "state"),
    [
        ("zero2", signal.SIGINT, "interrupted"),
        ("zero3", signal.SIGKILL, "running"),
        ("torchrun", signal.SIGTERM, "requeue"),
    ],
)
def test_two_stopped_processes_go_on_bit_for_bit_and_not_as_one(
    root: Path, launcher: str, number: signal.Signals, state: str
) -> None:
    train = {"max_steps": 60, "epochs": 60, "eval_every": 20, "save_every": 7}
    recipe = write_recipe(root, f"stopped-{launcher}", {"kind": "eagle1"}, train)
    whole, cut = root / f"{launcher}-whole", root / f"{launcher}-cut"
    run(command(launcher, recipe, "--run", str(whole)))
    stopped(command(launcher, recipe, "--run", str(cut)), number)
    assert json.loads((cut / "status.json").read_text())["state"] == state
    if launcher == "torchrun":
        said = run(command("one", recipe, "--run", str(cut)), code=2)
        assert "saved by 2 processes, now there are 1; go on with --num_processes 2" in said
    assert "going on from step" in run(command(launcher, recipe, "--run", str(cut)))
    assert records(cut) == records(whole)
    heads = [load_file(place / "heads/eagle1/model.safetensors") for place in (cut, whole)]
    assert all(heads[0][name].equal(value) for name, value in heads[1].items())


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_row_that_one_process_cannot_read_ends_both_with_the_same_code(root: Path, split: str) -> None:
    directory = root / f"broken-{split}"
    recipe = write_recipe(root, directory.name, {"kind": "eagle1"}, {"eval_every": 2}, mode="cached")
    run([sys.executable, "data/main.py", "features", "--config", str(recipe)])
    damage(directory / "features", split)
    said = run(command("torchrun", recipe), code=1)
    assert "error: train: another process failed" in said and "does not match its checksum" in said, said
    assert json.loads((directory / "status.json").read_text()) == {"stage": "train", "state": "failed", "code": 2}
    shutil.rmtree(directory)


def damage(directory: Path, split: Any) -> None:
    """Flips a bit in the states of a row of the second step, or of the held-out rows, that rank 1 alone reads."""
    cache = FeatureCache.open(directory)
    rows = cache.split(split)
    number = rows.numbers[Order(rows.lengths, 0, 1, world_size=2).parts(1, rank=1)[0][0] if split == "train" else 1]
    shard, span = next((shard, span) for shard, span in enumerate(cache.shards) if number in span)
    path, before = directory / f"shard-{shard:05d}.safetensors", sum(cache.lengths[span.start : number])
    content = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    states = json.loads(content[8 : 8 + size])["last_hidden"]
    content[8 + size + states["data_offsets"][0] + before * states["shape"][1] * 4 + 2] ^= 0x10
    path.write_bytes(content)
