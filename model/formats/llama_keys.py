"""The Llama-shaped keys of config.json that all layouts share: sizes and RoPE, read with every default spelt out."""

from pathlib import Path
from typing import Any

from model.errors import UserError
from model.formats.content import Destination, EagleConfig
from model.formats.values import flag, number, table, whole

ROPE_THETA = 10000.0  # the training code ignores the target's base, so a head without the key was trained with this
MAX_POSITIONS = 2048
ROPE_WORDS = ("rope_type", "attn_factors", "short_factor", "long_factor", "truncate")  # of its table, no numbers
ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ANY_LENGTH = (None, "linear", "llama3")  # kinds of RoPE whose frequencies do not depend on max_position_embeddings


def read_sizes(values: dict[str, Any], place: Path) -> dict[str, Any]:
    """The fields that Eagle1Config and Eagle3Config have in common.

    Defaults: as many key heads as heads, hidden_size / heads, 1e-6, 2,048 positions, a plain RoPE of base 10,000.
    Source: SafeAILab's EConfig. UserError for what is missing or no number.
    """
    if values.get("hidden_act", "silu") != "silu":
        raise UserError(f"{place}: hidden_act is {values['hidden_act']!r}; heads have 'silu'")
    if flag(values, "mlp_bias", place):
        raise UserError(f"{place}: mlp_bias is true; heads have no biases in their MLP")
    heads, width = whole(values, "num_attention_heads", place), whole(values, "hidden_size", place)
    own = values.get("max_position_embeddings") is not None
    positions = "max_position_embeddings" if own else "max_sequence_length"
    theta, scaling = read_rope(values, place)
    return {
        "hidden_size": width,
        "intermediate_size": whole(values, "intermediate_size", place),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(values, "num_key_value_heads", place, heads),
        "head_dim": whole(values, "head_dim", place, width // heads or None),
        "num_hidden_layers": whole(values, "num_hidden_layers", place, 1),
        "vocab_size": whole(values, "vocab_size", place),
        "rms_norm_eps": number(values, "rms_norm_eps", place, 1e-6),
        "max_position_embeddings": whole(values, positions, place, MAX_POSITIONS),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def read_rope(values: dict[str, Any], place: Path) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from the keys of transformers 4 (rope_scaling, "type") and 5 (rope_parameters)."""
    parameters, scaling = (table(values, name, place) for name in ("rope_parameters", "rope_scaling"))
    tables = {"config.json": values, "rope_parameters": parameters, "rope_scaling": scaling}
    bases = {name: number(found, "rope_theta", place) for name, found in tables.items() if found.get("rope_theta")}
    if len(set(bases.values())) > 1:
        told = ", ".join(f"{base:g} in {name}" for name, base in bases.items())
        raise UserError(f"{place}: rope_theta is {told}; the head was trained with one of them: take out the other")
    theta = next(iter(bases.values()), ROPE_THETA)
    scaling = {k: v for k, v in (scaling or parameters).items() if k != "rope_theta"}
    kind = scaling.pop("type", None)
    scaling = {"rope_type": kind, **scaling} if kind else scaling
    if scaling.get("rope_type", "default") == "default":
        return theta, None
    odd = [name for name, value in scaling.items() if name not in ROPE_WORDS and not _is_number_or_null(value)]
    missing = [name for name in ROPE_NUMBERS.get(str(scaling["rope_type"]), ()) if scaling.get(name) is None]
    if odd or missing:
        what = f"{odd[0]} is {scaling[odd[0]]!r}, no number" if odd else f"lacks {missing[0]}"
        raise UserError(f"{place}: rope_scaling of type {scaling['rope_type']!r}: {what}")
    return theta, scaling


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


def _is_number_or_null(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
