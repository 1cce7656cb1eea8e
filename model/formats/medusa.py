"""Medusa's published heads: medusa_lm_head.pt, the state dict of a list of residual blocks and an LM head each.

`i.j.linear` is block j of future token i, `i.L.weight` its LM head. config.json names the target and counts; the
weights are believed over it, as it has often been left at another count. Source: FasterDecoding/Medusa.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.formats.common import MAX_POSITIONS, HeadContent, HeadFiles, flag, number, read_rope, renamed, whole
from aerie.model.heads.multi_token import HydraConfig, MedusaConfig

NO_LIMIT = 2**20  # positions: a Medusa head has no attention, so only its target's context limits it
BLOCK, LM_HEAD = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), re.compile(r"(\d+)\.(\d+)\.weight")


def kind_of(values: dict[str, Any], names: set[str]) -> str | None:
    """'medusa' or None, by config.json's counts or by the names."""
    return "medusa" if values.get("medusa_num_heads") is not None or "0.0.linear.weight" in names else None


def read(files: HeadFiles) -> HeadContent:
    """The head; heads and layers are counted in the weights."""
    tensors = renamed(files.tensors, _renamed, files.weights_place)
    first = tensors.get("laws.lm_heads.0.weight")
    if first is None or first.ndim != 2:
        raise UserError(f"{files.weights_place}: no tensor is the LM head of the first future token ('0.L.weight')")
    heads = count(tensors, r"laws\.lm_heads\.(\d+)\.weight")
    layers = count(tensors, r"branches\.0\.blocks\.(\d+)\.linear\.weight")
    config = MedusaConfig(
        hidden_size=first.shape[1],
        vocab_size=first.shape[0],
        num_heads=heads,
        num_layers=layers,
        max_position_embeddings=NO_LIMIT,
    )
    said = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    return HeadContent(config, tensors, disagreements(files.values, said))


def count(tensors: dict[str, Tensor], pattern: str) -> int:
    """How many numbers the pattern's group takes among the names, counted to the highest."""
    found = [int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))]
    return max(found, default=-1) + 1


def disagreements(values: dict[str, Any], counted: dict[str, int]) -> tuple[str, ...]:
    """A sentence for each count that config.json gives otherwise than the weights."""
    return tuple(
        f"{name} is {values[name]}, the weights have {number}, which are all taken"
        for name, number in counted.items()
        if values.get(name) not in (None, number)
    )


def _renamed(name: str) -> str:
    if found := BLOCK.fullmatch(name):
        return f"branches.{found[1]}.blocks.{found[2]}.linear.{found[3]}"
    if found := LM_HEAD.fullmatch(name):
        return f"laws.lm_heads.{found[1]}.weight"
    return name


PREFIX = "prefix_embeding_layer."  # spelt so
UNREAD = re.compile(rf"{re.escape(PREFIX)}(embed_tokens\.weight|.*rotary_emb\.inv_freq)")
BLOCK_hydra = re.compile(r"hydra_mlp\.(\d+)\.(\d*[13579])\.(linear|res_connection)\.(weight|bias)")
LM_HEAD_hydra = re.compile(r"hydra_lm_head\.(\d+)\.1\.(weight|bias)")
HEAD_DIM = 128


def kind_of_hydra(values: dict[str, Any], names: set[str]) -> str | None:
    """'hydra' or None, by config.json's counts or by the names."""
    known = values.get("hydra_num_heads") is not None or any(name.startswith("hydra_mlp.") for name in names)
    return "hydra" if known else None


def read_hydra(files: HeadFiles) -> HeadContent:
    """The head; UserError for heads that do not read_hydra the drafted tokens, which are another method."""
    values, place = files.values, files.config_place
    if not flag(values, "grounded_heads", place, default=True) or values.get("hidden_state_offset"):
        raise UserError(f"{place}: grounded_heads false or a hidden_state_offset: such heads are not supported")
    read_ones = {name: value for name, value in files.tensors.items() if not UNREAD.fullmatch(name)}
    tensors = renamed(read_ones, _renamed_hydra, files.weights_place)
    first = tensors.get("laws.lm_heads.0.weight")
    if first is None or first.ndim != 2:
        raise UserError(f"{files.weights_place}: no tensor is the LM head of the first future token")
    heads = count(tensors, r"laws\.lm_heads\.(\d+)\.weight")
    layers = count(tensors, r"branches\.0\.blocks\.(\d+)\.linear\.weight")
    said = {"hydra_num_heads": heads, "hydra_num_layers": layers}
    layer, guesses = _prefix_sizes(values, tensors, first.shape[1], place)
    config = HydraConfig(
        hidden_size=first.shape[1],
        vocab_size=first.shape[0],
        num_heads=heads,
        num_layers=layers,
        lm_head_bias="laws.lm_heads.0.bias" in tensors,
        **layer,
    )
    return HeadContent(config, tensors, (*disagreements(values, said), *guesses))


def _prefix_sizes(
    values: dict[str, Any], tensors: dict[str, Tensor], width: int, place: Path
) -> tuple[dict[str, Any], list[str]]:
    """The sizes of Hydra++'s layer and what had to be guessed of them."""
    up, keys = tensors.get("prefix_layer.mlp.up_proj.weight"), tensors.get("prefix_layer.self_attn.k_proj.weight")
    if up is None or keys is None or up.ndim != 2 or keys.ndim != 2:
        return {"max_position_embeddings": NO_LIMIT}, []
    guesses = []
    if values.get("num_attention_heads") is not None:
        heads = whole(values, "num_attention_heads", place)
    else:
        if width % HEAD_DIM:
            raise UserError(f'{place}: add "num_attention_heads" of the target: the prefix layer has as many')
        heads = width // HEAD_DIM
        guesses.append(f"the prefix layer's attention is taken to have {heads} heads of {HEAD_DIM}, as Vicuna's")
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
        "rms_norm_eps": number(values, "rms_norm_eps", place, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": whole(values, "max_position_embeddings", place, MAX_POSITIONS),
    }, guesses


def _renamed_hydra(name: str) -> str:
    if found := BLOCK_hydra.fullmatch(name):
        part = "projection" if found[3] == "res_connection" else "linear"
        return f"branches.{found[1]}.blocks.{int(found[2]) // 2}.{part}.{found[4]}"
    if found := LM_HEAD_hydra.fullmatch(name):
        return f"laws.lm_heads.{found[1]}.{found[2]}"
    if name.startswith(f"{PREFIX}layers.0."):
        return f"prefix_layer.{name.removeprefix(f'{PREFIX}layers.0.')}"
    return f"prefix_layer.{name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else name
