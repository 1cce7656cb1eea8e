"""`aerie COMMAND`: all commands of the project under one name."""

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
    "run": Command("run", "run what is left of a recipe, up to the report"),
    "status": Command("status", "show what a run has done, and what to type next"),
    "keys": Command("configs.keys", "print a recipe's keys with their meaning, type and default"),
    "init": Command("data.main", "write a recipe that suits a target, its data and this machine"),
    "synthetic": Command("data.main", "write a corpus, questions and a tokenizer"),
    "check": Command("data.main", "check every byte of a feature cache"),
    "show": Command("data.main", "show conversations with their loss mask in colour"),
    "features": Command("data.main", "cache the target's hidden states"),
    "distill": Command("data.main", "let the target answer prompts"),
    "train": Command("train.main", "train a head"),
    "generate": Command("infer.main", "answer prompts"),
    "chat": Command("infer.main", "talk with the target"),
    "calibrate": Command("infer.main", "measure how well confidence predicts acceptance"),
    "bench": Command("infer.main", "measure tau and speedup of methods"),
    "tune": Command("infer.main", "find the fastest tree for a head on this machine"),
    "diagnose": Command(
        "infer.main", "find out why the target accepts a head's drafts less than it should"
    ),
    "report": Command("infer.main", "make a page of what was measured"),
    "results": Command("infer.main", "write tables of runs in Markdown"),
    "claims": Command("infer.main", "check which claims of the papers hold in a run"),
    "compare": Command("infer.main", "compare two rows of a bench"),
    "verify": Command("infer.main", "prove that methods are lossless"),
    "inspect": Command("model.main", "show what a head is, and whether it fits a target"),
    "convert": Command("model.main", "write a head in another program's layout"),
    "push": Command("model.main", "ship a head to the Hub"),
}
ALONE = ("run", "status", "keys", "train")  # their modules have one command and expect no name


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
        advice = f"; did you mean {close[0]!r}?" if close else "; aerie --help lists all"
        print(f"error: {name}: no command{advice}", file=sys.stderr)
        return 2
    print("usage: aerie COMMAND [OPTION ...]; aerie COMMAND --help shows a command's options\n")
    for command_name, command in COMMANDS.items():
        print(f"  {command_name:<11} {command.summary}")
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
