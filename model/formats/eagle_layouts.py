"""EAGLE heads in the layouts of SafeAILab's code, SGLang and speculators.

speculators 0.9.0 has EAGLE-3 heads, and 0.1 to 0.4 have EAGLE-1 heads.
"""

from pathlib import Path
from typing import Any

import torch

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.model.formats import content
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import TAP_CONVENTION, Eagle1Config, Eagle3Config

LAYER, TYPE = "transformer_layer_config", "speculators_model_type"
SERVER = "made_for"  # under "aerie": the server, with the versions that count taps this way
ZERO_BIAS = "fc_bias_is_padding"  # under "aerie": fc.bias is zeros that only SGLang needs
FIRST_LAYER = "layers.0.hidden_norm.weight"  # SafeAILab's name of this layer is midlayer
# RoPE's frequencies, which old pickles hold
DERIVED: content.RenameRule = (r"^.*rotary_emb\.inv_freq$", "")
EARLY_NAMES: tuple[content.RenameRule, ...] = (
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
)
TO_MIDLAYER: tuple[content.RenameRule, ...] = (
    (r"^layers\.0\.", "midlayer."),
    (r"^layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) - 1}."),
)
FROM_MIDLAYER: tuple[content.RenameRule, ...] = (
    (r"^layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + 1}."),
    (r"^midlayer\.", "layers.0."),
)
SPECULATORS_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LOST: dict[str, tuple[str, ...]] = {  # by layout: options that its readers silently drop
    "safeailab": ("qk_norm", *SPECULATORS_FLAGS),
    "sglang": ("qkv_bias", "qk_norm", "norm_before_residual", "norm_before_fc"),
    "speculators": (),
}
PUBLISHED_TAPS = 3  # how many taps EAGLE-3 has
# The pull requests since which vLLM reads an option (March and June 2026).
VLLM_SINCE = {"norm_before_fc": 38111, "fc_norm": 46488, "norm_output": 46488}
CHECKED = "0.5.10 to 0.5.23"  # the versions of SGLang to which TAP_RULES apply
TAP_RULES = read_yaml(Path(__file__).with_name("sglang.yaml"))[0]


def read_eagle1(files: content.HeadFiles, layout: str) -> content.HeadContent:
    values, path = files.values, files.config_path
    is_early = layout == "speculators"
    tensors = content.renamed(files.tensors, (DERIVED, *(EARLY_NAMES if is_early else ())))
    if values.get("layernorms"):
        raise UserError(f"{path}: layernorms is true, as in HASS heads, which are not supported")
    if layout == "safeailab" and "bias" not in values and "fc.bias" not in tensors:
        raise UserError(
            f'{path}: has no key "bias", which means true, but the weights have no fc.bias; '
            'add "bias": false'
        )
    is_padded = content.nested(values, "aerie").get(ZERO_BIAS)
    if is_padded and not tensors.get("fc.bias", torch.ones(1)).any():
        del tensors["fc.bias"]
    layer = {**values[LAYER], "num_hidden_layers": 1} if is_early else values
    options = {
        "safeailab": {"bias": values.get("bias", True), "qkv_bias": values.get("qkv_bias")},
        "sglang": {"bias": "fc.bias" in tensors},
        "speculators": {"bias": values.get("fusion_bias")},
    }
    sizes = content.read_sizes(layer, path)
    config = content.configured(Eagle1Config, {**sizes, **options[layout]}, path)
    return content.HeadContent(config, tensors, is_embedding_optional=is_early)


def read_eagle3(files: content.HeadFiles, layout: str) -> content.HeadContent:
    values, path = files.values, files.config_path
    is_speculators = layout == "speculators"
    extra = content.nested(values, "eagle_config")
    if extra.get("use_aux_hidden_state") is False:
        raise UserError(
            f"{path}: use_aux_hidden_state is false; heads that read no taps are not supported"
        )
    rules = (DERIVED, *(TO_MIDLAYER if FIRST_LAYER in files.tensors else ()))
    tensors = content.renamed(files.tensors, rules)
    sizes = content.read_sizes(values[LAYER] if is_speculators else values, path)
    taps, guesses = content.read_taps(values, files.after_blocks, path, is_speculators)
    draft_size = sizes.get("vocab_size")
    if is_speculators:
        draft_size = 32_000  # speculators' default
        if "t2d" in tensors and tensors["t2d"].ndim == 1:
            sizes["vocab_size"] = tensors["t2d"].shape[0]  # early exports wrote a wrong number
        if "norm_before_residual" not in values:
            guesses.append(
                "norm_before_residual is missing; aerie takes false, as speculators do (vLLM: true)"
            )
    options = {
        "draft_vocab_size": values.get("draft_vocab_size") or draft_size,
        "target_hidden_size": values.get("target_hidden_size") or sizes.get("hidden_size"),
        "after_blocks": taps,
        "qk_norm": "midlayer.self_attn.q_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_output": values.get("norm_output"),
        "norm_before_residual": values.get("norm_before_residual"),
        "norm_before_fc": {**extra, **values}.get("norm_before_fc", "input_norm.weight" in tensors),
    }
    return content.HeadContent(
        content.configured(Eagle3Config, {**sizes, **options}, path),
        tensors,
        tuple(guesses),
        is_embedding_optional=True,
        speculative_tokens=content.proposed_tokens(values),
    )


