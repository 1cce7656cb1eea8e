"""`aerie COMMAND`: every command of the project under one name."""

import difflib
import sys
from importlib import import_module
from typing import NamedTuple

from aerie.configs.errors import exit_codes


class Command(NamedTuple):
    module: str  # its main() runs the command
    summary: str

    def run(self) -> int:
        """Runs the command with the words that are left in sys.argv; returns its exit code."""
        return int(import_module(f"aerie.{self.module}").main())


COMMANDS = {
    "run": Command("run", "do what is left of a recipe, to the report"),
    "status": Command("status", "what a run has, and what to type next"),
    "keys": Command("configs.keys", "the keys of a recipe: meaning, type, default"),
    "init": Command("data.main", "write a recipe that suits a target, its data and this machine"),
    "synthetic": Command("data.main", "write a corpus, questions and a tokenizer"),
    "check": Command("data.main", "read every byte of a feature cache"),
    "show": Command("data.main", "conversations with the loss mask in colour"),
    "features": Command("data.main", "cache the target's hidden features"),
    "distill": Command("data.main", "have the target answer the prompts"),
    "train": Command("train.main", "train a head"),
    "generate": Command("infer.main", "answers to prompts"),
    "chat": Command("infer.main", "talk with the target"),
    "calibrate": Command("infer.main", "how confidence predicts acceptance"),
    "bench": Command("infer.main", "tau and speedup of every method asked for"),
    "tune": Command("infer.main", "the tree that suits a head on this machine"),
    "diagnose": Command("infer.main", "why a head is accepted less than it should be"),
    "report": Command("infer.main", "a page of what was measured"),
    "results": Command("infer.main", "the tables of runs in Markdown"),
    "claims": Command("infer.main", "what the papers claim, and what of it holds in a run"),
    "compare": Command("infer.main", "the difference between two rows of a bench"),
    "verify": Command("infer.main", "prove that methods are lossless"),
    "inspect": Command("model.main", "what a head is, and whether it fits a target"),
    "convert": Command("model.main", "write a head in another program's layout"),
    "push": Command("model.main", "ship a head to the Hub"),
}
ALONE = ("run", "status", "keys", "train")  # their modules have one command, and read no name of it


@exit_codes()
def main() -> int:
    """Runs the command that sys.argv names; --help lists the commands."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        if name in ALONE:
            del sys.argv[1]
        return COMMANDS[name].run()
    if not name.startswith("-"):
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"; did you mean {close[0]!r}?" if close else ""
        print(f"error: {name}: no command{advice}", file=sys.stderr)
        return 2
    print("usage: aerie COMMAND [OPTION ...]; aerie COMMAND --help shows a command's options\n")
    for command_name, command in COMMANDS.items():
        print(f"  {command_name:<11} {command.summary}")
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
