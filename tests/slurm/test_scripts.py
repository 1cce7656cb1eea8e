"""What slurm/env.sh does without a cluster, and what the batch scripts learn of a run: what the command has written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aerie.configs.errors import exit_code
from aerie.data.main import main
from aerie.model.storage import write_status
from tests import tiny
from tests.slurm import CHECKOUT

# In the place of srun: a step that USR1 stops, and that ends by itself when it has not come within five seconds.
STEP = """\
#!/usr/bin/env bash
trap 'echo stopped; exit 75' USR1
for _ in {1..50}; do sleep 0.1; done
"""
# As if the signal came just before the script waits for the first time, whatever it waits for.
SIGNALLED = """\
source slurm/env.sh
begin recipe.yaml
set -o functrace
trap 'if [[ $BASH_COMMAND == wait* ]]; then trap - DEBUG; sleep 0.5; kill -USR1 $$; fi' DEBUG
step "" on_one_node train/main.py
"""


def test_a_signal_just_before_the_script_waits_still_reaches_the_step_of_a_job_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "bin").mkdir()
    for tool, text in (("srun", STEP), ("scontrol", "#!/bin/sh\necho asked: $*\n")):
        (tmp_path / "bin" / tool).write_text(text)
        (tmp_path / "bin" / tool).chmod(0o755)
    name = 'a "big" one\\of\tfive'
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": name, "SLURM_JOB_NODELIST": "n1", "AERIE_LOGS": str(tmp_path)}
    # AERIE_VENV goes to the front of the path.
    environment = {**os.environ, **variables, "AERIE_VENV": str(tmp_path)}
    command = ["bash", "-c", SIGNALLED.replace("recipe.yaml", str(tmp_path / "recipe.yaml"))]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (75, ["stopped", "asked: requeue 7"]), done.stderr
    status = json.loads(next(tmp_path.glob("*-7.json")).read_text())
    assert (status["state"], status["name"]) == ("requeue", name.replace("\t", " "))


def said(root: Path, *words: str) -> str:
    """What slurm/state.py prints; the words are those of the job's command."""
    command = [sys.executable, "slurm/state.py", "--since", str(root / "since"), *words]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("shard", [(), ("--shard", "2/3")], ids=" ".join)
def test_the_scripts_read_the_status_that_a_command_writes(
    shard: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"path": str(tiny.target(tmp_path / "bare", chat_template=None))}  # a mistake: code 2
    data = {"conversations": [str(tiny.write_conversations(tmp_path / "rows.jsonl", 4))]}
    values = {"run": str(tmp_path / "run"), "target": target, "data": data}
    words = ("features", "--config", str(tiny.recipe(tmp_path / "recipe.yaml", values)), *shard)
    (tmp_path / "since").touch()
    assert said(tmp_path, *words) == "unknown"
    monkeypatch.setattr(sys, "argv", ["data/main.py", *words])
    assert exit_code(main) == 2
    assert said(tmp_path, *words) == "failed 2" and said(tmp_path, "distill", *words[1:]) == "unknown"


def test_a_status_is_of_one_stage_of_one_share(tmp_path: Path) -> None:
    recipe, run = tiny.recipe(tmp_path / "recipe.yaml", {"run": "elsewhere"}), tmp_path / "run"
    words = ("--config", str(recipe), "--run", str(run))
    (tmp_path / "since").touch()
    write_status(run / "status.json", "distill", "failed", 2)
    write_status(run / "status-distill-2-of-8.json", "distill 2/8", "requeue", 75)
    assert said(tmp_path, "distill", *words) == said(tmp_path, "distill", *words, "--shard", "1/1") == "failed 2"
    assert said(tmp_path, "distill", *words, "--shard", "2/8") == "requeue 75"
    assert said(tmp_path, "distill", *words, "--shard", "3/8") == said(tmp_path, *words) == "unknown"
    write_status(run / "status.json", "train", "failed", 2)  # train/main.py has no commands
    assert said(tmp_path, *words, "--train.max_steps", "9") == "failed 2"
    assert {said(tmp_path, name, *words) for name in ("distill", "report", "tune")} == {"unknown"}
