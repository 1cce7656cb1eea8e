"""The record beside an output: a command that can be given again, without this machine's directories."""

import sys
from pathlib import Path

import pytest

from aerie.model.storage import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "told"),
    [("train/main.py", "train/main.py"), (str(ROOT / "infer" / "main.py"), "infer/main.py"), ("/opt/bin/tool", "tool")],
)
def test_a_script_of_the_checkout_is_told_by_its_path_in_it(
    monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, "--config", "c.yaml"])
    assert environment()["argv"] == [told, "--config", "c.yaml"]
