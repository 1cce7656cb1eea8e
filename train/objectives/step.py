"""What an objective returns, and what the loop needs of one. Objectives return sums; only the loop divides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from aerie.data.batches import Batch

Sums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count)


@dataclass(frozen=True)
class StepOutput:
    """terms: name -> (weight, sum, count), the loss is their weighted mean; metrics: name -> (sum, count)."""

    terms: dict[str, tuple[float, Tensor, Tensor]]
    metrics: Sums

    def total(self, scales: Mapping[str, float] | None = None) -> Tensor:
        """The weighted total of all sums, each times its scale; the loop's scales hold the divisors."""
        scales = scales or dict.fromkeys(self.terms, 1.0)
        parts = [weight * value * scales[name] for name, (weight, value, _) in self.terms.items()]
        return sum(parts[1:], parts[0])

    def sums(self) -> Sums:
        """Terms and metrics alike, detached."""
        terms = {name: (value.detach(), count) for name, (_, value, count) in self.terms.items()}
        return {**terms, **self.metrics}


class Objective(Protocol):
    """One way to train a module."""

    @property
    def score_name(self) -> str:
        """The held-out measure by which the best weights are chosen; a leading '-' means that less is better."""
        ...

    def prepare(self, batch: Batch, epoch: int) -> Batch:
        """The batch with what training adds to it; runs in the prefetching thread."""
        ...

    def divisors(self, batch: Batch) -> dict[str, int]:
        """For each term the batch's share of what its sum is divided by, counted from the token ids alone."""
        ...

    def __call__(self, module: nn.Module, batch: Batch) -> StepOutput: ...

    def evaluate(self, module: Any, batch: Batch) -> Sums:
        """Held-out sums of the unwrapped module, without gradient."""
        ...

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """The held-out measures from the means of evaluate's sums."""
        ...
