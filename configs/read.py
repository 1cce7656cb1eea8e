"""YAML recipe -> frozen dataclasses, with every problem at once, each with its file, line and a suggestion.

The schema is plain frozen dataclasses. pydantic's TypeAdapter validates them, and `yaml.compose` knows the lines.
"""

import dataclasses
import difflib
import functools
import re
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from aerie.configs.errors import UserError

T = TypeVar("T")
_adapters: dict[Any, TypeAdapter[Any]] = {}
STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=False)


class _Loader(yaml.SafeLoader):
    """PyYAML with YAML 1.2 floats (3e-5 is a number) and booleans (only true and false)."""


_Loader.yaml_implicit_resolvers = {
    key: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")]
    for key, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9]+)$"),
    list("-+0123456789."),
)


def adapter(schema: Any) -> TypeAdapter[Any]:
    """pydantic's adapter of a section, kept: making one takes as long as thousands of its calls."""
    if schema not in _adapters:
        _adapters[schema] = TypeAdapter(schema)
    return _adapters[schema]


def load(path: Path, schema: type[T], overrides: list[str]) -> T:
    """The recipe at path with `section.key=value` overrides applied.

    Raises UserError that lists every unknown key (with a suggestion), wrong type and duplicate, with file:line.
    """
    values, lines = read_yaml(path)
    for override in overrides:
        _apply(override, values, lines)
    return validate(values, schema, str(path), lines)


def from_overrides(schema: type[T], overrides: list[str], source: str) -> T:
    """A section made of `key=value` overrides alone; UserError lists every problem."""
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    for override in overrides:
        _apply(override, values, lines)
    return validate(values, schema, source, lines)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's mapping, and 'file:line' of each dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot read the recipe: {reason}") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)  # noqa: S506 (_Loader is a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: a recipe is a mapping of sections; this is {type(values).__name__}")
    lines: dict[str, str] = {}
    _mark_lines(node, "", path, lines)
    return _copy(values), lines


def validate(values: dict[str, Any], schema: type[T], source: str, lines: dict[str, str]) -> T:
    """values as a schema instance; UserError with one line per problem."""
    try:
        checked: T = adapter(schema).validate_python(values)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(item, schema, source, lines) for item in error.errors())) from error
    return checked


def as_dict(section: Any) -> dict[str, Any]:
    """One section, or a whole recipe, as JSON-ready values with every default."""
    value: dict[str, Any] = adapter(type(section)).dump_python(section, mode="json")
    return value


def dump(recipe: Any) -> str:
    """The resolved recipe as YAML, with every default."""
    return yaml.safe_dump(as_dict(recipe), sort_keys=False, allow_unicode=True, width=120)