def write_eagle1(
    layout: str, head: content.HeadContent, target: content.TargetFacts
) -> content.Export:
    """config.json's values, tensors and notes.

    UserError for what readers would silently drop or misread.
    """
    config: Any = head.config
    refuse_eagle(layout, config, target)
    values, notes = _llama_values(layout, head, target)
    tensors = dict(head.tensors)
    if layout == "safeailab":
        values |= {"bias": config.bias, "qkv_bias": config.qkv_bias}
        return values, tensors, notes
    values["bias"] = False
    if not config.bias:
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
        values["aerie"] = {ZERO_BIAS: True}
        notes.append("fc.bias of zeros is added: without it SGLang would have a random one")
    return values, tensors, notes


def write_eagle3(
    layout: str, head: content.HeadContent, target: content.TargetFacts
) -> content.Export:
    """Like `write_eagle1`, for EAGLE-3."""
    config: Any = head.config
    refuse_eagle(layout, config, target)
    tensors = dict(head.tensors)  # with the embedding, as not every reader takes the target's
    if config.draft_vocab_size == config.vocab_size:  # readers expect no tables then
        del tensors["d2t"], tensors["t2d"]
    if layout == "speculators":
        values, notes = _speculators_eagle3(head, target)
        return values, content.renamed(tensors, FROM_MIDLAYER), notes
    values, notes = _llama_values(layout, head, target)
    values["draft_vocab_size"] = config.draft_vocab_size
    if (
        config.target_hidden_size != config.hidden_size
    ):  # only then, as readers take null for a width
        values["target_hidden_size"] = config.target_hidden_size
    values |= {
        "bias": False,
        "after_blocks": list(config.after_blocks),
        "tap_convention": TAP_CONVENTION,
    }
    if layout == "sglang":
        sglang_values, sglang_notes = _sglang_eagle3(config, target)
        values |= sglang_values
        notes += sglang_notes
    return values, tensors, notes


def _llama_values(
    layout: str, head: content.HeadContent, target: content.TargetFacts
) -> tuple[dict[str, Any], list[str]]:
    """The values that SafeAILab's code and SGLang read for a decoder layer, and notes."""
    config: Any = head.config
    sizes, notes = content.write_sizes(config, target)
    if layout != "safeailab":
        return {"architectures": [HEADS[head.kind].architecture], **sizes}, notes
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "linear":
        sizes["rope_scaling"] = {"type": "linear", "factor": float(scaling["factor"])}
    return {"architectures": ["LlamaForCausalLM"], **sizes}, notes


def _speculators_eagle3(
    head: content.HeadContent, target: content.TargetFacts
) -> tuple[dict[str, Any], list[str]]:
    config: Any = head.config
    sizes, notes = content.write_sizes(config, target)
    notes += [
        f"{name} needs a vLLM with its pull request {number}; earlier ones silently drop it"
        for name, number in VLLM_SINCE.items()
        if getattr(config, name)
    ]
    layer = {
        **sizes,
        "model_type": "qwen3" if config.qk_norm else "llama",
        "attention_bias": False,
        "mlp_bias": False,
    }
    if len(config.after_blocks) != PUBLISHED_TAPS:  # otherwise vLLM's fc would have another shape
        layer["num_aux_hidden_states"] = len(config.after_blocks)
    is_as_wide = config.target_hidden_size == config.hidden_size
    return {
        "architectures": ["Eagle3DraftModel"],
        **speculators_values(head, target, layer),
        **{name: getattr(config, name) for name in SPECULATORS_FLAGS},
        content.NUMBERED: list(config.after_blocks),
        "target_hidden_size": None if is_as_wide else config.target_hidden_size,
        "embed_requires_grad": False,
    }, notes


