"""vLLM drafts with each export what the head drafts here, and aerie diagnose asks a vLLM server.

The exports are the rows of the table in docs/exports.md.
"""

from pathlib import Path

import pytest

from aerie.infer import main
from aerie.model.storage import read_json
from tests import tiny
from tests.served.__main__ import (
    PAGE,
    PYTHON,
    Outcome,
    outcomes,
    page,
    serving,
    without_cycles,
)
from tests.served.rows import ROWS

pytestmark = [pytest.mark.served, pytest.mark.slow]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip("no vLLM: make served sets it up in .venv-served")
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def made(directory: Path) -> list[Outcome]:
    return outcomes(directory)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_vllm_drafts_with_an_export_what_its_head_drafts_here(
    made: list[Outcome], number: int
) -> None:
    outcome = made[number]
    assert outcome.state == outcome.row.expected, outcome


def test_the_page_has_this_table(made: list[Outcome]) -> None:
    assert without_cycles(PAGE.read_text(encoding="utf-8")) == without_cycles(page(made))


def test_the_ladder_has_the_servers_steps(made: list[Outcome], directory: Path) -> None:
    export = min(directory.glob("export*"), key=lambda path: path.stat().st_mtime)
    questions = [f"Please count {number} boats." for number in range(2, 10)]
    prompts = directory / "questions.txt"
    prompts.write_text("\n".join(questions))
    words = ["--target", directory / "target", "--head", directory / "head0"]
    words += ["--prompts", prompts, "--out", directory / "diagnose.json"]
    speculative = {"model": str(export), "method": "eagle", "num_speculative_tokens": 5}
    with serving(directory, speculative) as url:
        assert tiny.call(main, "diagnose", *words, "--server", url) == 0
    figures = read_json(directory / "diagnose.json")["figures"]
    for step in ("server", "reported"):
        assert figures[f"ladder.{step}.tau"]["value"] > 1
    # The server accepts every draft up to the same token as this engine.
    assert figures["drop.server.tau"]["value"] == pytest.approx(0, abs=1e-9)
