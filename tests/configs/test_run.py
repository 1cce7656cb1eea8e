"""aerie init, run and status: a recipe for any target, run to its report, stopped and continued."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from aerie import run as run_command
from aerie import status as status_command
from aerie.data import main as data_main
from aerie.data.inputs import target_inputs
from aerie.model.miniature import small_model
from aerie.model.storage import ROOT, Stage
from aerie.train import main as train_main
from tests import tiny
from tests.configs.test_recipes import load
from tests.train.sittings import ended, fork

FAMILIES = ("qwen2", "qwen3", "mistral", "gemma3_text", "gpt_oss")


def write(path: Path, family: str) -> Path:
    ends = {
        "eos_token_id": tiny.SPECIAL.index("<|end|>"),
        "pad_token_id": tiny.SPECIAL.index("<|pad|>"),
    }
    sizes = {"vocab_size": 320, "num_hidden_layers": 8, "layer_types": None}
    small_model(AutoConfig.for_model(family), **sizes, **ends).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with a small target and conversations."""
    monkeypatch.chdir(tmp_path)
    tiny.target(tmp_path / "target")
    rows = [
        {
            "messages": [
                {"role": turn["from"], "content": turn["value"]} for turn in row["conversations"]
            ]
        }
        for row in tiny.conversations(60)
    ]
    tiny.write_rows(tmp_path / "chats.jsonl", rows)
    tiny.write_rows(
        tmp_path / "questions.jsonl",
        [{"question_id": n, "turns": [f"Count {n} owls."]} for n in range(3)],
    )
    return tmp_path


init = partial(tiny.call, data_main, "init", "--data", "chats.jsonl")


@pytest.mark.parametrize("family", FAMILIES)
def test_init_writes_a_recipe_that_trains_for_any_family(
    folder: Path, family: str, capsys: Any
) -> None:
    assert (
        init("--target", write(folder / family, family), "--out", "r.yaml", "--kind", "eagle3") == 0
    )
    assert capsys.readouterr().out.endswith("\naerie run r.yaml\n")
    recipe = load(Path("r.yaml"))
    assert (recipe.features.mode, recipe.features.after_blocks, recipe.data.max_length) == (
        "cached",
        (2, 4, 7),
        128,
    )
    warm = (
        "--out",
        "w.yaml",
        "--kind",
        "eagle3",
        "--head.init_from",
        "head",
    )  # published heads have the usual taps
    assert init("--target", folder / family, *warm) == 0
    recipe = load(Path("w.yaml"))
    assert (
        recipe.features.after_blocks == (2, 4, 5)
        and recipe.train
        and recipe.train.optimizer.kind == "adamw"
    )
    rate, other = (
        recipe.train.learning_rate,
        ("--out", "a.yaml", "--kind", "eagle3", "--train.optimizer.kind", "adamw"),
    )
    assert init("--target", folder / family, *other) == 0 and (train := load(Path("a.yaml")).train)
    assert (train.learning_rate, train.scale_rates) == (rate, None)
    assert tiny.call(data_main, "features", "--config", "r.yaml", "--plan") == 0
    assert tiny.call(train_main, "--config", "r.yaml", "--plan", "--features.mode", "online") == 0


@pytest.mark.parametrize(
    ("speed", "every"), [(400e12, 20), (4e5, 10)]
)  # a quarter of 80 steps; every ten minutes
def test_on_gpus_init_evaluates_and_saves_by_minutes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, speed: float, every: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80e9)
    )
    monkeypatch.setattr("aerie.data.first_recipe.GPU_SPEED", speed)
    assert init("--target", "target", "--out", "r.yaml", "--train.max_steps", 80) == 0
    recipe = load(Path("r.yaml"))
    assert recipe.train and (recipe.train.eval_every, recipe.train.save_every) == (every, every)


def test_init_neither_asks_for_a_data_set_of_the_hub_nor_counts_it(folder: Path) -> None:
    assert init("--target", "target", "--data", "owner/name:train", "--out", "hub.yaml") == 0
    assert load(Path("hub.yaml")).features.mode == "online"


