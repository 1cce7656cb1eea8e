"""The numbers by which SGLang is told an EAGLE-3 head's taps: they depend on its version and on the target.

Without numbers SGLang reads (2, n // 2, n - 3). Most of its models add one to every number; DeepSeek's and two more do
so up to 0.5.12, and from 0.5.13 on only to numbers that begin with 1. Source: set_eagle3_layers_to_capture of SGLang
0.5.10 to 0.5.23.
"""

from dataclasses import dataclass
from typing import Any

import torch

from aerie.configs.errors import UserError
from aerie.model.formats import safeailab
from aerie.model.formats.content import (
    NUMBERED,
    Destination,
    Export,
    HeadContent,
    HeadFiles,
    read_sizes,
    refuse,
    refuse_options,
    write_sizes,
)
from aerie.model.heads.eagle import Eagle1Config, Eagle3Config
from aerie.model.target import default_taps

CHECKED = "0.5.10 to 0.5.23"
ADDS_ONE = (
    "ApertusForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "InternLM3ForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
BY_THE_FIRST = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "KimiK25ForConditionalGeneration",
)
INSTEAD = "serve it with vLLM (--to speculators)"


@dataclass(frozen=True)
class Numbers:
    """What config.json says (None: nothing, SGLang reads its default) and the versions that read these very taps."""

    values: list[int] | None
    versions: str


def sglang_numbers(
    after_blocks: tuple[int, ...], default: tuple[int, ...] | None, architectures: tuple[str, ...]
) -> Numbers:
    """The numbers for these taps of a target of these architectures; UserError where SGLang has none for them."""
    if after_blocks == default:
        return Numbers(None, CHECKED)
    if after_blocks[0] == 2:  # begins with 1 when written, so one is added by every rule
        return Numbers([k - 1 for k in after_blocks], CHECKED)
    taps = list(after_blocks)
    if any(name in BY_THE_FIRST for name in architectures):
        if after_blocks[0] == 1:
            raise UserError(f"--to sglang: cannot carry the taps {taps}: one is added to what begins with 1; {INSTEAD}")
        return Numbers(taps, "0.5.13 to 0.5.23")
    if not any(name in ADDS_ONE for name in architectures):
        what = ", ".join(architectures) or "a target of unknown architecture"
        raise UserError(f"--to sglang: cannot carry the taps {taps}: no rule known for {what}; {INSTEAD}")
    if after_blocks[0] == 0:
        raise UserError(f"--to sglang: cannot carry the taps {taps}: SGLang has no number for the embedding; {INSTEAD}")
    return Numbers([k - 1 for k in after_blocks], CHECKED)


NAME = "sglang"
EAGLE1, EAGLE3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"
OTHERS = ("Eagle3LlamaForCausalLM",)  # AngelSlim and ModelOpt write vLLM's name
SERVER = "made_for"  # under "aerie": the versions of the server whose counting of taps the files follow
ZERO_BIAS = "fc_bias_is_padding"  # under "aerie": our fc.bias is the zeros that SGLang needs, and no part of the head


def kind_of(values: dict[str, Any], names: set[str]) -> str | None:
    """'eagle1', 'eagle3' or None, by config.json's architectures."""
    found = values.get("architectures") or [""]
    if not isinstance(found, list) or not found:
        return None
    if found[0] in (EAGLE3, *OTHERS):
        return "eagle3"
    return "eagle1" if found[0] == EAGLE1 else None


def read(files: HeadFiles) -> HeadContent:
    """The head; an EAGLE-1 head's fc.bias is what the file has."""
    if kind_of(files.values, set(files.tensors)) == "eagle3":
        return safeailab.read_eagle3(files)
    values, place = files.values, files.config_place
    tensors = safeailab.without_derived(files.tensors)
    facts = values.get("aerie")
    if isinstance(facts, dict) and facts.get(ZERO_BIAS) and not tensors.get("fc.bias", torch.ones(1)).any():
        del tensors["fc.bias"]
    sizes = read_sizes(values, place)
    return HeadContent(Eagle1Config(**sizes, bias="fc.bias" in tensors, qkv_bias=False), tensors)


def write(content: HeadContent, destination: Destination) -> Export:
    """The files; UserError for what SGLang would drop or misread in silence."""
    config = content.eagle
    values, notes = write_sizes(config, destination)
    if isinstance(config, Eagle3Config):
        return _write_eagle3(content, config, destination, (values, notes))
    if config.qkv_bias:
        raise refuse(NAME, "qkv_bias", "SGLang's EAGLE-1 has none; serve it with vLLM (--to safeailab)")
    values = {"architectures": [EAGLE1], **values, "bias": False}
    tensors = dict(content.tensors)
    if not config.bias:
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
        values["aerie"] = {ZERO_BIAS: True}
        notes.append("fc.bias of zeros is added: SGLang has one in any case, random where the file has none")
    return Export(values, tensors, notes=tuple(notes))


def _write_eagle3(
    content: HeadContent, config: Eagle3Config, destination: Destination, sizes: tuple[dict[str, Any], list[str]]
) -> Export:
    values, notes = sizes
    refuse_options(NAME, config, ("qk_norm", "norm_before_residual", "norm_before_fc"), safeailab.ELSEWHERE)
    for flag in ("fc_norm", "norm_output"):
        if getattr(config, flag):
            notes.append(f"{flag} (EAGLE-3.1) is known to SGLang from 0.5.12 on; earlier ones drop it in silence")
    default = default_taps(destination.num_blocks) if destination.num_blocks >= 7 else None
    numbers = sglang_numbers(config.after_blocks, default, destination.architectures)
    values = {"architectures": [EAGLE3], **values, **safeailab.eagle3_values(config)}
    values |= {"fc_norm": config.fc_norm, "norm_output": config.norm_output, "norm_before_residual": False}
    values["aerie"] = {SERVER: f"SGLang {numbers.versions}"}
    counted = "its default, so that config.json names none"
    if numbers.values is not None:
        values["eagle_config"] = {"use_aux_hidden_state": True, NUMBERED: numbers.values}
        counted = f"written as {numbers.values}; for vLLM export with --to speculators"
    notes.append(f"made for SGLang {numbers.versions}: the taps {list(config.after_blocks)} are {counted}")
    return Export(values, safeailab.eagle3_tensors(content), notes=tuple(notes))
