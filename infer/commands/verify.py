"""`verify`: the proof that methods are lossless."""

import argparse
from dataclasses import replace
from pathlib import Path

from aerie.configs.errors import UserError
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.commands.chosen import Commands
from aerie.infer.decode.methods import heads_by_kind, kind_at
from aerie.infer.measure.lossless import add_options, demonstrate, options_of


def add(commands: Commands) -> None:
    """Adds the command's options."""
    verify = commands.add_parser("verify", help="prove that methods are lossless; exit code 1 where one is not")
    pipeline.add_arguments(verify, config_required=False)
    add_options(verify)


def run(arguments: argparse.Namespace, unknown: list[str]) -> int:
    options = options_of(arguments)
    if arguments.config is None:
        if arguments.target is None or unknown:
            raise UserError(f"verify needs --config RECIPE, or --target and no {' '.join(unknown) or 'recipe'}")
        config = TargetConfig(arguments.target, dtype=arguments.dtype or "float32", device_map=arguments.device_map)
        return demonstrate(options, config, heads_by_kind(arguments.head, None))
    recipe = pipeline.load(arguments, unknown)
    config = recipe.target if arguments.dtype else replace(recipe.target, dtype="float32")
    section = recipe.bench or recipe.calibrate
    rows = recipe.bench.rows if recipe.bench else ()
    named = {} if arguments.head else {kind_at(row.head): row.head for row in rows if row.head is not None}
    heads = {**heads_by_kind(arguments.head, pipeline.RunPaths(Path(recipe.run)).heads), **named}
    return demonstrate(options, config, heads, section.prompts if section else None, rows, recipe.threads)
