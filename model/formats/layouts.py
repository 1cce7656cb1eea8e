"""This project's own layout: config.json names its kind and every key of its configuration; nothing is guessed."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from aerie.configs.errors import UserError
from aerie.model.formats import medusa, safeailab, sglang, speculators
from aerie.model.formats.common import (
    Destination,
    Export,
    HeadContent,
    HeadFiles,
    flag,
    number,
    read_rope,
    read_taps,
    whole,
)
from aerie.model.heads import HEADS, AnyConfig
from aerie.model.heads.eagle import Eagle3Config
from aerie.model.heads.multi_token import HydraConfig, MedusaConfig
from aerie.model.storage import CONFIG, read_json
from aerie.model.weights import read_tensors

KIND = "aerie_kind"
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
    return found if isinstance(found, str) and found in HEADS else None


def read(files: HeadFiles) -> HeadContent:
    """The head as it was saved; UserError for a missing key or taps in another numbering."""
    place, values = files.config_place, files.values
    schema = HEADS[values[KIND]].config
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


@dataclass(frozen=True)
class Layout:
    """One layout. kind_of tells a head's kind by config.json and the tensors' names, None for another layout."""

    name: str
    kind_of: Callable[[dict[str, Any], set[str]], str | None]
    read: Callable[[HeadFiles], HeadContent]
    write: Callable[[HeadContent, Destination], Export] | None = None


LAYOUTS = (  # the first that knows the files reads them
    Layout("aerie", kind_of, read),
    Layout("medusa", medusa.kind_of, medusa.read),
    Layout("hydra", medusa.kind_of_hydra, medusa.read_hydra),
    Layout("speculators", speculators.kind_of, speculators.read, speculators.write),
    Layout("sglang", sglang.kind_of, sglang.read, sglang.write),
    Layout("safeailab", safeailab.kind_of, safeailab.read, safeailab.write),
)
WRITABLE = {layout.name: layout.write for layout in LAYOUTS if layout.write is not None}


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, which must be a table."""
    values = read_json(directory / CONFIG)
    if not isinstance(values, dict):
        raise UserError(f"{directory / CONFIG}: not a table of keys: not a head of this project or another")
    return values


def recognise(values: dict[str, Any], names: set[str], place: Path) -> tuple[Layout, str]:
    """The layout and the head's kind; UserError for files that are no head, or of a layout that is not known."""
    declared, theirs = values.get(KIND), values.get(speculators.TYPE)
    says = "aerie" if declared is not None else "speculators" if theirs is not None else None
    for layout in LAYOUTS:
        kind = layout.kind_of(values, names) if says in (None, layout.name) else None
        if kind is not None:
            return layout, kind
    if says == "aerie":
        raise UserError(f"{place}: not a head of this project ({KIND} is {declared!r})")
    if says == "speculators":
        raise UserError(f"{place}: {speculators.TYPE} is {theirs!r}; of speculators' heads, eagle3 and eagle are read")
    if is_whole_model(values, names):
        raise UserError(
            f"{place}: a whole language model and no draft head: a target, or a draft_lm, which decodes as it is "
            f"(--head) and needs no conversion"
        )
    raise UserError(
        f"{place}: not a head of this project ({KIND} is None), nor one in a layout that it reads "
        f"({', '.join(WRITABLE)})"
    )


def is_whole_model(values: dict[str, Any], names: set[str]) -> bool:
    """Whether files that are no head are a causal LM as transformers saves it."""
    architectures = values.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    whole = any(name.startswith(("model.layers.", "transformer.h.", "model.decoder.layers.")) for name in names)
    return whole or (first.endswith(("ForCausalLM", "LMHeadModel")) and "fc.weight" not in names and "d2t" not in names)


def read_content(directory: Path, after_blocks: tuple[int, ...] | None = None) -> tuple[Layout, HeadFiles, HeadContent]:
    """A head's directory in whatever layout; after_blocks are the taps to take where its files name none."""
    values = read_config(directory)
    place, tensors = read_tensors(directory)
    layout, _ = recognise(values, set(tensors), directory / CONFIG)
    files = HeadFiles(directory / CONFIG, values, place, tensors, after_blocks)
    content = layout.read(files)
    _check_config(content.config, directory / CONFIG)
    return layout, files, content


def _check_config(config: AnyConfig, place: Path) -> None:
    """UserError for sizes that fit no module."""
    if isinstance(config, MedusaConfig | HydraConfig):
        return
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{place}: num_attention_heads {config.num_attention_heads} is no multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    if isinstance(config, Eagle3Config) and config.draft_vocab_size > config.vocab_size:
        raise UserError(
            f"{place}: draft_vocab_size {config.draft_vocab_size:,} is larger than vocab_size {config.vocab_size:,}"
        )
