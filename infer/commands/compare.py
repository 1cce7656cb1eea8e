"""`compare`: the difference of tau between rows, in pairs of prompts."""

import argparse
from pathlib import Path

from aerie.configs.schema import recipe as pipeline
from aerie.infer.commands.chosen import HEAD, Commands


def add(commands: Commands) -> None:
    """Adds the command's options."""
    command = commands.add_parser(
        "compare", help="the difference of tau between rows of a bench, in pairs of prompts, with an interval"
    )
    pipeline.add_arguments(command)
    command.add_argument("--head", type=Path, help=HEAD)
    for name in ("of", "against"):
        command.add_argument(f"--{name}", type=int, nargs="+", required=True, help="rows of bench.rows, from 0; pooled")
    command.add_argument("--temperature", type=float, help="of the sampling that is compared, where there are several")


def run(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe = pipeline.load(arguments, unknown)
    from aerie.infer.measure.record import read_records
    from aerie.infer.measure.statistics import tau_difference
    from aerie.infer.report.tables import names

    records = read_records(pipeline.RunPaths(Path(recipe.run)).bench / "records.jsonl")
    if arguments.temperature is not None:
        records = [record for record in records if record.temperature == arguments.temperature]
    difference = tau_difference(records, arguments.of, arguments.against, recipe.seed)
    print(f"{names(records, arguments.of)} against {names(records, arguments.against)}:\n{difference.text()}")
    return 0
