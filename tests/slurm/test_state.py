"""What the batch scripts learn of a run: what the command itself has written, and no other job."""

import subprocess
import sys
from pathlib import Path

import pytest

from aerie.configs.errors import exit_code
from aerie.data.main import main
from aerie.model.storage import write_status
from tests import tiny
from tests.slurm import CHECKOUT


def said(root: Path, *words: str) -> str:
    """What slurm/state.py prints; the words are those of the job's command."""
    command = [sys.executable, "slurm/state.py", "--since", str(root / "since"), *words]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("shard", [(), ("--shard", "1/1"), ("--shard", "2/3")], ids=" ".join)
def test_the_scripts_read_the_status_that_a_command_writes(
    shard: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny.recipe(
        tmp_path / "recipe.yaml",
        {
            "run": str(tmp_path / "run"),
            "target": {"path": str(tiny.target(tmp_path / "bare", chat_template=None))},  # a mistake: code 2
            "data": {"conversations": [str(tiny.write_conversations(tmp_path / "rows.jsonl", 4))]},
        },
    )
    words = ("features", "--config", str(recipe), *shard)
    (tmp_path / "since").touch()
    assert said(tmp_path, *words) == "unknown"
    monkeypatch.setattr(sys, "argv", ["data/main.py", *words])
    assert exit_code(main) == 2
    assert said(tmp_path, *words) == "failed 2"
    assert said(tmp_path, "distill", *words[1:]) == "unknown"


def test_a_status_is_of_one_stage_of_one_share(tmp_path: Path) -> None:
    recipe, run = tiny.recipe(tmp_path / "recipe.yaml", {"run": "elsewhere"}), tmp_path / "run"
    words = ("--config", str(recipe), "--run", str(run))
    (tmp_path / "since").touch()
    write_status(run / "status.json", "distill", "failed", 2)
    write_status(run / "status-distill-2-of-8.json", "distill 2/8", "requeue", 75)
    assert said(tmp_path, "distill", *words) == said(tmp_path, "distill", *words, "--shard", "1/1") == "failed 2"
    assert said(tmp_path, "distill", *words, "--shard", "2/8") == "requeue 75"
    assert said(tmp_path, "distill", *words, "--shard", "3/8") == "unknown"
    assert said(tmp_path, *words) == said(tmp_path, *words, "--train.max_steps", "9") == "unknown"
    write_status(run / "status.json", "train", "failed", 2)
    assert said(tmp_path, *words, "--train.max_steps", "9") == "failed 2"
    assert said(tmp_path, "distill", *words) == "unknown"


def test_a_command_that_writes_no_status_is_not_answered_with_that_of_the_one_before(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path / "recipe.yaml", {"run": str(tmp_path / "run")})
    words = ("--config", str(recipe), "--bench.seeds", "3")
    (tmp_path / "since").touch()
    write_status(tmp_path / "run/status.json", "bench", "failed", 2)
    assert said(tmp_path, "bench", *words) == "failed 2"
    assert {said(tmp_path, name, *words) for name in ("report", "compare", "calibrate", "tune")} == {"unknown"}
