"""The keys of a recipe, and the page that lists them."""

from pathlib import Path

import pytest

from aerie.configs import keys
from tests.tiny import call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def test_the_page_of_recipes_is_fresh_and_every_key_has_a_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(keys, "--markdown") == 0
    fresh = PAGE.read_text(encoding="utf-8") == capsys.readouterr().out
    assert fresh, "renew it: aerie keys --markdown > docs/recipes.md"
    assert [
        key
        for _, _, rows in keys.documented_keys()
        for key, words in rows.items()
        if words.startswith("(")
    ] == []


def test_keys_tells_a_section_a_key_and_their_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "": ["- `train`: "],
        "train": [
            "(kind: eagle1 | eagle3 | medusa | hydra | block | draft_lm)",
            "(kind: eagle3)\n",
            "- `unroll_steps`: ",
        ],
        "tree.stop": ["`tree.stop` (rule: entropy)\n"],
        "bench.rows.0.tree.nodes": ["`bench.rows.*.tree` (shape: dynamic)\n"],
    }
    for section, texts in expected.items():
        assert call(keys, *filter(None, [section])) == 0
        out = capsys.readouterr().out
        assert all(text in out for text in texts), (section, out)
    for wrong, meant in {
        "trian": "train",
        "tree.depth": "tree.levels",
        "lr": "train.learning_rate",
    }.items():
        assert call(keys, wrong) == 2 and f"did you mean '{meant}'?" in capsys.readouterr().err
