"""Hydra's published heads: hydra_lm_head.pt, the state dict of its module.

`hydra_mlp.i.(1 + 2 j)` is block j of future token i (dropout stands between), `hydra_lm_head.i.1` its LM head;
`prefix_embeding_layer` is Hydra++'s decoder layer as a Llama with an embedding that nothing reads. The sizes of that
layer's attention are the target's and in no file: 128 a head, as every Vicuna has. Source: zankner/Hydra.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from model.errors import UserError
from model.formats.content import HeadContent, HeadFiles
from model.formats.llama_keys import MAX_POSITIONS, read_rope
from model.formats.medusa import NO_LIMIT, count, disagreements
from model.formats.renaming import renamed
from model.formats.values import flag, number, whole
from model.heads.hydra import HydraConfig

PREFIX = "prefix_embeding_layer."  # spelt so
UNREAD = re.compile(rf"{re.escape(PREFIX)}(embed_tokens\.weight|.*rotary_emb\.inv_freq)")
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d*[13579])\.(linear|res_connection)\.(weight|bias)")
LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.1\.(weight|bias)")
HEAD_DIM = 128


def kind_of(values: dict[str, Any], names: set[str]) -> str | None:
    """'hydra' or None, by config.json's counts or by the names."""
    known = values.get("hydra_num_heads") is not None or any(name.startswith("hydra_mlp.") for name in names)
    return "hydra" if known else None


def read(files: HeadFiles) -> HeadContent:
    """The head; UserError for heads that do not read the drafted tokens, which are another method."""
    values, place = files.values, files.config_place
    if not flag(values, "grounded_heads", place, default=True) or values.get("hidden_state_offset"):
        raise UserError(f"{place}: grounded_heads false or a hidden_state_offset: such heads are not supported")
    read_ones = {name: value for name, value in files.tensors.items() if not UNREAD.fullmatch(name)}
    tensors = renamed(read_ones, _renamed, files.weights_place)
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


def _renamed(name: str) -> str:
    if found := BLOCK.fullmatch(name):
        part = "projection" if found[3] == "res_connection" else "linear"
        return f"branches.{found[1]}.blocks.{int(found[2]) // 2}.{part}.{found[4]}"
    if found := LM_HEAD.fullmatch(name):
        return f"laws.lm_heads.{found[1]}.{found[2]}"
    if name.startswith(f"{PREFIX}layers.0."):
        return f"prefix_layer.{name.removeprefix(f'{PREFIX}layers.0.')}"
    return f"prefix_layer.{name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else name
