"""Reads the inputs of decoding commands: target, heads, prompts and template arguments."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.configs.read import user_path, validate
from aerie.configs.schema.data import RenderConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.measure import HeldOutPrompts, PromptsConfig
from aerie.configs.schema.recipe import Recipe
from aerie.model import storage
from aerie.model.hub import head_directory, is_on_hub

# No import of torch: --help and mistakes must be answered at once.


def prompts_or_held_out(prompts: PromptsConfig, recipe: Recipe, part: int) -> PromptsConfig:
    """The prompts that a section names, else a part of the held-out conversations."""
    if prompts.path is not None or prompts.tasks:
        return prompts
    data = replace(recipe.data, date=None)  # no question depends on it
    return HeldOutPrompts(**vars(prompts), data=data, part=part)


def run_heads(arguments: Namespace, recipe: Recipe) -> Any:
    """The heads of the recipe's run, and --head: from these a row takes its head."""
    from aerie.infer.measure.suite import RunHeads

    return RunHeads(
        directory=recipe.root / "heads",
        kind=recipe.head.kind,
        trained=recipe.head_output,
        option=arguments.head,
        is_plan=arguments.plan,
    )


def is_of_template(pair: str) -> bool:
    """Whether KEY=VALUE sets a key of `data`, as the chat template's arguments are."""
    return pair.startswith("data.")


def render_config(head: str | None, pairs: Sequence[str]) -> RenderConfig:
    """What the chat template gets without a recipe: the head's own arguments, changed by pairs.

    pairs: data.KEY=VALUE.
    """
    from aerie.data.rendering import ARGUMENTS, trained_arguments

    values = {ARGUMENTS: (trained_arguments(head) if head else None) or {}}
    return validate(
        values,
        RenderConfig,
        "command line",
        {},
        [pair.removeprefix("data.") for pair in pairs],
    )


def target_of(arguments: Namespace, pairs: Sequence[str] = ()) -> TargetConfig:
    """The target of --target, --dtype, --device-map and pairs KEY=VALUE of the section `target`."""
    flags = {"dtype": arguments.dtype, "device_map": arguments.device_map}
    values = {"path": arguments.target} | {key: word for key, word in flags.items() if word}
    overrides = [pair.removeprefix("target.") for pair in pairs]
    return validate(values, TargetConfig, "--target", {}, overrides)


def require_decodable(target: TargetConfig, heads: Sequence[str | None]) -> None:
    """UserError if aerie does not decode with this kind of target, or a head has no weights."""
    from aerie.model.target_files import load_config, only_trains

    reason = only_trains(load_config(target))
    if reason:
        raise UserError(f"{target.path}: {reason}")
    for head in heads:
        if head and not is_on_hub(head) and storage.find_weights(Path(head)) is None:
            raise UserError(
                f"{head}: holds no weights; train the head with: aerie train --config RECIPE"
            )


def head_path(text: str) -> Path:
    """The value of --head: a directory with a head, or an id on the Hub."""
    path = user_path(text)
    return path if is_on_hub(path) else head_directory(path)
