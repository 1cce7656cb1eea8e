"""A config.json's values by type: a missing or null one takes its default, a malformed one is a clear line.

Nothing is converted on the way: a size in quotes or a flag that says "false" is another writer's fault, and guessing
what was meant has loaded wrong heads.
"""

import math
from pathlib import Path
from typing import Any

from model.errors import UserError

MOST, MOST_LAYERS = 2**24, 1024  # beyond any size of a model; layers are built one by one
DEPTHS = ("num_hidden_layers", "num_heads", "num_layers")


def whole(values: dict[str, Any], name: str, place: Path, default: int | None = None) -> int:
    """A positive whole number; UserError where it is none, or missing without a default."""
    value = _found(values, name, place, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{place}: {name} is {value!r}; it must be a positive whole number")
    most = MOST_LAYERS if name in DEPTHS else MOST
    if value > most:
        raise UserError(f"{place}: {name} is {value:,}; no head has more than {most:,}")
    return value


def number(values: dict[str, Any], name: str, place: Path, default: float | None = None) -> float:
    """A positive finite number; UserError where it is none, or missing without a default."""
    value = _found(values, name, place, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{place}: {name} is {value!r}; it must be a positive number")
    return float(value)


def flag(values: dict[str, Any], name: str, place: Path, default: bool = False) -> bool:
    """True or false; UserError for anything else, a word in quotes included."""
    value = _found(values, name, place, default)
    if not isinstance(value, bool):
        raise UserError(f"{place}: {name} is {value!r}; it must be true or false, without quotes")
    return value


def table(values: dict[str, Any], name: str, place: Path) -> dict[str, Any]:
    """A table of keys, empty where there is none; UserError for anything else."""
    value = _found(values, name, place, {})
    if not isinstance(value, dict):
        raise UserError(f"{place}: {name} is {value!r}; it must be a table of keys or null")
    return dict(value)


def _found(values: dict[str, Any], name: str, place: Path, default: Any) -> Any:
    value = values.get(name)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"{place}: lacks {name}")
    return value
