"""Laws of a stopped command: what status.json says, what is left, and what the same command makes of it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import exit_code
from aerie.data import main as data_main
from aerie.model.storage import Stage
from aerie.train import main as train_main
from aerie.train import resume as output
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with its target, conversations and feature cache."""
    tiny.target(tmp_path / "target")
    tiny.write_conversations(tmp_path / "train.jsonl", 40)
    values = {
        "run": str(tmp_path / "run"),
        "threads": 1,
        "target": {"path": str(tmp_path / "target"), "dtype": "float32"},
        "data": {"conversations": [str(tmp_path / "train.jsonl")], "max_length": 128, "held_out": 0.2},
        "tree": {"levels": 4},
        "train": {
            "max_steps": 6,
            "batch_size": 8,
            "warmup_steps": 1,
            "log_every": 3,
            "eval_every": 3,
            "save_every": 2,
            "keep_best": 2,
        },
    }
    path = tiny.recipe(tmp_path / "recipe.yaml", values)
    assert call(data_main, "features", "--config", path) == 0
    return path


def call(module: Any, *words: object) -> int:
    """The exit code of a command run in this process."""
    before, sys.argv = sys.argv, ["main.py", *map(str, words)]
    try:
        return exit_code(module.main)
    finally:
        sys.argv = before


def status(recipe: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((recipe.parent / "run/status.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "state", "code"),
    [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "requeue", 75), (signal.SIGUSR1, "requeue", 75)],
)
def test_a_signal_ends_a_run_cleanly_and_the_next_call_goes_on(
    recipe: Path, number: signal.Signals, state: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "train/main.py", "--config", str(recipe)]
    command += ["--train.max_steps", "4000", "--train.epochs", "4000", "--train.eval_every", "0"]
    command += ["--train.save_every", "4000", "--train.log_every", "1"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    first = next(line for line in child.stdout if line.startswith("step "))
    time.sleep(0.2)
    child.send_signal(number)
    rest, _ = child.communicate(timeout=300)
    assert first and child.returncode == code and "stopped by a signal after step" in rest and "Traceback" not in rest
    assert status(recipe) == {"stage": "train", "state": state, "code": code}
    capsys.readouterr()
    assert call(train_main, *command[2:], "--train.max_seconds", "0") == 0
    assert "going on from step" in capsys.readouterr().out


def test_a_scheduler_that_stops_the_start_up_is_told_to_requeue(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_main, "_job", lambda setting: signal.raise_signal(signal.SIGTERM))
    assert call(train_main, "--config", recipe) == 75
    assert status(recipe) == {"stage": "train", "state": "requeue", "code": 75}


def test_a_finished_run_leaves_no_saves_and_the_best_weights_that_were_asked_for(recipe: Path) -> None:
    assert call(train_main, "--config", recipe) == 0
    state, record = (
        recipe.parent / "run/state/eagle1",
        json.loads((recipe.parent / "run/heads/eagle1/provenance.json").read_text()),
    )
    assert sorted(path.name for path in state.iterdir() if path.name != ".lock") == ["best"]
    assert len(record["best_steps"]) == 2 and record["best_steps"][0] == record["best_step"]
    kept = {path.name for path in (state / "best").iterdir()}
    assert kept == {f"step-{step:08d}" for step in record["best_steps"]}
    assert call(train_main, "--config", recipe, "--train.keep_last", "1", "--is-whole") == 0


@pytest.mark.parametrize("moment", ["finish", "_forget_saves"])
def test_a_kill_at_the_very_end_costs_no_training(
    recipe: Path, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*arguments: object, **facts: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(*((Stage, moment) if moment == "finish" else (train_main, moment)), killed)
        assert call(train_main, "--config", recipe) == 130
    first = (recipe.parent / "run/heads/eagle1/model.safetensors").read_bytes()
    capsys.readouterr()
    assert call(train_main, "--config", recipe) == 0
    said = "going on from step 4 of 6" if moment == "finish" else "train eagle1: whole, reused"
    assert said in capsys.readouterr().out
    assert (recipe.parent / "run/heads/eagle1/model.safetensors").read_bytes() == first
    assert not list((recipe.parent / "run/state/eagle1").glob("step-*"))


def stop_in_the_middle(recipe: Path, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Leaves a run with saves that is not whole."""

    def killed(*arguments: object, **facts: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Stage, "finish", killed)
        assert call(train_main, "--config", recipe, *words) == 130


def test_other_conversations_stop_a_resume_with_the_sentence_that_says_so(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_in_the_middle(recipe, monkeypatch)
    tiny.write_conversations(recipe.parent / "train.jsonl", 40, seed=1)
    assert call(train_main, "--config", recipe) == 2
    assert f"made before {recipe.parent / 'train.jsonl'} changed; rebuild with" in capsys.readouterr().err
    assert call(data_main, "features", "--config", recipe, "--overwrite") == 0
    assert call(train_main, "--config", recipe) == 2
    error = capsys.readouterr().err
    assert "step-00000004: step 4 on other data (feature cache: " in error and "--overwrite" in error
    assert call(train_main, "--config", recipe, "--overwrite") == 0


def test_online_other_conversations_and_another_recipe_stop_a_resume(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    online = ("--features.mode", "online", "--run", recipe.parent / "online")
    stop_in_the_middle(recipe, monkeypatch, *online)
    assert call(train_main, "--config", recipe, *online, "--train.seed", "3") == 2
    assert "of another recipe (train.seed: 0 there, 3 asked)" in capsys.readouterr().err
    tiny.write_conversations(recipe.parent / "train.jsonl", 40, seed=1)
    assert call(train_main, "--config", recipe, *online) == 2
    error = capsys.readouterr().err
    assert f"step 4 on other data (conversations.{recipe.parent / 'train.jsonl'}: " in error
    assert "token ids of the rows: " in error


def test_a_kill_between_any_two_files_of_the_command_leaves_a_run_that_goes_on(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = train_main.write_text, [1]

    def killed(path: Path, text: str) -> None:
        real(path, text)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    for module in (output, train_main):  # the first names the output, the second later writes its recipe
        monkeypatch.setattr(module, "write_text", killed)
    for place in (1, 2):
        left[0] = place
        assert call(train_main, "--config", recipe) == 130
    assert call(train_main, "--config", recipe) == 0
