"""Draft heads: new, warm-started, saved, and read in every known layout."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.heads import BlockSection, Eagle3Section, HeadConfig
from aerie.model.formats.content import HeadContent, table
from aerie.model.formats.layouts import read_content, write_tensors
from aerie.model.heads import HEADS, AnyConfig, Head
from aerie.model.heads.block import BlockHead
from aerie.model.heads.eagle import (
    EMBEDDING,
    TAP_CONVENTION,
    DraftVocabulary,
    Eagle3Config,
    Eagle3Head,
    EagleHead,
)
from aerie.model.heads.multi_token import MultiTokenHead
from aerie.model.hub import head_directory
from aerie.model.layers import Rotary
from aerie.model.storage import CONFIG, read_json, write_json
from aerie.model.target import VocabWeights, context_of

TABLES = ("d2t", "t2d")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BEGINNINGS = (
    "kind",
    "init_from",
    "lm_head_init",
    "norm_init",
    "fc_init",
    "initializer_range",
)  # how a head starts
POSITIONS = ("rope_theta", "max_position_embeddings")  # a warm start may change EAGLE's
LAYER = "intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps".split()


def new_head(
    section: HeadConfig,
    text_config: Any,
    vocab: VocabWeights,
    seed: int,
    path: str = "target",
    after_blocks: tuple[int, ...] = (),
    vocabulary: DraftVocabulary | None = None,
) -> Head:
    """A new head for a target, or the one in section.init_from."""
    _check_within(vars(section), vocab, text_config, "head.", path)
    if section.init_from is not None:
        return _warm_start(section, vocab, path, after_blocks)
    size = vocab.embedding.shape[0] if vocabulary is None else vocabulary.size
    head = HEADS[section.kind].module(config_for(section, text_config, vocab, after_blocks, size))
    head.initialise(
        vocab, torch.Generator().manual_seed(seed), getattr(section, "initializer_range", 0.02)
    )
    if isinstance(head, Eagle3Head) and isinstance(section, Eagle3Section):
        if vocabulary is not None:
            head.d2t.copy_(vocabulary.d2t)
            head.t2d.copy_(vocabulary.t2d)
        starts = {
            "lm_head": "frozen",
            "lm_head_init": "target",
            "norm_init": "target",
            "fc_init": "highest_tap",
        }
        asked = [name for name, value in starts.items() if getattr(section, name) == value]
        width, own = vocab.lm_head.shape[1], head.config.hidden_size
        if asked and width != own:
            raise UserError(
                f"head.{asked[0]}: {path} is {width:,} wide, the head {own:,}; leave head.hidden_size out"
            )
        if {"lm_head", "lm_head_init"} & {*asked}:
            head.lm_head.weight.data.copy_(
                vocab.lm_head[head.vocabulary.ids.to(vocab.lm_head.device)]
            )  # [Vd, D]
        head.lm_head.requires_grad_(section.lm_head == "trained")
        if section.norm_init == "target":
            assert vocab.final_norm is not None
            head.norm.weight.data.copy_(vocab.final_norm)
    if isinstance(section, Eagle3Section | BlockSection) and section.fc_init == "highest_tap":
        assert isinstance(head, Eagle3Head | BlockHead)
        scale: Any = 1.0
        if isinstance(section, Eagle3Section) and section.fc_norm and section.norm_output:
            # Scales normed taps to the size of the normed outputs that are fed back.
            scale = head.norm.weight.data.square().mean().sqrt()
        width = head.config.hidden_size
        head.fc.weight.data.zero_()[:, -width:] = scale * torch.eye(width)
    return head


def config_for(
    section: HeadConfig,
    text_config: Any,
    vocab: VocabWeights,
    taps: tuple[int, ...] = (),
    draft_vocab_size: int = 0,
) -> AnyConfig:
    """A new head's config.json: the recipe's values, else the target's."""
    vocab_size, width = vocab.embedding.shape
    asked = {name: value for name, value in vars(section).items() if value is not None}
    if getattr(text_config, "is_heterogeneous", False):  # Gemma 4: sizes by layer
        text_config = text_config.per_layer_config[0]
    theirs = {name: getattr(text_config, name, None) for name in LAYER}
    others = (
        "intermediate_size",
        "ffn_hidden_size",
        "ffn_dim",
        "n_inner",
    )  # Falcon's, OPT's, GPT-2's
    inner = next((size for name in others if (size := getattr(text_config, name, None))), 4 * width)
    theirs["intermediate_size"] = (
        max(inner) if isinstance(inner, list) else inner
    )  # Gemma-3n: one per layer
    heads = asked.get("num_attention_heads", theirs["num_attention_heads"] or max(1, width // 64))
    if "num_attention_heads" in asked:  # the target's grouping fits only its own heads
        theirs["num_key_value_heads"] = theirs["head_dim"] = None
    theta, scaling = rope_of(text_config)
    values = {
        **theirs,
        "hidden_size": width,
        "target_hidden_size": width,
        "vocab_size": vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": theirs["num_key_value_heads"] or heads,
        "head_dim": theirs["head_dim"] or asked.get("hidden_size", width) // heads,
        "rms_norm_eps": float(theirs["rms_norm_eps"] or 1e-6),
        "max_position_embeddings": context_of(text_config),
        "rope_theta": theta,
        "rope_scaling": None if "rope_theta" in asked else scaling,
        "qk_norm": str(getattr(text_config, "model_type", "")).startswith("qwen3"),
        "logit_scale": vocab.scale,
        "final_logit_softcap": vocab.softcap,
        "lm_head_bias": section.kind == "hydra" or vocab.bias is not None,
        **asked,
        "after_blocks": taps,
        "draft_vocab_size": draft_vocab_size,
    }
    if heads % (kv_heads := values["num_key_value_heads"]):
        raise UserError(
            f"head: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    schema = HEADS[section.kind].config
    names = {each.name for each in dataclasses.fields(schema)} & values.keys()
    if section.kind == "hydra" and not section.prefix_layer:  # it has no decoder layer
        names -= {*LAYER, "rope_theta", "rope_scaling"}
    return schema(**{name: values[name] for name in names})


def _warm_start(
    section: HeadConfig, vocab: VocabWeights, path: str, after_blocks: tuple[int, ...]
) -> Head:
    place = str(section.init_from)
    head = load_head(place, vocab=vocab, after_blocks=after_blocks or None)
    if head.kind != section.kind:
        raise UserError(
            f"head.init_from: {place} is an {head.kind} head, the recipe asks for {section.kind}"
        )
    check_sizes(head.config, vocab, place, path)
    positions: dict[str, Any] = {}
    asked: dict[str, Any] = {"features.after_blocks": after_blocks} if section.reads_taps else {}
    for key in dataclasses.fields(section):
        value = getattr(section, key.name)
        if (
            value is None
            or key.name in BEGINNINGS
            or (isinstance(head, EagleHead) and value == key.default)
        ):
            continue
        if isinstance(head, Eagle3Head) and key.name == "lm_head":  # frozen, as it was saved
            head.lm_head.requires_grad_(False)
            continue
        if isinstance(head, EagleHead) and key.name in POSITIONS:
            positions[key.name] = value
        else:
            asked[f"head.{key.name}"] = value
    for name, value in asked.items():
        if value != (there := getattr(head.config, name.split(".")[1], None)):
            raise UserError(
                f"{name}: the recipe asks {value}, {place} has {there}; set it to that, or drop init_from"
            )
    if isinstance(head, EagleHead):
        scaling = None if "rope_theta" in positions else head.config.rope_scaling
        head.config = dataclasses.replace(head.config, **positions, rope_scaling=scaling)
        head.rotary = Rotary(head.config)
    elif isinstance(head, MultiTokenHead):
        head.laws.vocab = None  # training sets it
    return head


def rope_of(text_config: Any) -> tuple[float, dict[str, Any] | None]:
    """RoPE's base and scaling (None: plain), for any transformers version."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "full_attention" in parameters:  # Gemma-3 has one per kind of layer
        parameters = parameters["full_attention"] or {}
    theta = parameters.get("rope_theta", getattr(text_config, "rope_theta", None)) or 10000.0
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta" and v is not None}
    return float(theta), None if scaling.get("rope_type", "default") == "default" else scaling


def position_warnings(config: Any, text_config: Any, place: str) -> list[str]:
    if getattr(config, "rope_theta", None) is None:  # a head without attention
        return []
    warnings, (theta, scaling) = [], rope_of(text_config)
    if (config.rope_theta, config.rope_scaling) != (theta, scaling):
        ours = f"rope_theta is {config.rope_theta:,.0f} with scaling {config.rope_scaling}"
        warnings.append(
            f"{place}: {ours}, its target's {theta:,.0f} with {scaling}; right only if it was trained so"
        )
    length, context = config.max_position_embeddings, context_of(text_config) or 0
    if length < context:
        warnings.append(
            f"{place}: max_position_embeddings is {length:,}, its target's {context:,}: answers stop there"
        )
    return warnings


def save_head(head: Head, directory: Path, **facts: Any) -> None:
    """facts go under "aerie" in config.json."""
    state, values = (
        head.state_dict(),
        {"architectures": [HEADS[head.kind].architecture], "aerie_kind": head.kind},
    )
    if hasattr(head.config, "after_blocks"):
        values |= {
            "model_type": "qwen3" if head.config.qk_norm else "llama",
            "tap_convention": TAP_CONVENTION,
        }
    if isinstance(head, Eagle3Head) and not head.saves_embedding:
        del state[EMBEDDING]
    write_tensors(directory, state)
    write_json(directory / CONFIG, {**values, **dataclasses.asdict(head.config), "aerie": facts})


def load_head(
    directory: Path | str,
    dtype: torch.dtype | None = None,
    vocab: VocabWeights | None = None,
    after_blocks: tuple[int, ...] | None = None,
) -> Head:
    """The head in a directory or on the Hub; vocab (embedding) and after_blocks fill in what its files leave out."""
    _, files, content = read_content(head_directory(directory), after_blocks)
    for guess in content.guesses:
        warn(f"{files.config_place}: {guess}")
    state = completed(content, vocab, files.weights_place)
    head = HEADS[content.kind].module(content.config)
    if isinstance(head, Eagle3Head) and head.shares_embedding and EMBEDDING in content.tensors:
        head.saves_embedding = not is_targets(state[EMBEDDING], vocab)
    head.load_state_dict(state)
    if isinstance(head, MultiTokenHead):
        head.laws.vocab = vocab
    stored = next(
        value.dtype
        for name, value in state.items()
        if value.is_floating_point() and name != EMBEDDING
    )
    return head.to(dtype or stored)


def head_facts(directory: Path | str) -> dict[str, Any]:
    return table(read_json(head_directory(directory) / CONFIG), "aerie")


def check_sizes(
    config: AnyConfig, vocab: VocabWeights, place: str, path: str, text_config: Any = None
) -> None:
    vocab_size, width = vocab.embedding.shape
    head_width = getattr(config, "target_hidden_size", config.hidden_size)
    for name, ours, theirs in (
        ("hidden size", head_width, width),
        ("vocabulary", config.vocab_size, vocab_size),
    ):
        if ours != theirs:
            what = f"its {name} is {ours}, that of {path} is {theirs}"
            raise UserError(f"{place}: belongs to another target: {what}")
    _check_within(vars(config), vocab, text_config, f"{place}: ", path)


def _check_within(
    values: dict[str, Any], vocab: VocabWeights, text_config: Any, place: str, path: str
) -> None:
    context, last = context_of(text_config) or 2**31, len(vocab.embedding) - 1
    for name, what, most in (
        ("block_size", "context", context),
        ("mask_token_id", "last token", last),
    ):
        if (values.get(name) or 0) > most:
            raise UserError(f"{place}{name}: {values[name]:,} is beyond {path}'s {what}, {most:,}")


def optional_of(content: HeadContent) -> set[str]:
    """Tensors that a file may lack: the target's embedding; d2t and t2d of equal vocabularies."""
    config, names = content.config, set[str]()
    width = getattr(config, "target_hidden_size", config.hidden_size)
    if content.is_embedding_optional and width == config.hidden_size:
        names.add(EMBEDDING)
    if isinstance(config, Eagle3Config) and config.draft_vocab_size == config.vocab_size:
        names.update(TABLES)
    return names


def check_content(content: HeadContent, place: Path) -> DraftVocabulary | None:
    """The draft vocabulary, if any; UserError for missing, unexpected, misshapen or broken tensors."""
    tensors = content.tensors
    with torch.device("meta"):  # names and shapes without memory for them
        expected = HEADS[content.kind].module(content.config).state_dict()
    for name in tensors.keys() & expected.keys() - {*TABLES}:
        if tensors[name].dtype not in FLOATS:
            raise UserError(
                f"{place}: {name} holds {tensors[name].dtype}: quantised heads are not read"
            )
    for name in sorted((expected.keys() - optional_of(content)) | tensors.keys()):
        there, asked = (
            list(some[name].shape) if name in some else "none" for some in (tensors, expected)
        )
        if there != asked:
            raise UserError(
                f"{place}: {name}: {there} there, {asked} expected; fetch the file anew"
            )
    for name, tensor in tensors.items():
        wrong = tensor.numel() - int(tensor.isfinite().sum())  # answers would not show it
        if wrong:
            what = f"{wrong:,} of {tensor.numel():,} values that are NaN or infinite"
            raise UserError(
                f"{place}: {name} holds {what}; take an earlier checkpoint, or fetch the file anew"
            )
    tables = [name for name in TABLES if name in tensors]
    if len(tables) == 1:
        raise UserError(f"{place}: has one of d2t and t2d ({tables[0]}); fetch the file anew")
    return DraftVocabulary.of_tables(tensors["d2t"], tensors["t2d"], str(place)) if tables else None


def completed(content: HeadContent, vocab: VocabWeights | None, place: Path) -> dict[str, Tensor]:
    """The head's tensors, with those that the file at place leaves out."""
    vocabulary, state, config = check_content(content, place), dict(content.tensors), content.config
    if isinstance(config, Eagle3Config):
        vocabulary = vocabulary or DraftVocabulary.of_ids(
            torch.arange(config.vocab_size), config.vocab_size
        )
        state |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    if content.is_embedding_optional and EMBEDDING not in state:
        if vocab is None:
            raise UserError(
                f"{place}: has no {EMBEDDING!r}, which is the target's; load it with its target"
            )
        check_sizes(config, vocab, str(place.parent), "the target")
        state[EMBEDDING] = vocab.embedding.detach().cpu()
    return state


def is_targets(embedding: Tensor, vocab: VocabWeights | None) -> bool:
    """Whether a head's embedding is the target's, in the head's precision."""
    return vocab is not None and torch.equal(vocab.embedding.cpu().to(embedding.dtype), embedding)
