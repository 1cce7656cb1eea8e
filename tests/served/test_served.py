"""Each row of the table in docs/served.md: vLLM drafts with an export what its head drafts here."""

import pytest

from tests.served.__main__ import (
    PYTHON,
    Outcome,
    outcomes,
    page_parts,
    table,
    without_cycles,
)
from tests.served.rows import ROWS

pytestmark = [pytest.mark.served, pytest.mark.slow]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    if not PYTHON.exists():
        pytest.skip("no vLLM: make served sets it up in .venv-served")
    return outcomes(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_vllm_drafts_with_an_export_what_its_head_drafts_here(
    made: list[Outcome], number: int
) -> None:
    outcome = made[number]
    assert outcome.state == outcome.row.expected, outcome


def test_the_page_has_this_table(made: list[Outcome]) -> None:
    assert without_cycles(page_parts()[1]) == without_cycles(table(made))
