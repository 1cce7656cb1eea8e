"""Decode with a draft head, calibrate it, measure it, tune its tree, compare, report, and prove that it is lossless."""

import argparse
import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")  # the checkout's packages, as aerie.*

from aerie.configs.errors import exit_code, stop_on_signals
from aerie.infer.commands import bench, calibrate, compare, generate, report, tune, verify

COMMANDS = {
    "generate": generate,
    "calibrate": calibrate,
    "bench": bench,
    "tune": tune,
    "report": report,
    "compare": compare,
    "verify": verify,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python infer/main.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add(commands)
    arguments, unknown = parser.parse_known_args()
    stop_on_signals()
    return COMMANDS[arguments.command].run(arguments, unknown)


if __name__ == "__main__":
    sys.exit(exit_code(main))
