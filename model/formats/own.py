"""This project's own layout: config.json names its kind and every key of its configuration; nothing is guessed."""

import dataclasses
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.formats.content import KINDS, AnyConfig, HeadContent, HeadFiles
from model.formats.taps import read_taps
from model.heads.eagle3 import Eagle3Config
from model.heads.hydra import HydraConfig

KIND = "aerie_kind"
SCHEMAS: dict[str, type[AnyConfig]] = {kind: schema for schema, kind in KINDS.items()}
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
    return found if found in SCHEMAS else None


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
    """The values that the schema names; UserError when one without default is missing."""
    fields = dataclasses.fields(schema)
    missing = [f.name for f in fields if f.name not in values and f.default is dataclasses.MISSING]
    if missing:
        raise UserError(f"{place}: lacks {', '.join(missing)}")
    return {f.name: values[f.name] for f in fields if f.name in values}
