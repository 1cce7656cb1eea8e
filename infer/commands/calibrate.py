"""`calibrate`: how confidence predicts acceptance."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.decode import USUAL, MethodConfig
from aerie.configs.schema.decode import digests as choice_digests
from aerie.infer.commands.chosen import HEAD, Commands, check_given, head_of, kinds_of, recipe_of
from aerie.infer.decode.methods import check_levels
from aerie.infer.measure.bench import check_inputs, inputs_of, prepare
from aerie.model.storage import Stage, with_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from aerie.infer.decode.engine import SpeculativeDecoder
    from aerie.model.target import Target


def add(commands: Commands) -> None:
    """Adds the command's options."""
    command = commands.add_parser(
        "calibrate", help="how confidence predicts acceptance, from decoding cycles on held-out prompts"
    )
    pipeline.add_arguments(command)
    command.add_argument("--head", type=Path, help=HEAD)


def run(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, head = recipe_of(arguments, unknown)
    section = recipe.calibrate
    if section is None:
        raise UserError(f"{arguments.config}: has no section 'calibrate'; add one with prompts: {{path: ...}}")
    asked = MethodConfig(section.method or USUAL[recipe.head.kind], section.tree)
    if not kinds_of(asked.method):
        raise UserError(f"calibrate.method: {asked.method} has no head, and so no confidence that could be measured")
    check_given(arguments.head, asked.method)
    tree = asked.tree
    used = head_of(asked, recipe, paths, head, "calibrate")
    check_levels(tree, used, "calibrate")
    check_inputs(recipe.target, [used], section.prompts)
    sections = {"calibrate": as_dict(section), **choice_digests([tree])}
    inputs = inputs_of(recipe.target, recipe.seed, [used], sections, section.prompts)
    stage = Stage("calibration", paths.calibration, inputs)
    if arguments.plan:
        print(
            f"calibrate: {section.prompts.num_prompts} prompts x {section.prompts.max_new_tokens} new tokens, "
            f"{asked.method}, {as_dict(tree) if tree else 'no tree'}, {used} -> {paths.calibration}"
        )
        return 0
    if stage.is_whole():
        print(f"calibrate: whole, reused ({paths.calibration})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    return with_status(paths.status, "calibrate", lambda: _measure_calibration(recipe, asked, stage, used))


def _measure_calibration(
    recipe: pipeline.Recipe, asked: MethodConfig, stage: Stage, head: str | None
) -> tuple[str, int]:
    prepare(recipe.threads)
    from aerie.data.progress import bar
    from aerie.infer.measure.calibrate import rebuild, record, write_calibration
    from aerie.infer.measure.tasks import encode, load_prompts

    section = recipe.calibrate
    assert section is not None
    prompts = load_prompts(section.prompts)
    target, tokenizer, decoder = _decoder(recipe, asked, head)
    with bar(len(prompts), "prompts", "calibrate") as progress:

        def questions() -> "Iterator[tuple[Tensor, str]]":
            for prompt in prompts:
                yield encode(prompt.text, tokenizer, target), prompt.task
                progress.update()

        recording = record(decoder, asked.tree, questions(), section, recipe.seed)
    lines = write_calibration(stage.output, recording, section.bins, head, lambda token: str(tokenizer.decode([token])))
    encoded = [encode(prompt.text, tokenizer, target) for prompt in prompts]
    rebuilt = rebuild(target, asked, head, encoded, section, stage.output)
    stage.finish(nodes=len(recording.tables["nodes"]), cycles=len(recording.tables["cycles"]))
    print("\n".join([*lines, *([rebuilt] if rebuilt else [])]))
    return "done", 0


def _decoder(
    recipe: pipeline.Recipe, asked: MethodConfig, head: str | None
) -> "tuple[Target, Any, SpeculativeDecoder]":
    from aerie.infer.decode.engine import make_decoder
    from aerie.infer.decode.methods import Drafters
    from aerie.infer.measure.bench import default_device
    from aerie.model.target import Target, load_tokenizer

    target = Target.load(recipe.target, default_device())
    return target, load_tokenizer(recipe.target), make_decoder(Drafters(target), asked, head, "calibrate")