def test_a_plan_refuses_what_another_target_or_head_left_and_names_runs_apart(
    folder: Path, capsys: Any
) -> None:
    plan = partial(tiny.call, run_command, "r.yaml", "--plan")
    asked = ("--train.epochs", 3, "--train.accumulation", 2, "--data.held_out", 0.3)
    assert init("--target", "target", "--out", "r.yaml", *asked) == 0
    steps = re.search(r"# ([\d,]+) steps", capsys.readouterr().out)
    recipe = load(Path("r.yaml"))
    assert recipe.run == f"runs/{folder.name}-eagle1" and plan() == 0
    assert tiny.call(train_main, "--config", "r.yaml", "--plan", "--features.mode", "online") == 0
    assert steps and f"steps: {steps[1]} of 4 rows" in capsys.readouterr().out
    assert tiny.call(data_main, "features", "--config", "r.yaml") == 0
    capsys.readouterr()
    tiny.target(folder / "other/target", seed=1)
    for words, said in (
        (
            ("--target", "other/target"),
            r"target.path: target there, other/target asked; .*; choose another --run\n",
        ),
        (
            ("--head.kind", "eagle3"),
            r"after_blocks \(null: those of head.kind\): .*; choose another --run, or add --over",
        ),
    ):
        assert plan(*words) == 2
        assert re.search(said, error := capsys.readouterr().err) and error.count("\n") == 1, error
    assert plan("--target", "other/target", "--overwrite") == 0
    Stage(
        "calibration",
        Path(recipe.run, "calibration"),
        {"target": target_inputs(recipe.target), "head": [{}]},
    ).finish()
    assert plan() == 2 and "holds the calibrate of another head" in capsys.readouterr().err
    for place in ("runs", f"{recipe.run}/features"):
        assert tiny.call(status_command, place) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{recipe.run}: features done\n") and ("absent" in out) == (
            place != "runs"
        )


@pytest.mark.slow
def test_a_run_goes_to_its_report_and_status_says_what_is_left(folder: Path, capfd: Any) -> None:
    asked = "--bench.reference false --train.epochs 1"
    for stage in ("bench", "calibrate"):
        asked += f" --{stage}.prompts.path questions.jsonl --{stage}.prompts.max_new_tokens 8"
    assert init("--target", "target", "--out", "r.yaml", "--run", "run", *asked.split()) == 0
    run, status = partial(tiny.call, run_command, "r.yaml"), partial(tiny.call, status_command)
    assert (
        status("run") == 2
        and run("--train.learning_rat", 1) == 2
        and run("--bench.prompts.path", "no.jsonl") == 2
    )
    said = capfd.readouterr().err
    assert (
        "run: no run" in said
        and "did you mean" in said
        and "no.jsonl: no such" in said
        and not (folder / "run").exists()
    )
    assert run("--plan") == 0 and not (folder / "run").exists()
    assert run("--train.learning_rate", 1e30, "--train.clip_norm", 1e30) == 2
    assert "the training diverged" in capfd.readouterr().err.splitlines()[-1]
    assert status("run") == 0 and "train failed, exit code 2" in (out := capfd.readouterr().out)
    assert re.search(
        r"features +whole +60 rows.*\n  train eagle1 +stopped.*\n  calibrate +absent", out
    )
    child = fork(lambda: run("--run", "long", "--train.epochs", 9999))
    while not (folder / "long/metrics.jsonl").exists():
        time.sleep(0.1)
    assert status("long") == 0 and "train eagle1   running  step" in capfd.readouterr().out
    os.kill(child, signal.SIGTERM)  # the tests may run with SIGINT ignored
    assert ended(child) == 130 and status("long") == 0
    assert re.search(
        r"train interrupted, exit code 130\n.*\n  train eagle1 +stopped  step",
        capfd.readouterr().out,
    )
    assert run() == 0 and "features: whole, reused" in capfd.readouterr().out and status("run") == 0
    assert re.search(
        r"bench +whole +6 answers.*\n  report +whole +best tau .*\nnext: aerie (push|tune)",
        capfd.readouterr().out,
    )
    weights = folder / "run/heads/eagle1/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert (
        status("run") == 0
        and "next: aerie run run/recipe.yaml --overwrite" in capfd.readouterr().out
    )
    assert run() == 2 and "model.safetensors: is damaged" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_mistake_under_the_launcher_is_its_last_line_and_its_code(
    folder: Path, capfd: Any
) -> None:
    command = [str(ROOT / "train/main.py"), "--config", "nowhere.yaml"]
    assert ended(fork(lambda: run_command.launch(command, 2, "no"))) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: nowhere.yaml: No such file")
