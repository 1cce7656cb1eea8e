"""The layouts in which heads are published: how each is told apart, read and written; and this project's own.

Our own config.json names the head's kind and every key of its configuration, so nothing is guessed.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from aerie.configs.errors import UserError
from aerie.model.formats import medusa, safeailab, sglang, speculators
from aerie.model.formats.content import Destination, Export, HeadContent, HeadFiles, read_rope, read_taps, take
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import Eagle1Config, Eagle3Config
from aerie.model.storage import CONFIG, read_json
from aerie.model.weights import read_tensors

KIND = "aerie_kind"
PREFIX_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")


def kind_of(values: dict[str, Any], names: set[str]) -> str | None:
    """The kind of head in our own layout, None where it holds none that is known."""
    kind = values.get(KIND)
    return kind if isinstance(kind, str) and kind in HEADS else None


def read(files: HeadFiles) -> HeadContent:
    """A head in our own layout; UserError for a missing key, a wrong type, or taps in another numbering."""
    place, values, kind = files.config_place, files.values, files.values[KIND]
    schema, entries = HEADS[kind].config, {}
    missing = [f.name for f in dataclasses.fields(schema) if f.name not in values and f.default is dataclasses.MISSING]
    if missing:
        raise UserError(f"{place}: lacks {', '.join(missing)}")
    for name, hint in get_type_hints(schema).items():
        options = get_args(hint) or (hint,)
        if name not in values:
            continue
        value = values[name]
        if name == "after_blocks":
            value = read_taps(values, None, place)[0]
        elif name == "rope_scaling":
            value = read_rope({name: value}, place)[1]
        elif all(isinstance(option, str) for option in options):  # a Literal
            if value not in options:
                raise UserError(f"{place}: {name} is {value!r}; it must be one of {', '.join(options)}")
        elif value is not None or type(None) not in options:
            number = next((option for option in (bool, int, float) if option in options), None)
            value = value if number is None else take(values, name, number, place)
        entries[name] = value
    if kind == "hydra" and entries.get("prefix_layer"):
        missing = [name for name in (*PREFIX_SIZES, "rms_norm_eps") if entries.get(name) is None]
        if missing:
            raise UserError(f"{place}: has a prefix layer and lacks {', '.join(missing)}")
    return HeadContent(schema(**entries), files.tensors, is_embedding_optional=schema is Eagle3Config)


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
    only = "aerie" if declared is not None else "speculators" if theirs is not None else None
    for layout in LAYOUTS:
        kind = layout.kind_of(values, names) if only in (None, layout.name) else None
        if kind is not None:
            return layout, kind
    if only == "speculators":
        raise UserError(f"{place}: {speculators.TYPE} is {theirs!r}; of speculators' heads, eagle3 and eagle are read")
    if only is None and is_whole_model(values, names):
        raise UserError(
            f"{place}: a whole language model and no draft head: a target, or a draft_lm, which decodes as it is "
            f"(--head) and needs no conversion"
        )
    known = "" if only else f", nor one in a layout that it reads ({', '.join(WRITABLE)})"
    raise UserError(f"{place}: not a head of this project ({KIND} is {declared!r}){known}")


def is_whole_model(values: dict[str, Any], names: set[str]) -> bool:
    """Whether files that are no head are a causal LM as transformers saves it."""
    architectures = values.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if any(name.startswith(("model.layers.", "transformer.h.", "model.decoder.layers.")) for name in names):
        return True
    return first.endswith(("ForCausalLM", "LMHeadModel")) and not {"fc.weight", "d2t"} & names


def read_content(directory: Path, after_blocks: tuple[int, ...] | None = None) -> tuple[Layout, HeadFiles, HeadContent]:
    """A head's directory in whatever layout; after_blocks are the taps to take where its files name none."""
    values, place = read_config(directory), directory / CONFIG
    weights, tensors = read_tensors(directory)
    layout, _ = recognise(values, set(tensors), place)
    files = HeadFiles(place, values, weights, tensors, after_blocks)
    content = layout.read(files)
    config = content.config
    if isinstance(config, Eagle1Config | Eagle3Config) and config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{place}: num_attention_heads {config.num_attention_heads} is no multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    if isinstance(config, Eagle3Config) and config.draft_vocab_size > config.vocab_size:
        raise UserError(
            f"{place}: draft_vocab_size {config.draft_vocab_size:,} is larger than vocab_size {config.vocab_size:,}"
        )
    return layout, files, content