def _sglang_eagle3(config: Any, target: content.TargetFacts) -> tuple[dict[str, Any], list[str]]:
    flags = {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    notes = [
        f"{name} (EAGLE-3.1) needs SGLang 0.5.12; earlier ones silently drop it"
        for name, is_on in flags.items()
        if is_on
    ]
    taps = config.after_blocks
    numbers, versions = sglang_numbers(taps, target.default_taps, target.architectures)
    values = {**flags, "norm_before_residual": False, "aerie": {SERVER: f"SGLang {versions}"}}
    counted = "SGLang's default, so config.json names none"
    if numbers is not None:
        counted = f"written as {numbers}; for vLLM export with --to speculators"
        values["eagle_config"] = {"use_aux_hidden_state": True, content.NUMBERED: numbers}
    notes.append(f"made for SGLang {versions}: the taps {list(taps)} are {counted}")
    return values, notes


def refuse_eagle(layout: str, config: Any, target: content.TargetFacts | None) -> None:
    """UserError for what the layout's readers would silently drop or misread.

    Without a target, only what the head alone tells is refused.
    """
    lost = [name for name in LOST[layout] if getattr(config, name, False)]
    instead = "serve it with vLLM (--to speculators)"
    is_eagle1 = isinstance(config, Eagle1Config)
    if is_eagle1:
        instead = "vLLM serves it from --to safeailab"
        lost += ["an EAGLE-1 head"] if layout == "speculators" else []
    elif layout == "speculators":
        if config.norm_before_fc and config.fc_norm:
            lost.append("norm_before_fc and fc_norm together")
    else:
        if config.num_hidden_layers > 1:
            lost.append(f"{config.num_hidden_layers} layers")
        if layout == "safeailab" and target and config.after_blocks != target.default_taps:
            lost.append(
                f"the taps {list(config.after_blocks)}: "
                f"SafeAILab's code reads {target.default_taps}"
            )
    if content.vllm_faults(config):
        instead = "decode it with aerie"
    if lost:
        raise UserError(f"--to {layout}: cannot carry {', '.join(lost)}; {instead}")
    if layout == "sglang" and target and not is_eagle1:
        sglang_numbers(config.after_blocks, target.default_taps, target.architectures)


def speculators_values(
    head: content.HeadContent, target: content.TargetFacts, layer: dict[str, Any]
) -> dict[str, Any]:
    """The values that config.json has for every head of speculators 0.9."""
    config: Any = head.config
    proposal = {"proposal_type": "greedy", "speculative_tokens": head.drafts}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        TYPE: head.method,
        "speculators_version": "0.9.0",
        "draft_vocab_size": getattr(config, "draft_vocab_size", config.vocab_size),
        "tie_word_embeddings": False,
        "after_blocks": list(config.after_blocks),
        "tap_convention": TAP_CONVENTION,
        "speculators_config": {
            "algorithm": head.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        LAYER: layer,
    }


def sglang_numbers(
    after_blocks: tuple[int, ...], default: tuple[int, ...] | None, architectures: tuple[str, ...]
) -> tuple[list[int] | None, str]:
    """config.json's numbers for these taps, and the versions of SGLang that read them right.

    Without numbers (None) SGLang reads (2, n // 2, n - 3); sglang.yaml has its other rules.
    UserError if no numbers give these taps.
    """
    if after_blocks == default:
        return None, CHECKED
    first = after_blocks[0]
    less_one = [entry - 1 for entry in after_blocks]
    if first == 2:  # written as 1, which every rule reads as 2
        return less_one, CHECKED
    names = {*architectures}
    if names & {*TAP_RULES["by_the_first"].split()}:
        if first != 1:
            return list(after_blocks), "0.5.13 to 0.5.23"
        why = "SGLang adds one to a list that begins with 1"
    elif not names & {*TAP_RULES["adds_one"].split()}:
        why = f"no rule known for {', '.join(architectures) or 'its target'}"
    elif first:
        return less_one, CHECKED
    else:
        why = "SGLang has no number for the embedding"
    raise UserError(
        f"--to sglang: cannot carry the taps {list(after_blocks)}: {why}; serve it with vLLM"
    )


EAGLE1 = content.Formats(read_eagle1, refuse_eagle, write_eagle1)
EAGLE3 = content.Formats(read_eagle3, refuse_eagle, write_eagle3)
