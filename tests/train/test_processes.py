"""Two CPU processes have the losses of one, under ZeRO 1 to 3 and DDP; after a stop they continue
bit for bit.

They are forks with a launcher's environment, to save the start-up; one run goes through `accelerate
launch`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands import launch
from safetensors.torch import load_file, save_file

from aerie.data import main as data_main
from aerie.data.batches import Order
from aerie.data.feature_cache import FeatureCache
from aerie.model.storage import ROOT
from aerie.train import jobs
from aerie.train import main as train_main
from tests import tiny
from tests.configs.test_recipes import load
from tests.train.sittings import ended, fork, lines, timeless
from tests.train.test_main import write_recipe

BIN = Path(sys.executable).parent
STEPS = 24
# Small chunks: processes need different numbers of them, but must call the LM heads equally often.
SMALL = {"loss_chunk_slots": 48, "max_steps": 6}
LM = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
MUON = {"save_every": 2, "optimizer": {"kind": "muon", "matrix_rate": 5e-3}}
# name -> (launcher, head, train)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle1": ("zero3", {"kind": "eagle1"}, {"eval_every": 5, **MUON}),
    "eagle1-ddp": ("torchrun", {"kind": "eagle1"}, {"eval_every": 5, **MUON}),
    "hydra": (
        "zero2",
        {"kind": "hydra", "prefix_layer": True},
        {"dropout": 0.2, "law_weight": 0.5, **SMALL, **MUON},
    ),
    "block": (
        "zero3",
        {"kind": "block", "markov_rank": 8, "norm_init": "target"},
        {"anchors": 5, "measure_prompts": 2, "measure_new_tokens": 8, "save_every": 2, **SMALL},
    ),
    "eagle3": (
        "zero3",
        {"kind": "eagle3", "draft_vocab_size": 256},
        {
            "unroll_steps": 3,
            "gradient_checkpointing": True,
            "measure_prompts": 2,
            "measure_new_tokens": 8,
            **SMALL,
        },
    ),
    "eagle3-frozen": (
        "zero3",
        {
            "kind": "eagle3",
            "draft_vocab_size": 256,
            "lm_head": "frozen",
            "norm_init": "target",
            "norm_output": True,
        },
        {"unroll_steps": 3, **SMALL, **MUON},
    ),
    "draft_lm": (
        "zero1",
        {"kind": "draft_lm", **LM},
        {"distill": "jsd", **SMALL, **MUON},
    ),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and a target wide enough for ZeRO-3 to shard a head's matrices and the frozen
    embedding."""
    directory = tmp_path_factory.mktemp("processes")
    tiny.target(directory / "target", hidden_size=128, vocab_size=512, num_blocks=7)
    tiny.write_conversations(directory / "train.jsonl", 9, seed=2)
    return directory


def recipe_for(root: Path, name: str, mode: str = "online") -> Path:
    _, head, train = CASES[name]
    fixed = {
        "max_steps": STEPS,
        "epochs": STEPS,
        "batch_size": 1,
        "learning_rate": 2e-3,
        "log_every": 1,
    }
    # 7 rows to train on, 2 held out: at an epoch's end one of two processes has no row.
    data = {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.25}
    sections = {"run": str(root / name), "data": data, "features": {"mode": mode}, "head": head}
    return write_recipe(
        root / f"{name}.yaml", root, {"eval_every": 0, **fixed, **train}, **sections
    )


