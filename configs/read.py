"""YAML recipe -> frozen dataclasses, every problem at once, each with its file, line and a suggestion.

The schema is plain frozen dataclasses, pydantic's TypeAdapter validates, `yaml.compose` knows the lines.
"""

import dataclasses
import difflib
import re
import types
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


def load(path: Path, schema: type[T], overrides: list[str]) -> T:
    """The recipe at path with `section.key=value` overrides applied.

    Raises UserError that lists every unknown key (with a suggestion), wrong type and duplicate, with file:line.
    """
    values, lines = read_yaml(path)
    for override in overrides:
        _apply(override, values, lines, schema)
    return validate(values, schema, str(path), lines)


def from_overrides(schema: type[T], overrides: list[str], source: str) -> T:
    """A section made of `key=value` overrides alone; UserError lists every problem."""
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    for override in overrides:
        _apply(override, values, lines, schema)
    return validate(values, schema, source, lines)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's mapping and, for each dotted key, 'file:line'."""
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
    return _unshared(values), lines


def _unshared(value: Any) -> Any:
    """A copy in which a YAML anchor used twice is two values, so that an override changes one of them."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def validate(values: dict[str, Any], schema: type[T], source: str, lines: dict[str, str]) -> T:
    """values as a schema instance; UserError with one line per problem."""
    try:
        checked: T = _adapter(schema).validate_python(values)
        return checked
    except ValidationError as error:
        problems = [_sentence(item, schema, source, lines) for item in error.errors()]
        raise UserError("\n".join(problems)) from error


def _adapter(schema: Any) -> TypeAdapter[Any]:
    """pydantic's adapter of a dataclass; making one takes as long as thousands of its calls."""
    if schema not in _adapters:
        _adapters[schema] = TypeAdapter(schema)
    return _adapters[schema]


def dump(recipe: Any) -> str:
    """The resolved recipe as YAML, every default spelt out."""
    value = _adapter(type(recipe)).dump_python(recipe, mode="json")
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)


def as_dict(section: Any) -> dict[str, Any]:
    """One section (or a whole recipe) as JSON-ready values."""
    value = _adapter(type(section)).dump_python(section, mode="json")
    assert isinstance(value, dict)
    return value


def _mark_lines(node: yaml.MappingNode, prefix: str, path: Path, lines: dict[str, str]) -> None:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        where = f"{path}:{key.start_mark.line + 1}"
        if name in lines:
            raise UserError(f"{where}: {name}: set twice (first at {lines[name]})")
        lines[name] = where
        if isinstance(value, yaml.MappingNode):
            _mark_lines(value, f"{name}.", path, lines)


def _apply(override: str, values: dict[str, Any], lines: dict[str, str], schema: type) -> None:
    name, separator, text = override.partition("=")
    if not separator:
        raise UserError(f"--{override}: an override needs a value: --{override} VALUE")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506
    except yaml.YAMLError as error:
        raise UserError(f"--{name}: cannot read the value {text!r}") from error
    *parents, leaf = name.split(".")
    place: Any = values
    for depth, parent in enumerate(parents):
        if isinstance(place, list):
            place = place[_position(parent, place, name)]
        elif parent not in dict(_fields(_class_at(schema, parents[:depth]))):
            raise UserError(f"--{name}: unknown option{_suggest(name, _all_names(schema))}")
        else:
            place = place.setdefault(parent, {})
        if not isinstance(place, dict | list):
            raise UserError(f"--{name}: {parent} is not a section")
    place[_position(leaf, place, name) if isinstance(place, list) else leaf] = value
    lines[name] = f"--{name}"


def _position(part: str, items: list[Any], name: str) -> int:
    """The position in a list that a part of an option's name says; UserError for what is none of it."""
    if not part.isdecimal() or int(part) >= len(items):
        raise UserError(f"--{name}: {part} is no position in a list of {len(items)}; positions count from 0")
    return int(part)


def _sentence(item: Any, schema: type, source: str, lines: dict[str, str]) -> str:
    steps = [str(part) for part in item["loc"] if not str(part).startswith(("tagged-union", "function-"))]
    location = [part for at, part in enumerate(steps) if not isinstance(_class_at(schema, steps[:at]), tuple)]
    name = ".".join(location)
    known = [n for n in (".".join(location[:end]) for end in range(len(location), 0, -1)) if n in lines]
    where = lines[known[0]] if known else source
    prefix = where if where == f"--{name}" else f"{where}: {name}"
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        parent = location[:-1]
        siblings = [".".join([*parent, field]) for field, _ in _fields(_class_at(schema, steps[:-1]))]
        return f"{prefix}: unknown key{_suggest(name, siblings)}"
    if item["type"] in ("union_tag_not_found", "union_tag_invalid"):
        key = item["ctx"]["discriminator"].strip("'")
        tags = [tag for member in _class_at(schema, steps) for tag in _tags(member, key)]
        tag = item["ctx"].get("tag")
        return f"{prefix}: " + (
            f"needs a {key}: {', '.join(tags)}" if tag is None else f"unknown {key} {tag!r}{_suggest(tag, tags)}"
        )
    if item["type"] in ("missing", "missing_argument"):
        return f"{prefix}: required, and not set"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    shown = (
        "" if isinstance(item["input"], dict | list) or item["type"] == "value_error" else f", not {item['input']!r}"
    )
    return f"{prefix}: {message[0].lower()}{message[1:]}{shown}"


def _suggest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close:
        leaf = name.rsplit(".", 1)[-1]
        close = [n for n in names if n.rsplit(".", 1)[-1].startswith(leaf[:4])][:1]
    return (
        f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(n.rsplit('.', 1)[-1] for n in names)}"
    )


def _fields(cls: Any) -> list[tuple[str, Any]]:
    if isinstance(cls, tuple):
        return list({name: hint for member in cls for name, hint in _fields(member)}.items())
    if not dataclasses.is_dataclass(cls):
        return []
    hints = typing.get_type_hints(cls)
    return [(field.name, _unwrap(hints[field.name])) for field in dataclasses.fields(cls)]


def _unwrap(hint: Any) -> Any:
    """The dataclass inside Optional[X], the tuple of those that a tagged union chooses from, or the hint itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = tuple(argument for argument in typing.get_args(hint) if dataclasses.is_dataclass(argument))
        if members:
            return members if len(members) > 1 else members[0]
    return hint


def _tags(member: Any, key: str) -> list[str]:
    """The values of the key by which a tagged union knows this member."""
    return [str(tag) for tag in typing.get_args(dict(_fields(member)).get(key))]


def _class_at(schema: Any, path: list[str]) -> Any:
    """What stands at a path of keys, positions in a list, and (below a tagged union) the chosen member's tag."""
    for part in path:
        if isinstance(schema, tuple):
            schema = next(
                (member for member in schema if any(part in _tags(member, key) for key, _ in _fields(member))), None
            )
        elif typing.get_origin(schema) is tuple:
            schema = _unwrap(typing.get_args(schema)[0])
        else:
            schema = dict(_fields(schema)).get(part)
    return schema


def _all_names(schema: Any, prefix: str = "") -> list[str]:
    names = []
    for name, hint in _fields(schema):
        names.append(prefix + name)
        names.extend(_all_names(hint, f"{prefix}{name}."))
    return names
