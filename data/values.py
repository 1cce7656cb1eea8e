"""The values in a row's columns, which JSON, Arrow and Python write differently."""

import ast
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from aerie.configs.errors import UserError

MAX_DEPTH = 100  # levels of nested lists and objects, which templates write by recursion


class UnusableRow(UserError):
    """The error of a row that cannot be used: a reason to count, and a sentence about the row."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(": ".join(filter(None, (reason, sentence))))
        self.reason = reason
        self.sentence = sentence


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


class TwoValues:
    """Stands for the two values of a key that an object has twice; every reader refuses it."""

    def __repr__(self) -> str:
        return "two values"


def object_of(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The object of these pairs; a key with two different values gets a TwoValues."""
    pairs = list(pairs)
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if values[key] != value:
                values[key] = TwoValues()
    return values


JSON = json.JSONDecoder(object_pairs_hook=object_of)
# What the parsers of JSON and Python raise for a text that they cannot read.
NOT_READ = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


def from_json(value: Any) -> Any:
    """The value in a JSON text; any other value unchanged."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            decoded = json.loads(value)
            return decoded if is_plain(decoded) else value
    return value


def unpacked(value: Any, brackets: tuple[str, ...] = ("[",)) -> Any:
    """A column's list, also from a text of JSON or Python (pandas writes Python to CSV)."""
    if isinstance(value, str) and value.lstrip().startswith(brackets):
        for read in (JSON.decode, ast.literal_eval):
            with suppress(*NOT_READ):
                return read(value.strip())
    return value


def read_object(value: Any) -> Any:
    """An object or a list, also from a text of JSON (`datasets` writes it) or of Python."""
    return unpacked(value, ("[", "{"))


def is_plain(value: Any) -> bool:
    """Whether a value is JSON that nests at most MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = list[Any]()
        for part in level:
            if isinstance(part, dict):
                inner += part.keys()
                inner += part.values()
                if not all(isinstance(key, str) for key in part):
                    return False
            elif isinstance(part, list):
                inner += part
            elif not isinstance(part, str | int | float | None):
                return False
        if not inner:
            return True
        level = inner
    return False


def is_empty(value: Any) -> bool:
    """Whether a value says nothing, such as the nulls that Arrow fills in for missing keys."""
    try:
        if isinstance(value, Mapping):
            return all(map(is_empty, value.values()))
        if isinstance(value, list | tuple):
            return all(map(is_empty, value))
    except RecursionError:  # hundreds of levels
        return False
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}"))
