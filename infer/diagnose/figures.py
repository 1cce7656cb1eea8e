"""The figures that a verdict is made of, by name, with intervals over prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pandas as pd

from aerie.infer.measure.bootstrap import Estimate, Side, estimate

DEPTHS = 5  # drafted positions that are told apart


@dataclass
class Symptoms:
    """What was measured, such as `ladder.chain.1`; and why something was not."""

    values: dict[str, Any] = field(default_factory=dict)  # Estimates and plain facts, by name
    absent: dict[str, str] = field(default_factory=dict)  # reasons, by name or its beginning

    def add(self, prefix: str, figures: dict[str, Any]) -> None:
        """Adds figures under `prefix.name`; one that is None was not measured."""
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
    """A figure for people, with its interval."""
    if isinstance(value, Estimate) and value.prompts < 2:
        return f"{value.value:.2f} (one prompt)"
    if isinstance(value, Estimate):
        return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Drafting:
    """How far drafts were accepted, prompt by prompt."""

    # a line for each prompt: tokens, starts, and of each position k: tries_k, hits_k
    table: pd.DataFrame

    @classmethod
    def of_prompts(cls, lines: Sequence[Mapping[str, float]]) -> "Drafting":
        """lines: the columns of each prompt; those of a position that it has none of are 0."""
        columns = ["tokens", "starts"]
        for position in range(1, DEPTHS + 1):
            columns += [f"hits_{position}", f"tries_{position}"]
        return cls(pd.DataFrame(lines, columns=columns).fillna(0.0))

    def side(self, name: str) -> Side:
        """Of tau, or of a position's acceptance if those before were accepted."""
        columns = ["tokens", "starts"] if name == "tau" else [f"hits_{name}", f"tries_{name}"]
        return Side(self.table[columns], lambda sums: sums[..., 0] / sums[..., 1])


FIGURES_OF_A_STEP = ["tau", *(str(position) for position in range(1, DEPTHS + 1))]


def estimates(*steps: Drafting) -> dict[str, Estimate | None]:
    """The figures of a step, or how much smaller those of a second one are, paired by prompt."""
    return {name: estimate([step.side(name) for step in steps]) for name in FIGURES_OF_A_STEP}
