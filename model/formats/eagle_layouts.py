"""EAGLE heads of SafeAILab's code, SGLang, and speculators (EAGLE-3: 0.9.0, EAGLE-1: 0.1 to 0.4)."""

from pathlib import Path
from typing import Any

import torch

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.model.formats import content
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import EMBEDDING, TAP_CONVENTION, Eagle1Config, Eagle3Config

SPECULATIVE_TOKENS = 5  # speculators' default for EAGLE-3
LAYER, TYPE = "transformer_layer_config", "speculators_model_type"
SERVER = "made_for"  # under "aerie": the versions that count taps this way
ZERO_BIAS = "fc_bias_is_padding"  # under "aerie": fc.bias is zeros, only for SGLang
FIRST_LAYER = "layers.0.hidden_norm.weight"  # SafeAILab calls this layer midlayer
DERIVED: content.Rule = (r"^.*rotary_emb\.inv_freq$", "")  # RoPE's frequencies, in old pickles
EARLY_NAMES: tuple[content.Rule, ...] = ((r"^fusion_fc\.", "fc."), (r"^transformer\.", "layers.0."))
TO_MIDLAYER: tuple[content.Rule, ...] = (
    (r"^layers\.0\.", "midlayer."),
    (r"^layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) - 1}."),
)
FROM_MIDLAYER: tuple[content.Rule, ...] = (
    (r"^layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) + 1}."),
    (r"^midlayer\.", "layers.0."),
)
SPECULATORS_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LOST: dict[str, tuple[str, ...]] = {  # options that readers would silently drop
    "safeailab": ("qk_norm", *SPECULATORS_FLAGS),
    "sglang": ("qkv_bias", "qk_norm", "norm_before_residual", "norm_before_fc"),
    "speculators": (),
}
VLLM_SINCE = {
    "norm_before_fc": 38111,
    "fc_norm": 46488,
    "norm_output": 46488,
}  # March and June 2026
CHECKED = "0.5.10 to 0.5.23"  # versions of SGLang
TAP_RULES = read_yaml(Path(__file__).with_name("sglang.yaml"))[0]


def read_eagle1(files: content.HeadFiles, layout: str) -> content.HeadContent:
    values, place, is_early = files.values, files.config_path, layout == "speculators"
    tensors = content.renamed(files.tensors, (DERIVED, *(EARLY_NAMES if is_early else ())))
    if values.get("layernorms"):
        raise UserError(f"{place}: layernorms is true: a HASS head; such heads are not supported")
    if layout == "safeailab" and "bias" not in values and "fc.bias" not in tensors:
        raise UserError(
            f'{place}: has no "bias", which means true, but the weights have no fc.bias; add "bias": false'
        )
    if (
        content.nested(values, "aerie").get(ZERO_BIAS)
        and not tensors.get("fc.bias", torch.ones(1)).any()
    ):
        del tensors["fc.bias"]
    sizes = content.read_sizes(
        {**values[LAYER], "num_hidden_layers": 1} if is_early else values, place
    )
    options = {
        "safeailab": {"bias": values.get("bias", True), "qkv_bias": values.get("qkv_bias")},
        "sglang": {"bias": "fc.bias" in tensors},
        "speculators": {"bias": values.get("fusion_bias")},
    }
    config = content.configured(Eagle1Config, {**sizes, **options[layout]}, place)
    return content.HeadContent(config, tensors, is_embedding_optional=is_early)


