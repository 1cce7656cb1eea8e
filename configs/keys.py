"""`aerie keys` prints the keys of a recipe with their meaning, type and default, from its
schema."""

import dataclasses
import datetime
import re
import types
import typing
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import yaml

from aerie.configs.errors import Arguments, UserError, exit_codes
from aerie.configs.read import TAGS, Place, Section, as_dict, sections, suggestion
from aerie.configs.schema.recipe import Recipe

TYPE_NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true | false",
    dict: "mapping",
    datetime.date: "date",
    type(None): "null",
}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
PAGE_HEADER = """# Recipes: every key

A recipe is a YAML file with the sections below; only `run`, `target.path` and `data.conversations`
are required. You can also set any key on the command line: `--train.learning_rate 1e-4`,
`--bench.rows.1.tree.nodes 30`. Below, `*` stands for a position in a list, counted from 0. A single
value counts as a list of one. In every path, `~` is the home directory. `aerie keys SECTION` prints
one section.

`aerie keys --markdown > docs/recipes.md` makes this page from the schema.
"""


class KeyBlock(NamedTuple):
    """The keys of one class of the schema."""

    heading: str  # the section and its kind: `train` (kind: eagle3)
    text: str  # what the section is for
    keys: dict[str, str]  # the meaning of each key, with (type; default)


@exit_codes()
def main() -> int:
    parser = Arguments(
        "aerie keys",
        description="Prints the keys of a recipe with their meaning, type and default.",
    )
    parser.add_argument(
        "section",
        nargs="?",
        default="",
        help="a section or key, such as train, bench.prompts or tree.stop.rule; without one, the "
        "sections are listed. A command line can set any key: --section.key VALUE",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print a page of all sections in Markdown"
    )
    arguments = parser.parse_args()
    section = re.sub(r"\.\d+(?=\.|$)", ".*", arguments.section)
    # A key such as head.kind has no line: the headings of its section name its values.
    tagged = re.sub(rf"\.({'|'.join(TAGS)})$", "", section)
    blocks = documented_keys(section) or documented_keys(tagged)
    if not blocks:
        advice = suggestion(section.split("."), Recipe)
        raise UserError(f"{section}: no section or key of a recipe; {advice}")
    if arguments.markdown:
        print(PAGE_HEADER)
    elif not section:
        del blocks[1:]  # only the recipe's own block
    for number, (heading, text, keys) in enumerate(blocks):
        listed = "".join(f"- `{key}`: {words}\n" for key, words in keys.items())
        print("\n" * (number > 0) + f"## {heading}\n\n{text}\n\n{listed}", end="")
    return 0


def documented_keys(section: str = "") -> list[KeyBlock]:
    """A block for each class of the schema in or below a section, or one block with the key that
    section names; [] for an unknown name."""
    uses: dict[Any, dict[str, list[str]]] = {}  # class -> path of a section -> its kinds there
    for schema, path, kind in sections(Recipe):
        uses.setdefault(schema, {}).setdefault(path, []).append(kind)
    parent, _, key = section.rpartition(".")
    blocks = []
    for schema, kinds_at in uses.items():
        paths = [path for path in kinds_at if not section or f"{path}.".startswith(f"{section}.")]
        keys = _meanings(schema)
        if any(map(any, kinds_at.values())):  # the heading already names the kind
            keys = {name: words for name, words in keys.items() if name not in TAGS}
        if not paths and parent in kinds_at and key in keys:
            paths = [parent]
            keys = {key: keys[key]}
        if paths:
            text = " ".join(schema.__doc__.split())
            blocks.append(KeyBlock(_heading(paths, kinds_at), text, keys))
    return blocks


def _heading(paths: list[str], kinds_at: dict[str, list[str]]) -> str:
    """A block's heading, such as '`train` (kind: eagle1 | eagle3)', or 'A recipe' for the top."""
    kinds = dict.fromkeys(chain.from_iterable(kinds_at[path] for path in paths))
    kinds.pop("", None)
    names = ", ".join(f"`{path}`" for path in paths if path)
    if not kinds:
        return names or "A recipe"
    # 'kind: a | kind: b' becomes 'kind: a | b'.
    choices = re.sub(r"[|] [a-z]+: ", "| ", " | ".join(kinds))
    return f"{names} ({choices})"


def _meanings(schema: Any) -> dict[str, str]:
    """The meaning of each key that the class itself declares, with its type and default."""
    return {
        field.name: f"{field.metadata.get('description', '')} ({_type_and_default(field)})".strip()
        for field in dataclasses.fields(schema)
        if field.name in vars(schema)["__annotations__"]
    }


def _type_and_default(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    type_text = _type_text(field.type)
    if default is dataclasses.MISSING:
        return f"{type_text}; required"
    if isinstance(default, Section):
        return type_text
    flow = yaml.safe_dump(as_dict(default), default_flow_style=True, width=inf)
    return f"{type_text}; default {flow}".removesuffix("...\n").strip()


def _type_text(hint: Any) -> str:
    """A type in words, such as 'integer >= 1', 'chain | static' or 'list of text | null'."""
    if hint == Place:
        return "path"
    if isinstance(hint, type) and issubclass(hint, Section):
        return "section"
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Annotated:
            return " ".join([_type_text(arguments[0]), ", ".join(_bounds(arguments[1:]))]).strip()
        case typing.Union | types.UnionType:
            return " | ".join(dict.fromkeys(map(_type_text, arguments)))
        case typing.Literal:
            return " | ".join(map(str, arguments))
        case origin if origin is tuple:
            return f"list of {_type_text(arguments[0])}"
        case origin:
            return TYPE_NAMES.get(origin or hint, "anything")


def _bounds(annotations: tuple[Any, ...]) -> list[str]:
    """The limits in a type's annotations, such as ['>= 0', '< 1']."""
    limits: dict[str, Any] = {}
    for annotation in annotations:
        for rule in getattr(annotation, "metadata", [annotation]):
            limits |= {
                sign: getattr(rule, name) for name, sign in BOUNDS.items() if hasattr(rule, name)
            }
    return [f"{sign} {limit:,.12g}" for sign, limit in limits.items()]
