"""No chat template loses a word in silence: each is learnt, or the row is left out."""

from pathlib import Path

import pytest

from aerie.data.values import UnusableRow
from tests.data import templates

PATHS = templates.template_paths()
needs_trl = pytest.mark.skipif(not PATHS, reason="trl, which ships the templates, is not installed")


@needs_trl
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_silent_loss(path: Path) -> None:
    """Every text of a kept conversation is learnt or read; only plain pairs are always kept."""
    template = path.read_text(encoding="utf-8")
    kept = 0
    for kind in templates.KINDS:
        try:
            rows, tally = templates.render(template, kind)
        except UnusableRow as error:
            assert kind != templates.Kind() and error.reason
            continue
        kept += 1
        lost = templates.lost_texts(kind, rows)
        assert bool(lost) == templates.is_cut(tally), kind
        assert not any(text.startswith(("question0", "system")) for text in lost), kind
    assert kept >= 4


@needs_trl
def test_table_of_the_docs() -> None:
    """docs/data.md holds the table that `python -m tests.data.templates` writes."""
    assert templates.table() in templates.PAGE.read_text(encoding="utf-8")
