"""Makes a target of any kind with small sizes and random weights, to try what its code does."""

from contextlib import suppress
from inspect import getattr_static
from pathlib import Path
from typing import Any

import torch

from aerie.configs.read import read_yaml
from aerie.configs.schema.heads import TargetConfig
from aerie.model.target import Target
from aerie.model.target_files import auto_class, context_of

PARAMETERS = 8_000_000  # the most that a miniature has
SHORT = 16  # tokens of a short prompt
SPEED = {"cpu": 2e10, "cuda": 1e15}  # operations a second (assumed)
TABLE = read_yaml(Path(__file__).with_name("miniature.yaml"))[0]
SMALL = {name: int(size) for size, names in TABLE["sizes"].items() for name in names.split()}
BY_LAYER = ("layer_types", "activation_sparsity_pattern", "mlp_layer_types")
PARTS = ("text_config", "decoder", "vision_config", "audio_config")


def miniature(config: Any, recipe: TargetConfig) -> Target | None:
    """A small target; None if its kind cannot be made so small.

    UserError if the kind is no target at any size.
    """
    try:
        model = small_model(config)
    except Exception:  # its sizes depend on each other in a way that TABLE does not know
        return None
    return Target(model, recipe)


def small_model(config: Any, **changes: Any) -> Any:
    """A small model; raises whatever transformers raises if the sizes do not fit each other."""
    usual = type(config)().to_dict()
    special = {name: value for name, value in config.to_dict().items() if usual.get(name) != value}
    of_kind = TABLE["own"].get(config.model_type, {})
    small = type(config)(**(special | _sizes(config) | of_kind | changes))
    small.is_decoder = True
    with torch.device("meta"):
        size = auto_class(small).from_config(small).num_parameters()
    if size > PARAMETERS:
        raise ValueError(f"{size / 1e6:,.0f} million parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(small).from_config(small, dtype=torch.float32).eval()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


def _sizes(config: Any) -> dict[str, Any]:
    """The small sizes of a configuration, for its parts as well."""
    values: dict[str, Any] = {"initializer_range": 0.2}
    values |= {name: size for name, size in SMALL.items() if _value(config, name) is not None}
    head_dim = 8
    if hasattr(config, "kv_lora_rank"):  # MLA
        head_dim = 4
        values |= {"num_key_value_heads": 4, "head_dim": 4}
    rope = _value(config, "rope_parameters") or {}
    if "long_factor" in rope:
        # LongRoPE: a factor for each rotated pair, and a switch that short texts reach
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        factors = {name: rope[name][:pairs] for name in ("short_factor", "long_factor")}
        switch = {"original_max_position_embeddings": 28}
        values |= {"rope_parameters": rope | factors | switch, **switch}
    if "mrope_section" in rope:  # how many pairs turn by time, height and width
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        sections = [pairs // 2, pairs // 4, pairs - pairs // 2 - pairs // 4]
        values |= {"rope_parameters": rope | {"mrope_section": sections}}
    for name in BY_LAYER:
        kinds = _value(config, name)
        if isinstance(kinds, list) and len(kinds) >= 4:
            values[name] = [*kinds[:3], kinds[-1]]
    for name in PARTS:
        part = _value(config, name)
        if hasattr(part, "to_dict"):
            values[name] = part.to_dict() | _sizes(part)
    return values


def _value(config: Any, name: str) -> Any:
    """The value of a key; None if other keys decide it."""
    spelling = getattr(config, "attribute_map", {}).get(name, name)
    attribute = getattr_static(config, spelling, None)
    if isinstance(attribute, property) and attribute.fset is None:
        return None
    with suppress(Exception):  # a key with values by layer is no attribute
        return getattr(config, name, None)


def lengths_to_check(target: Target) -> dict[int, float]:
    """{length: seconds} of a short text and of one near each limit of the configuration.

    The seconds are a guess of what a check takes.
    """
    room = (context_of(target.config) or 2**31) - 8
    lengths = {min(SHORT, room), (target.rope_switch or 2**31) + 8}
    lengths |= {limit - 2 for limit in _windows(target.config.to_dict())}
    operations = 10 * target.model.num_parameters()  # a token
    seconds = operations / SPEED.get(target.device.type, 1e15)
    return {length: seconds * length for length in sorted(lengths) if 0 < length <= room}


def _windows(values: dict[str, object]) -> set[int]:
    """The lengths of windows and chunks in a configuration."""
    lengths: set[int] = set()
    for key, value in values.items():
        if isinstance(value, dict):
            lengths |= _windows(value)
        elif isinstance(value, int) and value > 8 and ("window" in key or "chunk" in key):
            lengths.add(value)
    return lengths
