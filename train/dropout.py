"""Dropout whose masks are a function of seed, epoch, row and place: no neighbour, process or restart can move them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.batches import Batch, keyed_generator


@dataclass(frozen=True)
class KeyedDropout:
    """Drops entries of x [S, W], whose slots are those of one row after the other."""

    rate: float
    seeds: tuple[int, ...]  # of the rows
    counts: tuple[int, ...]  # slots of each row
    branch: int = 0

    @classmethod
    def of(cls, batch: Batch, slots: Tensor, rate: float, branch: int) -> "KeyedDropout | None":
        """For the chosen slots [B, T] of a batch and one branch of a head; None where nothing is to be dropped."""
        if rate == 0.0 or batch.seeds is None:
            return None
        return cls(rate, batch.seeds, tuple(slots.sum(1).tolist()), branch)

    def __call__(self, x: Tensor, place: int) -> Tensor:
        """x with each entry zero by the rate, else divided by its complement; other places have other masks."""
        kept = x.new_empty(x.shape)  # [S, W]
        for part, seed in zip(kept.split(self.counts), self.seeds, strict=True):
            own = keyed_generator(seed, self.branch, place).initial_seed()
            part.bernoulli_(1.0 - self.rate, generator=torch.Generator(x.device).manual_seed(own))
        return x * kept / (1.0 - self.rate)


def row_seeds(seed: int, epoch: int, rows: tuple[int, ...]) -> tuple[int, ...]:
    """What Batch.seeds holds in an epoch."""
    return tuple(keyed_generator(seed, epoch, row).initial_seed() for row in rows)
