"""`report`: summary.json and index.html from what was measured."""

import argparse
from pathlib import Path

import pipeline
from infer.commands.chosen import HEAD, Commands, recipe_of
from model.errors import UserError
from model.files import read_json


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
    from infer.report import Facts, console_table, write_report

    measured = paths.bench / "provenance.json"
    if not measured.is_file():
        raise UserError(
            f"{paths.bench}: nothing was measured yet; run: python infer/main.py bench --config {arguments.config}"
        )
    facts = read_json(measured)
    provenance = head / "provenance.json"
    trained = read_json(provenance) if provenance.is_file() else {}
    summary = write_report(
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
            commands=_commands(arguments.config, paths),
        ),
        seed=recipe.seed,
    )
    print(console_table({"rows": read_json(paths.report / "details.json").get("pooled", summary["rows"])}))
    print(f"\nreport: {paths.report / 'index.html'}")
    return 0


def _commands(config: Path, paths: pipeline.RunPaths) -> tuple[str, ...]:
    """The commands whose outputs the run has, in their order."""
    made = (
        ("accelerate launch data/main.py features", paths.features),
        ("accelerate launch train/main.py", paths.heads),
        ("python infer/main.py calibrate", paths.calibration),
        ("python infer/main.py bench", paths.bench),
        ("python infer/main.py tune", paths.tune),
    )
    found = [f"{words} --config {config}" for words, place in made if place.exists()]
    return (*found, f"python infer/main.py report --config {config}")
