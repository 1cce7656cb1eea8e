"""Medusa's and Hydra's published heads: the state dict of a module in {medusa,hydra}_lm_head.pt. They are only read.

Medusa: `i.j.linear` is block j of future token i, `i.L.weight` its LM head. config.json names the target and counts,
and has often been left at another count: the weights are believed. Source: FasterDecoding/Medusa, zankner/Hydra.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.formats.content import MAX_POSITIONS, HeadContent, HeadFiles, read_rope, renamed, take
from aerie.model.heads.multi_token import HydraConfig, MedusaConfig

NO_LIMIT = 2**20  # positions: a head without attention is limited by its target's context alone
BLOCK, LM_HEAD = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), re.compile(r"(\d+)\.(\d+)\.weight")
HYDRA_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d*[13579])\.(linear|res_connection)\.(weight|bias)")
HYDRA_LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.1\.(weight|bias)")
PREFIX = "prefix_embeding_layer."  # spelt so
UNREAD = re.compile(rf"{re.escape(PREFIX)}(embed_tokens\.weight|.*rotary_emb\.inv_freq)")
HEAD_DIM = 128  # of Vicuna, where config.json does not say


def kind_of(values: dict[str, Any], names: set[str]) -> str | None:
    """'medusa' or None, by config.json's counts or by the names."""
    return "medusa" if values.get("medusa_num_heads") is not None or "0.0.linear.weight" in names else None


def kind_of_hydra(values: dict[str, Any], names: set[str]) -> str | None:
    """'hydra' or None, by config.json's counts or by the names."""
    known = values.get("hydra_num_heads") is not None or any(name.startswith("hydra_mlp.") for name in names)
    return "hydra" if known else None


def read(files: HeadFiles) -> HeadContent:
    """A Medusa head; heads and layers are counted in the weights."""
    tensors = renamed(files.tensors, _medusa_name, files.weights_place)
    sizes, guesses = _counted(files, tensors, "medusa")
    return HeadContent(MedusaConfig(**sizes, max_position_embeddings=NO_LIMIT), tensors, guesses)


def read_hydra(files: HeadFiles) -> HeadContent:
    """A Hydra head; UserError for heads that do not read the drafted tokens, which are another method."""
    values, place = files.values, files.config_place
    if not take(values, "grounded_heads", bool, place, True) or values.get("hidden_state_offset"):
        raise UserError(f"{place}: grounded_heads false or a hidden_state_offset: such heads are not supported")
    kept = {name: value for name, value in files.tensors.items() if not UNREAD.fullmatch(name)}
    tensors = renamed(kept, _hydra_name, files.weights_place)
    sizes, guesses = _counted(files, tensors, "hydra")
    layer, guess = _prefix_sizes(values, tensors, sizes["hidden_size"], place)
    config = HydraConfig(**sizes, lm_head_bias="laws.lm_heads.0.bias" in tensors, **layer)
    return HeadContent(config, tensors, (*guesses, *guess))


def _counted(files: HeadFiles, tensors: dict[str, Tensor], kind: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The sizes that the weights have, and a sentence for each count that config.json gives otherwise."""
    first = tensors.get("laws.lm_heads.0.weight")
    if first is None or first.ndim != 2:
        raise UserError(f"{files.weights_place}: no tensor is the LM head of the first future token ('0.L.weight')")
    counts = {}
    for name, pattern in (("heads", r"laws\.lm_heads\.(\d+)\.weight"), ("layers", r"branches\.0\.blocks\.(\d+)\..*")):
        numbers = [int(match[1]) for key in tensors if (match := re.fullmatch(pattern, key))]
        counts[f"num_{name}"] = max(numbers, default=-1) + 1
    guesses = tuple(
        f"{kind}_{name} is {files.values[f'{kind}_{name}']}, the weights have {number}, which are all taken"
        for name, number in counts.items()
        if files.values.get(f"{kind}_{name}") not in (None, number)
    )
    return {"hidden_size": first.shape[1], "vocab_size": first.shape[0], **counts}, guesses


def _prefix_sizes(
    values: dict[str, Any], tensors: dict[str, Tensor], width: int, place: Path
) -> tuple[dict[str, Any], list[str]]:
    """The sizes of Hydra++'s layer and what had to be guessed of them."""
    up, keys = tensors.get("prefix_layer.mlp.up_proj.weight"), tensors.get("prefix_layer.self_attn.k_proj.weight")
    if up is None or keys is None or up.ndim != 2 or keys.ndim != 2:
        return {"max_position_embeddings": NO_LIMIT}, []
    guesses = []
    if values.get("num_attention_heads") is None:
        if width % HEAD_DIM:
            raise UserError(f'{place}: add "num_attention_heads" of the target: the prefix layer has as many')
        guesses = [
            f"the prefix layer's attention is taken to have {width // HEAD_DIM} heads of {HEAD_DIM}, as Vicuna's"
        ]
    heads = take(values, "num_attention_heads", int, place, width // HEAD_DIM)
    dim = width // heads
    if dim < 2 or keys.shape[0] < dim:
        raise UserError(f"{place}: num_attention_heads is {heads}, which does not fit the width {width:,}")
    theta, scaling = read_rope(values, place)
    return {
        "prefix_layer": True,
        "intermediate_size": up.shape[0],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.shape[0] // dim,
        "head_dim": dim,
        "rms_norm_eps": take(values, "rms_norm_eps", float, place, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": take(values, "max_position_embeddings", int, place, MAX_POSITIONS),
    }, guesses


def _medusa_name(name: str) -> str:
    if match := BLOCK.fullmatch(name):
        return f"branches.{match[1]}.blocks.{match[2]}.linear.{match[3]}"
    match = LM_HEAD.fullmatch(name)
    return name if match is None else f"laws.lm_heads.{match[1]}.weight"


def _hydra_name(name: str) -> str:
    if match := HYDRA_BLOCK.fullmatch(name):
        part = "projection" if match[3] == "res_connection" else "linear"
        return f"branches.{match[1]}.blocks.{int(match[2]) // 2}.{part}.{match[4]}"
    if match := HYDRA_LM_HEAD.fullmatch(name):
        return f"laws.lm_heads.{match[1]}.{match[2]}"
    if name.startswith(PREFIX):
        return f"prefix_layer.{name.removeprefix(PREFIX).removeprefix('layers.0.')}"
    return name
