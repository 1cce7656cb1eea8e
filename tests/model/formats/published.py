"""Heads in the layouts of other projects, scaled down (D 32, I 64, V 320, Vd 107, 8 blocks)."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from aerie.model.checkpoint import save_head
from aerie.model.export import export
from aerie.model.formats.content import TargetFacts
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.heads.multi_token import HydraHead, MedusaHead
from tests import tiny

WIDTH, MLP, VOCABULARY, DRAFT = 32, 64, 320, 107
PICKLE = "pytorch_model.bin"
TAPS = (2, 4, 5)  # the default for 8 blocks
PROJECTIONS = {
    "mlp.gate_proj": (MLP, WIDTH),
    "mlp.up_proj": (MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
}
LAYER = {
    **{
        f"self_attn.{name}_proj": (rows, 2 * WIDTH)
        for name, rows in (("q", WIDTH), ("k", 16), ("v", 16))
    },
    **{"self_attn.o_proj": (WIDTH, WIDTH), **PROJECTIONS},
    **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (WIDTH,)),
}
EAGLE3 = {  # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: 15 keys
    **{"d2t": (DRAFT,), "t2d": (VOCABULARY,), "fc.weight": (WIDTH, 3 * WIDTH)},
    **{f"midlayer.{name}.weight": shape for name, shape in LAYER.items()},
    **{"norm.weight": (WIDTH,), "lm_head.weight": (DRAFT, WIDTH)},
}
SIZES: dict[str, Any] = {
    **{
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "vocab_size": VOCABULARY,
    },
    **{"num_attention_heads": 4, "num_hidden_layers": 1},
}
EAGLE1_CONFIG: dict[str, Any] = {  # no bias, no rope_theta, no num_key_value_heads
    **{
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "model_type": "llama",
    },
    **{
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "tie_word_embeddings": False,
    },
}
# the keys of the published file: no RoPE, taps or head_dim
EAGLE3_CONFIG: dict[str, Any] = {
    **EAGLE1_CONFIG,
    "num_key_value_heads": 2,
    "draft_vocab_size": DRAFT,
}
EAGLE1 = {  # yuhuili/EAGLE-Vicuna-7B-v1.3: with fc.bias and embedding, without GQA
    **{
        "embed_tokens.weight": (VOCABULARY, WIDTH),
        "fc.weight": (WIDTH, 2 * WIDTH),
        "fc.bias": (WIDTH,),
    },
    **{f"layers.0.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"},
    **{f"layers.0.{name}.weight": shape for name, shape in PROJECTIONS.items()},
    "layers.0.post_attention_layernorm.weight": (WIDTH,),
}
SPECFORGE_CONFIG: dict[str, Any] = {  # SpecForge's export: RoPE in both spellings, no default taps
    **{
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFT,
    },
    **{
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    },
    **{
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "rope_theta": 1000000.0,
    },
    **{"rope_scaling": None, "dtype": "bfloat16", "tie_word_embeddings": False},
}
SPECULATORS_CONFIG: dict[str, Any] = {
    **{
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
    },
    **{
        "draft_vocab_size": DRAFT,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
    },
    **{
        "norm_before_residual": True,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
    },  # as RedHatAI's heads
    "speculators_config": {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {
            "name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
            "architectures": ["LlamaForCausalLM"],
        },
    },
    "transformer_layer_config": {
        **{
            **SIZES,
            "model_type": "llama",
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 2048,
        },
        **{"rms_norm_eps": 1e-5, "attention_bias": False, "rope_theta": 5e5, "rope_scaling": None},
    },
}


def tensors(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    """Random tensors, with norms near one, and d2t and t2d for every third token."""
    generator = torch.Generator().manual_seed(0)
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


def write(
    directory: Path, config: dict[str, Any], state: dict[str, Tensor], pickled: str = ""
) -> Path:
    """Writes a head's directory; pickled: the name of a pickle for its tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(state, directory / pickled)
    else:
        save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def safeailab_eagle1(directory: Path) -> Path:
    return write(directory, EAGLE1_CONFIG, tensors(EAGLE1), PICKLE)


def safeailab_eagle3(directory: Path, pickled: bool = True) -> Path:
    return write(directory, EAGLE3_CONFIG, tensors(EAGLE3), PICKLE if pickled else "")


def specforge(directory: Path, changes: dict[str, Any] | None = None) -> Path:
    return write(
        directory, {**SPECFORGE_CONFIG, **(changes or {})}, tensors(EAGLE3, torch.bfloat16)
    )


def angelslim(directory: Path) -> Path:
    """AngelSlim's layout: a pickle, with `tie_word_embeddings` true although it has an LM head."""
    changes = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "rope_theta": 1000000,
    }
    return write(
        directory, {**SPECFORGE_CONFIG, **changes}, tensors(EAGLE3, torch.bfloat16), PICKLE
    )


