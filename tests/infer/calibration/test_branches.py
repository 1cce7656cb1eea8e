"""Survival of branches and S_d against what was written, by hand; and the places of a tree."""

import numpy as np
import pytest
import torch

from aerie.infer.decode.tree import Tree, ancestors
from aerie.infer.measure.bounds import (
    FrontierArrays,
    LevelArrays,
    PositionArrays,
    branch_reliability,
    by_position,
    level_reliability,
    positions,
)


def test_survival_is_held_against_whole_branches() -> None:
    nodes = FrontierArrays(
        np.zeros(3, np.int64), np.array([1, 2, 2]), np.array([0.8, 0.4, 0.1]), np.array([True, True, False])
    )
    found = branch_reliability(nodes, bins=2)
    assert found["nodes"] == 3
    assert found["ece"] == pytest.approx((2 * abs(0.25 - 0.5) + 1 * 0.2) / 3)
    assert found["brier"] == pytest.approx((0.04 + 0.36 + 0.01) / 3)


def test_equations_22_to_24_by_depth() -> None:
    levels = LevelArrays(
        prompt=np.zeros(4, np.int64), cycle=np.array([0, 0, 1, 1]), depth=np.array([1, 2, 1, 2]),
        mass=np.array([0.9, 0.6, 0.7, 0.2]), held=np.array([True, True, True, False]),
        reached=np.array([True, False, True, False]),
    )  # fmt: skip
    first, second = level_reliability(levels)["by_depth"]
    assert (first["mass"], first["held"], first["reached"]) == (pytest.approx(0.8), 1.0, 1.0)
    assert (second["mass"], second["held"], second["reached"]) == (pytest.approx(0.4), 0.5, 0.0)
    assert (second["expected"], second["mean_reached"]) == (pytest.approx(1.2), 1.0)


def test_a_place_is_the_ranks_from_the_root_down() -> None:
    parents = torch.tensor([0, 0, 0, 2, 2, 1])
    zero = torch.zeros(6)
    tree = Tree(torch.arange(6), parents, torch.tensor([0, 1, 1, 2, 2, 2]), ancestors(parents, 2), zero, zero, 2, 2)
    assert positions(tree) == ["", "0", "1", "1.0", "1.1", "0.0"]


def test_figure_5_has_one_mean_per_prompt_and_place() -> None:
    arrays = PositionArrays(
        prompt=np.array([0, 0, 1, 0, 1]),
        position=np.array(["0", "0", "0", "10", "2"]),
        acceptance=np.array([1.0, 0.0, 1.0, 0.25, 0.5]),
    )
    first, second, third = by_position(arrays)
    assert [first["position"], second["position"], third["position"]] == ["0", "2", "10"]  # ranks, not text
    assert (first["nodes"], first["acceptance"], first["by_prompt"]) == (3, pytest.approx(2 / 3), [0.5, 1.0])
    assert first["quartiles"] == pytest.approx([0.5, 0.625, 0.75, 0.875, 1.0])
    assert [row["position"] for row in by_position(arrays, most=1)] == ["0"]
