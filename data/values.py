"""The values in a row's columns: what JSON, Arrow and Python write for the same thing."""

import ast
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from aerie.configs.errors import UserError

MAX_DEPTH = 100  # of lists and objects in each other; templates write them by recursion


class UnusableRow(UserError):
    """Carries a reason, which is counted, and a sentence about this row."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(": ".join(filter(None, (reason, sentence))))
        self.reason = reason
        self.sentence = sentence


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


class TwoValues:
    """Stands for the value of a key that an object has twice; no reader takes it for a value."""

    def __repr__(self) -> str:
        return "two values"


def object_of(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The object that has these keys and values."""
    pairs = list(pairs)
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if values[key] != value:
                values[key] = TwoValues()
    return values


JSON = json.JSONDecoder(object_pairs_hook=object_of)
# What the parsers of JSON and of Python raise for a text that is not theirs, or nests too deeply
NOT_READ = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


def from_json(value: Any) -> Any:
    """What a text of JSON holds; anything else as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            decoded = json.loads(value)
            return decoded if is_plain(decoded) else value
    return value


def unpacked(value: Any, brackets: tuple[str, ...] = ("[",)) -> Any:
    """The list in a column, also if it is JSON or, as pandas writes into a CSV cell, Python."""
    if isinstance(value, str) and value.lstrip().startswith(brackets):
        for read in (JSON.decode, ast.literal_eval):
            with suppress(*NOT_READ):
                return read(value.strip())
    return value


def read_object(value: Any) -> Any:
    """The object or the list in a text of JSON, as `datasets` writes an item, or of Python."""
    return unpacked(value, ("[", "{"))


def is_plain(value: Any) -> bool:
    """Whether a value is one of JSON, of at most MAX_DEPTH levels."""
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
    """Whether a value says nothing; Arrow fills in nulls where another row has a value."""
    try:
        if isinstance(value, Mapping):
            return all(map(is_empty, value.values()))
        if isinstance(value, list | tuple):
            return all(map(is_empty, value))
    except RecursionError:  # hundreds of levels
        return False
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}"))
