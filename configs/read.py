"""Reads YAML recipes into frozen dataclasses, and reports all problems at once, each with its line
and a fix."""

import copy
import dataclasses
import difflib
import functools
import os
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from aerie.configs.errors import UserError

T = TypeVar("T")
TAGS = ("kind", "shape", "rule", "method")  # keys that tell the members of a union apart


# ---------------------------------------------------------------------------------------------
# What a schema is made of


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple | None) else [value]


# A path or a Hub id.
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
Many = Annotated[tuple[T, ...], BeforeValidator(_as_list)]  # a single value is a list of one
Some = Annotated[tuple[T, ...], Field(min_length=1), BeforeValidator(_as_list)]


def require_ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    """The values; ValueError if they do not ascend."""
    meant = sorted(set(values))
    if list(values) != meant:
        raise ValueError(f"must ascend without repeats; did you mean {meant}?")
    return values


def _require_distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values; ValueError if two have the same name, or are equal where they have no names."""
    names = [getattr(value, "name", value) for value in values]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)} stands there twice; leave one out")
    return values


ascending = AfterValidator(require_ascending)
distinct = AfterValidator(_require_distinct)


def key(description: str, **default: Any) -> Any:
    """A key of a section: its meaning, which `aerie keys` prints, and its `default` or
    `default_factory`."""
    return dataclasses.field(metadata={"description": description}, **default)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(key,))
class Section:
    """Base of the schema's classes: frozen dataclasses that refuse unknown keys, infinities and
    NaN."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, kw_only: bool = False) -> None:
        dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)


# Cached, because making an adapter takes as long as thousands of calls to one.
adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def sections(hint: Any, path: str = "", kind: str = "") -> Iterator[tuple[Any, str, str]]:
    """Yields (class, dotted path, kind that selects it) for each class that declares keys, at and
    below a path.

    Base classes come before the classes that inherit from them. `*` in a path stands for a position
    in a list.
    """
    if isinstance(hint, type) and issubclass(hint, Section):
        for base in reversed(hint.__mro__):
            is_schema = issubclass(base, Section) and base is not Section
            if is_schema and vars(base).get("__annotations__"):
                yield base, path, kind
        for field in dataclasses.fields(hint):
            yield from sections(field.type, f"{path}.{field.name}".lstrip("."))
    elif typing.get_origin(hint) is not typing.Literal:
        members = typing.get_args(hint)
        tag = _tag_of(members)
        member_path = f"{path}.*" if typing.get_origin(hint) is tuple else path
        for member in members:
            member_kind = ""
            if tag:
                names = typing.get_args(member.__dataclass_fields__[tag].type)
                member_kind = f"{tag}: {' | '.join(names)}"
            yield from sections(member, member_path, member_kind)


def _tag_of(members: tuple[Any, ...]) -> str:
    """The key that tells the members of a union apart; '' if there is none."""
    keys = Counter(key for member in members for key in getattr(member, "__dataclass_fields__", ()))
    return next((tag for tag in TAGS if keys[tag] > 1), "")


