"""YAML recipe -> frozen dataclasses; all problems at once, each with its line and a suggestion."""

import copy
import dataclasses
import difflib
import functools
import itertools
import json
import math
import os
import re
import typing
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

from aerie.configs.errors import LONE_SURROGATE, UserError

T = TypeVar("T")


def _named(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("a path has at least one character, and no NUL")
    return text


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple | None) else [value]


Place = Annotated[
    str, AfterValidator(_named), AfterValidator(os.path.expanduser)
]  # a path, or the Hub's name for one
Many = Annotated[tuple[T, ...], BeforeValidator(_as_list)]  # a list; one value is a list of one
Some = Annotated[tuple[T, ...], Field(min_length=1), BeforeValidator(_as_list)]
TAGS = ("kind", "shape", "rule")  # the key that tells the members of a union apart


def user_path(text: str) -> Path:
    """A path from the command line, with ~ expanded."""
    return Path(text).expanduser()


def key(description: str, **default: Any) -> Any:
    """A key of a section: what it means, as `aerie keys` prints it, and `default` or `default_factory`."""
    return dataclasses.field(metadata={"description": description}, **default)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(key,))
class Section:
    """Makes a subclass a frozen dataclass that refuses unknown keys, infinities and NaN."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, kw_only: bool = False) -> None:
        dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_implicit_resolver(  # 3e-5 is a number, as in YAML 1.2
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
# Cached: making one takes as long as thousands of calls.
adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
MOST_BYTES, MOST_VALUES = (
    2**20,
    100_000,
)  # of a recipe; values that an anchor repeats count each time


def load(path: Path, schema: type[T], overrides: Sequence[str]) -> T:
    """The recipe at path with `section.key=value` overrides."""
    values, lines = read_yaml(path)
    return validate(values, schema, str(path), lines, overrides)


def require_regular(path: Path) -> None:
    """UserError for pipes, devices and sockets: they may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: a pipe or a device; name a regular file")


def read_text(path: Path, most_bytes: float = math.inf) -> str:
    """A file's UTF-8 text; UserError if it is unreadable or too long."""
    try:
        require_regular(path)
        if (size := path.stat().st_size) > most_bytes:
            raise UserError(
                f"{path}: has {size:,} bytes, and {most_bytes:,} are read at most; is it another file?"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}"
        ) from error


