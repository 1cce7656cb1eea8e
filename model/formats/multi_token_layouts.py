"""Medusa and Hydra heads in their published layouts, and Medusa heads in vLLM's own."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.formats import content
from aerie.model.formats.eagle_layouts import SERVER
from aerie.model.heads import HEADS
from aerie.model.heads.multi_token import MedusaConfig

NO_LIMIT = 2**20  # positions of a head without attention, which needs no limit
HEAD_DIM = 128  # the width of Vicuna's attention heads
# FasterDecoding/Medusa, zankner/Hydra
FROM_PUBLISHED: dict[str, tuple[content.RenameRule, ...]] = {
    "medusa": (  # {future token}.{block}.linear and {future token}.{number of blocks}.weight
        (r"^(\d+)\.(\d+)\.linear\.", r"branches.\1.blocks.\2.linear."),
        (r"^(\d+)\.(\d+)\.weight$", r"laws.lm_heads.\1.weight"),
    ),
    "hydra": (  # every second module is a dropout; "embeding" is Hydra's spelling
        (r"^prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq)$", ""),
        (r"^prefix_embeding_layer\.(layers\.0\.)?", "prefix_layer."),
        (
            r"^hydra_mlp\.(\d+)\.(\d+)\.",
            lambda match: f"branches.{match[1]}.blocks.{int(match[2]) // 2}.",
        ),
        (r"\.res_connection\.", ".projection."),
        (r"^hydra_lm_head\.(\d+)\.1\.", r"laws.lm_heads.\1."),
    ),
}
FROM_VLLM: tuple[content.RenameRule, ...] = (
    (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"branches.\1.blocks.\2.linear."),
    (r"^lm_heads\.", "laws.lm_heads."),
)
TO_VLLM: tuple[content.RenameRule, ...] = (
    (r"^branches\.(\d+)\.blocks\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
    (r"^laws\.lm_heads\.", "lm_heads."),
)
# keys that vLLM's config.json shares with ours
VLLM_KEYS = (
    "hidden_size vocab_size num_heads max_position_embeddings logit_scale final_logit_softcap"
).split()


def read_multi_token(files: content.HeadFiles, layout: str) -> content.HeadContent:
    """A Medusa or Hydra head.

    Sizes come from the weights, because published config.json files often have older ones.
    """
    values, path = files.values, files.config_path
    if values.get("grounded_heads") is False or values.get("hidden_state_offset"):
        raise UserError(
            f"{path}: heads with grounded_heads false or a hidden_state_offset are not supported"
        )
    is_vllm = layout == "vllm"
    kind = "medusa" if is_vllm else layout
    names = FROM_VLLM if is_vllm else FROM_PUBLISHED[kind]
    tensors = content.renamed(files.tensors, names)
    if "laws.lm_heads.0.weight" not in tensors:
        raise UserError(
            f"{files.weights_path}: has no LM head of the first future token ('0.L.weight'); "
            "fetch the file again"
        )
    vocab_size, width = tensors["laws.lm_heads.0.weight"].shape
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": vocab_size,
        "max_position_embeddings": NO_LIMIT,
    }
    if is_vllm:
        sizes |= {name: values[name] for name in VLLM_KEYS if values.get(name) is not None}
    guesses: list[str] = []
    for name, pattern in (
        ("heads", r"laws\.lm_heads\.(\d+)\.weight"),
        ("layers", r"branches\.0\.blocks\.(\d+)\..*"),
    ):
        matches = [re.fullmatch(pattern, key) for key in tensors]
        count = 1 + max((int(match[1]) for match in matches if match), default=-1)
        sizes[f"num_{name}"] = count
        recorded = values.get(f"{kind}_num_{name}")
        if recorded not in (None, count):
            guesses.append(
                f"{kind}_num_{name} is {recorded}, but the weights have {count}; aerie takes all"
            )
    if kind == "hydra":
        sizes["lm_head_bias"] = "laws.lm_heads.0.bias" in tensors
    if "prefix_layer.mlp.up_proj.weight" in tensors:  # Hydra++
        prefix_sizes, prefix_guesses = _prefix_sizes(values, tensors, width, path)
        sizes |= prefix_sizes
        guesses += prefix_guesses
    config = content.configured(HEADS[kind].config, sizes, path)
    return content.HeadContent(config, tensors, tuple(guesses))


def _prefix_sizes(
    values: dict[str, Any], tensors: dict[str, Tensor], width: int, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """The sizes of Hydra++'s prefix layer, and what was guessed."""
    guesses = []
    heads = values.get("num_attention_heads")
    if heads is None:
        if width % HEAD_DIM:
            raise UserError(f'{path}: add "num_attention_heads" of the target')
        heads = width // HEAD_DIM
        guesses.append(
            f"num_attention_heads is missing; aerie takes {heads} attention heads of {HEAD_DIM}, "
            "as Vicuna has"
        )
    head_dim = width // heads
    theta, scaling = content.read_rope(values, path)
    return {
        "prefix_layer": True,
        "intermediate_size": tensors["prefix_layer.mlp.up_proj.weight"].shape[0],
        "num_attention_heads": heads,
        "num_key_value_heads": tensors["prefix_layer.self_attn.k_proj.weight"].shape[0] // head_dim,
        "head_dim": head_dim,
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": values.get("max_position_embeddings", 2048),
    }, guesses


def refuse_multi_token(layout: str, config: Any, target: content.TargetFacts | None = None) -> None:
    """Refuses as `refuse_eagle` does; `vllm` takes Medusa heads with own LM heads, no biases."""
    is_medusa = type(config) is MedusaConfig
    if not is_medusa:
        raise UserError(f"--to {layout}: cannot carry a Hydra head; decode it with aerie")
    if layout != "vllm":
        raise UserError(
            f"--to {layout}: cannot carry a Medusa head; serve it with vLLM (--to vllm)"
        )
    lost = {"lm_head: target": config.lm_head == "target", "lm_head_bias": config.lm_head_bias}
    refused = [name for name, applies in lost.items() if applies]
    if refused:
        raise UserError(f"--to vllm: cannot carry {', '.join(refused)}; decode it with aerie")


def write_multi_token(
    layout: str, head: content.HeadContent, target: content.TargetFacts
) -> content.Export:
    """Like `write_eagle1`, for a Medusa head."""
    config: Any = head.config
    refuse_multi_token(layout, config)
    values = {
        "architectures": [HEADS["medusa"].architecture],
        "model_type": "medusa",
        **{name: getattr(config, name) for name in VLLM_KEYS},
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "aerie": {SERVER: "vLLM"},
    }
    return values, content.renamed(head.tensors, TO_VLLM), []


MULTI_TOKEN_FORMATS = content.Formats(read_multi_token, refuse_multi_token, write_multi_token)