# ---------------------------------------------------------------------------------------------
# Reading


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_implicit_resolver(  # 3e-5 is a number, as in YAML 1.2
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def load_file(path: Path, schema: type[T], overrides: Sequence[str]) -> T:
    """The YAML file at path as an instance of schema, with `section.key=value` overrides; UserError
    if it is wrong."""
    values, lines = read_yaml(path)
    return validate(values, schema, str(path), lines, overrides)


def user_path(text: str) -> Path:
    """A path from the command line, with ~ expanded."""
    return Path(text).expanduser()


def require_regular(path: Path) -> None:
    """UserError for a pipe, device or socket: reading one may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: a pipe or a device; name a regular file")


def read_text(path: Path) -> str:
    """A file's UTF-8 text; UserError if the file cannot be read."""
    try:
        require_regular(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", "not UTF-8 text")
        raise UserError(f"{path}: {problem}") from error


def _parse_yaml(text: str, source: str) -> tuple[Any, Any]:
    """(value, YAML node) of a text; UserError names the source."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node), node
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date with a thirteenth month
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", str(error).partition(";")[0])
        raise UserError(f"{source}{line}: not YAML ({problem}); check the indentation") from error


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A file's mapping, and the place 'file:line' of each dotted key."""
    values, node = _parse_yaml(read_text(path), str(path))
    if not isinstance(values, dict):
        raise UserError(
            f"{path}: a recipe is a mapping of sections; this is {type(values).__name__}"
        )
    lines: dict[str, str] = {}

    def mark_lines(node: yaml.MappingNode, prefix: str) -> None:
        for key_node, value in node.value:
            name = f"{prefix}{key_node.value}"
            line = f"{path}:{key_node.start_mark.line + 1}"
            if name in lines:
                raise UserError(
                    f"{line}: {name}: set twice (first at {lines[name]}); delete one of the two"
                )
            lines[name] = line
            if isinstance(value, yaml.MappingNode):
                mark_lines(value, f"{name}.")

    mark_lines(node, "")
    return values, lines


def override(words: Sequence[str], values: dict[str, Any], lines: dict[str, str]) -> None:
    """Applies overrides `a.b.c=value` to values. In lines, `--a.b.c` becomes the place of each key
    on the path."""
    for word in words:
        name, _, text = word.partition("=")
        value, _ = _parse_yaml(text, f"--{name}")
        parts = name.split(".")
        lines |= {".".join(parts[:end]): f"--{name}" for end in range(1, len(parts) + 1)}
        set_key(values, name, value, f"--{name}")


def set_key(section: Any, name: str, value: Any, source: str) -> None:
    """Sets a dotted key, and makes the sections on its path that are missing; UserError names the
    source."""
    *parents, leaf = name.split(".")
    for part in parents:
        index = _index(section, part, source)
        # A copy, so that other uses of the same YAML anchor keep their values.
        section[index] = copy.copy(section[index]) or {}
        section = section[index]
    section[_index(section, leaf, source)] = value


def _index(section: Any, part: str, source: str) -> Any:
    """The index of one part of a dotted name: a key, which is added if it is new, or a list
    position."""
    if isinstance(section, dict) and not part.isdecimal():
        section.setdefault(part, None)
        return part
    if isinstance(section, list) and part in map(str, range(len(section))):
        return int(part)
    raise UserError(f"{source}: there is no {part!r}; positions of a list count from 0")


def as_dict(section: Any) -> dict[str, Any]:
    """The section with every default, ready for JSON."""
    return typing.cast(dict[str, Any], adapter(type(section)).dump_python(section, mode="json"))


def dump(recipe: Any) -> str:
    """The recipe as YAML, with every default."""
    return yaml.safe_dump(as_dict(recipe), sort_keys=False, allow_unicode=True, width=120)


# ---------------------------------------------------------------------------------------------
# Checking: the line of each problem names the place, the value and the fix.


def validate(
    values: dict[str, Any],
    schema: type[T],
    source: str,
    lines: dict[str, str],
    overrides: Sequence[str] = (),
) -> T:
    """An instance of schema; UserError with a line for each problem.

    lines holds the place of each dotted key, 'file:line' or '--key'; source is the place of all
    other keys.
    """
    override(overrides, values, lines)
    try:
        return typing.cast(T, adapter(schema).validate_python(values))
    except ValidationError as error:
        texts = []
        problems: list[Any] = error.errors()
        # pydantic also calls a list too short if its items are wrong.
        for problem in [p for p in problems if p["type"] != "too_short"] or problems:
            parts = _key_parts(problem, values)
            advice = _advice(problem, parts, schema)
            texts.append(f"{_location(parts, source, lines)}: {advice}")
        raise UserError("\n".join(texts)) from error


def _key_parts(problem: Any, values: Any) -> list[str]:
    """The parts of a problem's dotted name, without the tags of unions, which pydantic adds."""
    loc = problem["loc"]
    parts = []
    for number, part in enumerate(loc, start=1):
        is_missing = number == len(loc) and problem["type"].startswith("missing")
        if is_missing or _has(values, part):
            parts.append(str(part))
        if _has(values, part):
            values = values[part]
    return parts


def _has(values: Any, part: Any) -> bool:
    if isinstance(values, list):
        return part in range(len(values))
    return isinstance(values, dict) and part in values


def _location(parts: list[str], source: str, lines: dict[str, str]) -> str:
    """The place where the key, or the closest section around it, is written, with the key's
    name."""
    name = ".".join(parts)
    line = source
    for end in range(1, len(parts) + 1):  # from the outermost section inwards
        line = lines.get(".".join(parts[:end]), line)
    is_clear = not name or f"{line}.".startswith(f"--{name}.")  # the flag contains the name
    return line if is_clear else f"{line}: {name}"


def _advice(problem: Any, parts: list[str], schema: type) -> str:
    """What is wrong with a key's value, and the fix."""
    value = problem["input"]
    context = problem.get("ctx", {})
    match problem["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"unknown key; {suggestion(parts, schema, problem['loc'])}"
        case kind if kind.startswith("missing"):
            return "required, and not set"
        case "dataclass_type" | "model_attributes_type":
            return f"has keys of its own, indented below it, not {value!r}"
        case "union_tag_not_found":
            return f"needs a key {context['discriminator']}"
        case "literal_error" | "union_tag_invalid":
            value = context.get("tag", value)
            expected = context.get("expected_tags") or context["expected"]
            similar = _similar(str(value), re.findall("'(.+?)'", expected))
            advice = f"did you mean {similar!r}?" if similar else f"known here: {expected}"
            return f"unknown {value!r}; {advice}"
    message = problem["msg"].removeprefix("Value error, ")
    text = f"{message[0].lower()}{message[1:]}"
    is_clear = isinstance(value, dict | list) or problem["type"] == "value_error"
    return text if is_clear else f"{text}, not {value!r}"


def suggestion(parts: list[str], schema: Any, loc: Sequence[Any] = ()) -> str:
    """The fix for an unknown key: our key for another program's name, or a similar key."""
    *section, leaf = parts
    here: list[str] = []
    full_names: dict[str, str] = {}  # key -> its dotted name; without keys inside lists
    for cls, path, _ in sections(schema):
        for field in dataclasses.fields(cls):
            if path == _pattern(section) and field.name not in here:
                here.append(field.name)
            if "*" not in path:
                full_names.setdefault(field.name, f"{path}.{field.name}".lstrip("."))
    if leaf in here:  # a key of another kind
        name = next(part for part in reversed(section) if not part.isdecimal())
        return f"it belongs to another kind of {name} than {loc[-2]}; leave it out"
    full_names |= {name: ".".join([*section, name]) for name in here}
    name = ALIASES.get(leaf.lower().replace("-", "_"), "")
    if name.rpartition(".")[2] not in full_names:
        name = _similar(leaf, here) or _similar(leaf, list(full_names), cutoff=0.8)
    if name:
        return f"did you mean {full_names.get(name, name)!r}?"
    return f"known here: {', '.join(here)}" if here else "aerie keys lists the sections"


def _similar(word: str, choices: list[str], cutoff: float = 0.6) -> str:
    """The choice most like a word; '' if none is like it."""
    return next(iter(difflib.get_close_matches(word, choices, n=1, cutoff=cutoff)), "")


def _pattern(parts: list[str]) -> str:
    """A dotted path with * for list positions, as `sections` writes it."""
    return ".".join("*" if part.isdecimal() else part for part in parts)


# Another program's name of a key -> our name.
ALIASES: dict[str, str] = read_yaml(Path(__file__).parent / "schema/aliases.yaml")[0]
