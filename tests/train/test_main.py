"""The command: plans, refusals in one line, a whole run, its reuse."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from data import main as data_main
from model.checkpoint import head_facts, load_head
from model.errors import exit_code
from tests import tiny
from train import main as train_main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a target, conversations, a recipe and its feature cache."""
    root = tmp_path_factory.mktemp("run")
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 60)
    _write_recipe(root, {})
    assert _call(data_main, "features", "--config", root / "recipe.yaml") == 0
    yield root


def _write_recipe(root: Path, train: dict[str, Any], **sections: Any) -> Path:
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.3},
        "tree": {"levels": 4},
        "train": {"max_steps": 6, "batch_size": 8, "warmup_steps": 1, "log_every": 3, "eval_every": 3, **train},
        **sections,
    }
    return tiny.recipe(root / "recipe.yaml", values)


def _call(module: Any, *words: object) -> int:
    """The exit code of a command run in this process."""
    before = sys.argv, os.environ.get("TRANSFORMERS_VERBOSITY")
    sys.argv = ["main.py", *map(str, words)]
    try:
        return exit_code(module.main)
    finally:
        sys.argv = before[0]
        PartialState._reset_state()


def test_a_plan_prints_steps_tokens_and_bytes_and_writes_nothing(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(made.rglob("*"))
    assert _call(train_main, "--config", made / "recipe.yaml", "--plan") == 0
    out = capsys.readouterr().out
    assert "steps: 6 of 8 rows x 1 x 1 process" in out and "trained" in out and "MiB with gradients and Adam" in out
    assert sorted(made.rglob("*")) == before


def test_a_plan_writes_an_untrained_head_that_loads(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", made / "recipe.yaml", "--plan", "--init-to", tmp_path / "new")
    assert _call(train_main, *words) == 0
    assert load_head(tmp_path / "new").config.hidden_size == 32
    assert _call(train_main, *words) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train.learning_rat", "1"], "did you mean 'train.learning_rate'?"),
        (["--run", "nowhere"], "nowhere/features: no such feature cache; build it with:"),
        (["--target", "/no/such/target"], "/no/such/target: no such target directory"),
        (["--data.max_length", "64"], "data.max_length 128, this recipe asks 64; rebuild with:"),
        (["--head.max_position_embeddings", "100"], "head.max_position_embeddings: 100 is less than data.max_length"),
        (["--init-to", "x"], "use it with --plan"),
        (["--head.init_from", "/no/head"], "/no/head: no such head directory"),
    ],
)
def test_mistakes_get_one_line_and_code_2(
    made: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    before = sorted(path for path in made.rglob("*") if path.name != "status.json")
    plan = [] if words[0] == "--init-to" else ["--plan"]
    assert _call(train_main, "--config", made / "recipe.yaml", *plan, *words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
    assert sorted(path for path in made.rglob("*") if path.name != "status.json") == before


def test_processes_that_do_not_know_each_other_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _call(train_main, "--config", made / "recipe.yaml", "--output", tmp_path / "head") == 2
    assert "asked for 2 processes that train together and 1 does" in capsys.readouterr().err
    assert json.loads((made / "run/status.json").read_text()) == {"stage": "train", "state": "failed", "code": 2}
    assert not (tmp_path / "head").exists()


def test_a_run_is_trained_once_reused_and_never_overwritten_by_another(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = made / "recipe.yaml"
    assert _call(train_main, "--config", recipe, "--is-whole") == 1
    assert _call(train_main, "--config", recipe) == 0
    head = made / "run/heads/eagle1"
    facts, record = head_facts(head), json.loads((head / "provenance.json").read_text())
    assert load_head(head) and facts["step"] in (3, 6) and facts["predicted_tau"] >= 1
    assert record["steps"] == 6 and record["tokens"] > 0 and record["ended"] == "finished"
    assert json.loads((made / "run/status.json").read_text()) == {"stage": "train", "state": "done", "code": 0}
    assert (head / "recipe.yaml").is_file() and (made / "run/metrics.jsonl").is_file()
    assert _call(train_main, "--config", recipe, "--is-whole") == 0
    capsys.readouterr()
    assert _call(train_main, "--config", recipe) == 0
    assert "train eagle1: whole, reused" in capsys.readouterr().out
    written = (head / "model.safetensors").read_bytes()
    assert _call(train_main, "--config", recipe, "--train.seed", "5") == 2
    assert "train.seed: 0 there, 5 asked" in capsys.readouterr().err
    assert (head / "model.safetensors").read_bytes() == written
    assert _call(train_main, "--config", recipe, "--train.seed", "5", "--overwrite") == 0
    assert (head / "model.safetensors").read_bytes() != written


def test_a_small_lm_is_trained_into_an_ordinary_directory(made: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    values = {
        "run": str(tmp_path / "run"),
        "output": str(tmp_path / "lm"),
        "threads": 1,
        "target": {"path": str(made / "target")},
        "data": {"conversations": [str(made / "train.jsonl")], "max_length": 128, "supervise": "all", "held_out": 0.3},
        "head": {"kind": "draft_lm", "num_hidden_layers": 2, **sizes},
        "train": {
            "max_steps": 12,
            "batch_size": 8,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "eval_every": 6,
            "log_every": 6,
        },
    }
    recipe = tiny.recipe(tmp_path / "lm.yaml", values)
    assert _call(train_main, "--config", recipe) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert losses[-1] < losses[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "lm").config.num_hidden_layers == 2
    assert _call(train_main, "--config", recipe, "--is-whole") == 0


def test_whether_a_run_is_whole_is_told_without_torch(made: Path) -> None:
    code = (
        "import sys; sys.argv = ['main.py', '--config', sys.argv[1], '--is-whole']\n"
        "from train import main\n"
        "main.main()\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(made / "recipe.yaml")], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.slow
def test_ctrl_c_ends_a_run_cleanly_and_the_next_call_goes_on(made: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "train/main.py",
        "--config",
        str(made / "recipe.yaml"),
        "--output",
        str(tmp_path / "head"),
    ]
    command += ["--train.max_steps", "4000", "--train.epochs", "4000", "--train.eval_every", "0"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    first = next(line for line in child.stdout if line.startswith("step "))
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    rest, _ = child.communicate(timeout=60)
    assert first and child.returncode == 130 and "stopped by a signal after step" in rest and "Traceback" not in rest
    assert json.loads((made / "run/status.json").read_text())["state"] == "interrupted"
    again = subprocess.run(
        [*command, "--train.max_seconds", "1"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert again.returncode == 0 and "going on from step" in again.stdout
