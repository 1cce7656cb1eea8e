"""Heads as others publish them, scaled down: their files, keys and shapes (D 32, I 64, V 320, Vd 107, 8 blocks)."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from aerie.model.export import TargetFacts
from aerie.model.formats.content import Destination
from aerie.model.heads.eagle import Eagle3Head
from tests import tiny

WIDTH, MLP, VOCABULARY, DRAFT = 32, 64, 320, 107
TAPS = (2, 4, 5)  # the default ones of 8 blocks
LAYER = {
    "self_attn.q_proj.weight": (WIDTH, 2 * WIDTH),
    "self_attn.k_proj.weight": (WIDTH // 2, 2 * WIDTH),
    "self_attn.v_proj.weight": (WIDTH // 2, 2 * WIDTH),
    "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "mlp.gate_proj.weight": (MLP, WIDTH),
    "mlp.up_proj.weight": (MLP, WIDTH),
    "mlp.down_proj.weight": (WIDTH, MLP),
    "hidden_norm.weight": (WIDTH,),
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
}
EAGLE3 = {  # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: 15 keys
    "d2t": (DRAFT,),
    "t2d": (VOCABULARY,),
    "fc.weight": (WIDTH, 3 * WIDTH),
    **{f"midlayer.{name}": shape for name, shape in LAYER.items()},
    "norm.weight": (WIDTH,),
    "lm_head.weight": (DRAFT, WIDTH),
}
EAGLE3_CONFIG: dict[str, Any] = {  # the published file's keys: neither RoPE nor taps nor head_dim
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": MLP,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFT,
}
EAGLE1 = {  # yuhuili/EAGLE-Vicuna-7B-v1.3: fc.bias and the embedding, as many key heads as heads
    "embed_tokens.weight": (VOCABULARY, WIDTH),
    "fc.weight": (WIDTH, 2 * WIDTH),
    "fc.bias": (WIDTH,),
    **{f"layers.0.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"},
    "layers.0.mlp.gate_proj.weight": (MLP, WIDTH),
    "layers.0.mlp.up_proj.weight": (MLP, WIDTH),
    "layers.0.mlp.down_proj.weight": (WIDTH, MLP),
    "layers.0.post_attention_layernorm.weight": (WIDTH,),
}
EAGLE1_CONFIG: dict[str, Any] = {  # no bias, no rope_theta, no num_key_value_heads
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": MLP,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
SPECFORGE_CONFIG: dict[str, Any] = {  # what SpecForge exports: RoPE in both spellings, no taps for the default ones
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFT,
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
SPECULATORS_CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "draft_vocab_size": DRAFT,
    "norm_before_residual": True,  # as RedHatAI's heads have it
    "norm_before_fc": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "embed_requires_grad": False,
    "tie_word_embeddings": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": None,
    },
}


def tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float16, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors; norms around one, d2t and t2d of every third token."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        scale = 0.3 if len(shape) == 2 else 0.1
        made[name] = (values * scale + (1.0 if "norm" in name else 0.0)).to(dtype)
    if "d2t" in shapes:
        ids = torch.arange(0, VOCABULARY, 3)[:DRAFT]
        made["d2t"] = ids - torch.arange(DRAFT)
        made["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
        made["t2d"][ids] = True
    return made


def write(directory: Path, config: dict[str, Any], state: dict[str, Tensor], pickled: bool = False) -> Path:
    """A head's directory of these files."""
    directory.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(state, directory / "pytorch_model.bin")
    else:
        save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def safeailab_eagle1(directory: Path, changes: dict[str, Any] | None = None, **options: Any) -> Path:
    """SafeAILab's Vicuna-7B EAGLE-1 head; changes update config.json."""
    return write(directory, {**EAGLE1_CONFIG, **(changes or {})}, tensors(EAGLE1), **{"pickled": True, **options})


def safeailab_eagle3(directory: Path, changes: dict[str, Any] | None = None, **options: Any) -> Path:
    """SafeAILab's LLaMA-3.1-8B EAGLE-3 head."""
    return write(directory, {**EAGLE3_CONFIG, **(changes or {})}, tensors(EAGLE3), **{"pickled": True, **options})


def specforge(directory: Path, changes: dict[str, Any] | None = None) -> Path:
    """A SpecForge export for SGLang: safetensors in bf16, no embedding."""
    return write(directory, {**SPECFORGE_CONFIG, **(changes or {})}, tensors(EAGLE3, torch.bfloat16))


def angelslim(directory: Path) -> Path:
    """AngelSlim's: vLLM's architecture, `tie_word_embeddings` true although there is an LM head, a pickle."""
    changes = {"architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True, "rope_theta": 1000000}
    return write(directory, {**SPECFORGE_CONFIG, **changes}, tensors(EAGLE3, torch.bfloat16), pickled=True)


def speculators(directory: Path, changes: dict[str, Any] | None = None) -> Path:
    """An EAGLE-3 head of speculators, with its embedding."""
    state = tensors({**EAGLE3, "embed_tokens.weight": (VOCABULARY, WIDTH)}, torch.bfloat16)
    state = {name.replace("midlayer.", "layers.0."): value for name, value in state.items()}
    return write(directory, {**SPECULATORS_CONFIG, **(changes or {})}, state)


def ends_facts(num_blocks: int = 8, max_positions: int = 256, **changes: Any) -> TargetFacts:
    """A target of random ends and no files, for what needs no more."""
    ends = tiny.ends(**changes)
    text = tiny.llama(num_blocks=1, max_position_embeddings=max_positions).config
    text.num_hidden_layers = num_blocks
    return TargetFacts("tiny", text, ends, Destination("tiny", ("LlamaForCausalLM",), num_blocks, max_positions))


def eagle3(**changes: Any) -> Eagle3Head:
    """A head of this project for `ends_facts`, its norms away from one."""
    made = tiny.eagle3_head(tiny.ends().embedding, **{"after_blocks": TAPS, "scale": 6.0, **changes}).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        if parameter.ndim == 1:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
    return made
