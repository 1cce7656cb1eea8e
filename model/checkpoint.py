"""A head on disk: `config.json` + `model.safetensors`; and a new head for a target.

Nothing is loaded by luck: every key is accounted for, every shape checked, before a weight is copied.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import HeadConfig
from model.errors import UserError
from model.files import read_json, write_atomically, write_json
from model.heads.eagle1 import Eagle1Config, Eagle1Head
from model.target import TargetEnds

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def new_head(config: HeadConfig, text_config: Any, ends: TargetEnds, seed: int, path: str = "target") -> Eagle1Head:
    """An initialised head for a target; with config.init_from, the weights of that head instead."""
    if config.kind != "eagle1":
        raise UserError(f"head.kind {config.kind!r} is no draft head that reads features")
    if config.init_from is not None:
        head = load_head(Path(config.init_from))
        check_fits(head, ends, config.init_from, path)
        return head
    head = Eagle1Head(eagle1_config(config, text_config, ends))
    head.initialise(ends.embedding.float().cpu(), torch.Generator().manual_seed(seed))
    return head


def eagle1_config(config: HeadConfig, text_config: Any, ends: TargetEnds) -> Eagle1Config:
    """The head's sizes: the target's own where the recipe leaves them open; RoPE and its length always spelt out."""
    vocab_size, hidden_size = ends.embedding.shape
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
    return Eagle1Config(
        hidden_size=hidden_size,
        intermediate_size=config.intermediate_size or int(text_config.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=config.num_hidden_layers,
        vocab_size=vocab_size,
        rms_norm_eps=float(getattr(text_config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=config.max_position_embeddings or int(text_config.max_position_embeddings),
        rope_theta=theta,
        rope_scaling=scaling,
        bias=config.bias,
    )


def rope_of(text_config: Any) -> tuple[float, dict[str, Any] | None]:
    """The target's RoPE base and scaling (None for plain RoPE), whichever generation of configuration holds them."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "full_attention" in parameters:  # one RoPE per kind of layer (Gemma-3): the head attends fully
        parameters = parameters["full_attention"]
    theta = parameters.get("rope_theta", getattr(text_config, "rope_theta", None)) or 10000.0
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta" and v is not None}
    return float(theta), None if scaling.get("rope_type", "default") == "default" else scaling


def save_head(head: Eagle1Head, directory: Path, weights: dict[str, Tensor] | None = None, **facts: Any) -> None:
    """Writes config.json and model.safetensors, each whole or absent.

    weights: a gathered state dict where the module's own is sharded (ZeRO-3). facts go under "aerie" in config.json.
    """
    state = {k: v.detach().cpu().clone() for k, v in (weights or head.state_dict()).items()}  # fused weights are views
    _check_state(state, head, directory / WEIGHTS)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / WEIGHTS, lambda path: save_file(state, path, metadata={"format": "pt"}))
    write_json(directory / CONFIG, {**head.config.to_json(), "aerie": facts})


def load_head(directory: Path, dtype: torch.dtype | None = None) -> Eagle1Head:
    """The head in a directory; UserError names every missing, unexpected or misshapen key."""
    if not directory.is_dir():
        raise UserError(
            f"{directory}: no such head directory; train one with: accelerate launch train/main.py --config ..."
        )
    config = read_json(directory / CONFIG)
    if config.get("aerie_kind") != "eagle1":
        raise UserError(
            f"{directory / CONFIG}: not a head of this project (aerie_kind is {config.get('aerie_kind')!r})"
        )
    known = {field.name for field in dataclasses.fields(Eagle1Config)}
    missing = [
        f.name for f in dataclasses.fields(Eagle1Config) if f.name not in config and f.default is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{directory / CONFIG}: lacks {', '.join(missing)}")
    head = Eagle1Head(Eagle1Config(**{k: v for k, v in config.items() if k in known}))
    try:
        state = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory / WEIGHTS}: cannot read the weights: {error}") from error
    _check_state(state, head, directory / WEIGHTS)
    head.load_state_dict(state)
    return head.to(dtype) if dtype is not None else head.to(state["fc.weight"].dtype)


def check_fits(head: Eagle1Head, ends: TargetEnds, head_path: str, target_path: str) -> None:
    """UserError when the head was made for another target (hidden size, vocabulary)."""
    vocab_size, hidden_size = ends.embedding.shape
    for name, ours, theirs in (
        ("hidden size", head.config.hidden_size, hidden_size),
        ("vocabulary", head.config.vocab_size, vocab_size),
    ):
        if ours != theirs:
            raise UserError(
                f"{head_path}: belongs to another target: its {name} is {ours}, that of {target_path} is {theirs}; "
                f"give the target it was trained for, or train a head for this one"
            )


def head_facts(directory: Path) -> dict[str, Any]:
    """What was written under "aerie" in config.json when the head was saved."""
    facts = read_json(directory / CONFIG).get("aerie")
    return dict(facts) if isinstance(facts, dict) else {}


def _check_state(state: dict[str, Tensor], head: Eagle1Head, place: Path) -> None:
    expected = {name: tuple(shape) for name, shape in _shapes(head).items()}
    missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or unexpected:
        parts = [
            f"{word} {_list(names)}" for word, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise UserError(f"{place}: {', '.join(parts)}")
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise UserError(f"{place}: {name} has shape {list(state[name].shape)}, config.json says {list(shape)}")


def _shapes(head: Eagle1Head) -> dict[str, tuple[int, ...]]:
    """The true shapes, also of a module whose parameters DeepSpeed has sharded."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in head.state_dict(keep_vars=True).items()}


def _list(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
