"""The section `tune` of a recipe."""

from dataclasses import dataclass

from infer.task_config import PromptsConfig
from model.recipe import STRICT


@dataclass(frozen=True)
class TuneConfig:
    """Which trees are searched, on which prompts they are predicted, and on which others the choice is measured."""

    __pydantic_config__ = STRICT
    prompts: PromptsConfig  # that predict; held out from training
    measure: PromptsConfig | None = None  # that the choice is then timed on, other ones; null: it is not measured
    levels: int = 10  # the deepest tree
    k: int = 10  # the widest frontier
    grid: bool = False  # also time a grid of twelve trees

    def __post_init__(self) -> None:
        if min(self.levels, self.k) < 2:
            raise ValueError("levels and k are at least 2")
        if self.grid and self.measure is None:
            raise ValueError("grid: true times twelve trees on the prompts of `measure`; set them")
