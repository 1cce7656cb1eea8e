"""Heads that travel: look at one, write it in another layout, ship it to the Hub.

python model/main.py inspect HEAD [--target T] [--json]
python model/main.py convert HEAD --to safeailab|sglang|speculators --target T --out DIR
python model/main.py push HEAD --repo user/name [--private] [--revision BRANCH] [--dry-run]
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")  # the checkout's packages, as aerie.*

import argparse
import json
import re

from aerie.configs.errors import UserError, exit_code
from aerie.model.hub import HUB_ID, head_directory, require_login
from aerie.model.storage import is_dirty, read_json

TARGET = "check against this target (local directory or Hub id)"
TAPS = "taps of an EAGLE-3 head that names none, as 2,16,29"


def parser() -> argparse.ArgumentParser:
    """The options of the three commands."""
    top = argparse.ArgumentParser(description="Heads that travel: inspect, convert, push.", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_argument("head", help="a head's directory, or a Hub repository (user/name, user/name@revision)")
        command.add_argument("--target", required=name == "convert", help=TARGET)
        command.add_argument("--after-blocks", help=TAPS)
        return command

    inspect = add("inspect", "what a head's files hold, and whether it fits a target")
    inspect.add_argument("--json", action="store_true", help="for tools")
    convert = add("convert", "write a head in another layout, for vLLM, SGLang or SafeAILab's code")
    convert.add_argument("--to", required=True, choices=("safeailab", "sglang", "speculators"), help="the layout")
    convert.add_argument("--out", required=True, type=Path, help="the directory to write")
    convert.add_argument("--target-name", help="what servers are told to load, where it is not --target")
    convert.add_argument("--speculative-tokens", type=int, help="speculators' drafts per cycle (the head's, or 5)")
    convert.add_argument("--any-target", action="store_true", help="although it was trained on other weights")
    convert.add_argument("--overwrite", action="store_true", help="replace what is in --out")
    push = add("push", "ship a head to the Hub with a card made from its run's reports")
    push.add_argument("--repo", required=True, help="user/name")
    push.add_argument("--run", type=Path, help="the run with report/ and calibration/ (default: the head's own)")
    push.add_argument("--target-name", help="the target's Hub id, where the head names a local path")
    push.add_argument("--license", help="licence of these weights, as the Hub spells it (apache-2.0)")
    push.add_argument("--private", action="store_true", help="a private repository; refused where it is public")
    push.add_argument("--revision", help="the branch (default: main)")
    push.add_argument("--dry-run", action="store_true", help="print what would go, and stop")
    push.add_argument("--without-results", action="store_true", help="ship although nothing was measured")
    push.add_argument("--uncommitted", action="store_true", help="ship although the tree was not committed")
    return top


def main() -> int:
    """The exit code of the command in sys.argv."""
    import warnings

    arguments = parser().parse_args()
    from transformers.utils import logging

    warnings.filterwarnings("ignore")  # no chatter from the libraries between the lines
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = getattr(arguments, "target_name", None)
    if name is not None and re.fullmatch(r"[\w./~][\w./~:@+-]*", name) is None:
        raise UserError(f"--target-name {name!r}: no name of a model, such as user/name or a path without blanks")
    return {"inspect": inspect, "convert": convert, "push": push}[arguments.command](arguments)


def inspect(arguments: argparse.Namespace) -> int:
    """Prints one screen, or JSON with --json; 1 when the head would not load or does not fit the target."""
    from aerie.model.export import TargetFacts
    from aerie.model.inspection import inspect_head, screen

    target = None if arguments.target is None else TargetFacts.load(arguments.target)
    head = inspect_head(arguments.head, target, taps_of(arguments))
    print(json.dumps(head, indent=1) if arguments.json else screen(head))
    return 1 if head["problems"] else 0


def convert(arguments: argparse.Namespace) -> int:
    """Writes --out, and prints what its reader would have to be told."""
    from aerie.model.export import TargetFacts, export

    out, drafts, taps = arguments.out, arguments.speculative_tokens, taps_of(arguments)
    if drafts is not None and drafts < 1:
        raise UserError(f"--speculative-tokens {drafts}: a cycle drafts at least one token")
    require_own_directory(out, arguments.overwrite)
    target = TargetFacts.load(arguments.target, arguments.target_name, drafts)
    try:
        done = export(arguments.head, arguments.to, out, target, taps, arguments.any_target)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}; name another directory") from error
    print("".join(f"note: {note}\n" for note in done.notes), end="")
    print(
        f"convert: {done.source_layout} -> {arguments.to}: {done.num_tensors} tensors in {done.weights}, read back and "
        f"equal bit for bit"
    )
    return 0


def push(arguments: argparse.Namespace) -> int:
    """Ships the head, or with --dry-run prints what would go."""
    from aerie.model.export import TargetFacts
    from aerie.model.push import Order, Repository, look, pack, upload

    if HUB_ID.fullmatch(arguments.repo) is None or "@" in arguments.repo:
        raise UserError(f"--repo {arguments.repo}: no repository name; it looks like user/name")
    directory, taps = head_directory(arguments.head), taps_of(arguments)
    if not directory.is_dir():
        raise UserError(f"{arguments.head}: no such head directory")
    target = None if arguments.target is None else TargetFacts.load(arguments.target)
    names = (directory, arguments.repo, arguments.run, arguments.target_name, arguments.license, target, taps)
    shipment = pack(Order(*names, arguments.without_results, arguments.uncommitted), is_dirty())
    print("".join(f"note: {note}\n" for note in shipment.notes), end="")
    where = f"{arguments.repo}{'' if arguments.revision is None else '@' + arguments.revision}"
    if not arguments.dry_run:
        require_login()
    visibility = ""
    try:
        repository = look(arguments.repo, arguments.revision)
    except UserError as error:
        if not arguments.dry_run:
            raise
        why = str(error).split("; nothing is half there")[0]
        print(f"note: whether it is there, whose it is and what a push would remove is not known: {why}")
        repository, visibility = Repository(arguments.repo, arguments.revision), ", if it is new"
    repository.require_visibility(arguments.private)
    removed = ", ".join(repository.removals(shipment.files))
    if arguments.dry_run:
        readme = shipment.files["README.md"]
        assert isinstance(readme, bytes)
        goes = f"\ngoes there: {removed}" if removed else ""
        visibility = ("private" if repository.is_private or arguments.private else "public") + visibility
        print(f"push: would ship to {where} ({visibility}):\n{shipment.text()}{goes}\n\nREADME.md:\n{readme.decode()}")
        return 0
    address = upload(repository, shipment.files, arguments.private, "A draft head")
    gone = f", removed {removed} of an earlier push" if removed else ""
    print(f"push: {len(shipment.files)} files to {where}{gone}: {address}")
    return 0


def require_own_directory(out: Path, overwrite: bool) -> None:
    """UserError unless out is new, empty, or an earlier export that may be replaced: nothing else is ever removed."""
    above = next((place for place in out.parents if place.exists()), out)
    if not above.is_dir() or ((out.exists() or out.is_symlink()) and not out.is_dir()):
        raise UserError(f"--out {out}: {out if above.is_dir() else above} is no directory; name another place")
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    if names and not overwrite:
        raise UserError(f"--out {out}: not empty; name a new directory, or replace it with --overwrite")
    values = read_json(out / "config.json") if "config.json" in names else {}
    facts = values.get("aerie") if isinstance(values, dict) else None
    is_export = isinstance(facts, dict) and "exported_from" in facts
    if names and not (is_export and all(path.is_file() for path in out.iterdir())):
        raise UserError(f"--out {out}: holds something else than an earlier export; name a new directory")


def taps_of(arguments: argparse.Namespace) -> tuple[int, ...] | None:
    """--after-blocks 2,16,29 as (2, 16, 29)."""
    text = arguments.after_blocks
    if text is None:
        return None
    words = text.split(",")
    taps = tuple(int(word) for word in words if word.strip().isdecimal())
    if len(taps) < len(words) or list(taps) != sorted(set(taps)):
        raise UserError(f"--after-blocks {text}: must be ascending block numbers without repeats, like 2,16,29")
    return taps


if __name__ == "__main__":
    sys.exit(exit_code(main))
