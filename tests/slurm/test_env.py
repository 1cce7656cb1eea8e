"""What slurm/env.sh does by itself, without a cluster."""

import json
import os
import subprocess
from pathlib import Path

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


def in_bash(script: str, root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "n1", "AERIE_LOGS": str(root)}
    path = f"{root}/bin:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script.replace("recipe.yaml", str(root / "recipe.yaml"))],
        cwd=CHECKOUT,
        env={**os.environ, **variables, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_signal_just_before_the_script_waits_still_reaches_the_step(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", STEP), ("scontrol", "#!/bin/sh\necho asked: $*\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    # AERIE_VENV goes to the front of the path
    done = in_bash(SIGNALLED, tmp_path, AERIE_VENV=str(tmp_path))
    assert (done.returncode, done.stdout.splitlines()) == (75, ["stopped", "asked: requeue 7"]), done.stderr
    assert json.loads((tmp_path / "train-7.json").read_text())["state"] == "requeue"


def test_a_jobs_name_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    name = 'a "big" one\\of\tfive'
    assert in_bash("source slurm/env.sh; begin recipe.yaml", tmp_path, SLURM_JOB_NAME=name).returncode == 0
    status = next(tmp_path.glob("*-7.json"))
    assert json.loads(status.read_text())["name"] == name.replace("\t", " ")
