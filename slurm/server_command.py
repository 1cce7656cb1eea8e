"""Prints the command of the servers that a stage asks; nothing if it asks none, or is done.

python slurm/server_command.py STAGE --config RECIPE [--section.key VALUE ...]
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    # the checkout's packages, as aerie.*
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")

import argparse

from aerie.configs.errors import exit_codes
from aerie.configs.schema.recipe import add_arguments, load
from aerie.run import is_left, urls_asked


@exit_codes()
def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("stage", choices=("distill", "features", "train"))
    add_arguments(parser)
    arguments, overrides = parser.parse_known_args()
    from aerie.data.servers import command_of_stage

    recipe = load(arguments, overrides)
    stage = arguments.stage
    urls = urls_asked(recipe, stage)
    if urls and is_left(stage, sys.argv[2:]):
        print(command_of_stage(recipe, stage, urls[0]))


if __name__ == "__main__":
    main()
