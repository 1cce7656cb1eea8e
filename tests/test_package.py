"""pip installs everything under `aerie`, beside a user's modules with our folders' names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import sys
import aerie, aerie.run, aerie.status, aerie.configs.keys
import aerie.data.main, aerie.train.main, aerie.model.main, aerie.infer.main
assert "torch" not in sys.modules
from aerie.infer import SpeculativeDecoder
from aerie.model.storage import template_path
assert template_path("configs/templates/vicuna.jinja").is_file()
print(aerie.__file__, SpeculativeDecoder.__name__)
"""


@pytest.mark.slow
def test_an_installed_wheel_works_beside_a_users_own_modules(tmp_path: Path) -> None:
    site, mine = tmp_path / "site", tmp_path / "mine"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(ROOT)],
        check=True,
        capture_output=True,
    )
    (mine / "data").mkdir(parents=True)
    for name in ("model.py", "train.py", "data/__init__.py"):
        (mine / name).write_text("raise SystemExit('a module of the user was imported')\n")
    environment = {**os.environ, "PYTHONPATH": str(site), "DS_ACCELERATOR": "cpu"}

    def python(*words: str) -> str:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=mine, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert python("-c", CODE).strip() == f"{site / 'aerie/__init__.py'} SpeculativeDecoder"
    assert "  chat        talk with the target" in python("-m", "aerie", "--help")
    assert (site / "aerie/data/connector/cpu_states.py").is_file()
    assert (site / "bin" / "aerie").is_file() and (site / "aerie/data/corpus/words.yaml").is_file()
    for template in ROOT.glob("[dim]*/**/*.jinja"):
        assert (site / "aerie" / template.relative_to(ROOT)).is_file()
