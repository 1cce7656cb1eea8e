"""A new head's configuration: the recipe's sizes, and the target's own where the recipe leaves them open."""

from typing import Any

from model.config import HeadConfig
from model.errors import UserError
from model.heads.eagle1 import Eagle1Config
from model.heads.eagle3 import Eagle3Config
from model.heads.hydra import HydraConfig
from model.heads.medusa import MedusaConfig
from model.target import TargetEnds


def eagle1_config(config: HeadConfig, text_config: Any, ends: TargetEnds) -> Eagle1Config:
    """The head's sizes: the target's own where the recipe leaves them open; RoPE and its length always spelt out."""
    return Eagle1Config(**_sizes(config, text_config, ends), bias=config.bias)


def eagle3_config(
    config: HeadConfig, text_config: Any, ends: TargetEnds, after_blocks: tuple[int, ...], draft_vocab_size: int
) -> Eagle3Config:
    """As eagle1_config; qk_norm is the target's where the recipe leaves it open."""
    qk_norm = config.qk_norm
    if qk_norm is None:
        qk_norm = str(getattr(text_config, "model_type", "")).startswith("qwen3")
    return Eagle3Config(
        **_sizes(config, text_config, ends),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=ends.embedding.shape[1],
        after_blocks=after_blocks,
        qk_norm=qk_norm,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )


def medusa_config(config: HeadConfig, text_config: Any, ends: TargetEnds) -> MedusaConfig:
    """The recipe's heads and the target's own sizes and final transform."""
    return MedusaConfig(**_multi_token(config, text_config, ends), lm_head_bias=ends.bias is not None)


def hydra_config(config: HeadConfig, text_config: Any, ends: TargetEnds) -> HydraConfig:
    """As medusa_config; with a prefix layer its sizes too, the target's own where the recipe leaves them open."""
    heads = _multi_token(config, text_config, ends)
    if not config.prefix_layer:
        return HydraConfig(**heads)
    layer = _sizes(config, text_config, ends)
    del layer["num_hidden_layers"]
    return HydraConfig(**{**heads, **layer}, prefix_layer=True)


def _multi_token(config: HeadConfig, text_config: Any, ends: TargetEnds) -> dict[str, Any]:
    vocab_size, hidden_size = ends.embedding.shape
    return {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings or int(text_config.max_position_embeddings),
        "lm_head": config.lm_head,
        "logit_scale": ends.scale,
        "final_logit_softcap": ends.softcap,
    }


def _sizes(config: HeadConfig, text_config: Any, ends: TargetEnds) -> dict[str, Any]:
    vocab_size, hidden_size = ends.embedding.shape
    hidden_size = config.hidden_size or hidden_size
    heads = config.num_attention_heads or int(text_config.num_attention_heads)
    own_heads = config.num_attention_heads is None
    kv_heads = config.num_key_value_heads or (
        int(getattr(text_config, "num_key_value_heads", None) or heads) if own_heads else heads
    )
    own_dim = getattr(text_config, "head_dim", None) if own_heads else None
    head_dim = config.head_dim or int(own_dim or hidden_size // heads)
    if heads % kv_heads:
        raise UserError(f"head: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    theta, scaling = rope_of(text_config)
    if config.rope_theta is not None:
        theta, scaling = config.rope_theta, None
    return {
        "hidden_size": hidden_size,
        "intermediate_size": config.intermediate_size or int(text_config.intermediate_size),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": vocab_size,
        "rms_norm_eps": float(getattr(text_config, "rms_norm_eps", 1e-6)),
        "max_position_embeddings": config.max_position_embeddings or int(text_config.max_position_embeddings),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def position_warnings(config: Any, text_config: Any, place: str) -> list[str]:
    """A sentence for each way in which a head's positions are not its target's; what is as it should be yields none.

    Base 10,000 and 2,048 positions, the defaults of a configuration that leaves them out, have ruined published heads.
    """
    found: list[str] = []
    if getattr(config, "rope_theta", None) is None:  # a head without attention
        return found
    own, target = (config.rope_theta, getattr(config, "rope_scaling", None)), rope_of(text_config)
    if own != target:
        found.append(
            f"{place}: the head's RoPE has {_spelt(*own)}, its target's {_spelt(*target)}; right only if the head was "
            f"trained so: a new one follows its target where head.rope_theta is left out"
        )
    context = getattr(text_config, "max_position_embeddings", None)
    if context is not None and config.max_position_embeddings < context:
        found.append(
            f"{place}: max_position_embeddings is {config.max_position_embeddings:,}, its target's {context:,}: prompt "
            f"and answer together stop there; train with head.max_position_embeddings {context} for all of it"
        )
    return found


def rope_of(text_config: Any) -> tuple[float, dict[str, Any] | None]:
    """The target's RoPE base and scaling (None for plain RoPE), whichever generation of configuration holds them."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "full_attention" in parameters:  # one RoPE per kind of layer (Gemma-3): the head attends fully
        parameters = parameters["full_attention"]
    theta = parameters.get("rope_theta", getattr(text_config, "rope_theta", None)) or 10000.0
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta" and v is not None}
    return float(theta), None if scaling.get("rope_type", "default") == "default" else scaling


def _spelt(theta: float, scaling: dict[str, Any] | None) -> str:
    kind = "no scaling" if scaling is None else f"{scaling.get('rope_type')} scaling"
    factor = None if scaling is None else scaling.get("factor")
    return f"base {theta:,.0f} and {kind}{'' if factor is None else f' by {factor:g}'}"
