"""The whole recipe and where a run keeps its files: what the four `main.py` share.

This is the one place beside them that sees every section; it imports configurations only.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import model_validator

from aerie.configs import read as yaml_recipe
from aerie.configs.errors import UserError
from aerie.configs.read import STRICT
from aerie.configs.schema.data import DataConfig, DistillConfig, FeaturesConfig, SyntheticConfig
from aerie.configs.schema.decode import OPTIONS, USUAL, MethodConfig, TreeConfig, completed
from aerie.configs.schema.measure import BenchConfig, CalibrateConfig, PromptsConfig, TuneConfig
from aerie.configs.schema.target_and_head import DEFAULT_KIND, Eagle1Section, HeadConfig, TargetConfig
from aerie.configs.schema.train import Eagle1Train, Train, for_head


@dataclass(frozen=True)
class Recipe:
    """One run: every section, validated once."""

    __pydantic_config__ = STRICT
    run: str  # the run's directory
    target: TargetConfig
    data: DataConfig
    head: HeadConfig = Eagle1Section()
    features: FeaturesConfig = FeaturesConfig()
    train: Train = Eagle1Train()
    # of the usual method of the recipe's head, for generate and measured tau; the file names what differs from that
    tree: TreeConfig | None = None
    calibrate: CalibrateConfig | None = None
    bench: BenchConfig | None = None
    tune: TuneConfig | None = None
    synthetic: SyntheticConfig | None = None
    distill: DistillConfig | None = None
    output: str | None = None  # where the trained module goes; null: RUN/heads/KIND
    threads: int | None = None  # torch threads per process; null: torch's choice
    seed: int = 0

    @model_validator(mode="before")
    @classmethod
    def _complete_trees(cls, values: Any) -> Any:
        """`tree` is completed from the usual method of the head's kind, calibrate's from the method that it names.

        `train` is told the head's kind, which decides its keys.
        """
        head, calibrate = (values.get(name) or {} for name in ("head", "calibrate"))
        kind = str(head.get("kind", DEFAULT_KIND)) if isinstance(head, dict) else ""
        usual, train = USUAL.get(kind), for_head(values.get("train"), kind)
        values = {**values, "train": train, "tree": completed(usual, values.get("tree")) if usual else None}
        if isinstance(calibrate, dict) and calibrate:
            tree = completed(calibrate.get("method") or usual, calibrate.get("tree"))
            values["calibrate"] = {**calibrate, "tree": tree}
        return values

    @property
    def measuring(self) -> tuple[PromptsConfig, ...]:
        """The prompts that its sections measure with, those that a tree is tuned on among them."""
        sections = (self.bench, self.calibrate, self.tune)
        asked = tuple(section.prompts for section in sections if section is not None)
        measure = None if self.tune is None else self.tune.measure
        return asked if measure is None else (*asked, measure)


class RunPaths:
    """The files of one run directory: each arrow of the pipeline is one of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.conversations, self.distilled, self.features = (
            root / name for name in ("conversations", "distilled", "features")
        )
        self.calibration, self.bench, self.tune = (root / name for name in ("calibration", "bench", "tune"))
        self.report, self.heads, self.status = (root / name for name in ("report", "heads", "status.json"))

    def state(self, kind: str) -> Path:
        return self.root / "state" / kind

    def head(self, recipe: Recipe) -> Path:
        return Path(recipe.output) if recipe.output else self.heads / recipe.head.kind


def add_arguments(parser: argparse.ArgumentParser, config_required: bool = True) -> None:
    """The options that every command has; any other `--section.key value` overrides the recipe."""
    parser.add_argument("--config", type=Path, required=config_required, help="the recipe (YAML)")
    parser.add_argument("--run", help="the run's directory (overrides the recipe)")
    parser.add_argument("--target", help="local directory or Hub id of the target (overrides target.path)")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (overrides target.dtype)")
    parser.add_argument("--device-map", help="'auto' spreads the target over the GPUs (overrides target.device_map)")
    parser.add_argument("--plan", action="store_true", help="validate everything, print what would run, and stop")
    parser.add_argument("--overwrite", action="store_true", help="replace what another recipe left in the output")


def load(arguments: argparse.Namespace, unknown: list[str]) -> Recipe:
    """The recipe that --config names, with the command line's overrides; UserError lists every problem."""
    keys = {"run": "run", "target": "target.path", "dtype": "target.dtype", "device_map": "target.device_map"}
    flags = {key: getattr(arguments, flag, None) for flag, key in keys.items()}
    overrides = [*pairs_of(unknown), *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    return yaml_recipe.load(arguments.config, Recipe, [*_forgotten(arguments.config, overrides), *overrides])


def _forgotten(path: Path, overrides: list[str]) -> list[str]:
    """The overrides that forget the file's trees where the command line asks for another head's kind or method."""
    given = dict(pair.split("=", 1) for pair in overrides if pair.startswith(("head.kind=", "calibrate.method=")))
    if not given:
        return []
    values = yaml_recipe.read_yaml(path)[0]
    head, calibrate = (values[name] if isinstance(values.get(name), dict) else {} for name in ("head", "calibrate"))
    kind = head.get("kind", DEFAULT_KIND)
    other_kind = given.get("head.kind", kind) != kind
    method = calibrate.get("method") or USUAL.get(kind)
    other_method = given.get("calibrate.method", method) != method or (other_kind and not calibrate.get("method"))
    return [*(["tree={}"] if other_kind else []), *(["calibrate.tree={}"] if calibrate and other_method else [])]


METHOD_SECTIONS = ("tree.", "typical.", *(f"{name}." for name in OPTIONS))


def method_words(unknown: list[str], alone: bool = False) -> tuple[list[str], list[str]]:
    """The overrides of a method as 'key=value', and the other words as they are; alone: there may be no others."""
    pairs = pairs_of(unknown)
    of_method = [pair for pair in pairs if alone or pair.startswith(METHOD_SECTIONS)]
    return of_method, [f"--{pair}" for pair in pairs if pair not in of_method]


def method_from(method: str, overrides: list[str]) -> MethodConfig:
    """A method with what the command line changes of it ('tree.levels=4'); UserError lists every problem."""
    return yaml_recipe.from_overrides(MethodConfig, [f"method={method}", *overrides], "command line")


def pairs_of(words: list[str]) -> list[str]:
    """['--a.b', '3', '--c=4'] -> ['a.b=3', 'c=4']."""
    pairs, rest = [], iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise UserError(f"{word}: not an option; overrides look like --train.learning_rate 1e-4")
        pair = word[2:] if "=" in word else f"{word[2:]}={next(rest, '')}"
        if pair.endswith("=") and "=" not in word:
            raise UserError(f"{word}: needs a value")
        pairs.append(pair)
    return pairs
