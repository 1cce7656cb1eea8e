"""`aerie COMMAND`: the commands of configs, data, train, model and infer under one name."""

import difflib
import sys
from importlib import import_module

from aerie.configs.errors import exit_codes

PACKAGES = {
    "configs": ("run", "status", "keys"),
    "data": ("init", "synthetic", "check", "show", "features", "distill"),
    "train": ("train",),
    "infer": ("generate", "chat", "calibrate", "bench", "tune", "report", "results", "compare", "verify"),
    "model": ("inspect", "convert", "push"),
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
        print("\n".join(f"  {package:8} {', '.join(commands)}" for package, commands in PACKAGES.items()))
        return 0 if command in ("-h", "--help") else 2
    if command == "train":
        del sys.argv[1]  # train/main.py has one command
    code: int = import_module(f"aerie.{owners[command]}.main").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
