"""`aerie COMMAND`: the commands of configs, data, train, model and infer under one name."""

import difflib
import sys
from importlib import import_module

from aerie.configs.errors import exit_codes

COMMANDS = """\
configs run         do what is left of a recipe, to the report
configs status      what a run has, and what to type next
configs keys        the keys of a recipe: meaning, type, default
data    init        write a recipe that suits a target, its data and this machine
data    synthetic   write a corpus, questions and a tokenizer
data    check       read every byte of a feature cache
data    show        conversations with the loss mask in colour
data    features    cache the target's hidden features
data    distill     have the target answer the prompts
train   train       train a head
infer   generate    answers to prompts
infer   chat        talk with the target
infer   calibrate   how confidence predicts acceptance
infer   bench       tau and speedup of every method asked for
infer   tune        the tree that suits a head on this machine
infer   report      a page of what was measured
infer   results     the tables of runs in Markdown
infer   claims      what the papers claim, and what of it holds in a run
infer   compare     the difference between two rows of a bench
infer   verify      prove that methods are lossless
model   inspect     what a head is, and whether it fits a target
model   convert     write a head in another program's layout
model   push        ship a head to the Hub"""
OWNERS = {command: package for package, command, *_ in map(str.split, COMMANDS.splitlines())}


@exit_codes()
def main() -> int:
    """Runs the main of the command's package; --help lists the commands."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command not in OWNERS:
        if not command.startswith("-"):
            close = difflib.get_close_matches(command, OWNERS, n=1)
            print(
                f"error: {command}: no command{f'; did you mean {close[0]!r}?' if close else ''}",
                file=sys.stderr,
            )
            return 2
        print("usage: aerie COMMAND [OPTION ...]; aerie COMMAND --help shows a command's options\n")
        print("\n".join(f"  {line[8:]}" for line in COMMANDS.splitlines()))
        return 0 if command in ("-h", "--help") else 2
    if command == "train":
        del sys.argv[1]  # train/main.py has one command
    return int(import_module(f"aerie.{OWNERS[command]}.main").main())


if __name__ == "__main__":
    sys.exit(main())
