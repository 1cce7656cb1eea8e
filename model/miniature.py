"""A target of a given kind with small sizes and random weights, to try what its code does."""

from contextlib import suppress
from inspect import getattr_static
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from aerie.configs.schema.heads import TargetConfig
from aerie.model.target import Target, context_of

PARAMETERS = 8_000_000  # at most
SHORT = 16  # tokens of a prompt
SPEED = {"cpu": 2e10, "cuda": 1e15}  # operations in the second that a check beside a limit may take
SIZES = {
    97: "vocab_size n_vocab vocab_size_per_layer_input",
    32: "hidden_size n_embd d_model embedding_size word_embed_proj_dim",
    48: "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_ff intermediate_size_mlp "
    "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
    "num_decoder_layers num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts qk_rope_head_dim rotary_dim",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k linear_num_key_heads mamba_n_groups "
    "linear_num_value_heads n_groups",
    256: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx",
    1: "n_group topk_group n_shared_experts bos_token_id eos_token_id",
    8: "head_dim v_head_dim qk_nope_head_dim index_head_dim mamba_d_state ssm_state_size state_size mamba_d_head "
    "mamba_head_dim linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_num_heads "
    "hidden_size_per_layer_input",
    16: "kv_lora_rank q_lora_rank sliding_window window_size attention_window_size sliding_window_size "
    "keep_window_size attention_chunk_size local_attention",
    0: "pad_token_id num_kv_shared_layers",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
OWN: dict[str, dict[str, Any]] = {  # of kinds whose sizes depend on each other
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "gemma3": {"vision_config": {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 1}},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
}
BY_LAYER = ("layer_types", "activation_sparsity_pattern", "mlp_layer_types")
PARTS = ("text_config", "decoder")


def miniature(config: Any, recipe: TargetConfig) -> Target | None:
    """null: the kind cannot be made so small; UserError where it is no target at any size."""
    try:
        model = small_model(config)
    except Exception:  # its sizes depend on each other in a way of their own
        return None
    return Target(model, recipe)


def small_model(config: Any, **changes: Any) -> Any:
    """Whatever transformers raises where the sizes do not fit each other."""
    usual = type(config)().to_dict()
    given = {name: value for name, value in config.to_dict().items() if usual.get(name) != value}
    small = type(config)(**(given | _sizes(config) | OWN.get(config.model_type, {}) | changes))
    small.is_decoder = True
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(small).num_parameters()
    if size > PARAMETERS:
        raise ValueError(f"{size / 1e6:,.0f} million parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


def _sizes(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"initializer_range": 0.2}
    values |= {name: size for name, size in SMALL.items() if _given(config, name) is not None}
    if hasattr(config, "kv_lora_rank"):  # MLA
        values |= {"num_key_value_heads": 4, "head_dim": 4}
    rope = _given(config, "rope_parameters") or {}
    if "long_factor" in rope:  # LongRoPE: a factor for each pair of the entries that turn, and a length in reach
        pairs = int((4 if hasattr(config, "kv_lora_rank") else 8) * rope.get("partial_rotary_factor", 1.0)) // 2
        factors = {name: rope[name][:pairs] for name in ("short_factor", "long_factor")}
        values |= {"rope_parameters": rope | factors | {"original_max_position_embeddings": 28}}
        values["original_max_position_embeddings"] = 28
    for name in BY_LAYER:
        if isinstance(kinds := _given(config, name), list) and len(kinds) >= 4:
            values[name] = [*kinds[:3], kinds[-1]]
    for name in PARTS:
        if hasattr(part := _given(config, name), "to_dict"):
            values[name] = part.to_dict() | _sizes(part)
    return values


def _given(config: Any, name: str) -> Any:
    """null for what follows from other values."""
    way = getattr_static(config, getattr(config, "attribute_map", {}).get(name, name), None)
    with suppress(Exception):  # values by layer are no attributes
        return None if isinstance(way, property) and way.fset is None else getattr(config, name, None)


def lengths_to_check(target: Target) -> dict[int, float]:
    """Of texts on both sides of what the configuration names a limit, and about how many seconds a check takes."""
    room, cost = (context_of(target.config) or 2**31) - 8, 10 * target.model.num_parameters()  # operations a token
    beside = {limit - 2 for limit in _windows(target.config.to_dict())} | {(target.rope_switch or 2**31) + 8}
    lengths = sorted(length for length in {min(SHORT, room), *beside} if 0 < length <= room)
    return {length: cost * length / SPEED.get(target.device.type, 1e15) for length in lengths}


def _windows(values: dict[str, object]) -> set[int]:
    """The lengths that a configuration gives windows and chunks."""
    found = set[int]()
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _windows(value)
        elif isinstance(value, int) and value > 8 and ("window" in key or "chunk" in key):
            found.add(value)
    return found
