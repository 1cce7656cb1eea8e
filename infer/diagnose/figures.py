"""The figures that decide a verdict, by name, with 95 % intervals over prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pandas as pd

from aerie.infer.measure.bootstrap import Estimate, Side, estimate

DEPTHS = 5  # acceptance is measured at this many positions of a draft


@dataclass
class Symptoms:
    """The measured figures, and the reasons why others were not measured."""

    values: dict[str, Any] = field(default_factory=dict)  # by name, such as `ladder.chain.1`
    absent: dict[str, str] = field(default_factory=dict)  # name, or its beginning -> reason

    def add(self, prefix: str, figures: dict[str, Any]) -> None:
        """Adds each figure as `prefix.name`, unless it is None, which means not measured."""
        for name, value in figures.items():
            if value is not None:
                self.values[f"{prefix}.{name}"] = value

    def as_json(self) -> dict[str, Any]:
        figures = {}
        for name, value in self.values.items():
            if isinstance(value, Estimate):
                ends = {"low": value.low, "high": value.high}
                known = {end: number if isfinite(number) else None for end, number in ends.items()}
                value = value._asdict() | known
            figures[name] = value
        return {"figures": figures, "absent": self.absent}


def shown(value: Any) -> str:
    """A figure in words, with its interval."""
    if isinstance(value, Estimate) and value.prompts < 2:
        return f"{value.value:.2f} (one prompt)"
    if isinstance(value, Estimate):
        return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Drafting:
    """How far the target accepted drafts, by prompt."""

    # A line for each prompt, with the columns tokens, starts, and hits_k, tries_k of position k.
    table: pd.DataFrame

    @classmethod
    def of_prompts(cls, lines: Sequence[Mapping[str, float]]) -> "Drafting":
        """lines: the columns of each prompt; a missing column counts as 0."""
        columns = ["tokens", "starts"]
        for position in range(1, DEPTHS + 1):
            columns += [f"hits_{position}", f"tries_{position}"]
        return cls(pd.DataFrame(lines, columns=columns).fillna(0.0))

    def side(self, name: str) -> Side:
        """The side of tau, or of a position's acceptance, given that all before were accepted."""
        columns = ["tokens", "starts"] if name == "tau" else [f"hits_{name}", f"tries_{name}"]
        return Side(self.table[columns], lambda sums: sums[..., 0] / sums[..., 1])


FIGURES_OF_A_STEP = ["tau", *(str(position) for position in range(1, DEPTHS + 1))]


def estimates(*steps: Drafting) -> dict[str, Estimate | None]:
    """The figures of one step, or how much a second step loses of each, paired by prompt."""
    return {name: estimate([step.side(name) for step in steps]) for name in FIGURES_OF_A_STEP}
