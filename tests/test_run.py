"""aerie init writes a recipe for any target; aerie run takes it to its report, also after stops.

aerie status tells what is left. The batch scripts read how a stage ended from its status file.
"""

import os
import re
import shutil
import signal
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
from aerie.data.inputs import target_inputs
from aerie.model.miniature import small_model
from aerie.model.storage import ROOT, Stage, write_status
from tests import tiny
from tests.configs.test_recipes import load
from tests.train.sittings import ended, fork

ENDS = {"eos": "end", "pad": "pad"}
INIT = "aerie init --data chats.jsonl --out r.yaml --target target "


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
    """Features and training take any family's recipe; another optimiser keeps its rate."""
    sizes = {"vocab_size": 320, "num_hidden_layers": 8, "layer_types": None}
    ends = {f"{name}_token_id": tiny.SPECIAL.index(f"<|{word}|>") for name, word in ENDS.items()}
    small_model(AutoConfig.for_model(family), **sizes, **ends).save_pretrained(folder / family)
    tiny.tokenizer().save_pretrained(folder / family)
    text = """
    {init} --out r.yaml
        aerie run r.yaml
    aerie features --config r.yaml --plan
    aerie train --config r.yaml --plan --features.mode online
    {init} --out w.yaml --head.init_from head
    {init} --out a.yaml --train.optimizer.kind adamw
    """
    init = f"aerie init --data chats.jsonl --target {folder / family} --kind eagle3"
    tiny.session(text, capsys, init=init)
    recipe, warm, adamw = (load(Path(f"{name}.yaml")) for name in "rwa")
    assert (recipe.features.mode, recipe.data.max_length) == ("cached", 128)
    assert recipe.features.after_blocks == (2, 4, 7)
    # Taps for a warm start are the usual ones, which published heads have.
    assert warm.features.after_blocks == (2, 4, 5) and warm.train.optimizer.kind == "adamw"
    assert (adamw.train.learning_rate, adamw.train.scale_rates) == (warm.train.learning_rate, None)


@pytest.mark.parametrize(("speed", "every"), [(400e12, 20), (4e5, 10)])
def test_init_on_gpus(
    folder: Path, monkeypatch: Any, capsys: Any, speed: float, every: int
) -> None:
    """A training evaluates and saves after a quarter of its 80 steps, or every ten minutes."""
    properties = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr("aerie.data.first_recipe.GPU_SPEED", speed)
    tiny.session(INIT + "--train.max_steps 80", capsys)
    train = load(Path("r.yaml")).train
    assert (train.eval_every, train.save_every) == (every, every)


def test_init_neither_loads_nor_counts_a_data_set_of_the_hub(folder: Path, capsys: Any) -> None:
    tiny.session(INIT + "--data owner/name:train", capsys)
    assert load(Path("r.yaml")).features.mode == "online"


def test_plan_refuses_what_another_target_or_head_left(folder: Path, capsys: Any) -> None:
    options = "--train.epochs 3 --train.accumulation 2 --data.held_out 0.3"
    steps = re.search(r"# ([\d,]+) steps", tiny.session(INIT + options, capsys))
    shutil.copy("r.yaml", "w.yaml")
    recipe = load(Path("r.yaml"))
    assert steps and recipe.run == f"runs/{folder.name}-eagle1"
    tiny.target(folder / "other/target", seed=1)
    text = """
    aerie run r.yaml w.yaml --plan
        aerie report --config r.yaml
        aerie features --config w.yaml
    aerie train --config r.yaml --plan --features.mode online
        steps: {steps} of 4 rows
    aerie features --config r.yaml
    aerie run r.yaml --plan --target other/target
        exit 2
        target.path: target before, other/target now;
        choose an
    aerie run r.yaml --plan --head.kind eagle3
        exit 2
        after_blocks (null: those of head.kind):
        or add --overwrite
    aerie run r.yaml --plan --target other/target --overwrite
    """
    tiny.session(text, capsys, steps=steps[1])
    inputs = {"target": target_inputs(recipe.target), "head": [{}]}
    Stage("calibration", Path(recipe.run, "calibration"), inputs).finish()
    text = """
    aerie run r.yaml --plan
        exit 2
        holds what calibrate made with another head
    aerie status {run}
        {run}: features done
        absent
    """
    tiny.session(text, capsys, run=recipe.run)


