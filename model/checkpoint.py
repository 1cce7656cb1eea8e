"""A new head's configuration: the recipe's sizes, and the target's own where the recipe leaves them open."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.target_and_head import HeadConfig
from aerie.model.formats.common import AnyConfig, HeadContent
from aerie.model.formats.layouts import read_content, recognise
from aerie.model.heads.eagle import EMBEDDING, Eagle1Config, Eagle1Head, Eagle3Config, Eagle3Head
from aerie.model.heads.multi_token import HydraConfig, HydraHead, MedusaConfig, MedusaHead
from aerie.model.hub import head_directory
from aerie.model.layers import Rotary
from aerie.model.storage import CONFIG, WEIGHTS, read_json, write_json
from aerie.model.target import TargetEnds
from aerie.model.vocab import DraftVocabulary
from aerie.model.weights import tensor_names, write_tensors


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


TABLES = ("d2t", "t2d")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Head = Eagle1Head | Eagle3Head | MedusaHead | HydraHead
MULTI_TOKEN_SHAPE = ("num_heads", "num_layers", "prefix_layer", "lm_head", "max_position_embeddings")
PREFIX_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
OWN_SHAPE = (  # what a warm start cannot change
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
    "qk_norm",
    "fc_norm",
    "norm_output",
)


def new_head(
    config: HeadConfig,
    text_config: Any,
    ends: TargetEnds,
    seed: int,
    path: str = "target",
    after_blocks: tuple[int, ...] = (),
    vocabulary: DraftVocabulary | None = None,
) -> Head:
    """An initialised head for a target; with config.init_from, the weights and the draft vocabulary of that head.

    after_blocks are the taps that an EAGLE-3 head is given, vocabulary its draft vocabulary (None: the target's).
    """
    if config.kind == "draft_lm":
        raise UserError(f"head.kind {config.kind!r} is no draft head that reads features")
    if config.init_from is not None:
        return _warm_start(config, ends, path, after_blocks)
    generator = torch.Generator().manual_seed(seed)
    if config.kind == "eagle1":
        first = Eagle1Head(eagle1_config(config, text_config, ends))
        first.initialise(ends, generator)
        return first
    if config.kind == "medusa":
        medusa = MedusaHead(medusa_config(config, text_config, ends))
        medusa.initialise(ends, generator)
        return medusa
    if config.kind == "hydra":
        hydra = HydraHead(hydra_config(config, text_config, ends))
        hydra.initialise(ends, generator, config.initializer_range)
        return hydra
    vocabulary = vocabulary or DraftVocabulary.identity(ends.embedding.shape[0])
    head = Eagle3Head(eagle3_config(config, text_config, ends, after_blocks, vocabulary.size))
    head.initialise(ends, generator)
    head.set_vocabulary(vocabulary)
    if config.lm_head_init == "target":
        head.take_lm_head(ends.lm_head, path)
    return head


def save_head(head: Head, directory: Path, weights: dict[str, Tensor] | None = None, **facts: Any) -> None:
    """Writes config.json and model.safetensors, each whole or absent.

    weights: a gathered state dict where the module's own is sharded (ZeRO-3). facts go under "aerie" in config.json.
    An EAGLE-3 head's embedding stays out where it is the target's own, as in the published files.
    """
    state = dict(weights or head.state_dict())
    if isinstance(head, Eagle3Head) and not head.saves_embedding:
        state.pop(EMBEDDING, None)
    optional = {EMBEDDING} if isinstance(head, Eagle3Head) and head.shares_embedding else set()
    check_state(state, shapes_of(head), directory / WEIGHTS, optional)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory, state)
    write_json(directory / CONFIG, {**head.config.to_json(), "aerie": facts})


def load_head(
    directory: Path | str,
    dtype: torch.dtype | None = None,
    ends: TargetEnds | None = None,
    after_blocks: tuple[int, ...] | None = None,
) -> Head:
    """The head in a directory or a Hub repository ("user/name", "user/name@revision"), in whichever known layout.

    UserError names every missing, unexpected or misshapen key. ends give the embedding that a file may leave out;
    after_blocks are the taps of a published EAGLE-3 head whose config.json does not name them. What had to be guessed
    is said on stderr.
    """
    place = head_directory(directory)
    if not place.is_dir():
        raise UserError(
            f"{directory}: no such head directory; train one with: accelerate launch train/main.py --config ..."
        )
    _, files, content = read_content(place, after_blocks)
    for guess in content.guesses:
        warn(f"{files.config_place}: {guess}")
    check_content(content, files.weights_place)
    state = completed(content, ends, files.weights_place)
    head = empty_head(content.config)
    if isinstance(head, Eagle3Head) and head.shares_embedding and EMBEDDING in content.tensors:
        head.saves_embedding = not is_targets(state[EMBEDDING], ends)
    head.load_state_dict(state)
    if isinstance(head, MedusaHead | HydraHead):
        head.laws.ends = ends
    stored = next(value.dtype for name, value in state.items() if value.is_floating_point() and name != EMBEDDING)
    return head.to(dtype or stored)


def kind_of(values: Any, place: Path) -> str:
    """The kind of head that a config.json at place and the weights beside it hold; UserError where they hold none."""
    if not isinstance(values, dict):
        raise UserError(f"{place}: not a head of this project: not a table of keys")
    return recognise(values, tensor_names(place.parent), place)[1]


def empty_head(config: AnyConfig) -> Head:
    """The module that a configuration describes, its weights still to come; UserError for sizes that cannot be."""
    if isinstance(config, Eagle1Config):
        return Eagle1Head(config)
    if isinstance(config, MedusaConfig):
        return MedusaHead(config)
    return HydraHead(config) if isinstance(config, HydraConfig) else Eagle3Head(config)


def expected_shapes(config: AnyConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a head's tensors, told without memory for them."""
    with torch.device("meta"):
        return shapes_of(empty_head(config))


def check_fits(head: Head, ends: TargetEnds, head_path: str, target_path: str) -> None:
    """UserError when the head was made for another target (hidden size, vocabulary)."""
    check_sizes(head.config, ends, head_path, target_path)


def check_sizes(config: AnyConfig, ends: TargetEnds, head_path: str, target_path: str) -> None:
    """As check_fits, told by the configuration alone."""
    vocab_size, hidden_size = ends.embedding.shape
    own_size = config.target_hidden_size if isinstance(config, Eagle3Config) else config.hidden_size
    for name, ours, theirs in (
        ("hidden size", own_size, hidden_size),
        ("vocabulary", config.vocab_size, vocab_size),
    ):
        if ours != theirs:
            raise UserError(
                f"{head_path}: belongs to another target: its {name} is {ours}, that of {target_path} is {theirs}; "
                f"give the target it was trained for, or train a head for this one"
            )


def head_facts(directory: Path | str) -> dict[str, Any]:
    """What was written under "aerie" in config.json when the head was saved."""
    facts = read_json(head_directory(directory) / CONFIG).get("aerie")
    return dict(facts) if isinstance(facts, dict) else {}


def _warm_start(config: HeadConfig, ends: TargetEnds, path: str, after_blocks: tuple[int, ...]) -> Head:
    """The head in config.init_from, as the recipe asks for it; UserError for another shape than the recipe's."""
    place = str(config.init_from)
    head = load_head(place, ends=ends, after_blocks=after_blocks or None)
    if head.kind != config.kind:
        raise UserError(f"head.init_from: {place} is an {head.kind} head, the recipe asks for {config.kind}")
    check_fits(head, ends, place, path)
    if isinstance(head, MedusaHead | HydraHead):
        return _same_shape(head, config, place)
    if isinstance(head, Eagle3Head) and head.config.after_blocks != after_blocks:
        raise UserError(
            f"head.init_from: {place} reads the taps {head.config.after_blocks}, the recipe gives {after_blocks}; "
            f"set features.after_blocks to {list(head.config.after_blocks)}"
        )
    for name in OWN_SHAPE:
        asked, found = getattr(config, name), getattr(head.config, name, None)
        unset = asked is None or (asked is False and name != "qk_norm")
        if not unset and asked != found:
            raise UserError(
                f"head.{name}: the recipe asks {asked}, {place} has {found}; leave it out, or drop init_from"
            )
    if config.num_hidden_layers not in (1, head.config.num_hidden_layers):
        raise UserError(
            f"head.num_hidden_layers: the recipe asks {config.num_hidden_layers}, {place} has "
            f"{head.config.num_hidden_layers}; leave it out, or drop init_from"
        )
    theta, scaling = head.config.rope_theta, head.config.rope_scaling
    if config.rope_theta is not None:
        theta, scaling = config.rope_theta, None
    length = config.max_position_embeddings or head.config.max_position_embeddings
    changes: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": length}
    if isinstance(head, Eagle3Head):
        head.config = dataclasses.replace(head.config, **changes)
    else:
        head.config = dataclasses.replace(head.config, **changes)
    head.rotary = Rotary(theta, scaling, head.config.head_dim, length)
    return head


def _same_shape(head: MedusaHead | HydraHead, config: HeadConfig, place: str) -> MedusaHead | HydraHead:
    """The head, if the recipe asks for its very shape; UserError otherwise."""
    layer = PREFIX_SIZES if config.prefix_layer else ()
    for name in (*MULTI_TOKEN_SHAPE, *layer):
        asked, found = getattr(config, name), getattr(head.config, name, False)
        if asked is not None and asked != found:
            raise UserError(f"head.{name}: the recipe asks {asked}, {place} has {found}; set it to that")
    head.laws.ends = None  # whoever trains gives them
    return head


def optional_of(content: HeadContent) -> set[str]:
    """The keys that a file may lack: the target's embedding, and the identity between equal vocabularies."""
    config = content.config
    optional = {EMBEDDING} if content.is_embedding_optional else set()
    if isinstance(config, Eagle3Config):
        if config.target_hidden_size != config.hidden_size:
            optional = set()
        if config.draft_vocab_size == config.vocab_size:
            optional |= {"d2t", "t2d"}
    return optional


def check_content(content: HeadContent, place: Path) -> None:
    """UserError for a head that does not load; place names the file in errors."""
    for check in loading_checks(content, place):
        check()


def loading_checks(content: HeadContent, place: Path) -> tuple[Callable[[], None], ...]:
    """What a head has to stand before its weights are taken: each raises UserError."""
    state, config = content.tensors, content.config

    def check_vocabulary() -> None:
        vocabulary_of(state, str(place))

    return (
        lambda: check_state(state, expected_shapes(config), place, optional_of(content)),
        lambda: check_finite(state, place),
        check_vocabulary,
    )


def check_finite(state: dict[str, Tensor], place: Path) -> None:
    """UserError for weights that are not-a-number or infinite, which no target's answers show but every draft feels."""
    for name, tensor in state.items():
        if name in TABLES or tensor.dtype not in FLOATS:
            continue
        wrong = int((~tensor.isfinite()).sum())
        if wrong:
            raise UserError(
                f"{place}: {name} holds {wrong:,} of {tensor.numel():,} values that are NaN or infinite: the head's "
                f"training diverged or the file is damaged; take an earlier checkpoint, or fetch the file anew"
            )


def vocabulary_of(state: dict[str, Tensor], place: str) -> DraftVocabulary | None:
    """The draft vocabulary in a head's tables, None without tables; UserError for one table alone or wrong ones."""
    found = [name for name in TABLES if name in state]
    if len(found) == 1:
        raise UserError(f"{place}: has one of d2t and t2d ({found[0]}); they go together: get the whole file")
    return DraftVocabulary.of_tables(state["d2t"], state["t2d"], place) if found else None


def completed(content: HeadContent, ends: TargetEnds | None, place: Path) -> dict[str, Tensor]:
    """The tensors with what a file may leave out; checks the draft vocabulary. place names the file in errors."""
    state, config = dict(content.tensors), content.config
    if isinstance(config, Eagle3Config):
        vocabulary = vocabulary_of(state, str(place)) or DraftVocabulary.identity(config.vocab_size)
        state |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    if content.is_embedding_optional and EMBEDDING not in state:
        if ends is None:
            raise UserError(f"{place}: has no {EMBEDDING!r}, which is the target's; load the head with its target")
        check_sizes(config, ends, str(place.parent), "the target")
        state[EMBEDDING] = ends.embedding.detach().cpu()
    return state


def is_targets(embedding: Tensor, ends: TargetEnds | None) -> bool:
    """Whether a head's embedding is the target's, in the head's precision."""
    if ends is None or ends.embedding.shape != embedding.shape:
        return False
    return torch.equal(ends.embedding.cpu().to(embedding.dtype), embedding)


def check_state(
    state: dict[str, Tensor], expected: dict[str, tuple[int, ...]], place: Path, optional: set[str]
) -> None:
    """UserError that names the missing, unexpected or misshapen tensors of the file at place."""
    missing = sorted(expected.keys() - state.keys() - optional)
    unexpected = sorted(state.keys() - expected.keys())
    if missing or unexpected:
        parts = [
            f"{word} {_list(names)}" for word, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise UserError(f"{place}: {', '.join(parts)}")
    for name, tensor in state.items():
        if tuple(tensor.shape) != expected[name]:
            raise UserError(f"{place}: {name} has shape {list(tensor.shape)}, config.json says {list(expected[name])}")
        if name not in TABLES and tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{place}: {name} holds {kind}: quantised heads are not read; get this head in bfloat16")


def shapes_of(head: Head) -> dict[str, tuple[int, ...]]:
    """The true shapes, also of a module whose parameters DeepSpeed has sharded."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in head.state_dict(keep_vars=True).items()}


def _list(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
