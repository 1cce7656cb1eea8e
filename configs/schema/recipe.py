"""The whole recipe, and where a run keeps its files. Every `main.py` uses both."""

import argparse
import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt, model_validator

from aerie.configs.errors import UserError
from aerie.configs.read import (
    Place,
    Section,
    key,
    override,
    read_text,
    read_yaml,
    user_path,
    validate,
)
from aerie.configs.schema.data import DataConfig, DistillConfig, FeaturesConfig, SyntheticConfig
from aerie.configs.schema.decode import USUAL, TreeConfig, completed, fitted
from aerie.configs.schema.heads import (
    DEFAULT_KIND,
    Eagle1Section,
    Eagle1Train,
    HeadConfig,
    Seed,
    TargetConfig,
    Train,
)
from aerie.configs.schema.measure import BenchConfig, CalibrateConfig, TuneConfig

KEYS_OF_FLAGS = {  # argparse's name of an option -> the key that it overrides
    "run": "run",
    "target": "target.path",
    "dtype": "target.dtype",
    "device_map": "target.device_map",
}


class Recipe(Section):
    """What to run, and how."""

    run: Place = key("the directory in which the run keeps its files")
    target: TargetConfig = key("the model that aerie speeds up")
    data: DataConfig = key("the conversations that the head learns from, and those held out")
    head: HeadConfig = key(
        "the draft head; its `kind` (eagle1) decides which keys the section has",
        default=Eagle1Section(),
    )
    features: FeaturesConfig = key(
        "the target's states that heads learn from", default=FeaturesConfig()
    )
    train: Train = key(
        "how to train the head; head.kind decides which keys the section has", default=Eagle1Train()
    )
    tree: TreeConfig | None = key("changes to the tree of the head's usual method", default=None)
    calibrate: CalibrateConfig | None = key(
        "how to measure whether the head's confidence can be trusted; null means all defaults",
        default=None,
    )
    bench: BenchConfig | None = key(
        "how to measure tau and speedup of methods; null means all defaults", default=None
    )
    tune: TuneConfig | None = key(
        "how to search for the fastest tree; `aerie run` tunes only if this is set", default=None
    )
    synthetic: SyntheticConfig | None = key(
        "a made-up corpus, which `aerie synthetic` writes; see configs/draft_lm/embedded.yaml",
        default=None,
    )
    distill: DistillConfig | None = key(
        "how `aerie distill` lets the target answer prompts", default=None
    )
    output: Place | None = key(
        "where the trained head goes; null means RUN/heads/KIND", default=None
    )
    last_stage: Literal["train", "report"] = key(
        "the last stage of `aerie run`; `train` suits a target that does not fit this machine",
        default="report",
    )
    threads: PositiveInt | None = key(
        "torch threads per process; null lets torch choose", default=None
    )
    seed: Seed = key(
        "decides what rows with sampling draw, and the bootstrap of intervals", default=0
    )

    @property
    def root(self) -> Path:
        return Path(self.run)

    @property
    def date_file(self) -> Path:
        """The file with the date that the chat template writes into this run's rows."""
        return self.root / "date.txt"

    @property
    def head_output(self) -> Path:
        """The directory that training writes."""
        return Path(self.output or self.root / "heads" / self.head.kind)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """The values with the trees' published settings, and with the head's kind in `train`."""
        kind, method = _kind_and_method(values)
        usual = USUAL.get(kind)  # None for a wrong kind, which the section `head` reports
        train = values.get("train") or {}
        calibrate = values.get("calibrate")
        if isinstance(train, dict):
            train = train | {"kind": kind} if usual else {"kind": DEFAULT_KIND}
        if isinstance(calibrate, dict):
            calibrate = calibrate | {"tree": completed(method, calibrate.get("tree"))}
        tree = completed(usual, values.get("tree"))
        return {**values, "train": train, "tree": tree, "calibrate": calibrate}

    @model_validator(mode="after")
    def _fit_tree(self) -> "Recipe":
        """The recipe with its tree cut to the levels that the head drafts."""
        most = self.head.levels_of(vars(self.head))
        if not most or self.tree is None or self.tree.shape == "static":
            return self
        tree = fitted(self.tree, USUAL[self.head.kind], most, "tree", "the head")
        return replace(self, tree=tree)


