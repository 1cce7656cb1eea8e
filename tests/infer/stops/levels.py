"""Levels made by hand, and laws of a known entropy, for the tests of stop rules."""

import torch
from torch import Tensor

from aerie.infer.decode.stop import Stop
from aerie.infer.decode.tree import Level


def level(depth: int, survival: list[float], candidates: list[float] | None = None) -> Level:
    """A level whose frontier has these survivals; every node came from the same law."""
    alive = torch.tensor(survival).log()
    every = alive if candidates is None else torch.tensor(candidates).log()
    rows = torch.zeros(len(every), dtype=torch.long)
    return Level(depth, torch.zeros(1, 2), rows[:1], rows, rows, every, every, torch.arange(len(alive)), alive)


def level_of(depth: int, log_q: Tensor, rows: list[int], survival: list[float]) -> Level:
    """A level whose nodes, the best first, come from these rows of laws log q [r, Vd]."""
    at, alive = torch.tensor(rows), torch.tensor(survival).log()
    return Level(depth, log_q, torch.arange(len(log_q)), at, at, alive, alive, torch.arange(len(at)), alive)


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
