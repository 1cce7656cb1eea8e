"""What slurm/env.sh does without a cluster, and what the batch scripts learn of a run: what the command has written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aerie.data import main as data_main
from aerie.model.storage import write_status
from tests import tiny
from tests.slurm import CHECKOUT
from tests.train.test_main import call

# In the place of srun: a step that a signal stops, and that ends by itself when none has come within five seconds.
STEP = """\
#!/usr/bin/env bash
trap 'echo stopped; exit 75' USR1 TERM
for _ in {1..50}; do sleep 0.1; done
"""
# As if the signal came just before the script waits for the first time; SLURM itself sends TERM to the step, too.
SIGNALLED = """\
source slurm/env.sh
begin RECIPE
set -o functrace
trap 'if [[ $BASH_COMMAND == wait* ]]; then trap - DEBUG; sleep 0.5; kill SIGNAL; fi' DEBUG
step "" on_one_node train/main.py
"""


@pytest.mark.parametrize(
    ("signals", "code", "state", "said"),
    [
        ("-USR1 $$", 75, "requeue", ["stopped", "asked: requeue 7"]),
        ("-TERM $$ $started", 143, "interrupted", ["stopped"]),
    ],
)
def test_a_signal_before_the_script_waits_reaches_the_step(
    tmp_path: Path, signals: str, code: int, state: str, said: list[str]
) -> None:
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "bin").mkdir()
    for tool, text in (("srun", STEP), ("scontrol", "#!/bin/sh\necho asked: $*\n")):
        (tmp_path / "bin" / tool).write_text(text)
        (tmp_path / "bin" / tool).chmod(0o755)
    name = 'a "big" one\\of\tfive'
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": name, "SLURM_JOB_NODELIST": "n1", "AERIE_LOGS": str(tmp_path)}
    environment = {**os.environ, **variables, "AERIE_VENV": str(tmp_path)}  # goes to the front of the path
    command = ["bash", "-c", SIGNALLED.replace("RECIPE", str(tmp_path / "recipe.yaml")).replace("SIGNAL", signals)]
    options: Any = {"cwd": CHECKOUT, "env": environment, "timeout": 60}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert (done.returncode, done.stdout.splitlines()) == (code, said), done.stderr
    status = json.loads(next(tmp_path.glob("*-7.json")).read_text())
    assert (status["state"], status["name"]) == (state, name.replace("\t", " "))


def said(root: Path, *words: str) -> str:
    """What slurm/state.py prints; the words are those of the job's command."""
    command = [sys.executable, "slurm/state.py", "--since", str(root / "since"), *words]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()


def test_the_scripts_read_the_status_that_a_command_writes_of_one_stage_of_one_share(tmp_path: Path) -> None:
    target = {"path": str(tiny.target(tmp_path / "bare", chat_template=None))}  # a mistake: code 2
    data = {"conversations": [str(tiny.write_conversations(tmp_path / "rows.jsonl", 4))]}
    run, values = tmp_path / "run", {"run": "elsewhere", "target": target, "data": data}
    words = ("--config", str(tiny.recipe(tmp_path / "recipe.yaml", values)), "--run", str(run))
    (tmp_path / "since").touch()
    for shard in ((), ("--shard", "2/3")):
        assert said(tmp_path, "features", *words, *shard) == "unknown"
        assert call(data_main, "features", *words, *shard) == 2
        assert said(tmp_path, "features", *words, *shard) == "failed 2"
    write_status(run / "status-distill-2-of-8.json", "distill 2/8", "requeue", 75)
    assert said(tmp_path, "distill", *words, "--shard", "2/8") == "requeue 75"
    assert said(tmp_path, "distill", *words, "--shard", "3/8") == said(tmp_path, "distill", *words) == "unknown"
    write_status(run / "status.json", "train", "failed", 2)  # train/main.py has no commands
    assert said(tmp_path, *words, "--train.max_steps", "9") == "failed 2"