def parse_json(text: str, read: Callable[[str], Any] = json.loads) -> Any:
    """The JSON value of a text; ValueError if it is not JSON, or too deep or too long for Python."""
    try:
        return read(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _parse_yaml(text: str, place: str) -> tuple[Any, Any]:
    """(value, YAML node) of a text."""
    try:
        loader = _Loader(text)
        node: Any = loader.get_single_node()
        waiting, count = [node] * (node is not None), 0
        while waiting:  # if an anchor contains itself, only MOST_VALUES ends this
            value = waiting.pop().value
            if isinstance(value, str) and LONE_SURROGATE.search(value):
                raise UserError(
                    f"{place}: {value!a} holds half of a surrogate pair; write the character itself"
                )
            inner = [] if isinstance(value, str) else value
            inner = (
                [*itertools.chain.from_iterable(inner)]
                if inner and isinstance(inner[0], tuple)
                else inner
            )
            count += len(inner)
            if count > MOST_VALUES:
                raise UserError(
                    f"{place}: more than {MOST_VALUES:,} values, with what anchors repeat; write fewer"
                )
            waiting += inner
        return None if node is None else loader.construct_document(node), node
    except RecursionError as error:
        raise UserError(f"{place}: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # impossible dates, too long numbers
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if mark else place
        what = getattr(error, "problem", None) or str(error).splitlines()[0].partition(";")[0]
        raise UserError(f"{where}: not YAML ({what}); check the indentation") from error


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's mapping, and 'file:line' of each dotted key."""
    values, node = _parse_yaml(read_text(path, MOST_BYTES), str(path))
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise UserError(
            f"{path}: a recipe is a mapping of sections; this is {type(values).__name__}"
        )
    lines: dict[str, str] = {}

    def mark_lines(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            name, where = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
            if name in lines:
                raise UserError(f"{where}: {name}: set twice (first at {lines[name]})")
            lines[name] = where
            if isinstance(value, yaml.MappingNode):
                mark_lines(value, f"{name}.")

    mark_lines(node, "")
    return values, lines


ALIASES = read_yaml(Path(__file__).parent / "schema/aliases.yaml")[
    0
]  # what other programs call our keys


def override(words: Sequence[str], values: dict[str, Any], lines: dict[str, str]) -> None:
    """Sets `a.b.c=value` in values, and `--a.b.c` in lines."""
    for word in words:
        name, _, text = word.partition("=")
        value, _ = _parse_yaml(text, f"--{name}")
        parts, section = name.split("."), typing.cast(Any, values)
        for depth, part in enumerate(parts):
            key: Any = part
            if isinstance(section, list):
                if not part.isdecimal() or int(part) >= len(section):
                    raise UserError(
                        f"--{name}: {part} is no position in a list of {len(section)} (the first is 0)"
                    )
                key = int(part)
            elif not isinstance(section, dict) or part.isdecimal():
                raise UserError(
                    f"--{name}: {parts[depth - 1]} is no {'list' if part.isdecimal() else 'section'}"
                )
            lines[".".join(parts[: depth + 1])] = f"--{name}"
            if depth == len(parts) - 1:
                section[key] = value
            else:  # a copy: other uses of a YAML anchor stay
                inner = section.get(key) if isinstance(section, dict) else section[key]
                section[key] = {} if inner is None else copy.copy(inner)
                section = section[key]


def validate(
    values: dict[str, Any],
    schema: type[T],
    source: str,
    lines: dict[str, str],
    overrides: Sequence[str] = (),
) -> T:
    """A schema instance; UserError: one line per problem."""
    override(overrides, values, lines)
    try:
        return typing.cast(T, adapter(schema).validate_python(values))
    except ValidationError as error:
        problems = error.errors()
        # pydantic also calls lists of wrong items too short
        inside = {
            problem["loc"][:end] for problem in problems for end in range(len(problem["loc"]))
        }
        problems = [
            each for each in problems if each["type"] != "too_short" or each["loc"] not in inside
        ]
        raise UserError(
            "\n".join(_sentence(each, values, schema, source, lines) for each in problems)
        ) from error


def as_dict(section: Any) -> dict[str, Any]:
    """JSON-ready, with every default."""
    return typing.cast(dict[str, Any], adapter(type(section)).dump_python(section, mode="json"))


def dump(recipe: Any) -> str:
    """YAML with every default."""
    return yaml.safe_dump(as_dict(recipe), sort_keys=False, allow_unicode=True, width=120)


def _sentence(problem: Any, values: Any, schema: type, source: str, lines: dict[str, str]) -> str:
    kind, parts = problem["type"], list[str]()
    for number, part in enumerate(problem["loc"], start=1):
        # skip parts that are no keys: union tags
        known_parts = (
            range(len(values))
            if isinstance(values, list)
            else values
            if isinstance(values, dict)
            else ()
        )
        is_there = part in known_parts
        if is_there or (kind.startswith("missing") and number == len(problem["loc"])):
            parts.append(str(part))
            values = values[part] if is_there else None
    name = ".".join(parts)
    known = next(
        (key for key in reversed([*itertools.accumulate(parts, "{}.{}".format)]) if key in lines),
        None,
    )
    where = lines[known] if known else source
    prefix = (
        where if f"{where}.".startswith(f"--{name}.") else f"{where}: {name}".removesuffix(": ")
    )
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{prefix}: unknown key; {suggestion(parts, schema, problem['loc'])}"
    if kind == "union_tag_not_found":
        key = problem["ctx"]["discriminator"].strip("'")
        kinds = [kind for _, place, kind in sections(schema) if place == _place(parts) and kind]
        return f"{prefix}: needs a key {key!r}: {', '.join(dict.fromkeys(kinds)).replace(f'{key}: ', '')}"
    if kind == "union_tag_invalid":
        key, tag, choices = (
            problem["ctx"][of].replace("'", "") for of in ("discriminator", "tag", "expected_tags")
        )
        close = difflib.get_close_matches(tag, choices.split(", "), n=1, cutoff=0.5)
        advice = f"did you mean {close[0]!r}?" if close else f"known here: {choices}"
        return f"{prefix}: unknown {key} {tag!r}; {advice}"
    choices = re.findall("'(.+?)'", problem["ctx"]["expected"]) if kind == "literal_error" else []
    if close := difflib.get_close_matches(str(problem["input"]), choices, n=1):
        return f"{prefix}: unknown {problem['input']!r}; did you mean {close[0]!r}?"
    if kind.startswith("missing"):
        return f"{prefix}: required, and not set"
    plain = dict.fromkeys(
        ("dataclass_type", "model_attributes_type"), "Has keys of its own, indented below it"
    )
    plain["tuple_type"] = "Input should be a list"
    message = plain.get(kind, problem["msg"].removeprefix("Value error, "))
    is_told = isinstance(problem["input"], dict | list) or kind == "value_error"
    return f"{prefix}: {message[0].lower()}{message[1:]}" + (
        "" if is_told else f", not {problem['input']!r}"
    )


def _place(parts: list[str]) -> str:
    """With * for list positions, as in `sections`."""
    return ".".join("*" if part.isdecimal() else part for part in parts)


def suggestion(parts: list[str], schema: Any, loc: Any = ()) -> str:
    """Advice for an unknown key: our key for another trainer's name, or a similar key here or in another section."""
    *section, leaf = parts
    known = [
        (place, field.name)
        for cls, place, _ in sections(schema)
        for field in dataclasses.fields(cls)
    ]
    beside = dict.fromkeys(key for place, key in known if place == _place(section))
    if leaf in beside:  # a key of another kind
        return f"it belongs to another kind of {section[-1]} than {loc[-2]}, leave it out"
    meant = {
        key: f"{place}.{key}".lstrip(".") for place, key in reversed(known) if "*" not in place
    }
    meant |= {key: ".".join([*section, key]) for key in beside}
    alias = next(
        (
            key
            for key, others in ALIASES.items()
            if leaf.lower().replace("-", "_") in others.split()
        ),
        "",
    )
    close = (
        [alias]
        if alias.rpartition(".")[2] in meant
        else difflib.get_close_matches(leaf, beside, n=1)
    )
    close = close or difflib.get_close_matches(leaf, meant, n=1, cutoff=0.8)
    return (
        f"did you mean {meant.get(close[0], close[0])!r}?"
        if close
        else f"known here: {', '.join(beside)}"
    )


def sections(hint: Any, place: str = "", kind: str = "") -> Iterator[tuple[Any, str, str]]:
    """(class, place, kind that selects it) for each class with keys at and below a place, base classes first."""
    if isinstance(hint, type) and issubclass(hint, Section):
        bases = [
            base
            for base in reversed(hint.__mro__)
            if issubclass(base, Section) and base is not Section
        ]
        yield from ((base, place, kind) for base in bases if vars(base).get("__annotations__"))
        for field in dataclasses.fields(hint):
            yield from sections(field.type, f"{place}.{field.name}".lstrip("."))
    elif typing.get_origin(hint) is not typing.Literal:
        members = typing.get_args(hint)
        tags = [
            tag
            for member in members
            for tag in TAGS
            if tag in getattr(member, "__dataclass_fields__", ())
        ]
        for member in members:
            inner = f"{place}.*" if typing.get_origin(hint) is tuple else place
            choices = (
                typing.get_args(member.__dataclass_fields__[tags[0]].type) if len(tags) > 1 else ()
            )
            yield from sections(
                member, inner, f"{tags[0]}: {' | '.join(choices)}" if choices else ""
            )
