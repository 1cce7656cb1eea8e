"""aerie init, run and status: a recipe for any target, run to its report, stopped and continued.

The batch scripts read how a run ended from what the command has written.
"""

import os
import re
import signal
import subprocess
import sys
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
from aerie.model.storage import ROOT, Stage, write_status
from aerie.train import main as train_main
from tests import tiny
from tests.configs.test_recipes import load
from tests.train.sittings import ended, fork

ENDS = {"eos": "end", "pad": "pad"}
init = partial(tiny.call, data_main, "init", "--data", "chats.jsonl", "--out", "r.yaml")
run = partial(tiny.call, run_command, "r.yaml")
status = partial(tiny.call, status_command)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with a small target and conversations."""
    monkeypatch.chdir(tmp_path)
    tiny.target(tmp_path / "target")
    tiny.write_conversations(tmp_path / "chats.jsonl", 60)
    questions = [{"question_id": n, "turns": [f"Count {n} owls."]} for n in range(3)]
    tiny.write_rows(tmp_path / "questions.jsonl", questions)
    return tmp_path


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3_text", "gpt_oss"])
def test_init_writes_a_recipe_that_trains(folder: Path, family: str, capsys: Any) -> None:
    """For any family: features and training take it; another optimiser leaves the rate alone."""
    sizes = {"vocab_size": 320, "num_hidden_layers": 8, "layer_types": None}
    ends = {f"{name}_token_id": tiny.SPECIAL.index(f"<|{word}|>") for name, word in ENDS.items()}
    small_model(AutoConfig.for_model(family), **sizes, **ends).save_pretrained(folder / family)
    tiny.tokenizer().save_pretrained(folder / family)
    make = partial(init, "--target", folder / family, "--kind", "eagle3")
    assert make() == 0 and capsys.readouterr().out.endswith("\naerie run r.yaml\n")
    recipe = load(Path("r.yaml"))
    assert (recipe.features.mode, recipe.data.max_length) == ("cached", 128)
    assert recipe.features.after_blocks == (2, 4, 7)
    assert tiny.call(data_main, "features", "--config", "r.yaml", "--plan") == 0
    assert tiny.call(train_main, "--config", "r.yaml", "--plan", "--features.mode", "online") == 0
    # A published head has the usual taps.
    assert make("--out", "w.yaml", "--head.init_from", "head") == 0
    warm = load(Path("w.yaml"))
    assert warm.features.after_blocks == (2, 4, 5) and warm.train.optimizer.kind == "adamw"
    assert make("--out", "a.yaml", "--train.optimizer.kind", "adamw") == 0
    train = load(Path("a.yaml")).train
    assert (train.learning_rate, train.scale_rates) == (warm.train.learning_rate, None)


@pytest.mark.parametrize(("speed", "every"), [(400e12, 20), (4e5, 10)])
def test_init_on_gpus(folder: Path, monkeypatch: Any, speed: float, every: int) -> None:
    """Evaluates and saves after a quarter of 80 steps, or every ten minutes."""
    properties = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr("aerie.data.first_recipe.GPU_SPEED", speed)
    assert init("--target", "target", "--train.max_steps", 80) == 0
    train = load(Path("r.yaml")).train
    assert (train.eval_every, train.save_every) == (every, every)


def test_init_neither_loads_nor_counts_a_data_set_of_the_hub(folder: Path) -> None:
    assert init("--target", "target", "--data", "owner/name:train") == 0
    assert load(Path("r.yaml")).features.mode == "online"


def test_plan_refuses_what_another_target_or_head_left(folder: Path, capsys: Any) -> None:
    plan = partial(run, "--plan")
    options = ("--train.epochs", 3, "--train.accumulation", 2, "--data.held_out", 0.3)
    assert init("--target", "target", *options) == 0
    steps = re.search(r"# ([\d,]+) steps", capsys.readouterr().out)
    recipe = load(Path("r.yaml"))
    assert recipe.run == f"runs/{folder.name}-eagle1" and plan() == 0
    assert tiny.call(train_main, "--config", "r.yaml", "--plan", "--features.mode", "online") == 0
    assert steps and f"steps: {steps[1]} of 4 rows" in capsys.readouterr().out
    assert tiny.call(data_main, "features", "--config", "r.yaml") == 0
    tiny.target(folder / "other/target", seed=1)
    capsys.readouterr()
    for words, refusal in (
        ("--target other/target", r"target.path: target there, other/target asked; .*choose an"),
        ("--head.kind eagle3", r"after_blocks \(null: those of head.kind\): .*or add --overwrite"),
    ):
        assert plan(*words.split()) == 2
        errors = capsys.readouterr().err
        assert re.search(refusal, errors) and errors.count("\n") == 1, errors
    assert plan("--target", "other/target", "--overwrite") == 0
    inputs = {"target": target_inputs(recipe.target), "head": [{}]}
    Stage("calibration", Path(recipe.run, "calibration"), inputs).finish()
    assert plan() == 2 and "holds the calibrate of another head" in capsys.readouterr().err
    assert status(recipe.run) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{recipe.run}: features done\n") and "absent" in out


@pytest.mark.slow
def test_a_run_goes_to_its_report(folder: Path, capfd: Any) -> None:
    """After mistakes, a failure and a kill; and status says what is left each time."""

    def status_of(run_name: str) -> str:
        capfd.readouterr()
        assert status(run_name) == 0
        return str(capfd.readouterr().out)

    options = """--run run --bench.reference false --train.epochs 1
    --bench.prompts.path questions.jsonl --bench.prompts.max_new_tokens 8
    --calibrate.prompts.path questions.jsonl --calibrate.prompts.max_new_tokens 8"""
    assert init("--target", "target", *options.split()) == 0
    assert run("--bench.prompts.path", "no.jsonl") == 2 and run("--plan") == 0
    assert "no.jsonl: no such" in capfd.readouterr().err and not Path("run").exists()
    assert run("--train.learning_rate", 1e30, "--train.clip_norm", 1e30) == 2
    assert "the training diverged" in capfd.readouterr().err.splitlines()[-1]
    out = status_of("run")
    assert "train failed, exit code 2" in out
    assert re.search(r"features +whole +60 rows.*\n  train eagle1 +stopped.*\n  cali.* absent", out)
    child = fork(lambda: run("--run", "long", "--train.epochs", 9999))
    while not Path("long/metrics.jsonl").exists():
        time.sleep(0.1)
    assert "train eagle1   running  step" in status_of("long")
    os.kill(child, signal.SIGTERM)  # the tests may run with SIGINT ignored
    assert ended(child) == 130
    lines = r"train interrupted, exit code 130\n.*\n  train eagle1 +stopped  step"
    assert re.search(lines, status_of("long"))
    assert run() == 0 and "features: whole, reused" in capfd.readouterr().out
    lines = r"bench +whole +6 answers.*\n  report +whole +best tau .*\nnext: aerie (push|tune)"
    assert re.search(lines, status_of("run"))
    tiny.flip(Path("run/heads/eagle1/model.safetensors"))
    assert "next: aerie run run/recipe.yaml --overwrite" in status_of("run")
    assert run() == 2 and "model.safetensors: is damaged" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_mistake_under_the_launcher_is_its_last_line_and_its_code(capfd: Any) -> None:
    command = [str(ROOT / "train/main.py"), "--config", "nowhere.yaml"]
    assert ended(fork(lambda: run_command.launch(command, 2, "no"))) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: nowhere.yaml: No such file")


def said(root: Path, *words: str) -> str:
    """What slurm/state.py prints for the words of the job's command."""
    command = [sys.executable, "slurm/state.py", "--since", str(root / "since"), *words]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def test_the_scripts_read_the_status_that_a_command_writes_of_one_stage_of_one_share(
    tmp_path: Path,
) -> None:
    target = {"path": str(tiny.target(tmp_path / "bare", chat_template=None))}  # a mistake: code 2
    data = {"conversations": [str(tiny.write_conversations(tmp_path / "rows.jsonl", 4))]}
    run, values = tmp_path / "run", {"run": "elsewhere", "target": target, "data": data}
    words = ("--config", str(tiny.recipe(tmp_path / "recipe.yaml", values)), "--run", str(run))
    (tmp_path / "since").touch()
    for shard in ((), ("--shard", "2/3")):
        assert said(tmp_path, "features", *words, *shard) == "unknown"
        assert tiny.call(data_main, "features", *words, *shard) == 2
        assert said(tmp_path, "features", *words, *shard) == "failed 2"
    write_status(run / "status-distill-2-of-8.json", "distill 2/8", "requeue", 75)
    assert said(tmp_path, "distill", *words, "--shard", "2/8") == "requeue 75"
    for shard in ((), ("--shard", "3/8")):
        assert said(tmp_path, "distill", *words, *shard) == "unknown"
    write_status(run / "status.json", "train", "failed", 2)  # train/main.py has no commands
    assert said(tmp_path, *words, "--train.max_steps", "9") == "failed 2"