@pytest.mark.slow
def test_a_run_goes_to_its_report(folder: Path, capfd: Any) -> None:
    """The run goes on after mistakes, a failure and a kill; status always says what is left."""
    options = """--run run --bench.reference false --train.epochs 1
    --bench.prompts.path questions.jsonl --bench.prompts.max_new_tokens 8
    --calibrate.prompts.path questions.jsonl --calibrate.prompts.max_new_tokens 8"""
    text = """
    {init}
    aerie run r.yaml --bench.prompts.path no.jsonl
        exit 2
        no.jsonl: no such
    aerie run r.yaml --plan
    test ! -e run
    aerie run r.yaml --train.learning_rate 1e30 --train.clip_norm 1e30
        exit 2
        the training diverged
    aerie status run
        train failed, exit code 2
        features whole 60 rows
        train eagle1 stopped
        absent
    """
    tiny.session(text, capfd, init=" ".join((INIT + options).split()))
    run = partial(tiny.call, run_command, "r.yaml", "--run", "long", "--train.epochs", 9999)
    child = fork(run)
    while not Path("long/metrics.jsonl").exists():
        time.sleep(0.1)
    tiny.session("aerie status long\n train eagle1 running step", capfd)
    os.kill(child, signal.SIGTERM)  # the tests may run with SIGINT ignored
    assert ended(child) == 130
    text = """
    aerie status long
        train interrupted, exit code 130
        train eagle1 stopped step
    aerie run r.yaml
        features: whole, reused
        s: start
        , report
    aerie status run
        bench whole 6 answers
        report whole best tau
        next: aerie
    """
    tiny.session(text, capfd)
    began = time.monotonic()
    _, _, printed = tiny.typed("aerie run r.yaml r.yaml", capfd)
    total = re.search(r"run: (\d+) s", printed)
    assert total and int(total[1]) > 0.7 * (time.monotonic() - began)  # of both recipes
    tiny.flip(Path("run/heads/eagle1/model.safetensors"))
    text = """
    aerie status run
        next: aerie run run/recipe.yaml --overwrite
    aerie run r.yaml
        exit 2
        model.safetensors: is damaged
    """
    tiny.session(text, capfd)


@pytest.mark.slow
def test_a_mistake_under_the_launcher_is_its_last_line_and_its_code(capfd: Any) -> None:
    command = [str(ROOT / "train/main.py"), "--config", "nowhere.yaml"]
    assert ended(fork(lambda: run_command.launch(command, 2, "no"))) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: nowhere.yaml: No such file")


def test_the_scripts_read_the_status_that_a_command_writes_of_one_stage_of_one_share(
    tmp_path: Path, capsys: Any
) -> None:
    # A target without a chat template is a mistake: code 2.
    target = {"path": str(tiny.target(tmp_path / "bare", chat_template=None))}
    data = {"conversations": [str(tiny.write_conversations(tmp_path / "rows.jsonl", 4))]}
    run, values = tmp_path / "run", {"run": "elsewhere", "target": target, "data": data}
    words = f"--config {tiny.recipe(tmp_path / 'recipe.yaml', values)} --run {run}"
    (tmp_path / "since").touch()
    state = f"cd {ROOT}; {sys.executable} slurm/state.py --since {tmp_path}/since"
    for share in ("", "--shard 2/3"):
        text = """
        {state} features {words}
            unknown
        aerie features {words}
            exit 2
        {state} features {words}
            failed 2
        """
        tiny.session(text, capsys, state=state, words=f"{words} {share}")
    write_status(run / "status-distill-2-of-8.json", "distill 2/8", "requeue", 75)
    write_status(run / "status.json", "train", "failed", 2)
    text = """
    {state} distill {words} --shard 2/8
        requeue 75
    {state} distill {words}
        unknown
    {state} distill {words} --shard 3/8
        unknown
    {state} {words} --train.max_steps 9
        failed 2
    """  # state.py gets no command for train/main.py, which has none
    tiny.session(text, capsys, state=state, words=words)