def read_eagle3(files: content.HeadFiles, layout: str) -> content.HeadContent:
    values, place, is_speculators = files.values, files.config_path, layout == "speculators"
    extra = content.nested(values, "eagle_config")
    if extra.get("use_aux_hidden_state") is False:
        raise UserError(
            f"{place}: use_aux_hidden_state is false: heads that read no taps are not supported"
        )
    rules = (DERIVED, *(TO_MIDLAYER if FIRST_LAYER in files.tensors else ()))
    tensors = content.renamed(files.tensors, rules)
    sizes = content.read_sizes(values[LAYER] if is_speculators else values, place)
    taps, guesses = content.read_taps(values, files.after_blocks, place, is_speculators)
    draft, drafts = sizes.get("vocab_size"), content.proposed_tokens(values)
    if is_speculators:
        draft = 32_000  # if config.json does not say
        if "t2d" in tensors and tensors["t2d"].ndim == 1:
            sizes["vocab_size"] = tensors["t2d"].shape[0]  # early exports wrote another number
        if "norm_before_residual" not in values:
            guesses.append(
                "norm_before_residual is missing; false is taken, as by speculators (vLLM: true)"
            )
    options = {
        "draft_vocab_size": values.get("draft_vocab_size") or draft,
        "target_hidden_size": values.get("target_hidden_size") or sizes.get("hidden_size"),
        "after_blocks": taps,
        "qk_norm": "midlayer.self_attn.q_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_output": values.get("norm_output"),
        "norm_before_residual": values.get("norm_before_residual"),
        "norm_before_fc": {**extra, **values}.get("norm_before_fc", "input_norm.weight" in tensors),
    }
    config = content.configured(Eagle3Config, {**sizes, **options}, place)
    return content.HeadContent(
        config, tensors, tuple(guesses), is_embedding_optional=True, speculative_tokens=drafts
    )


