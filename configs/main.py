"""Settings: the keys of a recipe.

aerie keys [SECTION] [--markdown]
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")  # the checkout's packages, as aerie.*

import argparse
import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator
from math import inf
from typing import Any

import yaml

from aerie.configs.errors import UserError, exit_codes, stop_on_signals
from aerie.configs.read import Place, Section, as_dict, suggestion
from aerie.configs.schema.recipe import Recipe

TAGS = ("kind", "shape", "rule")  # the key that tells the members of a union apart
TYPES = {int: "integer", float: "number", str: "text", bool: "true | false", dict: "mapping", type(None): "null"}
PAGE = """# Recipes: every key

A recipe is a YAML file with the sections below; `run`, `target.path` and `data.conversations` are all that it needs.
Any key can be set on the command line too: `--train.learning_rate 1e-4`, `--bench.rows.1.tree.nodes 30` (`*` below is
a place in a list, from 0). One value where a list is expected is a list of one, and `~` is the home directory in every
path. `aerie keys SECTION` prints a section.

This page is made from the schema by `aerie keys --markdown > docs/recipes.md`.
"""
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@exit_codes()
def main() -> int:
    parser = argparse.ArgumentParser("aerie", description="Settings.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(command: Any, summary: str) -> argparse.ArgumentParser:
        options = commands.add_parser(command.__name__, help=summary, description=summary, allow_abbrev=False)
        options.set_defaults(run_command=command)
        return options

    options = add(keys, "print the keys of a recipe: meaning, type, default")
    options.add_argument("section", nargs="?", help="such as train, bench.prompts or tree.stop; default: the sections")
    options.add_argument("--markdown", action="store_true", help="as a page; of every section by default")
    arguments = parser.parse_args()
    stop_on_signals()
    return int(arguments.run_command(arguments))


def keys(arguments: argparse.Namespace) -> int:
    section = re.sub(r"\.\d+(?=\.|$)", ".*", arguments.section or "")
    blocks = documented(section)
    if not blocks:
        raise UserError(f"{section}: no section or key of a recipe; {suggestion(section.split('.'), Recipe)}")
    if arguments.markdown:
        lists = ("".join(f"- `{name}`: {words}\n" for name, words in rows.items()) for _, _, rows in blocks)
        pages = [f"## {head}\n\n{text}{listed}" for (head, text, _), listed in zip(blocks, lists, strict=True)]
        print("\n".join([*([] if section else [PAGE]), *pages]), end="")
        return 0
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    for head, text, rows in blocks if section else blocks[:1]:
        print(head.replace("`", ""), *textwrap.wrap(text, width - 2), sep="\n  ", end="\n\n")
        indent = " " * (max(map(len, rows), default=0) + 4)
        for name, words in rows.items():
            first = f"  {name}".ljust(len(indent))
            print(textwrap.fill(words, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False))
        print()
    if not section:
        print("aerie keys SECTION prints the keys of one; a command line can set each of them: --section.key VALUE")
    return 0


def documented(section: str = "") -> list[tuple[str, str, dict[str, str]]]:
    """Heading, text and {key: meaning (type; default)} of each class at and below a place, after the key so named."""
    found: dict[Any, dict[str, list[str]]] = {}  # class -> place -> kinds
    for cls, place, kind in _sections(Recipe):
        found.setdefault(cls, {}).setdefault(place, []).append(kind)
    blocks, (parent, _, leaf) = [], section.rpartition(".")
    for cls, at in found.items():
        places = [place for place in at if f"{place}.".startswith(f"{section}." if section else "")]
        own = {key: words for key, words in _keys(cls) if not (key in TAGS and any(map(any, at.values())))}
        if not places and parent in at and leaf in own:
            places, own = [parent], {leaf: own[leaf]}
        if places:
            kinds = " | ".join(dict.fromkeys(kind for place in places for kind in at[place] if kind))
            kinds = kinds and f" ({re.sub(r'[|] [a-z]+: ', '| ', kinds)})"
            text = "" if cls.__doc__.startswith(f"{cls.__name__}(") else f"{cls.__doc__}\n\n"  # dataclass writes one
            blocks.append((", ".join(f"`{place}`" for place in places if place) + kinds or "A recipe", text, own))
    return blocks


def _sections(hint: Any, place: str = "", kind: str = "") -> Iterator[tuple[Any, str, str]]:
    """Every class with keys at and below a place, those that it inherits from first, and the kind that chooses it."""
    if isinstance(hint, type) and issubclass(hint, Section):
        bases = [base for base in reversed(hint.__mro__) if issubclass(base, Section) and base is not Section]
        yield from ((base, place, kind) for base in bases if vars(base).get("__annotations__"))
        for field in dataclasses.fields(hint):
            yield from _sections(field.type, f"{place}.{field.name}".lstrip("."))
    elif typing.get_origin(hint) is not typing.Literal:
        members = typing.get_args(hint)
        tags = [tag for member in members for tag in TAGS if tag in getattr(member, "__dataclass_fields__", ())]
        for member in members:
            inner = f"{place}.*" if typing.get_origin(hint) is tuple else place
            kinds = f"{tags[0]}: {_type(member.__dataclass_fields__[tags[0]].type)}" if len(tags) > 1 else ""
            yield from _sections(member, inner, kinds)


def _keys(cls: Any) -> Iterator[tuple[str, str]]:
    """Those that the class itself declares; their comments stand behind or above them."""
    lines, fields = inspect.getsource(cls).splitlines(), {field.name: field for field in dataclasses.fields(cls)}
    for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and (field := fields.get(ast.unparse(node.target))):
            first = node.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            words = [line.strip().lstrip("# ") for line in lines[first : node.lineno - 1]]
            words.append(lines[(node.end_lineno or 1) - 1].partition("  # ")[2])
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            facts = _type(field.type)
            if value is dataclasses.MISSING:
                facts += "; required"
            elif not isinstance(value, Section):
                flow = yaml.safe_dump(as_dict(value), default_flow_style=True, width=inf)
                facts += f"; default {flow}".removesuffix("...\n").strip()
            yield field.name, " ".join(filter(None, [*words, f"({facts})"]))


def _type(hint: Any) -> str:
    """'integer >= 1', 'chain | static', 'list of text | null'."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint == Place:
        return "path"
    if origin is typing.Annotated:
        rules = [rule for metadata in inner[1:] for rule in getattr(metadata, "metadata", [metadata])]
        limits = {sign: getattr(rule, name) for rule in rules for name, sign in BOUNDS.items() if hasattr(rule, name)}
        bounds = [f"{sign} {limit:g}" for sign, limit in limits.items() if limit != inf]
        return " ".join([_type(inner[0]), ", ".join(bounds)]).strip()
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type, inner)))
    if origin is typing.Literal:
        return " | ".join(map(str, inner))
    if isinstance(hint, type) and issubclass(hint, Section):
        return "section"
    return f"list of {_type(inner[0])}" if origin is tuple else TYPES.get(origin or hint, "anything")


if __name__ == "__main__":
    sys.exit(main())
