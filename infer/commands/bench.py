"""`bench`: tau and speedup of every row of the recipe."""

import argparse
from dataclasses import replace
from pathlib import Path

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict, load
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.decode import METHODS, MethodConfig
from aerie.configs.schema.decode import digests as choice_digests
from aerie.configs.schema.measure import BenchConfig
from aerie.infer.commands.chosen import HEAD, Commands, head_of, recipe_of
from aerie.infer.decode.methods import check_levels, kind_at
from aerie.infer.measure.bench import (
    asked_of,
    begin_bench,
    calibrators_of,
    check_inputs,
    inputs_of,
    plan_text,
    prepare,
    suite_of,
)
from aerie.infer.measure.tasks import sources_facts
from aerie.model.hub import is_on_hub
from aerie.model.storage import Stage, with_status, write_json


def add(commands: Commands) -> None:
    """Adds the command's options."""
    command = commands.add_parser("bench", help="tau and speedup of every row of the recipe")
    pipeline.add_arguments(command)
    command.add_argument("--head", type=Path, help=HEAD)
    command.add_argument(
        "--row", type=Path, action="append", default=[], metavar="FILE.yaml", help="one more row, as `tune` writes it"
    )


def run(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, head = recipe_of(arguments, unknown)
    section = recipe.bench
    if section is None:
        raise UserError(f"{arguments.config}: has no section 'bench'; add one with prompts and rows")
    section = replace(section, rows=(*section.rows, *(load(path, MethodConfig, []) for path in arguments.row)))
    suite = suite_of(section)
    heads, trees = [], []
    for row, place in zip(suite.rows, suite.places, strict=True):
        trees.append(row.tree)
        unseen = arguments.plan and row.head is not None and METHODS[row.method].heads and is_on_hub(row.head)
        heads.append(row.head if unseen else head_of(row, recipe, paths, head, place))  # a plan fetches nothing
        if not unseen:
            check_levels(trees[-1], heads[-1], place)
    check_inputs(recipe.target, heads, section.prompts)
    if arguments.plan:
        print(f"{plan_text(section)} -> {paths.bench}")
        return 0
    sections = {"bench": as_dict(section), "threads": recipe.threads, **calibrators_of(suite.rows, heads)}
    sections |= choice_digests(trees)
    stage = Stage("bench", paths.bench, inputs_of(recipe.target, recipe.seed, heads, sections, section.prompts))
    if stage.is_whole():
        print(f"bench: whole, reused ({paths.bench})")
        return 0
    stage.require_own_directory(arguments.overwrite)
    begin_bench(stage, arguments.overwrite)
    return with_status(paths.status, "bench", lambda: _measure_bench(recipe, section, stage, heads))


def _measure_bench(
    recipe: pipeline.Recipe, section: BenchConfig, stage: Stage, heads: list[str | None]
) -> tuple[str, int]:
    prepare(recipe.threads)
    from aerie.infer.measure.bench import Bench, default_device, describe, make_decoders, max_context, run
    from aerie.infer.measure.record import SUITE, line_of
    from aerie.infer.measure.reference import measure_overhead, measure_reference, overhead_text, reference_text
    from aerie.infer.measure.tasks import load_prompts, pinned
    from aerie.model.storage import write_text
    from aerie.model.target import Target, load_tokenizer

    asked = pinned(section.prompts)
    prompts = load_prompts(asked)
    suite = suite_of(section)
    target = Target.load(recipe.target, default_device())
    decoders = make_decoders(target, suite.rows, heads, suite.places)
    kinds = [None if head is None else kind_at(Path(head)) for head in heads]
    bench = Bench(target, load_tokenizer(recipe.target), decoders, kinds, section, stage.output)
    write_json(stage.output / SUITE, as_dict(asked_of(section, prompts, max_context(target))))
    records = run(bench, prompts, recipe.seed)
    if section.reference:
        reference, records = measure_reference(bench, records)
        print(reference_text(reference))
    if section.overhead:
        print("\n".join(overhead_text(row) for row in measure_overhead(bench, prompts)))
    write_text(bench.records_path, "".join(line_of(record) for record in records))
    stage.finish(hardware=describe(target), answers=len(records), prompts=sources_facts(asked))
    failed = [record for record in records if record.status == "error"]
    print(
        f"bench: {len(records)} answers -> {stage.output}"
        + (f"; {len(failed)} failed: {failed[0].message}" if failed else "")
    )
    return "done", 0