def write_eagle(
    layout: str, head: content.HeadContent, target: content.TargetFacts
) -> content.Export:
    """config.json's values, tensors and notes; UserError for what readers would silently drop or misread."""
    config, tensors, is_safeailab = head.config, dict(head.tensors), layout == "safeailab"
    assert isinstance(config, Eagle1Config | Eagle3Config)
    refuse_eagle(layout, config, target)
    sizes, notes = content.write_sizes(config, target)
    architecture = "LlamaForCausalLM" if is_safeailab else HEADS[head.kind].architecture
    values = {"architectures": [architecture], **sizes}
    scaling = config.rope_scaling or {}
    if is_safeailab and scaling.get("rope_type") == "linear":
        values["rope_scaling"] = {"type": "linear", "factor": float(scaling["factor"])}
    if isinstance(config, Eagle3Config):
        assert EMBEDDING in tensors  # not every reader takes it from the target
        if config.draft_vocab_size == config.vocab_size:  # readers expect no tables then
            tensors = {
                name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")
            }
        width = (
            None if config.target_hidden_size == config.hidden_size else config.target_hidden_size
        )
        if layout == "speculators":
            for name, number in VLLM_SINCE.items():
                if getattr(config, name):
                    notes.append(
                        f"{name} needs a vLLM with its pull request {number}; earlier ones drop it in silence"
                    )
            layer = {**sizes, "model_type": "qwen3" if config.qk_norm else "llama"}
            layer |= {"attention_bias": False, "mlp_bias": False}
            drafts = head.speculative_tokens or SPECULATIVE_TOKENS
            values = {
                "architectures": ["Eagle3DraftModel"],
                **speculators_values("eagle3", config, target, drafts, layer),
                **{name: getattr(config, name) for name in SPECULATORS_FLAGS},
                content.NUMBERED: list(config.after_blocks),
                "target_hidden_size": width,
                "embed_requires_grad": False,
            }
            return values, content.renamed(tensors, FROM_MIDLAYER), notes
        values["draft_vocab_size"] = config.draft_vocab_size
        values |= (
            {} if width is None else {"target_hidden_size": width}
        )  # null would be read as a width
        values |= {
            "bias": False,
            "after_blocks": list(config.after_blocks),
            "tap_convention": TAP_CONVENTION,
        }
        if not is_safeailab:
            flags = {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
            for name in (name for name, is_on in flags.items() if is_on):
                notes.append(
                    f"{name} (EAGLE-3.1) needs SGLang 0.5.12; earlier ones drop it in silence"
                )
            numbers, versions = sglang_numbers(
                config.after_blocks, target.default_taps, target.architectures
            )
            values |= {
                **flags,
                "norm_before_residual": False,
                "aerie": {SERVER: f"SGLang {versions}"},
            }
            counted = "its default, so that config.json names none"
            if numbers is not None:
                counted = f"written as {numbers}; for vLLM export with --to speculators"
                values["eagle_config"] = {"use_aux_hidden_state": True, content.NUMBERED: numbers}
            notes.append(
                f"made for SGLang {versions}: the taps {list(config.after_blocks)} are {counted}"
            )
    elif is_safeailab:
        values |= {"bias": config.bias, "qkv_bias": config.qkv_bias}
        if config.bias:
            notes.append("vLLM stops at fc.bias; SafeAILab's code and SGLang read it")
    else:
        values["bias"] = False
        if not config.bias:
            tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
            values["aerie"] = {ZERO_BIAS: True}
            notes.append("fc.bias of zeros is added: SGLang would have a random one")
    return values, tensors, notes


def refuse_eagle(
    layout: str, config: Eagle1Config | Eagle3Config, target: content.TargetFacts | None
) -> None:
    """UserError for what readers would silently drop or misread; without a target, as far as the head alone tells."""
    lost = [name for name in LOST[layout] if getattr(config, name, False)]
    instead = "serve it with vLLM (--to speculators)"
    if isinstance(config, Eagle1Config):
        instead = "vLLM serves it from --to safeailab"
        lost += ["an EAGLE-1 head"] if layout == "speculators" else []
    elif layout == "speculators":
        lost += (
            ["norm_before_fc and fc_norm together"]
            if config.norm_before_fc and config.fc_norm
            else []
        )
    else:
        lost += [f"{config.num_hidden_layers} layers"] if config.num_hidden_layers > 1 else []
        if layout == "safeailab" and target and config.after_blocks != target.default_taps:
            lost.append(
                f"the taps {list(config.after_blocks)}: SafeAILab's code reads {target.default_taps}"
            )
    if lost:
        raise UserError(f"--to {layout}: cannot carry {', '.join(lost)}; {instead}")
    if layout == "sglang" and isinstance(config, Eagle3Config) and target:
        sglang_numbers(config.after_blocks, target.default_taps, target.architectures)


def speculators_values(
    algorithm: str, config: Any, target: content.TargetFacts, drafts: int, layer: dict[str, Any]
) -> dict[str, Any]:
    """What config.json has for all heads of speculators 0.9; drafts: tokens that servers draft per cycle."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1}
    return {
        TYPE: algorithm,
        "speculators_version": "0.9.0",
        "draft_vocab_size": getattr(config, "draft_vocab_size", config.vocab_size),
        "tie_word_embeddings": False,
        "after_blocks": list(config.after_blocks),
        "tap_convention": TAP_CONVENTION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        LAYER: layer,
    }


def sglang_numbers(
    after_blocks: tuple[int, ...], default: tuple[int, ...] | None, architectures: tuple[str, ...]
) -> tuple[list[int] | None, str]:
    """config.json's numbers for these taps, and the versions of SGLang that read them so.

    Without numbers SGLang reads (2, n // 2, n - 3); the other rules are in sglang.yaml.
    """
    if after_blocks == default:
        return None, CHECKED
    first, less_one = after_blocks[0], [k - 1 for k in after_blocks]
    if first == 2:  # written as 1, which every rule reads as 2
        return less_one, CHECKED
    if any(name in TAP_RULES["by_the_first"].split() for name in architectures):
        if first != 1:
            return list(after_blocks), "0.5.13 to 0.5.23"
        why = "SGLang adds one to a list that begins with 1"
    elif not any(name in TAP_RULES["adds_one"].split() for name in architectures):
        why = f"no rule known for {', '.join(architectures) or 'its target'}"
    elif first:
        return less_one, CHECKED
    else:
        why = "SGLang has no number for the embedding"
    raise UserError(
        f"--to sglang: cannot carry the taps {list(after_blocks)}: {why}; serve it with vLLM"
    )


EAGLE1 = content.Formats(read_eagle1, refuse_eagle, write_eagle)
EAGLE3 = content.Formats(read_eagle3, refuse_eagle, write_eagle)
