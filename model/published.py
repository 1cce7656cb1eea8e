"""Published EAGLE-3 heads: what their config.json leaves unsaid, spelt out.

Source: the config.json and weight files of SafeAILab's heads, and the defaults of the code that trained them.
"""

from typing import Any

from torch import Tensor

from model.errors import UserError

ROPE_THETA = 10000.0  # the training code ignores the target's base, so a head without the key was trained with this
NUMBERED = "eagle_aux_hidden_state_layer_ids"  # vLLM counts it as hidden_states, SGLang as layer outputs: one less


def is_published(values: dict[str, Any]) -> bool:
    """Whether this config.json is of an EAGLE-3 head that another project wrote."""
    return "aerie_kind" not in values and "draft_vocab_size" in values


def spelt_out(
    values: dict[str, Any], state: dict[str, Tensor], after_blocks: tuple[int, ...] | None, place: str
) -> dict[str, Any]:
    """The keys of Eagle3Config for a published config.json; after_blocks are the taps to take where it names none.

    UserError for what cannot be told from the files: unknown taps, another residual.
    """
    extra = values.get("eagle_config") or {}
    if values.get("norm_before_residual"):
        raise UserError(f"{place}: norm_before_residual is true; heads of this project add the feature before its norm")
    numbered = values.get(NUMBERED, extra.get(NUMBERED))
    agreeing = () if after_blocks is None else (after_blocks, tuple(k - 1 for k in after_blocks))
    if after_blocks is None or (numbered is not None and tuple(numbered) not in agreeing):
        raise UserError(
            f"{place}: which of the target's states this head reads is not certain ({NUMBERED} is {numbered}, counted "
            f"from 0 or from 1): name them in features.after_blocks, or add after_blocks (entries of transformers' "
            f"hidden_states) and tap_convention 'hidden_states' to the file"
        )
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    theta, scaling = _rope(values)
    own = {
        "num_hidden_layers": 1,
        "num_key_value_heads": heads,
        "head_dim": width // heads if width and heads else None,
        "target_hidden_size": width,
        "rms_norm_eps": 1e-6,
        "fc_norm": "fc_norm.0.weight" in state,
        "qk_norm": "midlayer.self_attn.q_norm.weight" in state,
    }
    stated = {name: value for name, value in values.items() if value is not None}
    return {**own, "after_blocks": after_blocks, **stated, "rope_theta": theta, "rope_scaling": scaling}


def _rope(values: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from the keys of transformers 4 (rope_scaling, "type") and 5 (rope_parameters)."""
    parameters = dict(values.get("rope_parameters") or {})
    theta = float(values.get("rope_theta") or parameters.pop("rope_theta", None) or ROPE_THETA)
    parameters.pop("rope_theta", None)
    scaling = dict(values.get("rope_scaling") or parameters)
    kind = scaling.pop("type", None)
    scaling = {"rope_type": kind, **scaling} if kind else scaling
    return theta, None if scaling.get("rope_type", "default") == "default" else scaling
