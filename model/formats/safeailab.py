"""SafeAILab's layout: a Llama-shaped config.json and a flat pytorch_model.bin. vLLM reads its EAGLE-1 heads so too.

EAGLE-1: `bias` is true where config.json has no such key; the embedding is in the file; layer 0 has no input norm.
EAGLE-3: the layer is `midlayer`; `d2t` holds offsets; the embedding is the target's; no base of RoPE means 10,000; the
taps are always (2, n // 2, n - 3). Source: the published files and the code that reads them.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.formats.content import (
    Destination,
    Export,
    HeadContent,
    HeadFiles,
    read_sizes,
    read_taps,
    refuse,
    refuse_options,
    renamed,
    take,
    write_sizes,
)
from aerie.model.heads.eagle import EMBEDDING, TAP_CONVENTION, Eagle1Config, Eagle3Config
from aerie.model.target import default_taps

NAME = "safeailab"
FIRST_LAYER = "layers.0.hidden_norm.weight"  # as others name midlayer.hidden_norm.weight
ELSEWHERE = "export it for vLLM with --to speculators"
FLAGS = ("qk_norm", "fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
DERIVED = re.compile(r".*rotary_emb\.inv_freq")  # old pickles hold RoPE's frequencies; config.json decides them


def kind_of(values: dict[str, Any], names: set[str]) -> str | None:
    """'eagle3', 'eagle1' or None, by the tensors' names and config.json's draft vocabulary."""
    if any(name.startswith("midlayer.") for name in names) or FIRST_LAYER in names:
        return "eagle3"
    if values.get("draft_vocab_size") is not None:
        return "eagle3"
    return "eagle1" if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names else None


def read(files: HeadFiles) -> HeadContent:
    """The head, its config.json's silence filled in; every tensor is kept or named as derived."""
    if kind_of(files.values, set(files.tensors)) == "eagle3":
        return read_eagle3(files)
    values, place = files.values, files.config_place
    sizes = read_sizes(values, place)
    bias = take(values, "bias", bool, place, "bias" not in values)
    if "bias" not in values and "fc.bias" not in files.tensors:
        raise UserError(
            f"{files.weights_place}: has no 'fc.bias', and {place.name} has no \"bias\", which means true; "
            f'a head without one says "bias": false'
        )
    config = Eagle1Config(**sizes, bias=bias, qkv_bias=take(values, "qkv_bias", bool, place, False))
    return HeadContent(config, without_derived(files.tensors))


def read_eagle3(files: HeadFiles, layer: dict[str, Any] | None = None) -> HeadContent:
    """An EAGLE-3 head by SafeAILab's names, or with `layers.0` for `midlayer` as other projects name it.

    layer is speculators' table of the sizes; None: they stand in config.json itself.
    """
    values, place = files.values, files.config_place
    extra: dict[str, Any] = take(values, "eagle_config", dict, place, {})
    if not take(extra, "use_aux_hidden_state", bool, place, True):
        raise UserError(f"{place}: use_aux_hidden_state is false: the head reads no taps; such heads are not supported")
    tensors = midlayer_first(without_derived(files.tensors), files.weights_place)
    sizes = read_sizes(values if layer is None else layer, place)
    taps, guess = read_taps(values, files.after_blocks, place, is_speculators=layer is not None)
    options = values if "norm_before_fc" in values else {**extra, **values}
    config = Eagle3Config(
        **sizes,
        draft_vocab_size=take(values, "draft_vocab_size", int, place, sizes["vocab_size"]),
        target_hidden_size=take(values, "target_hidden_size", int, place, sizes["hidden_size"]),
        after_blocks=taps,
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=take(values, "norm_output", bool, place, False),
        norm_before_residual=take(values, "norm_before_residual", bool, place, False),
        norm_before_fc=take(options, "norm_before_fc", bool, place, "input_norm.weight" in tensors),
    )
    return HeadContent(config, tensors, () if guess is None else (guess,), is_embedding_optional=True)


def write(content: HeadContent, destination: Destination) -> Export:
    """The files; UserError for what SafeAILab's reader would drop or misread in silence."""
    config = content.eagle
    values, notes = write_sizes(config, destination)
    values = {"architectures": ["LlamaForCausalLM"], **values}
    scaling = config.rope_scaling
    if scaling is not None and scaling.get("rope_type") == "linear":
        values["rope_scaling"] = {"type": "linear", "factor": float(scaling["factor"])}
    if isinstance(config, Eagle1Config):
        if config.bias:
            notes.append("vLLM has no fc.bias and stops at it; SafeAILab's own code and SGLang read it")
        values |= {"bias": config.bias, "qkv_bias": config.qkv_bias}
        return Export(values, content.tensors, pickled=True, notes=tuple(notes))
    refuse_options(NAME, config, FLAGS, ELSEWHERE)
    default = default_taps(destination.num_blocks) if destination.num_blocks >= 7 else None
    if config.after_blocks != default:
        taps = "no taps of such a short target" if default is None else f"always {list(default)}"
        raise refuse(NAME, f"the taps {list(config.after_blocks)}: SafeAILab's code reads {taps}", ELSEWHERE)
    values |= eagle3_values(config)
    return Export(values, eagle3_tensors(content), pickled=True, notes=tuple(notes))


def eagle3_values(config: Eagle3Config) -> dict[str, Any]:
    """The keys of EAGLE-3's config.json, and ours for the taps."""
    width = config.target_hidden_size
    own_width = {} if width == config.hidden_size else {"target_hidden_size": width}
    return {
        "draft_vocab_size": config.draft_vocab_size,
        **own_width,  # readers take a null for a width
        "bias": False,
        "after_blocks": list(config.after_blocks),
        "tap_convention": TAP_CONVENTION,
    }


def eagle3_tensors(content: HeadContent) -> dict[str, Tensor]:
    """The tensors without tables where both vocabularies are one, as readers expect it; always with the embedding."""
    assert EMBEDDING in content.tensors and isinstance(content.config, Eagle3Config)
    same = content.config.draft_vocab_size == content.config.vocab_size
    return {name: value for name, value in content.tensors.items() if not (same and name in ("d2t", "t2d"))}


def midlayer_first(tensors: dict[str, Tensor], place: Path) -> dict[str, Tensor]:
    """The tensors with `layers.0` called `midlayer` and later layers counted from 0, where they are not yet.

    UserError for a file at place with two first layers.
    """
    if FIRST_LAYER not in tensors:
        return tensors
    other = next((name for name in sorted(tensors) if name.startswith("midlayer.")), None)
    if other is not None:
        raise UserError(
            f"{place}: has {other!r} and {FIRST_LAYER!r}, two names of the head's first layer; take out the layer that "
            f"is not its own"
        )
    return renamed(tensors, _renamed, place)


def without_derived(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors but those that config.json decides."""
    return {name: value for name, value in tensors.items() if not DERIVED.fullmatch(name)}


def _renamed(name: str) -> str:
    found = re.match(r"layers\.(\d+)\.", name)
    if found is None:
        return name
    number = int(found[1])
    return (f"layers.{number - 1}." if number else "midlayer.") + name[found.end() :]
