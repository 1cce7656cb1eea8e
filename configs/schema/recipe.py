"""The whole recipe and where a run keeps its files: what the four `main.py` share."""

import argparse
import difflib
from pathlib import Path
from typing import Any

from pydantic import PositiveInt, model_validator

from aerie.configs.errors import UserError
from aerie.configs.read import (
    Place,
    Section,
    as_dict,
    key,
    override,
    read_yaml,
    user_path,
    validate,
)
from aerie.configs.schema.data import DataConfig, DistillConfig, FeaturesConfig, SyntheticConfig
from aerie.configs.schema.decode import METHODS, USUAL, TreeConfig, completed
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

FLAGS = ["--config", "--target", "--dtype", "--device-map", "--plan", "--overwrite", "--is-whole"]
FLAGS += [
    "--prompt",
    "--prompts",
    "--method",
    "--max-new-tokens",
    "--temperature",
    "--top-k",
    "--top-p",
]


class Recipe(Section):
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
        "a made-up corpus (`aerie synthetic`), as in configs/embedded.yaml", default=None
    )
    distill: DistillConfig | None = key(
        "answers that the target writes itself (`aerie distill`)", default=None
    )
    output: Place | None = key("the trained head; null: RUN/heads/KIND", default=None)
    threads: PositiveInt | None = key(
        "torch threads per process; null: torch's choice", default=None
    )
    seed: Seed = key(
        "of measurements: the draws of sampled rows, the bootstrap of intervals", default=0
    )

    def __post_init__(self) -> None:
        most = self.head.levels_of(vars(self.head))
        if most and self.tree is not None and self.tree.shape != "static":
            object.__setattr__(
                self, "tree", fitted(self.tree, USUAL[self.head.kind], most, "tree", "the head")
            )

    @property
    def paths(self) -> "RunPaths":
        return RunPaths(Path(self.run))

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Adds trees' published settings, and the head's kind to `train`."""
        kind, method = _kind_and_method(values)
        train, calibrate = values.get("train"), values.get("calibrate")
        if train is None or isinstance(train, dict):  # the section `head` reports a wrong kind
            train = {**(train or {}), "kind": kind} if kind in USUAL else {"kind": DEFAULT_KIND}
        tree = completed(USUAL[kind], values.get("tree")) if kind in USUAL else None
        if isinstance(calibrate, dict) and calibrate:
            calibrate = {**calibrate, "tree": completed(method, calibrate.get("tree"))}
        return {**values, "train": train, "tree": tree, "calibrate": calibrate}


def _kind_and_method(values: dict[str, Any]) -> tuple[str, str | None]:
    """The head's kind, and the method that calibrate measures."""
    head, calibrate = (
        values[name] if isinstance(values.get(name), dict) else {} for name in ("head", "calibrate")
    )
    kind = str(head.get("kind", DEFAULT_KIND))
    return kind, calibrate.get("method") or USUAL.get(kind)


def fitted(tree: Any, method: str, most: int, place: str, head: str) -> Any:
    """A TreeConfig no deeper than its head drafts: cuts the method's default depth; UserError for any other depth."""
    if tree.levels <= most:
        return tree
    if method and tree.levels == (METHODS[method].tree or {}).get("levels"):
        return validate(as_dict(tree) | {"levels": most}, type(tree), place, {})
    fix = "give tree.choices of at most" if tree.shape == "static" else "set tree.levels to"
    raise UserError(
        f"{place}: is {tree.levels} levels deep, and {head} drafts at most {most}; {fix} {most}"
    )


class RunPaths:
    def __init__(self, root: Path) -> None:
        self.root, self.status = root, root / "status.json"
        self.conversations, self.distilled = root / "conversations", root / "distilled"
        self.features, self.heads, self.report = root / "features", root / "heads", root / "report"
        self.calibration, self.bench, self.tune = (
            root / "calibration",
            root / "bench",
            root / "tune",
        )

    def state(self, kind: str) -> Path:
        return self.root / "state" / kind

    def head(self, recipe: Recipe) -> Path:
        return Path(recipe.output) if recipe.output else self.heads / recipe.head.kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every command's options; any other `--section.key value` is an override."""
    words = "`aerie keys SECTION` prints the keys of a section, what they mean and their defaults."
    parser.epilog = f"Any key of the recipe can be set too: --section.key VALUE (--train.learning_rate 1e-4). {words}"
    parser.add_argument("--config", type=user_path, help="the recipe (YAML)")
    parser.add_argument("--run", help="the run's directory")
    parser.add_argument("--target", help="directory or Hub id (overrides target.path)")
    parser.add_argument("--dtype", help="overrides target.dtype")
    parser.add_argument("--device-map", help="overrides target.device_map")
    parser.add_argument("--plan", action="store_true", help="print what would run, and stop")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what another recipe left in the output"
    )


def load(arguments: argparse.Namespace, unknown: list[str]) -> Recipe:
    """The recipe with the command line's overrides; another head kind or method there drops its tree."""
    keys = {
        "run": "run",
        "target": "target.path",
        "dtype": "target.dtype",
        "device_map": "target.device_map",
    }
    flags = {key: getattr(arguments, flag, None) for flag, key in keys.items()}
    overrides = [
        *pairs_of(unknown),
        *(f"{key}={value}" for key, value in flags.items() if value is not None),
    ]
    if arguments.config is None:
        raise UserError("no recipe; name one with --config RECIPE.yaml")
    values, lines = read_yaml(arguments.config)
    kind, method = _kind_and_method(values)
    override(
        [pair for pair in overrides if pair.startswith(("head.kind=", "calibrate.method="))],
        values,
        lines,
    )
    other_kind, other_method = _kind_and_method(values)
    if other_kind != kind:
        values["tree"] = None
    if other_method != method and isinstance(values.get("calibrate"), dict):
        values["calibrate"] = {**values["calibrate"], "tree": None}
    return validate(values, Recipe, str(arguments.config), lines, overrides)


def pairs_of(words: list[str]) -> list[str]:
    """['--a.b', '3', '--c=4'] -> ['a.b=3', 'c=4']."""
    pairs, rest = list[str](), iter(words)
    for word in rest:
        if not word.startswith("--"):
            fix = "overrides look like --train.learning_rate 1e-4"
            if pairs:
                key, first = pairs[-1].split("=", 1)
                fix = f"a list is one word: --{key} '[{first.strip('[,')}, {word.strip('],')}]'"
            raise UserError(f"{word}: not an option; {fix}")
        if close := difflib.get_close_matches(word.partition("=")[0], FLAGS, n=1, cutoff=0.85):
            is_elsewhere = close[0] == word.partition("=")[0]
            fix = (
                "this command has no such option"
                if is_elsewhere
                else f"unknown option; did you mean {close[0]}?"
            )
            raise UserError(f"{word}: {fix}")
        pair = word[2:] if "=" in word else f"{word[2:]}={next(rest, '')}"
        pair = f"target.{pair}" if pair.startswith("generation.") else pair
        if pair.endswith("=") and "=" not in word:
            raise UserError(f"{word}: needs a value")
        pairs.append(pair)
    return pairs
