"""The layout of SGLang, SpecForge and AngelSlim: SafeAILab's names in safetensors, under SGLang's architectures.

EAGLE-1: SGLang always has an fc.bias, random where the file has none, and takes `bias` for one of the attention; so a
head without one gets zeros, and config.json says false. EAGLE-3: taps are numbered as in
model/formats/sglang_taps.py.
"""

from typing import Any

import torch

from model.formats import safeailab
from model.formats.content import Destination, Export, HeadContent, HeadFiles, refuse
from model.formats.llama_keys import read_sizes, write_sizes
from model.formats.sglang_taps import sglang_numbers
from model.formats.taps import NUMBERED
from model.heads.eagle1 import Eagle1Config
from model.heads.eagle3 import Eagle3Config
from model.target import default_taps

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
    for flag in ("qk_norm", "norm_before_residual", "norm_before_fc"):
        if getattr(config, flag):
            raise refuse(NAME, f"{flag}, which SGLang's Llama draft does not know", safeailab.ELSEWHERE)
    if config.num_hidden_layers > 1:
        raise refuse(NAME, f"{config.num_hidden_layers} layers, of which SGLang reads one", safeailab.ELSEWHERE)
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
