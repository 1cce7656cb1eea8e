"""The Llama-shaped keys of config.json that all layouts share: sizes and RoPE, read with every default spelt out."""

from pathlib import Path
from typing import Any

from model.errors import UserError
from model.formats.content import Destination, EagleConfig

ROPE_THETA = 10000.0  # the training code ignores the target's base, so a head without the key was trained with this
MAX_POSITIONS = 2048
ANY_LENGTH = (None, "linear", "llama3")  # kinds of RoPE whose frequencies do not depend on max_position_embeddings


def read_sizes(values: dict[str, Any], place: Path) -> dict[str, Any]:
    """The fields that Eagle1Config and Eagle3Config have in common.

    Defaults: as many key heads as heads, hidden_size / heads, 1e-6, 2,048 positions, a plain RoPE of base 10,000.
    Source: SafeAILab's EConfig. UserError for what is missing or no number.
    """
    if values.get("hidden_act", "silu") != "silu":
        raise UserError(f"{place}: hidden_act is {values['hidden_act']!r}; heads have 'silu'")
    if values.get("mlp_bias"):
        raise UserError(f"{place}: mlp_bias is true; heads have no biases in their MLP")
    heads, width = _count(values, "num_attention_heads", place), _count(values, "hidden_size", place)
    positions = values.get("max_position_embeddings") or values.get("max_sequence_length")
    theta, scaling = read_rope(values, place)
    return {
        "hidden_size": width,
        "intermediate_size": _count(values, "intermediate_size", place),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(values, "num_key_value_heads", place, heads),
        "head_dim": _count(values, "head_dim", place, width // heads),
        "num_hidden_layers": _count(values, "num_hidden_layers", place, 1),
        "vocab_size": _count(values, "vocab_size", place),
        "rms_norm_eps": float(values.get("rms_norm_eps") or 1e-6),
        "max_position_embeddings": int(positions or MAX_POSITIONS),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def read_rope(values: dict[str, Any], place: Path) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from the keys of transformers 4 (rope_scaling, "type") and 5 (rope_parameters)."""
    both = (values.get("rope_parameters"), values.get("rope_scaling"))
    if not all(entry is None or isinstance(entry, dict) for entry in both):
        raise UserError(f"{place}: rope_scaling and rope_parameters must be tables or null")
    parameters, scaling = (dict(entry or {}) for entry in both)
    theta = values.get("rope_theta") or parameters.get("rope_theta") or scaling.get("rope_theta") or ROPE_THETA
    scaling = {k: v for k, v in (scaling or parameters).items() if k != "rope_theta"}
    kind = scaling.pop("type", None)
    scaling = {"rope_type": kind, **scaling} if kind else scaling
    return float(theta), None if scaling.get("rope_type", "default") == "default" else scaling


def write_sizes(config: EagleConfig, destination: Destination) -> tuple[dict[str, Any], list[str]]:
    """The keys of config.json for every reader (RoPE in both spellings), and notes.

    max_position_embeddings is the longer of the head's and the target's: servers draft nothing, or noise, beyond it.
    """
    notes, positions = [], config.max_position_embeddings
    kind = (config.rope_scaling or {}).get("rope_type")
    if destination.max_position_embeddings > positions and kind in ANY_LENGTH:
        notes.append(
            f"max_position_embeddings {positions:,} is written as {destination.max_position_embeddings:,}, the "
            f"target's: servers cannot draft beyond it (the head was not trained there)"
        )
        positions = destination.max_position_embeddings
    scaling = config.rope_scaling
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else dict(scaling),
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
    }, notes


def _count(values: dict[str, Any], name: str, place: Path, default: int | None = None) -> int:
    value = values.get(name)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"{place}: lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{place}: {name} is {value!r}; it must be a positive whole number")
    return value
