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
from typing import TYPE_CHECKING

from aerie.configs.errors import UserError, exit_code
from aerie.model.hub import HUB_ID, head_directory, require_login
from aerie.model.storage import is_dirty, read_json

if TYPE_CHECKING:
    from aerie.model.push import Repository

AFTER_BLOCKS = "taps of an EAGLE-3 head that names none, as 2,16,29"
LAYOUTS = ("safeailab", "sglang", "speculators")


def main() -> int:
    """The exit code of the command in sys.argv."""
    parser = argparse.ArgumentParser(description="Heads that travel: inspect, convert, push.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = {}
    for command, add_options, summary in (
        (inspect, _inspect_options, "what a head's files hold, and whether it fits a target"),
        (convert, _convert_options, "write a head in another layout, for vLLM, SGLang or SafeAILab's code"),
        (push, _push_options, "ship a head to the Hub with a card made from its run's reports"),
    ):
        options = commands.add_parser(command.__name__, help=summary, description=summary, allow_abbrev=False)
        options.add_argument("head", help="a head's directory, or a Hub repository (user/name, user/name@revision)")
        add_options(options)
        chosen[command.__name__] = command
    arguments = parser.parse_args()
    _be_quiet()
    return chosen[arguments.command](arguments)


def inspect(arguments: argparse.Namespace) -> int:
    """Prints one screen, or JSON with --json; 1 when the head would not load or does not fit the target."""
    from aerie.model.export import TargetFacts
    from aerie.model.inspection import inspect_head, screen

    taps = _taps(arguments.after_blocks)
    target = None if arguments.target is None else TargetFacts.load(arguments.target)
    found = inspect_head(arguments.head, target, taps)
    print(json.dumps(found, indent=1) if arguments.json else screen(found))
    return 1 if found["problems"] else 0


def convert(arguments: argparse.Namespace) -> int:
    """Writes OUT, and says what its reader would have to be told."""
    from aerie.model.export import TargetFacts, export

    out, drafts = arguments.out, arguments.speculative_tokens
    if drafts is not None and drafts < 1:
        raise UserError(f"--speculative-tokens {drafts}: a cycle drafts at least one token")
    taps = _taps(arguments.after_blocks)
    _check_name(arguments.target_name)
    _check_out(out, arguments.overwrite)
    target = TargetFacts.load(arguments.target, arguments.target_name, drafts)
    try:
        done = export(arguments.head, arguments.to, out, target, taps, arguments.any_target)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}; name another directory") from error
    for note in done.notes:
        print(f"note: {note}")
    print(
        f"convert: {done.source_layout} -> {arguments.to}: {done.num_tensors} tensors in {done.weights}, read back and "
        f"equal bit for bit"
    )
    return 0


def push(arguments: argparse.Namespace) -> int:
    """Ships the head, or with --dry-run prints what would go."""
    from aerie.model.export import TargetFacts
    from aerie.model.push import Order, Permissions, pack, upload

    if HUB_ID.fullmatch(arguments.repo) is None or "@" in arguments.repo:
        raise UserError(f"--repo {arguments.repo}: no repository name; it looks like user/name")
    taps = _taps(arguments.after_blocks)
    _check_name(arguments.target_name)
    directory = head_directory(arguments.head)
    if not directory.is_dir():
        raise UserError(f"{arguments.head}: no such head directory")
    target = None if arguments.target is None else TargetFacts.load(arguments.target)
    order = Order(directory, arguments.repo, arguments.run, arguments.target_name, arguments.license, target, taps)
    shipment = pack(order, Permissions(arguments.without_results, arguments.uncommitted), is_dirty())
    for note in shipment.notes:
        print(f"note: {note}")
    where = f"{arguments.repo}{'' if arguments.revision is None else '@' + arguments.revision}"
    if not arguments.dry_run:
        require_login()
    repository, is_asked = _found_there(arguments)
    removed = repository.removals(shipment.files)
    if arguments.dry_run:
        readme = shipment.files["README.md"]
        assert isinstance(readme, bytes)
        goes = f"\ngoes there: {', '.join(removed)}" if removed else ""
        visibility = "private" if repository.is_private or arguments.private else "public"
        visibility = visibility if is_asked else f"{visibility}, if it is new"
        print(f"push: would ship to {where} ({visibility}):\n{shipment.text()}{goes}\n\nREADME.md:\n{readme.decode()}")
        return 0
    address = upload(repository, shipment.files, arguments.private, "A draft head")
    gone = f", removed {', '.join(removed)} of an earlier push" if removed else ""
    print(f"push: {len(shipment.files)} files to {where}{gone}: {address}")
    return 0