def speculators(directory: Path) -> Path:
    state = tensors({**EAGLE3, "embed_tokens.weight": (VOCABULARY, WIDTH)}, torch.bfloat16)
    state = {name.replace("midlayer.", "layers.0."): value for name, value in state.items()}
    return write(directory, SPECULATORS_CONFIG, state)


def sharded(directory: Path, state: dict[str, Tensor], pickled: bool = False) -> Path:
    """Writes these tensors alternately into two shards; returns the index."""
    base, suffix = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
    shards = [f"{base}-0000{number}-of-00002{suffix}" for number in (1, 2)]
    table = {name: shards[place % 2] for place, name in enumerate(sorted(state))}
    for shard in shards:
        part = {name: value for name, value in state.items() if table[name] == shard}
        (torch.save if pickled else save_file)(part, directory / shard)
    index = directory / f"{base}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return index


def same(one: Any, two: Any) -> None:
    """Asserts that two heads have the same configuration and, bit for bit, the same tensors."""
    assert one.config == two.config
    same_tensors(one.state_dict(), two.state_dict())


def same_tensors(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == two[name].dtype and torch.equal(value, two[name]), name


def target_facts(num_blocks: int = 8, max_positions: int = 256, **changes: Any) -> TargetFacts:
    text = tiny.llama(num_blocks=1, max_position_embeddings=max_positions).config
    text.num_hidden_layers = num_blocks
    return TargetFacts("tiny", text, tiny.vocab(**changes), "tiny", ("LlamaForCausalLM",))


def eagle3(**changes: Any) -> Eagle3Head:
    """A head of this project for `target_facts`, with norms that are not one."""
    made = tiny.eagle3_head(
        tiny.vocab().embedding, **{"after_blocks": TAPS, "scale": 6.0, **changes}
    ).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        if parameter.ndim == 1:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
    return made


def made(kind: str, **changes: Any) -> Any:
    """A small head of this project for the tiny vocabulary."""
    if kind == "eagle1":
        return tiny.head(tiny.vocab().embedding, **changes)
    return eagle3(**changes) if kind == "eagle3" else of_kind(kind, **changes)


of_kind = partial(tiny.multi_token_head, target_vocab=tiny.vocab())


def shipped(head: Any, to: str, directory: Path, **changes: Any) -> Path:
    """Saves a head as HEAD below a directory, exports it as OUT, and returns OUT."""
    save_head(head, directory / "head", step=4)
    export(directory / "head", to, directory / "out", target_facts(**changes))
    return directory / "out"


def medusa(directory: Path, layers: int = 1, **changes: Any) -> tuple[MedusaHead, Path]:
    head: Any = tiny.multi_token_head("medusa", tiny.vocab(), noise=0.2, num_layers=layers)
    own = head.state_dict()
    state = {f"{i}.{layers}.weight": own[f"laws.lm_heads.{i}.weight"] for i in range(4)}
    for i, j, part in (
        (i, j, part) for i in range(4) for j in range(layers) for part in ("weight", "bias")
    ):
        state[f"{i}.{j}.linear.{part}"] = own[f"branches.{i}.blocks.{j}.linear.{part}"]
    assert len(state) == len(own)
    config = {
        "medusa_num_heads": 4,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    return head, write(directory, {**config, **changes}, state, "medusa_lm_head.pt")


def hydra(directory: Path, **changes: Any) -> tuple[HydraHead, Path]:
    """A Hydra++ head and its directory as zankner publishes it: dropout between blocks, an unread
    embedding."""
    head: Any = tiny.multi_token_head(
        "hydra", tiny.vocab(), noise=0.2, num_layers=2, prefix_layer=True
    )
    state = {"prefix_embeding_layer.embed_tokens.weight": torch.zeros(320, 32)}
    for name, value in head.state_dict().items():
        first, *rest = name.split(".")
        if first == "branches":
            part = {"linear": "linear", "projection": "res_connection"}[rest[3]]
            state[f"hydra_mlp.{rest[0]}.{1 + 2 * int(rest[2])}.{part}.{rest[4]}"] = value
        elif first == "laws":
            state[f"hydra_lm_head.{rest[1]}.1.{rest[2]}"] = value
        else:
            layer = [] if rest[0] == "norm" else ["layers.0"]
            state[".".join(["prefix_embeding_layer", *layer, *rest])] = value
    config = {
        **{
            "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
            "grounded_heads": True,
            "hidden_state_offset": 0,
        },
        **{"hydra_head_arch": "prefix-mlp", "hydra_num_heads": 4, "hydra_num_layers": 2},
        "num_attention_heads": 4,  # our key: the published file takes the target's
    }
    return head, write(directory, {**config, **changes}, state, "hydra_lm_head.pt")
