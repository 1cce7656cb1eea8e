"""The whole recipe and where a run keeps its files: what the four `main.py` share."""

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

KEYS_OF_FLAGS = {  # an option's name in argparse's result: the key that it overrides
    "run": "run",
    "target": "target.path",
    "dtype": "target.dtype",
    "device_map": "target.device_map",
}


class Recipe(Section):
    """The whole recipe."""

    run: Place = key("the run's directory")
    target: TargetConfig = key("the model that is sped up")
    data: DataConfig = key("what is trained on, and what is held out")
    head: HeadConfig = key(
        "the draft head; its `kind` (eagle1) decides which other keys there are",
        default=Eagle1Section(),
    )
    features: FeaturesConfig = key(
        "the target's states that heads learn from", default=FeaturesConfig()
    )
    train: Train = key(
        "how the head is trained; the keys depend on head.kind", default=Eagle1Train()
    )
    tree: TreeConfig | None = key("changes to the tree of the head's usual method", default=None)
    calibrate: CalibrateConfig | None = key(
        "how far the head's confidence can be trusted; null: all defaults", default=None
    )
    bench: BenchConfig | None = key("tau and speedup of methods; null: all defaults", default=None)
    tune: TuneConfig | None = key(
        "search for the fastest tree; if set, `aerie run` tunes too", default=None
    )
    synthetic: SyntheticConfig | None = key(
        "a made-up corpus (`aerie synthetic`), as in configs/draft_lm/embedded.yaml", default=None
    )
    distill: DistillConfig | None = key(
        "answers that the target writes itself (`aerie distill`)", default=None
    )
    output: Place | None = key("the trained head; null: RUN/heads/KIND", default=None)
    last_stage: Literal["train", "report"] = key(
        "the stage that ends `aerie run`; train: decode nothing here (the target does not fit)",
        default="report",
    )
    threads: PositiveInt | None = key(
        "torch threads per process; null: torch's choice", default=None
    )
    seed: Seed = key("decides the draws of sampled rows and the bootstrap of intervals", default=0)

    @property
    def root(self) -> Path:
        return Path(self.run)

    @property
    def date_file(self) -> Path:
        """Keeps the date that the chat template writes in this run's rows."""
        return self.root / "date.txt"

    @property
    def head_output(self) -> Path:
        """What a training writes."""
        return Path(self.output or self.root / "heads" / self.head.kind)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Adds the published settings of the trees, and the head's kind to `train`."""
        kind, method = _kind_and_method(values)
        usual = USUAL.get(kind)  # None: the section `head` reports a wrong kind
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
        """Cuts the tree to the levels that the head drafts."""
        most = self.head.levels_of(vars(self.head))
        if not most or self.tree is None or self.tree.shape == "static":
            return self
        tree = fitted(self.tree, USUAL[self.head.kind], most, "tree", "the head")
        return replace(self, tree=tree)


def _kind_and_method(values: dict[str, Any]) -> tuple[str, str | None]:
    """The head's kind, and the method that calibrate measures, in unchecked values."""
    head = values.get("head")
    calibrate = values.get("calibrate")
    kind = head.get("kind", DEFAULT_KIND) if isinstance(head, dict) else DEFAULT_KIND
    method = calibrate.get("method") if isinstance(calibrate, dict) else None
    return str(kind), method or USUAL.get(str(kind))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every command's options; any other `--section.key value` is an override."""
    parser.epilog = (
        "Any key of the recipe can be set too: --section.key VALUE (--train.learning_rate 1e-4). "
        "`aerie keys SECTION` prints the keys of a section, what they mean and their defaults."
    )
    parser.add_argument("--config", type=user_path, help="the recipe (YAML)")
    parser.add_argument("--run", help="the run's directory")
    parser.add_argument("--target", help="directory or Hub id (overrides target.path)")
    parser.add_argument("--dtype", help="overrides target.dtype")
    parser.add_argument("--device-map", help="overrides target.device_map")
    parser.add_argument("--plan", action="store_true", help="print what would run, and stop")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what another recipe left in the output"
    )


def load(
    arguments: argparse.Namespace, unknown: list[str], method_of_tree: str | None = None
) -> Recipe:
    """The recipe with the command line's overrides, and the date that its run has kept.

    Another kind of head or another method there drops the file's tree. method_of_tree: what
    overrides of `tree` are meant for; they count if it is the usual method (None) of the head.
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
    """The date in a run's date_file."""
    text = read_text(path).strip()
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{path}: {text[:40]!r} is no date like 2026-11-27; mend it") from error


def pairs_of_flags(arguments: argparse.Namespace) -> list[str]:
    """The overrides for which there are options, such as ['target.path=llama'] for --target."""
    values = {name: getattr(arguments, flag, None) for flag, name in KEYS_OF_FLAGS.items()}
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def pairs_of(words: list[str]) -> list[str]:
    """['--a.b', '3', '--c=4'] -> ['a.b=3', 'c=4']."""
    pairs: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise UserError(
                f"{word}: not an option; overrides look like --train.learning_rate 1e-4, and a "
                "list is one word: --features.after_blocks '[2, 8]'"
            )
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            value = next(rest, "")
            if not value:
                raise UserError(f"{word}: needs a value")
        if name.startswith("generation."):
            name = f"target.{name}"
        pairs.append(f"{name}={value}")
    return pairs