def _found_there(arguments: argparse.Namespace) -> "tuple[Repository, bool]":
    """The repository as it is, and whether the Hub could be asked: a dry run does without.

    UserError where it is public and was to be private.
    """
    from aerie.model.push import Repository, look

    try:
        repository = look(arguments.repo, arguments.revision)
    except UserError as error:
        if not arguments.dry_run:
            raise
        why = str(error).split("; nothing is half there")[0]
        print(f"note: whether it is there, whose it is and what a push would remove is not known: {why}")
        return Repository(arguments.repo, arguments.revision), False
    repository.require_visibility(arguments.private)
    return repository, True


def _check_out(out: Path, overwrite: bool) -> None:
    """UserError unless out is new, empty, or an earlier export that may be replaced: nothing else is ever removed."""
    above = next((place for place in out.parents if place.exists()), out)
    if not above.is_dir():
        raise UserError(f"--out {out}: {above} is no directory; name another place")
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UserError(f"--out {out}: is no directory; name a new one")
    names = [path.name for path in out.iterdir()]
    if not names:
        return
    if not overwrite:
        raise UserError(f"--out {out}: not empty; name a new directory, or replace it with --overwrite")
    values = read_json(out / "config.json") if "config.json" in names else {}
    facts = values.get("aerie") if isinstance(values, dict) else None
    if not isinstance(facts, dict) or "exported_from" not in facts or any(path.is_dir() for path in out.iterdir()):
        raise UserError(f"--out {out}: holds something else than an earlier export; name a new directory")


def _inspect_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--target", help="check against this target (local directory or Hub id)")
    options.add_argument("--after-blocks", help=AFTER_BLOCKS)
    options.add_argument("--json", action="store_true", help="for tools")


def _convert_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--to", required=True, choices=LAYOUTS, help="the layout")
    options.add_argument("--target", required=True, help="the head's target (local directory or Hub id)")
    options.add_argument("--out", required=True, type=Path, help="the directory to write")
    options.add_argument("--target-name", help="what servers are told to load, where it is not --target")
    options.add_argument("--speculative-tokens", type=int, help="speculators' drafts per cycle (the head's, or 5)")
    options.add_argument("--after-blocks", help=AFTER_BLOCKS)
    options.add_argument("--any-target", action="store_true", help="although it was trained on other weights")
    options.add_argument("--overwrite", action="store_true", help="replace what is in --out")


def _push_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--repo", required=True, help="user/name")
    options.add_argument("--run", type=Path, help="the run with report/ and calibration/ (default: the head's own)")
    options.add_argument("--target", help="check against this target (local directory or Hub id)")
    options.add_argument("--target-name", help="the target's Hub id, where the head names a local path")
    options.add_argument("--after-blocks", help=AFTER_BLOCKS)
    options.add_argument("--license", help="licence of these weights, as the Hub spells it (apache-2.0)")
    options.add_argument("--private", action="store_true", help="a private repository; refused where it is public")
    options.add_argument("--revision", help="the branch (default: main)")
    options.add_argument("--dry-run", action="store_true", help="print what would go, and stop")
    options.add_argument("--without-results", action="store_true", help="ship although nothing was measured")
    options.add_argument("--uncommitted", action="store_true", help="ship although the tree was not committed")


def _taps(text: str | None) -> tuple[int, ...] | None:
    """'2,16,29' -> (2, 16, 29)."""
    if text is None:
        return None
    try:
        taps = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise UserError(f"--after-blocks {text}: not a list of block numbers like 2,16,29") from error
    if list(taps) != sorted(set(taps)) or taps[0] < 0:
        raise UserError(f"--after-blocks {text}: must ascend without repeats")
    return taps


def _check_name(name: str | None) -> None:
    """UserError for a --target-name that is no name of a model: it goes into commands and files for servers."""
    if name is not None and re.fullmatch(r"[\w./~][\w./~:@+-]*", name) is None:
        raise UserError(
            f"--target-name {name!r}: no name of a model; it looks like user/name, or is a path without blanks"
        )


def _be_quiet() -> None:
    """No chatter from the libraries between the lines."""
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(exit_code(main))
