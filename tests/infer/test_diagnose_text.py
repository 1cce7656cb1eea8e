"""What of a gap in acceptance is the text's, the draft vocabulary's and the head's."""

import numpy as np
import pandas as pd
import pytest

from aerie.infer.diagnose.text import PARTS, compare_texts, length_figures

ACCEPT = "accept_0"


def places(
    seed: int, hardness: float, skill: float = 1.0, outside: float = 0.0, first_row: int = 0
) -> pd.DataFrame:
    """40 texts of 30 places. A head accepts skill * exp(-entropy), and nothing outside."""
    generator = np.random.default_rng(seed)
    entropy = generator.exponential(hardness, 1200)
    inside = generator.random(1200) >= outside
    accepted = inside & (generator.random(1200) < skill * np.exp(-entropy))
    return pd.DataFrame(
        {
            "row": first_row + np.arange(1200) // 30,
            "length": 10 + np.arange(1200) % 30,
            "entropy": entropy,
            "inside": inside,
            ACCEPT: accepted.astype(float),
        }
    )


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("text", {"hardness": 1.5}),
        ("head", {"skill": 0.6}),
        ("vocabulary", {"outside": 0.4}),
    ],
)
def test_the_gap_is_that_parts_alone(part: str, changes: dict[str, float]) -> None:
    worse = places(**{"seed": 1, "hardness": 0.5, "first_row": 40, **changes})  # type: ignore[arg-type]
    gap = compare_texts(places(0, 0.5), worse, ACCEPT)
    assert gap["total"].value == pytest.approx(sum(gap[name].value for name in PARTS[1:]))
    for name in PARTS[1:]:
        assert (gap[name].low > 0.1) == (name == part)
        assert gap[name].high > 0.1 or abs(gap[name].value) < 0.06
    assert gap["total"].prompts == 80  # no pairs


def test_pairs_of_one_text_have_narrower_intervals() -> None:
    table = places(0, 0.5)
    worse = table.assign(**{ACCEPT: table[ACCEPT] * (np.arange(len(table)) % 3 > 0)})
    paired = compare_texts(table, worse, ACCEPT)["total"]
    unpaired = compare_texts(table, worse.assign(row=worse.row + 40), ACCEPT)["total"]
    assert paired.value == pytest.approx(unpaired.value)
    assert paired.high - paired.low < 0.8 * (unpaired.high - unpaired.low)


def test_the_length_at_which_acceptance_falls() -> None:
    table = places(0, 0.5)
    assert length_figures(table, ACCEPT)["loss"].low < 0.05
    table[ACCEPT] *= (table.length < 32) | (np.arange(len(table)) % 2 == 0)
    fall = length_figures(table, ACCEPT)
    assert fall["at"] == 32 and fall["loss"].low > 0.15
    assert length_figures(table[:20], ACCEPT) == {}