def forked(launcher: str, log: Path, *words: object, command: Any = train_main) -> list[int]:
    """Two processes that run the command in the environment that a launcher sets."""
    environment: dict[str, str] = {}
    if launcher != "torchrun":
        config = f"--config_file {ROOT}/configs/accelerate/{launcher}.yaml train/main.py".split()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.run.run", lambda _: environment.update(os.environ))
            launch.launch_command(launch.launch_command_parser().parse_args(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": "2",
        }

    def one(rank: str) -> int:
        os.environ.update(environment | {"RANK": rank, "LOCAL_RANK": rank, "DS_ACCELERATOR": "cpu"})
        sys.stdout = sys.stderr = log.open("a", buffering=1)
        return tiny.call(command, *words)

    return [fork(partial(one, rank)) for rank in ("0", "1")]


def together(launcher: str, run: Path, *words: object) -> str:
    """Runs two processes, which must succeed; returns their output."""
    log = run.with_suffix(".log")
    assert [*map(ended, forked(launcher, log, *words, "--run", run))] == [0, 0], log.read_text()
    return log.read_text()


def head_of(run: Path, kind: str = "eagle1") -> Any:
    return load_file(run / "heads" / kind / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_two_are_one(root: Path, name: str) -> None:
    """Two processes have the losses of one."""
    launcher, head, train = CASES[name]
    recipe, two = recipe_for(root, name), root / f"{name}-two"
    assert tiny.call(train_main, "--config", recipe, "--train.accumulation", 2) == 0
    if name == "eagle1":  # the launcher itself
        words = f"launch --config_file configs/accelerate/{launcher}.yaml train/main.py --config"
        start = [str(BIN / "accelerate"), *words.split(), str(recipe), "--run", str(two)]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"}
        subprocess.run(start, cwd=ROOT, env=environment, check=True, timeout=600)
    else:
        together(launcher, two, "--config", recipe)
    pairs = [pair for pair in zip(lines(root / name), lines(two), strict=True) if "loss" in pair[0]]
    assert len(pairs) == train.get("max_steps", STEPS)
    for first, second in pairs:
        # Muon's rounds are in bf16; over the steps the rounding adds up to 1e-4.
        assert second["loss"] == pytest.approx(first["loss"], rel=2e-4)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        assert second["learning_rate"] == first["learning_rate"]
    output = two / "heads" / head["kind"]
    assert (
        json.loads((output / "provenance.json").read_text())["processes"] == 2
    )  # as WORLD_SIZE said
    for key, value in head_of(root / name, head["kind"]).items():
        assert (head_of(two, head["kind"])[key].float() - value.float()).abs().max() < 1e-3
    assert (
        "measure_prompts" not in train
        or json.loads((output / "config.json").read_text())["aerie"]["tau"] >= 1
    )


@pytest.mark.parametrize(
    ("name", "number", "state", "code"),
    [
        ("eagle1", signal.SIGKILL, "running", -signal.SIGKILL),
        ("eagle1-ddp", signal.SIGTERM, "requeue", 75),
        ("hydra", signal.SIGKILL, "running", -signal.SIGKILL),
        ("block", signal.SIGKILL, "running", -signal.SIGKILL),
        ("draft_lm", signal.SIGKILL, "running", -signal.SIGKILL),
    ],
)
def test_two_go_on(
    root: Path, name: str, number: signal.Signals, state: str, code: int, capsys: Any
) -> None:
    """Two stopped processes go on bit for bit and not as one."""
    launcher, head, _ = CASES[name]
    cut = root / f"{name}-cut"
    words = ("--config", recipe_for(root, name))
    children = forked(launcher, root / f"{name}.log", *words, "--run", cut)
    while not (cut / "metrics.jsonl").exists() or len(lines(cut)) < 4:
        assert os.waitpid(children[0], os.WNOHANG) == (0, 0)
    for child in children:
        os.kill(child, number)
    assert [*map(ended, children)] == [code, code]
    assert json.loads((cut / "status.json").read_text())["state"] == state
    assert tiny.call(train_main, *words, "--run", cut) == 2
    assert (
        "saved by 2 processes, but this run has 1; go on with --num_processes 2"
        in capsys.readouterr().err
    )
    assert "going on from step" in together(launcher, cut, *words)
    assert timeless(cut) == timeless(root / f"{name}-two")
    two = head_of(root / f"{name}-two", head["kind"])
    assert all(head_of(cut, head["kind"])[key].equal(value) for key, value in two.items())


def test_clipping(root: Path) -> None:
    """The recipes clipping reaches deepspeed."""
    recipe = recipe_for(root, "eagle1")
    # A constant factor does not change Adam's steps, unless gradients get far below its eps of
    # 1e-8.
    words = ("--train.clip_norm", "1e-9", "--train.optimizer", "{kind: adamw}")
    together("zero1", root / "clipped", "--config", recipe, *words, "--train.max_steps", 8)
    begun = jobs.build_job(load(recipe), root / "none", overwrite=False, is_plan=True)
    before = begun.objective.head.fc.weight
    clipped = (head_of(root / "clipped")["fc.weight"] - before).abs().max()
    assert clipped < 0.2 * (head_of(root / "eagle1-two")["fc.weight"] - before).abs().max()


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_unreadable_row(root: Path, split: Any) -> None:
    """A row that one process cannot read ends both with the same code."""
    recipe = recipe_for(root, "eagle1", "cached")
    run = root / f"broken-{split}"
    assert tiny.call(data_main, "features", "--config", recipe, "--run", run) == 0
    cache = FeatureCache.open(run / "features")
    order = Order(cache.split("train").lengths, 0, 1, world_size=2)
    # A row, of a step or held out, that only rank 1 reads.
    number = cache.split(split).numbers[order.parts(0, 1)[0][0] if split == "train" else 1]
    shard, span = next((shard, span) for shard, span in enumerate(cache.shards) if number in span)
    path = run / f"features/shard-{shard:05d}.safetensors"
    tensors = load_file(path)
    tensors["last_hidden"][sum(cache.lengths[span.start : number])] += 1.0
    path.unlink()  # the tensors are views of the old file
    save_file(tensors, path)
    log = root / f"{split}.log"
    assert [*map(ended, forked("torchrun", log, "--config", recipe, "--run", run))] == [2, 2], (
        log.read_text()
    )
    assert (
        "error: train: another process failed" in log.read_text() and "checksum" in log.read_text()
    )
    assert json.loads((run / "status.json").read_text()) == {
        "stage": "train",
        "state": "failed",
        "code": 2,
    }
