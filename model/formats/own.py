"""This project's own layout: config.json names its kind and every key of its configuration; nothing is guessed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from model.errors import UserError
from model.formats.content import KINDS, AnyConfig, HeadContent, HeadFiles
from model.formats.llama_keys import read_rope
from model.formats.taps import read_taps
from model.formats.values import flag, number, whole
from model.heads.eagle3 import Eagle3Config
from model.heads.hydra import HydraConfig

KIND = "aerie_kind"
SCHEMAS: dict[str, type[AnyConfig]] = {kind: schema for schema, kind in KINDS.items()}
READERS: dict[type, Callable[[dict[str, Any], str, Path], Any]] = {bool: flag, int: whole, float: number}
PREFIX_SIZES = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
)


def kind_of(values: dict[str, Any], names: set[str]) -> str | None:
    """The kind of head, None where this layout does not hold one that is known."""
    found = values.get(KIND)
    return found if isinstance(found, str) and found in SCHEMAS else None


def read(files: HeadFiles) -> HeadContent:
    """The head as it was saved; UserError for a missing key or taps in another numbering."""
    place, values = files.config_place, files.values
    schema = SCHEMAS[values[KIND]]
    if schema is Eagle3Config and "after_blocks" in values:
        values = {**values, "after_blocks": read_taps(values, None, place)[0]}
    config = schema(**_known(values, schema, place))
    missing = [name for name in PREFIX_SIZES if getattr(config, name, None) is None]
    if isinstance(config, HydraConfig) and config.prefix_layer and missing:
        raise UserError(f"{place}: has a prefix layer and lacks {', '.join(missing)}")
    return HeadContent(config, files.tensors, is_embedding_optional=isinstance(config, Eagle3Config))


def _known(values: dict[str, Any], schema: type[AnyConfig], place: Path) -> dict[str, Any]:
    """The values that the schema names; UserError when one without default is missing, or is of another type."""
    fields = dataclasses.fields(schema)
    missing = [f.name for f in fields if f.name not in values and f.default is dataclasses.MISSING]
    if missing:
        raise UserError(f"{place}: lacks {', '.join(missing)}")
    types = get_type_hints(schema)
    return {f.name: _typed(values, f.name, types[f.name], place) for f in fields if f.name in values}


def _typed(values: dict[str, Any], name: str, declared: Any, place: Path) -> Any:
    """The value, of the declared type."""
    options = get_args(declared) or (declared,)
    value, reader = values[name], next((READERS[option] for option in options if option in READERS), None)
    if name == "rope_scaling":
        return read_rope({name: value}, place)[1]
    if value is None and type(None) in options:
        return None
    if all(isinstance(option, str) for option in options) and value not in options:  # a Literal
        raise UserError(f"{place}: {name} is {value!r}; it must be one of {', '.join(options)}")
    return value if reader is None or name == "after_blocks" else reader(values, name, place)