def _kind_and_method(values: dict[str, Any]) -> tuple[str, str | None]:
    """The head's kind, and the method that calibrate measures, from values that are not checked
    yet."""
    head = values.get("head")
    calibrate = values.get("calibrate")
    kind = head.get("kind", DEFAULT_KIND) if isinstance(head, dict) else DEFAULT_KIND
    method = calibrate.get("method") if isinstance(calibrate, dict) else None
    return str(kind), method or USUAL.get(str(kind))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command. Any other `--section.key value` is an override."""
    parser.epilog = (
        "You can also set any key of the recipe: --section.key VALUE (--train.learning_rate 1e-4). "
        "`aerie keys SECTION` prints a section's keys with their meaning and default."
    )
    parser.add_argument("--config", type=user_path, help="the recipe (YAML)")
    parser.add_argument("--run", help="the run's directory")
    parser.add_argument("--target", help="a directory or a Hub id; overrides target.path")
    parser.add_argument("--dtype", help="overrides target.dtype")
    parser.add_argument("--device-map", help="overrides target.device_map")
    parser.add_argument(
        "--plan", action="store_true", help="print what the command would do, and stop"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an output that another recipe made"
    )


def load(
    arguments: argparse.Namespace, unknown: list[str], method_of_tree: str | None = None
) -> Recipe:
    """The recipe with the command line's overrides, and with the date that its run has kept.

    If an override changes the head's kind or the method, the file's tree is dropped. method_of_tree
    names the method that overrides of `tree` are meant for; they count only if that is the head's
    usual method, or None.
    """
    if arguments.config is None:
        raise UserError("no recipe; name one with --config RECIPE.yaml")
    overrides = pairs_of(unknown) + pairs_of_flags(arguments)
    values, lines = read_yaml(arguments.config)
    kind, method = _kind_and_method(values)
    first = [pair for pair in overrides if pair.startswith(("head.kind=", "calibrate.method="))]
    override(first, values, lines)
    new_kind, new_method = _kind_and_method(values)
    if new_kind != kind:
        values["tree"] = None
    if new_method != method and isinstance(values.get("calibrate"), dict):
        values["calibrate"] = {**values["calibrate"], "tree": None}
    if method_of_tree not in (None, USUAL.get(new_kind)):
        overrides = [pair for pair in overrides if not pair.startswith("tree.")]
    recipe = validate(values, Recipe, str(arguments.config), lines, overrides)
    if recipe.data.date is None and recipe.date_file.is_file():
        recipe = with_date(recipe, read_date(recipe.date_file))
    return recipe


def with_date(recipe: Recipe, date: datetime.date) -> Recipe:
    return replace(recipe, data=replace(recipe.data, date=date))


def read_date(path: Path) -> datetime.date:
    """The date in a run's date_file; UserError if the file holds no date."""
    text = read_text(path).strip()
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise UserError(
            f"{path}: {text[:40]!r} is no date like 2026-11-27; correct it, or delete the file"
        ) from error


def pairs_of_flags(arguments: argparse.Namespace) -> list[str]:
    """The overrides that have an option of their own: ['target.path=llama'] for --target llama."""
    values = {name: getattr(arguments, flag, None) for flag, name in KEYS_OF_FLAGS.items()}
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def pairs_of(words: list[str]) -> list[str]:
    """['--a.b', '3', '--c=4'] -> ['a.b=3', 'c=4']."""
    pairs: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise UserError(
                f"{word}: not an option; overrides look like --train.learning_rate 1e-4. Quote a "
                "list as one word: --features.after_blocks '[2, 8]'"
            )
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            value = next(rest, "")
            if not value:
                raise UserError(f"{word}: needs a value; write {word} VALUE")
        if name.startswith("generation."):
            name = f"target.{name}"
        pairs.append(f"{name}={value}")
    return pairs
