"""Levels made by hand, and laws of a known entropy, for the tests of stop rules."""

import torch
from torch import Tensor

from aerie.infer.decode.stop import Level, Stop


def level(depth: int, survival: list[float], candidates: list[float] | None = None) -> Level:
    """A level whose frontier has these survivals; every node came from the same law."""
    found = torch.tensor(survival).log()
    every = None if candidates is None else torch.tensor(candidates).log()
    zero = torch.zeros(len(survival), dtype=torch.long)
    return Level(depth, found, found, torch.zeros(1, 2), torch.zeros(1), zero, every)


def uncertain(*counts: float) -> Tensor:
    """log q [n, 8] of laws that are uniform over this many of eight tokens: their entropy is log(count)."""
    laws = torch.full((len(counts), 8), float("-inf"))
    for row, count in enumerate(counts):
        laws[row, : int(count)] = -torch.tensor(count).log()
    return laws


def depth_of(rule: Stop, masses: list[list[float]]) -> int | None:
    """The depth at which the rule ends a tree whose levels have these survivals; null: it does not."""
    rule.begin()
    for depth, survival in enumerate(masses, start=1):
        if rule.ends(level(depth, survival)):
            return depth
    return None


def steady(share: float, depth: int = 18) -> list[list[float]]:
    """Levels of one node each, of which each survives with the same chance."""
    return [[share**d] for d in range(1, depth + 1)]
