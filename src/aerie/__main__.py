"""`aerie COMMAND`: the commands of configs, data, train, model and infer under one name."""

import difflib
import sys
from importlib import import_module

from aerie.configs.errors import exit_codes

PACKAGES = {
    "configs": {
        "run": "do what is left of a recipe, to the report",
        "status": "what a run has, and what to type next",
        "keys": "the keys of a recipe: meaning, type, default",
    },
    "data": {
        "init": "write a recipe that suits a target, its data and this machine",
        "synthetic": "write a corpus, questions and a tokenizer",
        "check": "read every byte of a feature cache",
        "show": "conversations with the loss mask in colour",
        "features": "cache the target's hidden features",
        "distill": "have the target answer the prompts",
    },
    "train": {"train": "train a head"},
    "infer": {
        "generate": "answers to prompts",
        "chat": "talk with the target",
        "calibrate": "how confidence predicts acceptance",
        "bench": "tau and speedup of every method asked for",
        "tune": "the tree that suits a head on this machine",
        "report": "a page of what was measured",
        "results": "the tables of runs in Markdown",
        "compare": "the difference between two rows of a bench",
        "verify": "prove that methods are lossless",
    },
    "model": {
        "inspect": "what a head is, and whether it fits a target",
        "convert": "write a head in another program's layout",
        "push": "ship a head to the Hub",
    },
}


@exit_codes()
def main() -> int:
    """Hands the words to the command's own main; --help lists the commands."""
    owners = {command: package for package, commands in PACKAGES.items() for command in commands}
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command not in owners:
        if not command.startswith("-"):
            close = difflib.get_close_matches(command, owners, n=1)
            print(f"error: {command}: no command{f'; did you mean {close[0]!r}?' if close else ''}", file=sys.stderr)
            return 2
        print("usage: aerie COMMAND [OPTION ...]; aerie COMMAND --help tells a command's options\n")
        print("\n".join(f"  {name:10} {words}" for commands in PACKAGES.values() for name, words in commands.items()))
        return 0 if command in ("-h", "--help") else 2
    if command == "train":
        del sys.argv[1]  # train/main.py has one command
    code: int = import_module(f"aerie.{owners[command]}.main").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