def _copy(value: Any) -> Any:
    """A deep copy in which a YAML anchor used twice is two values, so that an override changes only one of them."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _mark_lines(node: yaml.MappingNode, prefix: str, path: Path, lines: dict[str, str]) -> None:
    for key, value in node.value:
        name, where = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
        if name in lines:
            raise UserError(f"{where}: {name}: set twice (first at {lines[name]})")
        lines[name] = where
        if isinstance(value, yaml.MappingNode):
            _mark_lines(value, f"{name}.", path, lines)


def _apply(override: str, values: dict[str, Any], lines: dict[str, str]) -> None:
    """Sets one `a.b.c=value` in values; unknown names are left to the validation."""
    name, _, text = override.partition("=")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506
    except yaml.YAMLError as error:
        raise UserError(f"--{name}: cannot read the value {text!r}") from error
    parts, place = name.split("."), typing.cast(Any, values)
    for depth, part in enumerate(parts):
        key: Any = part
        if isinstance(place, list):
            if not part.isdecimal() or int(part) >= len(place):
                raise UserError(f"--{name}: {part} is no position in a list of {len(place)}; positions count from 0")
            key = int(part)
        elif not isinstance(place, dict):
            raise UserError(f"--{name}: {parts[depth - 1]} is not a section")
        lines[".".join(parts[: depth + 1])] = f"--{name}"
        if depth == len(parts) - 1:
            place[key] = value
        elif isinstance(place, dict) and place.get(key) is None:
            place[key] = {}
        place = place[key]


def _sentence(item: Any, schema: type, source: str, lines: dict[str, str]) -> str:
    """One line for one of pydantic's errors: place, what is wrong, and a suggestion."""
    names, tags = _names(schema)
    location: list[str] = []
    for part in map(str, item["loc"]):
        if not part.startswith(("tagged-union", "function-")) and _plain([*location, part]) not in tags:
            location.append(part)
    name = ".".join(location)
    known = next((key for end in range(len(location), 0, -1) if (key := ".".join(location[:end])) in lines), None)
    where = lines[known] if known else source
    prefix = where if where == f"--{name}" or where.startswith(f"--{name}.") else f"{where}: {name}".removesuffix(": ")
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{prefix}: unknown key{_suggestion(location, names)}"
    if item["type"] in ("union_tag_not_found", "union_tag_invalid"):
        key, tag = item["ctx"]["discriminator"].strip("'"), item["ctx"].get("tag")
        choices = sorted(each.rsplit(".", 1)[-1] for each in tags if each.rpartition(".")[0] == _plain(location))
        if tag is None:
            return f"{prefix}: needs a {key}: {', '.join(choices)}"
        close = difflib.get_close_matches(str(tag), choices, n=1, cutoff=0.5)
        advice = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(choices)}"
        return f"{prefix}: unknown {key} {tag!r}; {advice}"
    if item["type"] in ("missing", "missing_argument"):
        return f"{prefix}: required, and not set"
    message = item["msg"].removeprefix("Value error, ")
    is_told = isinstance(item["input"], dict | list) or item["type"] == "value_error"
    return f"{prefix}: {message[0].lower()}{message[1:]}" + ("" if is_told else f", not {item['input']!r}")


def _suggestion(location: list[str], names: list[str]) -> str:
    """The key that was meant: one of the same section, or of any section with a similar last part."""
    *section, leaf = location
    beside = [name.rsplit(".", 1)[-1] for name in names if name.rpartition(".")[0] == _plain(section)]
    if leaf in beside:  # of another member of a union
        return f"; it belongs to another kind of {section[-1]}, leave it out"
    close = difflib.get_close_matches(leaf, beside, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {'.'.join([*section, close[0]])!r}?"
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(names) if "*" not in name}
    far = difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.8)
    return f"; did you mean {leaves[far[0]]!r}?" if far else f"; known here: {', '.join(dict.fromkeys(beside))}"


def _plain(parts: list[str]) -> str:
    """A dotted name with * for positions in lists, as `_names` has them."""
    return ".".join("*" if part.isdecimal() else part for part in parts)


@functools.cache
def _names(schema: type) -> tuple[list[str], set[str]]:
    """Every dotted key of a schema (* is any position in a list), and the tags by which its unions choose a member."""
    names: list[str] = []
    tags: set[str] = set()

    def visit(hint: Any, place: list[str], tag_key: str | None) -> None:
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            for key, inner in typing.get_type_hints(hint, include_extras=True).items():
                if key == tag_key:
                    tags.update(".".join([*place, str(tag)]) for tag in typing.get_args(inner))
                names.append(".".join([*place, key]))
                visit(inner, [*place, key], None)
            return
        arguments = typing.get_args(hint)
        if typing.get_origin(hint) is typing.Annotated:
            hint, *marks = arguments
            arguments = typing.get_args(hint)
            tag_key = next((mark.discriminator for mark in marks if getattr(mark, "discriminator", None)), tag_key)
        deeper = [*place, "*"] if typing.get_origin(hint) in (tuple, list) else place
        for argument in arguments:
            visit(argument, deeper, tag_key)

    visit(schema, [], None)
    return list(dict.fromkeys(names)), tags
