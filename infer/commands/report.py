"""`report`: summary.json and index.html from what was measured."""

import argparse
import shlex
from pathlib import Path

from aerie.configs.errors import UserError
from aerie.configs.schema import recipe as pipeline
from aerie.infer.commands.chosen import HEAD, Commands, recipe_of
from aerie.model.storage import read_json


def add(commands: Commands) -> None:
    """Adds the command's options."""
    command = commands.add_parser("report", help="summary.json and index.html from what was measured")
    pipeline.add_arguments(command)
    command.add_argument("--head", type=Path, help=HEAD)


def run(arguments: argparse.Namespace, unknown: list[str]) -> int:
    recipe, paths, head = recipe_of(arguments, unknown)
    if arguments.plan:
        print(f"report: {paths.bench} and {paths.calibration} -> {paths.report}")
        return 0
    from aerie.infer.report.page import Facts, write_report
    from aerie.infer.report.tables import console_table

    measured = paths.bench / "provenance.json"
    if not measured.is_file():
        records = paths.bench / "records.jsonl"
        begun = (
            f"only {sum(1 for _ in records.open('rb')):,} answers of a bench that" if records.is_file() else "nothing"
        )
        raise UserError(
            f"{paths.bench}: {begun} was {'stopped' if records.is_file() else 'measured yet'}; run: "
            f"python infer/main.py bench --config {arguments.config}"
        )
    facts = read_json(measured)
    provenance = head / "provenance.json"
    trained = read_json(provenance) if provenance.is_file() else {}
    rows = write_report(
        paths.bench,
        paths.calibration,
        paths.report,
        Facts(
            run=str(recipe.run),
            commit=facts.get("commit"),
            target={"name": recipe.target.path, "dtype": recipe.target.dtype},
            head={
                "kind": recipe.head.kind,
                "name": str(head),
                **{k: trained[k] for k in ("training_tokens", "steps", "seconds") if k in trained},
            },
            hardware=facts.get("hardware", {}),
            commands=_commands(arguments.config, paths, head),
        ),
        seed=recipe.seed,
    )
    print(console_table(rows))
    print(f"\nreport: {paths.report / 'index.html'}")
    return 0


def _commands(config: Path, paths: pipeline.RunPaths, head: Path) -> tuple[str, ...]:
    """The commands that made the run, as each stage's provenance has them."""
    found = []
    for place in (paths.features, head, paths.calibration, paths.bench, paths.tune):
        record = place / "provenance.json"
        words = read_json(record).get("argv") if record.is_file() else None
        if words:
            launcher = "accelerate launch" if words[0] in ("data/main.py", "train/main.py") else "python"
            found.append(f"{launcher} {shlex.join(words)}")
    return (*found, f"python infer/main.py report --config {config}")
