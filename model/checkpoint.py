"""Makes, warm-starts, saves and loads draft heads, in every known layout."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError, warn
from aerie.configs.schema.heads import HeadConfig
from aerie.model.formats.content import HeadContent, nested
from aerie.model.formats.layouts import read_content, write_tensors
from aerie.model.heads import HEADS, AnyConfig, Head
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
from aerie.model.layers import FIXED_SCALING, Rotary, fixed_scaling
from aerie.model.storage import CONFIG, read_json, write_json
from aerie.model.target_files import context_of
from aerie.model.vocab_weights import VocabWeights

VOCABULARY_TABLES = ("d2t", "t2d")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Keys of the section `head` that say how a head starts.
BEGINNINGS = ("kind", "init_from", "lm_head_init", "norm_init", "fc_init", "initializer_range")
UNLIMITED = 2048  # a head's positions if its target has no limit
POSITIONS = ("rope_theta", "max_position_embeddings")  # what an EAGLE head's warm start may change
INNER_SIZES = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")  # Falcon, OPT, GPT-2


def new_head(
    section: HeadConfig,
    text_config: Any,
    vocab: VocabWeights,
    seed: int,
    path: str = "target",
    after_blocks: tuple[int, ...] = (),
    vocabulary: DraftVocabulary | None = None,
) -> Head:
    """A new head for a target, or the head in section.init_from; UserError if it does not fit.

    text_config and vocab are the target's, and path names it in errors.
    """
    _check_within(vars(section), vocab, text_config, "head.", path)
    if section.init_from is not None:
        return _warm_start(section, vocab, path, after_blocks)
    size = vocab.embedding.shape[0] if vocabulary is None else vocabulary.size
    config = config_for(section, text_config, vocab, after_blocks, size)
    head = HEADS[section.kind].module(config)
    generator = torch.Generator().manual_seed(seed)
    head.initialise(vocab, generator, getattr(section, "initializer_range", 0.02))
    if vocabulary is not None and isinstance(head, Eagle3Head):
        head.d2t.copy_(vocabulary.d2t)
        head.t2d.copy_(vocabulary.t2d)
    head.start_from_target(section, vocab, path)
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
    chosen = {name: value for name, value in vars(section).items() if value is not None}
    values = _layer_sizes(chosen, text_config, width)
    theta, scaling = rope_of(text_config)
    values |= {
        "hidden_size": width,
        "target_hidden_size": width,
        "vocab_size": vocab_size,
        # A target without a limit (BLOOM) gives none; training then sets the limit by its rows.
        "max_position_embeddings": context_of(text_config) or UNLIMITED,
        "rope_theta": theta,
        # The target's scaling goes with the target's base.
        "rope_scaling": None if "rope_theta" in chosen else scaling,
        "qk_norm": str(getattr(text_config, "model_type", "")).startswith("qwen3"),
        "logit_scale": vocab.scale,
        "final_logit_softcap": vocab.softcap,
        "lm_head_bias": vocab.bias is not None,
        **chosen,
        "after_blocks": taps,
        "draft_vocab_size": draft_vocab_size,
    }
    if values["num_attention_heads"] % values["num_key_value_heads"]:
        raise UserError(
            f"head.num_attention_heads: {values['num_attention_heads']} is no multiple of "
            f"num_key_value_heads {values['num_key_value_heads']}"
        )
    kind = HEADS[section.kind]
    if kind.adapt is not None:
        values = kind.adapt(section, values)
    names = {key.name for key in dataclasses.fields(kind.config)} & values.keys()
    return kind.config(**{name: values[name] for name in names})


def _layer_sizes(chosen: dict[str, Any], text_config: Any, width: int) -> dict[str, Any]:
    """A decoder layer's sizes: the recipe's (chosen), else the target's."""
    if getattr(text_config, "is_heterogeneous", False):  # Gemma 4 has sizes by layer
        text_config = text_config.per_layer_config[0]

    def of_target(name: str) -> Any:
        return getattr(text_config, name, None)

    inner = next(filter(None, map(of_target, INNER_SIZES)), 4 * width)
    heads = chosen.get("num_attention_heads")
    kv_heads = head_dim = None
    if heads is None:  # the target's grouping fits only its own number of heads
        heads = of_target("num_attention_heads") or max(1, width // 64)
        kv_heads = of_target("num_key_value_heads")
        head_dim = of_target("head_dim")
    return {
        # Gemma-3n has one per layer
        "intermediate_size": max(inner) if isinstance(inner, list) else inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "head_dim": head_dim or chosen.get("hidden_size", width) // heads,
        "rms_norm_eps": float(of_target("rms_norm_eps") or 1e-6),
    }


def _warm_start(
    section: HeadConfig, vocab: VocabWeights, path: str, after_blocks: tuple[int, ...]
) -> Head:
    source = str(section.init_from)
    head = load_head(source, vocab=vocab, after_blocks=after_blocks or None)
    if head.kind != section.kind:
        raise UserError(
            f"head.init_from: {source} is of kind {head.kind}, but head.kind is {section.kind}; "
            "change one of them"
        )
    check_sizes(head.config, vocab, source, path)
    is_eagle = isinstance(head, EagleHead)
    # In an EAGLE section, a key with its default value counts as not set.
    chosen = {
        key.name: getattr(section, key.name)
        for key in dataclasses.fields(section)
        if key.name not in BEGINNINGS
        and getattr(section, key.name) not in (None, key.default if is_eagle else None)
    }
    if isinstance(head, Eagle3Head) and "lm_head" in chosen:  # its rows stay as they were saved
        head.lm_head.requires_grad_(chosen.pop("lm_head") != "frozen")
    may_change = POSITIONS if is_eagle else ()
    positions = {name: chosen.pop(name) for name in may_change if name in chosen}
    # values that the saved head must have, by key of the recipe
    required: dict[str, Any] = {"features.after_blocks": after_blocks} if section.reads_taps else {}
    required |= {f"head.{name}": value for name, value in chosen.items()}
    for name, value in required.items():
        saved = getattr(head.config, name.split(".")[1], None)
        if value != saved:
            raise UserError(
                f"{name}: the recipe has {value}, but {source} has {saved}; "
                f"set it to {saved}, or leave head.init_from out"
            )
    if isinstance(head, EagleHead):
        if "rope_theta" in positions:
            positions["rope_scaling"] = None
        head.config = dataclasses.replace(head.config, **positions)
        head.rotary = Rotary(head.config)
    elif isinstance(head, MultiTokenHead):
        head.laws.vocab = None  # training sets the target's
    return head


def rope_of(text_config: Any) -> tuple[float, dict[str, Any] | None]:
    """RoPE's base and scaling (None: plain) of a head for this target.

    A head's layers attend to the whole text and rotate all of each attention head, by one fixed
    table. So a head takes the base of the target's full attention, and the scaling if it does not
    depend on the text's length.
    """
    parameters = _parameters_of_full_attention(text_config)
    theta = parameters.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10000.0
    return float(theta), fixed_scaling(parameters, context_of(text_config))


def rope_notes(text_config: Any) -> list[str]:
    """A line that says which RoPE a new head has, if this differs from the target's."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    of_full_attention = _parameters_of_full_attention(text_config)
    rope_type = of_full_attention.get("rope_type", "default")
    partial = of_full_attention.get("partial_rotary_factor") or 1.0
    differs = {
        "has one RoPE per kind of layer": of_full_attention is not parameters,
        f"rotates {partial:g} of each attention head": partial != 1.0,
        f"has RoPE of type {rope_type}": rope_type not in ("default", *FIXED_SCALING),
        "has positions in three rows (mrope)": "mrope_section" in of_full_attention,
    }
    sentences = [sentence for sentence, applies in differs.items() if applies]
    if not sentences:
        return []
    theta, scaling = rope_of(text_config)
    kind = "plain" if scaling is None else scaling["rope_type"]
    return [
        f"RoPE: the target {', '.join(sentences)}; the head has one table that rotates all of each "
        f"attention head ({kind}, base {theta:,.0f})"
    ]


def _parameters_of_full_attention(text_config: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = getattr(text_config, "rope_parameters", None) or {}
    by_layer = {name: part for name, part in parameters.items() if isinstance(part, dict)}
    if not by_layer:
        return parameters
    return by_layer.get("full_attention") or next(iter(by_layer.values()))


def position_warnings(config: Any, text_config: Any, path: str) -> list[str]:
    """Sentences about a head (at path) whose RoPE or positions differ from its target's."""
    if getattr(config, "rope_theta", None) is None:  # a head without attention
        return []
    warnings: list[str] = []
    theta, scaling = rope_of(text_config)
    if (config.rope_theta, config.rope_scaling) != (theta, scaling):
        warnings.append(
            f"{path}: rope_theta is {config.rope_theta:,.0f} with scaling {config.rope_scaling}, "
            f"its target's {theta:,.0f} with {scaling}; this is right only if the head was trained "
            "with it"
        )
    length = config.max_position_embeddings
    context = context_of(text_config) or 0
    if length < context:
        warnings.append(
            f"{path}: max_position_embeddings is {length:,}, its target's {context:,}: "
            f"answers end at {length:,} tokens"
        )
    return warnings


def save_head(head: Head, directory: Path, **facts: Any) -> None:
    """Writes weights and config.json, with the facts under "aerie"."""
    state = head.state_dict()
    if isinstance(head, Eagle3Head) and not head.saves_embedding:
        del state[EMBEDDING]
    values = {"architectures": [HEADS[head.kind].architecture], "aerie_kind": head.kind}
    if hasattr(head.config, "after_blocks"):
        values["model_type"] = "qwen3" if head.config.qk_norm else "llama"
        values["tap_convention"] = TAP_CONVENTION
    write_tensors(directory, state)
    write_json(directory / CONFIG, {**values, **dataclasses.asdict(head.config), "aerie": facts})


def load_head(
    directory: Path | str,
    dtype: torch.dtype | None = None,
    vocab: VocabWeights | None = None,
    after_blocks: tuple[int, ...] | None = None,
) -> Head:
    """The head in a directory or on the Hub; UserError if its files are broken.

    vocab (for the embedding) and after_blocks fill in what the files leave out.
    """
    _, files, content = read_content(head_directory(directory), after_blocks)
    for guess in content.guesses:
        warn(f"{files.config_path}: {guess}")
    state = complete_state(content, vocab, files.weights_path)
    head = HEADS[content.kind].module(content.config)
    # An embedding that differs from the target's must be saved with the head.
    if isinstance(head, Eagle3Head) and head.shares_embedding and EMBEDDING in content.tensors:
        head.saves_embedding = not is_targets(state[EMBEDDING], vocab)
    head.load_state_dict(state)
    if isinstance(head, MultiTokenHead):
        head.laws.vocab = vocab
    return head.to(dtype or dtype_of(state))


def dtype_of(state: dict[str, Tensor]) -> torch.dtype:
    """The dtype of a head's own weights; its embedding may be the target's."""
    return next(
        tensor.dtype
        for name, tensor in state.items()
        if name != EMBEDDING and tensor.is_floating_point()
    )


def head_facts(directory: Path | str) -> dict[str, Any]:
    """What `save_head` wrote under "aerie"; {} for a foreign head."""
    return nested(read_json(head_directory(directory) / CONFIG), "aerie")


def check_sizes(
    config: AnyConfig, vocab: VocabWeights, source: str, path: str, text_config: Any = None
) -> None:
    """UserError unless a head's sizes fit the target at path; source names the head."""
    vocab_size, width = vocab.embedding.shape
    head_width = getattr(config, "target_hidden_size", config.hidden_size)
    for name, size, target_size in (
        ("hidden size", head_width, width),
        ("vocabulary", config.vocab_size, vocab_size),
    ):
        if size != target_size:
            raise UserError(
                f"{source}: belongs to another target: its {name} is {size}, "
                f"and that of {path} is {target_size}"
            )
    _check_within(vars(config), vocab, text_config, f"{source}: ", path)


def _check_within(
    values: dict[str, Any], vocab: VocabWeights, text_config: Any, prefix: str, path: str
) -> None:
    for name, what, most in (
        ("block_size", "context", context_of(text_config) or 2**31),
        ("mask_token_id", "last token", len(vocab.embedding) - 1),
    ):
        if (values.get(name) or 0) > most:
            raise UserError(f"{prefix}{name}: {values[name]:,} is beyond {path}'s {what}, {most:,}")


def optional_of(content: HeadContent) -> set[str]:
    """Tensors that a file may lack: the target's embedding; d2t and t2d, if all tokens are in."""
    config = content.config
    names: set[str] = set()
    width = getattr(config, "target_hidden_size", config.hidden_size)
    if content.is_embedding_optional and width == config.hidden_size:
        names.add(EMBEDDING)
    has_table = content.tensors.keys() & {*VOCABULARY_TABLES}  # with one, the file must have both
    if not has_table and getattr(config, "draft_vocab_size", None) == config.vocab_size:
        names.update(VOCABULARY_TABLES)
    return names


def check_content(content: HeadContent, path: Path) -> DraftVocabulary | None:
    """The draft vocabulary, if any.

    UserError for missing, unexpected, misshapen or broken tensors.
    """
    tensors = content.tensors
    with torch.device("meta"):  # names and shapes without memory for them
        expected = HEADS[content.kind].module(content.config).state_dict()
    for name in tensors.keys() - {*VOCABULARY_TABLES}:
        if tensors[name].dtype not in FLOATS:
            raise UserError(
                f"{path}: {name} holds {tensors[name].dtype}: quantised heads are not read; "
                "name an unquantised one"
            )
    for name in sorted((expected.keys() - optional_of(content)) | tensors.keys()):
        shape = list(tensors[name].shape) if name in tensors else "none"
        expected_shape = list(expected[name].shape) if name in expected else "none"
        if shape != expected_shape:
            raise UserError(
                f"{path}: {name}: the file has {shape}, but the head needs {expected_shape}; "
                "fetch the file again"
            )
    for name, tensor in tensors.items():
        broken = tensor.numel() - int(tensor.isfinite().sum())
        if broken:  # answers would stay right, and so not show it
            raise UserError(
                f"{path}: {name} holds {broken:,} of {tensor.numel():,} values that are NaN or "
                "infinite; take an earlier checkpoint, or fetch the file again"
            )
    if "d2t" not in tensors:
        return None
    return DraftVocabulary.of_tables(tensors["d2t"], tensors["t2d"], str(path))


def complete_state(
    content: HeadContent, vocab: VocabWeights | None, path: Path
) -> dict[str, Tensor]:
    """The head's tensors, completed by those that the file at path leaves out."""
    vocabulary = check_content(content, path)
    config = content.config
    state = dict(content.tensors)
    if isinstance(config, Eagle3Config):
        if vocabulary is None:
            vocabulary = DraftVocabulary.of_ids(torch.arange(config.vocab_size), config.vocab_size)
        state |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    if content.is_embedding_optional and EMBEDDING not in state:
        if vocab is None:
            raise UserError(
                f"{path}: has no {EMBEDDING!r}, which is the target's; "
                "load the head with its target"
            )
        check_sizes(config, vocab, str(path.parent), "the target")
        state[EMBEDDING] = vocab.embedding.detach().cpu()
    return state


def is_targets(embedding: Tensor, vocab: VocabWeights | None) -> bool:
    """Whether a head's embedding is the target's, in the dtype of the head."""
    return vocab is not None and torch.equal(vocab.embedding.cpu().to(embedding.dtype), embedding)
