"""Inspects a head, converts it to another layout, or pushes it to the Hub.

python model/main.py inspect|convert|push HEAD
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    # the checkout's packages, as aerie.*
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")

import argparse
import json
from os.path import expanduser
from typing import TYPE_CHECKING

from aerie.configs.errors import Arguments, UserError, exit_codes
from aerie.configs.read import require_ascending, user_path
from aerie.model.hub import HUB_ID, quieten
from aerie.model.storage import CONFIG, read_json

if TYPE_CHECKING:
    from aerie.model.push import Files


def parser() -> argparse.ArgumentParser:
    top = Arguments(
        "aerie", description="Inspect, convert and push draft heads.", allow_abbrev=False
    )
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_argument(
            "head", type=expanduser, help="a directory, or user/name[@revision] on the Hub"
        )
        command.add_argument(
            "--target", type=expanduser, required=name == "convert", help="a directory or a Hub id"
        )
        command.add_argument(
            "--after-blocks", type=taps, help="taps of a head whose files name none, as 2,16,29"
        )
        return command

    inspect = add("inspect", "show what a head's files hold, and whether the head fits")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    convert = add("convert", "write a head for vLLM, SGLang or SafeAILab's code")
    convert.add_argument(
        "--to",
        required=True,
        choices=("safeailab", "sglang", "speculators", "vllm"),
        help="the layout (vllm: the one that vLLM loads)",
    )
    convert.add_argument("--out", required=True, type=user_path, help="the directory to write")
    convert.add_argument("--target-name", help="the target that servers load (default: --target)")
    convert.add_argument(
        "--any-target",
        action="store_true",
        help="accept a target with other weights than the head's own",
    )
    convert.add_argument(
        "--overwrite", action="store_true", help="replace an earlier export in --out"
    )
    push = add("push", "ship a head to the Hub, with a card from its run's reports")
    push.add_argument("--repo", required=True, help="user/name")
    push.add_argument(
        "--run", type=user_path, help="the run with its reports (default: the head's own)"
    )
    push.add_argument("--target-name", help="the target's Hub id, in place of a local path")
    push.add_argument("--license", help="the head's licence, as the Hub spells it (apache-2.0)")
    push.add_argument(
        "--private", action="store_true", help="make the repository private; refuse a public one"
    )
    push.add_argument("--revision", help="the branch (default: main)")
    push.add_argument("--dry-run", action="store_true", help="print what would be pushed, and stop")
    push.add_argument(
        "--without-results", action="store_true", help="push although nothing was measured"
    )
    push.add_argument(
        "--uncommitted",
        action="store_true",
        help="push although the checkout has uncommitted changes",
    )
    return top


@exit_codes()
def main() -> int:
    import warnings

    arguments = parser().parse_args()
    from aerie.model.formats.content import TargetFacts

    warnings.filterwarnings("ignore")  # of libraries
    quieten()
    if arguments.target is not None:
        arguments.target = TargetFacts.load(
            arguments.target, getattr(arguments, "target_name", None)
        )
    return {"inspect": inspect, "convert": convert, "push": push}[arguments.command](arguments)


def taps(text: str) -> tuple[int, ...]:
    """The numbers of 2,16,29; ValueError, which argparse explains, unless they ascend."""
    return require_ascending(tuple(map(int, text.split(","))))


def inspect(arguments: argparse.Namespace) -> int:
    """Returns 1 if the head does not load or fit."""
    from aerie.model.inspection import inspect_head, screen

    head = inspect_head(arguments.head, arguments.target, arguments.after_blocks)
    print(json.dumps(head, indent=1) if arguments.json else screen(head))
    return 1 if head["problems"] else 0


def convert(arguments: argparse.Namespace) -> int:
    from aerie.model.export import export

    out, to = arguments.out, arguments.to
    _require_replaceable(out, arguments.overwrite)
    layout, notes = export(
        arguments.head, to, out, arguments.target, arguments.after_blocks, arguments.any_target
    )
    print("".join(f"note: {note}\n" for note in notes), end="")
    print(f"convert: {layout} -> {to}: {out} (read back: equal bit for bit)")
    return 0


def _require_replaceable(out: Path, overwrite: bool) -> None:
    """UserError for a directory with files, unless they are an earlier export to overwrite."""
    from aerie.model.formats.content import nested

    files = list(out.glob("*"))
    if not files:
        return
    values = read_json(out / CONFIG) if out / CONFIG in files else {}
    if "exported_from" not in nested(values, "aerie") or any(path.is_dir() for path in files):
        raise UserError(
            f"--out {out}: not empty, and it is no earlier export; name a new directory"
        )
    if not overwrite:
        raise UserError(f"--out {out}: holds an earlier export; replace it with --overwrite")


def push(arguments: argparse.Namespace) -> int:
    from tempfile import TemporaryDirectory

    from aerie.model.inspection import inspect_head
    from aerie.model.push import pack, upload

    repo, revision = arguments.repo, arguments.revision
    if HUB_ID.fullmatch(repo) is None or "@" in repo:
        raise UserError(f"--repo {repo}: is no repository name; give user/name")
    head = inspect_head(arguments.head, arguments.target, arguments.after_blocks)
    allowed = [name for name in ("without_results", "uncommitted") if getattr(arguments, name)]
    where = repo if revision is None else f"{repo}@{revision}"
    with TemporaryDirectory() as temporary:
        server = Path(temporary) / "server", arguments.target
        files, notes = pack(
            head, repo, arguments.run, arguments.target_name, arguments.license, allowed, server
        )
        print("".join(f"note: {note}\n" for note in notes), end="")
        if arguments.dry_run:
            _print_push(repo, files, revision, where)
            return 0
        address, removed = upload(repo, files, revision, arguments.private)
        print(
            f"push: {len(files)} files to {where}, "
            f"removed {', '.join(removed) or 'nothing'}: {address}"
        )
    return 0


def _print_push(repo: str, files: "Files", revision: str | None, where: str) -> None:
    """Prints what a push would do, with the size of each file and the card."""
    from aerie.model.push import removals

    try:
        effect = f"remove {', '.join(removals(repo, files, revision)) or 'nothing'}"
    except UserError as error:
        effect = f"fail now ({error})"
    print(f"push: would {effect}, and ship to {where}:")
    for name, file in sorted(files.items()):
        size = len(file) if isinstance(file, bytes) else file.stat().st_size
        print(f"  {size:>16,} bytes  {name}")
    print(f"\nREADME.md:\n{bytes(files['README.md']).decode()}")


if __name__ == "__main__":
    sys.exit(main())
