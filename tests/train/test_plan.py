"""What a run would do, said before anything is started: the recipes of targets that no test can load."""

import json
from pathlib import Path

import pytest

from aerie.configs.errors import exit_code
from aerie.train import main as train_main
from tests import tiny

RECIPES = Path(__file__).resolve().parents[2] / "configs" / "eagle3"
BLOCKS = {"vicuna-13b": 40, "llama31-8b": 32, "llama33-70b": 80, "qwen3-8b": 36, "qwq-32b": 64}


@pytest.mark.parametrize("recipe", BLOCKS)
def test_an_eagle3_recipe_plans_its_run_for_a_small_target_of_the_same_depth(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.target(tmp_path / "target", num_blocks=BLOCKS[recipe], max_position_embeddings=8192)
    tiny.write_conversations(tmp_path / "train.jsonl", 60)
    own = {
        "run": tmp_path / "run",
        "target.path": tmp_path / "target",
        "target.chat_template": "null",
        "data.conversations": f"[{tmp_path / 'train.jsonl'}]",
        "data.held_out": 0.3,
        "head.draft_vocab_size": 160,
    }
    words = [str(word) for key, value in own.items() for word in (f"--{key}", value)]
    path = RECIPES / f"{recipe}.yaml"
    monkeypatch.setattr(
        "sys.argv", ["main.py", "--config", str(path), *words, "--plan", "--init-to", str(tmp_path / "new")]
    )
    assert exit_code(train_main.main) == 0
    assert "draft vocabulary: 160 of 320 tokens cover" in capsys.readouterr().out
    taps = json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))["after_blocks"]
    assert f"({', '.join(map(str, taps))})" in path.read_text(encoding="utf-8")  # as its comment says
