"""Decode with a draft head, calibrate it, measure it, tune its tree, compare, report, and prove that it is lossless."""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")  # the checkout's packages, as aerie.*

from aerie.configs.errors import exit_code, stop_on_signals
from aerie.configs.schema import recipe as pipeline
from aerie.configs.schema.decode import METHODS, Method
from aerie.infer import commands

HELP = {
    "generate": "stream an answer; accepted draft tokens are green",
    "calibrate": "how confidence predicts acceptance, from decoding cycles on held-out prompts",
    "bench": "tau and speedup of every row of the recipe",
    "tune": "the tree that suits the heads on this machine, as a YAML; and how well that was predicted",
    "report": "summary.json and index.html from what was measured",
    "compare": "the difference of tau between rows of a bench, in pairs of prompts, with an interval",
    "verify": "prove that methods are lossless; exit code 1 where one is not",
}
WITHOUT_RECIPE = ("generate", "verify")  # --config is optional there
HEAD: dict[str, Any] = {"type": Path, "help": "a head directory (default: the run's own)"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE.yaml"}
ROWS: dict[str, Any] = {"type": int, "nargs": "+", "required": True, "help": "rows of bench.rows, from 0; pooled"}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "generate": {
        "--prompt": {"required": True},
        "--raw": {"action": "store_true", "help": "the prompt as it is, without the chat template"},
        "--method": {"choices": get_args(Method), "help": "default: the usual one of the head"},
        "--row": {**FILE, "help": "a method with its tree, as `tune` writes it"},
        "--max-new-tokens": {"type": int},
        "--temperature": {"type": float},
        "--top-k": {"type": int},
        "--top-p": {"type": float},
        "--seed": {"type": int, "default": 0},
        "--show-tree": {"action": "store_true", "help": "print the first draft tree"},
        "--save-tree": {"type": Path, "metavar": "PATH.json", "help": "write the first draft tree as JSON"},
        "--cycles": {"type": Path, "metavar": "PATH.jsonl", "help": "write a record of every cycle"},
        "--head": HEAD,
    },
    "calibrate": {"--head": HEAD},
    "bench": {
        "--head": HEAD,
        "--row": {"action": "append", "default": [], **FILE, "help": "one more row, as `tune` writes it"},
    },
    "tune": {"--head": HEAD},
    "report": {"--head": HEAD},
    "compare": {
        "--head": HEAD,
        "--of": ROWS,
        "--against": ROWS,
        "--temperature": {"type": float, "help": "of the sampling that is compared, where there are several"},
    },
    "verify": {
        "--head": {"type": Path, "action": "append", "default": [], "help": "a head directory; one of each kind"},
        "--methods": {"default": ",".join(METHODS), "help": "eagle2,sps,...; default: all"},
        "--prompts": {"type": int, "default": 20, "help": "prompts answered greedily (default 20)"},
        "--draws": {"type": int, "default": 2000, "help": "sampled answers for each p-value (default 2000)"},
        "--seed": {"type": int, "default": 0, "help": "of the sampled answers"},
        "--json": {"type": Path, "help": "write what was found to this file too"},
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python infer/main.py", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, options in OPTIONS.items():
        command = subparsers.add_parser(name, help=HELP[name])
        pipeline.add_arguments(command, config_required=name not in WITHOUT_RECIPE)
        for flag, settings in options.items():
            command.add_argument(flag, **settings)
    arguments, unknown = parser.parse_known_args()
    stop_on_signals()
    return int(getattr(commands, arguments.command)(arguments, unknown))


if __name__ == "__main__":
    sys.exit(exit_code(main))
