"""A head's positions against its target's: what ruins a head in silence is said."""

from dataclasses import replace
from typing import Any

import pytest

from aerie.configs.schema.target_and_head import Eagle1Section, Eagle3Section
from aerie.model.checkpoint import config_for, position_warnings
from tests import tiny

LONG: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def test_a_head_that_follows_its_target_is_no_matter() -> None:
    for changes in ({}, LONG):
        text = tiny.llama(**changes).config
        assert position_warnings(config_for(Eagle1Section(), text, tiny.ends()), text, "head") == []
        new = config_for(Eagle3Section(), text, tiny.ends(), (1, 2), 320)
        assert position_warnings(replace(new, max_position_embeddings=200_000), text, "head") == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 10000.0, "rope_scaling": None}, ["the head's RoPE has base 10,000 and no scaling"]),
        ({"rope_scaling": None}, ["its target's base 500,000 and llama3 scaling by 8; right only if"]),
        ({"max_position_embeddings": 2048}, ["max_position_embeddings is 2,048, its target's 131,072"]),
        (
            {"rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 2048},
            ["RoPE has base 10,000", "max_position_embeddings is 2,048"],
        ),
    ],
)
def test_the_defaults_that_ruin_heads_are_each_a_sentence_with_the_place(
    changes: dict[str, Any], said: list[str]
) -> None:
    text = tiny.llama(**LONG).config
    config = config_for(Eagle3Section(), text, tiny.ends(), (1, 2), 320)
    found = position_warnings(replace(config, **changes), text, "heads/x")
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert sentence.startswith("heads/x: ") and part in sentence
