"""`tune`: the fastest method for the heads of a run on this machine."""

import argparse
from pathlib import Path

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.measure import TuneConfig
from aerie.infer.commands.chosen import HEAD, Commands, recipe_of
from aerie.infer.decode.methods import heads_by_kind
from aerie.infer.measure.bench import check_inputs, inputs_of, prepare
from aerie.infer.measure.tune import check_apart
from aerie.model.storage import Stage, with_status

TUNABLE = ("eagle1", "eagle3", "draft_lm")  # whose trees are searched; a static one comes from `calibrate`


def add(commands: Commands) -> None:
    """Adds the command's options."""
    command = commands.add_parser(
        "tune", help="the tree that suits the heads on this machine, as a YAML; and how well that was predicted"
    )
    pipeline.add_arguments(command)
    command.add_argument("--head", type=Path, help=HEAD)


def run(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, _ = recipe_of(arguments, unknown)
    section = recipe.tune
    if section is None:
        raise UserError(f"{arguments.config}: has no section 'tune'; add one with prompts: {{path: ...}}")
    heads = heads_by_kind([arguments.head] if arguments.head else [], None if arguments.head else paths.heads)
    heads = {kind: place for kind, place in heads.items() if kind in TUNABLE}
    if not heads:
        raise UserError(
            f"{arguments.head or paths.heads}: no head of kind {', '.join(TUNABLE)}; train one, or give --head"
        )
    for prompts in (section.prompts, section.measure or section.prompts):
        check_inputs(recipe.target, list(heads.values()), prompts)
    inputs = inputs_of(recipe.target, recipe.seed, list(heads.values()), {"tune": as_dict(section)}, section.prompts)
    stage = Stage("tune", paths.tune, {**inputs, "threads": recipe.threads})
    check_apart(section)
    if arguments.plan:
        print(f"tune: {', '.join(heads)}, up to {section.levels} levels, k {section.k} -> {paths.tune / 'tuned.yaml'}")
        return 0
    if stage.is_whole():
        print(f"tune: whole, reused ({paths.tune})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    return with_status(paths.status, "tune", lambda: _tune_heads(recipe, section, stage, heads))


def _tune_heads(recipe: pipeline.Recipe, section: TuneConfig, stage: Stage, heads: dict[str, str]) -> tuple[str, int]:
    prepare(recipe.threads)
    from aerie.infer.measure.bench import default_device, describe
    from aerie.infer.measure.tune import TUNED, measure, tune
    from aerie.model.target import Target, load_tokenizer

    target, tokenizer = Target.load(recipe.target, default_device()), load_tokenizer(recipe.target)
    best = tune(target, tokenizer, heads, section, stage.output)
    if section.measure is not None:
        measure(target, tokenizer, best, section, stage.output, recipe.seed)
    stage.finish(hardware=describe(target))
    print(f"tune: {stage.output / TUNED} (generate --row FILE, bench --row FILE)")
    return "done", 0
