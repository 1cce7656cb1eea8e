"""The layout of vllm-project/speculators, which `vllm serve DIR` reads: a nested config.json and `layers.0`.

EAGLE-3 as speculators 0.9.0 writes it; of EAGLE-1, which it dropped, the files of its versions 0.1 to 0.4 are read.
Taps are entries of hidden_states by definition. vLLM takes a missing norm_before_residual for true, speculators for
false: it is always written.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from aerie.configs.errors import UserError
from aerie.model.formats.content import (
    NUMBERED,
    SPECULATIVE_TOKENS,
    Destination,
    Export,
    HeadContent,
    HeadFiles,
    read_sizes,
    refuse,
    renamed,
    take,
    write_sizes,
)
from aerie.model.formats.safeailab import eagle3_tensors, read_eagle3
from aerie.model.heads.eagle import TAP_CONVENTION, Eagle1Config, Eagle3Config

NAME, TYPE, LAYER = "speculators", "speculators_model_type", "transformer_layer_config"
VERSION = "0.9.0"
DRAFT_VOCABULARY = 32_000  # of a config.json that does not say
SERVED = ("llama", "qwen3")
OLD_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}  # of EAGLE-1, versions 0.1 to 0.4


def kind_of(values: dict[str, Any], names: set[str]) -> str | None:
    """'eagle1', 'eagle3' or None, by speculators_model_type."""
    return {"eagle": "eagle1", "eagle3": "eagle3"}.get(str(values.get(TYPE)))


def read(files: HeadFiles) -> HeadContent:
    """The head; UserError for a type or an option that this project has no module for."""
    values, place = files.values, files.config_place
    layer = values.get(LAYER)
    if not isinstance(layer, dict):
        raise UserError(f"{place}: has no {LAYER}; it is no whole export of speculators")
    if values[TYPE] == "eagle":
        return _read_eagle1(files, layer)
    if "t2d" in files.tensors and files.tensors["t2d"].ndim == 1:
        layer = {**layer, "vocab_size": files.tensors["t2d"].shape[0]}  # early exports wrote another number
    if values.get("draft_vocab_size") is None:
        files = replace(files, values={**values, "draft_vocab_size": DRAFT_VOCABULARY})
    content = read_eagle3(files, layer)
    guesses = content.guesses
    if "norm_before_residual" not in values:
        guesses += ("norm_before_residual is not said; false is taken, as speculators does (vLLM takes true)",)
    methods = take(values, "speculators_config", dict, place, {}).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    drafts = first.get("speculative_tokens") if isinstance(first, dict) else None
    return replace(content, guesses=guesses, speculative_tokens=drafts)


def write(content: HeadContent, destination: Destination) -> Export:
    """The files that speculators 0.9.0 and vLLM read; UserError for an EAGLE-1 head, which neither does."""
    config = content.eagle
    if not isinstance(config, Eagle3Config):
        raise refuse(NAME, "an EAGLE-1 head", 'vLLM serves it from --to safeailab with "method": "eagle"')
    if config.norm_before_fc and config.fc_norm:
        raise refuse(NAME, "norm_before_fc and fc_norm together", "speculators allows one of them")
    layer, notes = write_sizes(config, destination)
    layer |= {"model_type": "qwen3" if config.qk_norm else "llama", "attention_bias": False, "mlp_bias": False}
    own_width = config.target_hidden_size if config.target_hidden_size != config.hidden_size else None
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": destination.speculative_tokens or content.speculative_tokens or SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    values = {
        "architectures": ["Eagle3DraftModel"],
        TYPE: "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        NUMBERED: list(config.after_blocks),
        "target_hidden_size": own_width,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "after_blocks": list(config.after_blocks),
        "tap_convention": TAP_CONVENTION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": destination.target, "architectures": list(destination.architectures)},
        },
        LAYER: layer,
    }
    tensors = {_layers_name(name): value for name, value in eagle3_tensors(content).items()}
    return Export(values, tensors, notes=tuple(notes))


def _read_eagle1(files: HeadFiles, layer: dict[str, Any]) -> HeadContent:
    """The EAGLE-1 head of an early version, whose embedding is always the target's."""
    place: Path = files.config_place
    if take(files.values, "layernorms", bool, place, False):
        raise UserError(f"{place}: layernorms is true: a HASS head, which has norms that no EAGLE-1 head has")
    sizes = read_sizes({**layer, "num_hidden_layers": 1}, place)
    tensors = renamed(files.tensors, _old_name, files.weights_place)
    config = Eagle1Config(**sizes, bias=take(files.values, "fusion_bias", bool, place, False))
    return HeadContent(config, tensors, is_embedding_optional=True)


def _old_name(name: str) -> str:
    for theirs, ours in OLD_NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _layers_name(name: str) -> str:
    """The layers counted from 0, the first being the double-width one."""
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    found = re.match(r"layers\.(\d+)\.", name)
    return name if found is None else f"layers.{int(found[1]) + 1}.{name[found.end() :]}"
