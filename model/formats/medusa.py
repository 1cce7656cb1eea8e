"""Medusa's published heads: medusa_lm_head.pt, the state dict of a list of residual blocks and an LM head each.

`i.j.linear` is block j of future token i, `i.L.weight` its LM head. config.json names the target and counts; the
weights are believed over it, as it has often been left at another count. Source: FasterDecoding/Medusa.
"""

import re
from typing import Any

from torch import Tensor

from model.errors import UserError
from model.formats.content import HeadContent, HeadFiles
from model.formats.renaming import renamed
from model.heads.medusa import MedusaConfig

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
