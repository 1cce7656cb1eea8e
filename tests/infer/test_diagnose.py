"""The diagnosis: what is wrong with a head, said in the first sentence."""

from pathlib import Path
from typing import Any

import pytest

from aerie.model.storage import read_json
from tests import tiny
from tests.infer.test_main import write_recipe


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("diagnose")
    write_recipe(root)
    return root


def test_it_is_said_on_a_page_and_in_a_file(world: Path, capsys: Any) -> None:
    tiny.session(
        """
        aerie diagnose --target {root}/target --head {root}/run/heads/eagle3
            exit 2
            error: diagnose needs --config RECIPE, or --target, --head and --prompts FILE
        aerie diagnose --config {root}/recipe.yaml --out {root}/found.json
            undertrained: none of the known causes
            chain, decoded here
        """,
        capsys,
        root=world,
    )
    assert read_json(world / "found.json")["cause"] == "undertrained"
