"""The layouts in which heads are published: how each is told apart, read, and written.

Another layout is one module with kind_of, read and write, and one line in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.files import read_json
from model.formats import hydra, medusa, own, safeailab, sglang, speculators
from model.formats.content import AnyConfig, Destination, Export, HeadContent, HeadFiles
from model.head_files import CONFIG
from model.heads.eagle3 import Eagle3Config
from model.heads.hydra import HydraConfig
from model.heads.medusa import MedusaConfig
from model.weights import read_tensors


@dataclass(frozen=True)
class Layout:
    """One layout. kind_of tells a head's kind by config.json and the tensors' names, None for another layout."""

    name: str
    kind_of: Callable[[dict[str, Any], set[str]], str | None]
    read: Callable[[HeadFiles], HeadContent]
    write: Callable[[HeadContent, Destination], Export] | None = None


LAYOUTS = (  # the first that knows the files reads them
    Layout("aerie", own.kind_of, own.read),
    Layout("medusa", medusa.kind_of, medusa.read),
    Layout("hydra", hydra.kind_of, hydra.read),
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
    declared, theirs = values.get(own.KIND), values.get(speculators.TYPE)
    says = "aerie" if declared is not None else "speculators" if theirs is not None else None
    for layout in LAYOUTS:
        kind = layout.kind_of(values, names) if says in (None, layout.name) else None
        if kind is not None:
            return layout, kind
    if says == "aerie":
        raise UserError(f"{place}: not a head of this project ({own.KIND} is {declared!r})")
    if says == "speculators":
        raise UserError(f"{place}: {speculators.TYPE} is {theirs!r}; of speculators' heads, eagle3 and eagle are read")
    if is_whole_model(values, names):
        raise UserError(
            f"{place}: a whole language model and no draft head: a target, or a draft_lm, which decodes as it is "
            f"(--head) and needs no conversion"
        )
    raise UserError(
        f"{place}: not a head of this project ({own.KIND} is None), nor one in a layout that it reads "
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
