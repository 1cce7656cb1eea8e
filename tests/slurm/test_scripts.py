"""The batch scripts read how a run ended from what the command has written."""

import subprocess
import sys
from pathlib import Path

from aerie.data import main as data_main
from aerie.model.storage import ROOT, write_status
from tests import tiny
from tests.tiny import call


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
        assert call(data_main, "features", *words, *shard) == 2
        assert said(tmp_path, "features", *words, *shard) == "failed 2"
    write_status(run / "status-distill-2-of-8.json", "distill 2/8", "requeue", 75)
    assert said(tmp_path, "distill", *words, "--shard", "2/8") == "requeue 75"
    for shard in ((), ("--shard", "3/8")):
        assert said(tmp_path, "distill", *words, *shard) == "unknown"
    write_status(run / "status.json", "train", "failed", 2)  # train/main.py has no commands
    assert said(tmp_path, *words, "--train.max_steps", "9") == "failed 2"
