"""A head on disk: `config.json` + `model.safetensors`; and a new head for a target.

Nothing is loaded by luck: every key is accounted for, every shape checked, before a weight is copied.
"""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import MULTI_TOKEN, HeadConfig
from model.errors import UserError
from model.files import read_json, write_atomically, write_json
from model.heads.eagle1 import Eagle1Config, Eagle1Head
from model.heads.eagle3 import EMBEDDING, TAP_CONVENTION, Eagle3Config, Eagle3Head
from model.heads.hydra import HydraConfig, HydraHead
from model.heads.medusa import MedusaConfig, MedusaHead
from model.layers import Rotary
from model.published import is_published, spelt_out
from model.sizes import eagle1_config, eagle3_config, hydra_config, medusa_config
from model.target import TargetEnds
from model.vocab import DraftVocabulary

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
Head = Eagle1Head | Eagle3Head | MedusaHead | HydraHead
KINDS = ("eagle1", "eagle3", *MULTI_TOKEN)
MULTI_TOKEN_SHAPE = ("num_heads", "num_layers", "prefix_layer", "lm_head", "max_position_embeddings")
PREFIX_SIZES = (  # of a Hydra head's prefix layer; a recipe does not set the last
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
)
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
    embedding = ends.embedding.float().cpu()
    if config.kind == "eagle1":
        first = Eagle1Head(eagle1_config(config, text_config, ends))
        first.initialise(embedding, generator)
        return first
    if config.kind == "medusa":
        medusa = MedusaHead(medusa_config(config, text_config, ends))
        medusa.initialise(ends, generator)
        return medusa
    if config.kind == "hydra":
        hydra = HydraHead(hydra_config(config, text_config, ends))
        hydra.initialise(ends, generator, config.initializer_range)
        return hydra
    vocabulary = vocabulary or DraftVocabulary.identity(embedding.shape[0])
    head = Eagle3Head(eagle3_config(config, text_config, ends, after_blocks, vocabulary.size))
    head.initialise(embedding, generator)
    head.set_vocabulary(vocabulary)
    if config.lm_head_init == "target":
        head.take_lm_head(ends.lm_head, path)
    return head


def save_head(head: Head, directory: Path, weights: dict[str, Tensor] | None = None, **facts: Any) -> None:
    """Writes config.json and model.safetensors, each whole or absent.

    weights: a gathered state dict where the module's own is sharded (ZeRO-3). facts go under "aerie" in config.json.
    An EAGLE-3 head's embedding stays out where it is the target's own, as in the published files.
    """
    state = {k: v.detach().cpu().clone() for k, v in (weights or head.state_dict()).items()}  # fused weights are views
    optional = _optional(head)
    if isinstance(head, Eagle3Head) and not head.saves_embedding:
        state.pop(EMBEDDING, None)
    _check_state(state, head, directory / WEIGHTS, optional & {EMBEDDING})
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / WEIGHTS, lambda path: save_file(state, path, metadata={"format": "pt"}))
    write_json(directory / CONFIG, {**head.config.to_json(), "aerie": facts})


def load_head(
    directory: Path,
    dtype: torch.dtype | None = None,
    ends: TargetEnds | None = None,
    after_blocks: tuple[int, ...] | None = None,
) -> Head:
    """The head in a directory; UserError names every missing, unexpected or misshapen key.

    EAGLE-3: ends give the embedding that published files leave out; after_blocks are the taps of a published head
    whose config.json does not name them. Medusa and Hydra with lm_head 'target': ends give that LM head.
    """
    if not directory.is_dir():
        raise UserError(
            f"{directory}: no such head directory; train one with: accelerate launch train/main.py --config ..."
        )
    values = read_json(directory / CONFIG)
    kind = kind_of(values, directory / CONFIG)
    place, state = _read_weights(directory, kind)
    head = _empty_head(kind, values, state, after_blocks, directory / CONFIG)
    _check_state(state, head, place, _optional(head))
    if isinstance(head, Eagle3Head):
        _complete(state, head, ends, place)
    head.load_state_dict(state)
    if isinstance(head, MedusaHead | HydraHead):
        head.laws.ends = ends
    return head.to(dtype or next(x.dtype for x in state.values() if x.is_floating_point()))


def _empty_head(
    kind: str, values: dict[str, Any], state: dict[str, Tensor], after_blocks: tuple[int, ...] | None, place: Path
) -> Head:
    """The head that a config.json describes, its weights still to be loaded."""
    if kind == "eagle1":
        return Eagle1Head(Eagle1Config(**_known(values, Eagle1Config, place)))
    if kind == "medusa":
        return MedusaHead(MedusaConfig(**_known(values, MedusaConfig, place)))
    if kind == "hydra":
        config = HydraConfig(**_known(values, HydraConfig, place))
        missing = [name for name in PREFIX_SIZES if getattr(config, name) is None]
        if config.prefix_layer and missing:
            raise UserError(f"{place}: has a prefix layer and lacks {', '.join(missing)}")
        return HydraHead(config)
    return Eagle3Head(_read_eagle3_config(values, state, after_blocks, place))


def kind_of(values: Any, place: Path) -> str:
    """The kind of head that a config.json describes, one of KINDS; UserError for any other."""
    found = values.get("aerie_kind") if isinstance(values, dict) else None
    if found in KINDS:
        return str(found)
    if isinstance(values, dict) and is_published(values):
        return "eagle3"
    raise UserError(f"{place}: not a head of this project (aerie_kind is {found!r})")


def check_fits(head: Head, ends: TargetEnds, head_path: str, target_path: str) -> None:
    """UserError when the head was made for another target (hidden size, vocabulary)."""
    vocab_size, hidden_size = ends.embedding.shape
    config = head.config
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


def head_facts(directory: Path) -> dict[str, Any]:
    """What was written under "aerie" in config.json when the head was saved."""
    facts = read_json(directory / CONFIG).get("aerie")
    return dict(facts) if isinstance(facts, dict) else {}


def _warm_start(config: HeadConfig, ends: TargetEnds, path: str, after_blocks: tuple[int, ...]) -> Head:
    """The head in config.init_from, as the recipe asks for it; UserError for another shape than the recipe's."""
    place = str(config.init_from)
    head = load_head(Path(place), ends=ends, after_blocks=after_blocks or None)
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
        if asked not in (None, False) and asked != found:
            raise UserError(
                f"head.{name}: the recipe asks {asked}, {place} has {found}; leave it out, or drop init_from"
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
    layer = PREFIX_SIZES[:-1] if config.prefix_layer else ()
    for name in (*MULTI_TOKEN_SHAPE, *layer):
        asked, found = getattr(config, name), getattr(head.config, name, False)
        if asked is not None and asked != found:
            raise UserError(f"head.{name}: the recipe asks {asked}, {place} has {found}; set it to that")
    head.laws.ends = None  # whoever trains gives them
    return head


def _read_weights(directory: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """The file and its tensors; published EAGLE-3 heads also come as a pickle, of which only tensors are read."""
    path = directory / WEIGHTS
    try:
        if kind == "eagle3" and not path.is_file() and (directory / PICKLE).is_file():
            path = directory / PICKLE
            return path, dict(torch.load(path, map_location="cpu", weights_only=True))
        return path, load_file(path)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: cannot read the weights: {error}") from error


def _read_eagle3_config(
    values: dict[str, Any], state: dict[str, Tensor], after_blocks: tuple[int, ...] | None, place: Path
) -> Eagle3Config:
    """The configuration, every default spelt out."""
    if "after_blocks" in values:
        if values.get("tap_convention") != TAP_CONVENTION:
            raise UserError(
                f"{place}: tap_convention is {values.get('tap_convention')!r}; after_blocks must be entries of "
                f"transformers' hidden_states ({TAP_CONVENTION!r})"
            )
        after_blocks = tuple(values["after_blocks"])
        if not after_blocks or list(after_blocks) != sorted(set(after_blocks)):
            raise UserError(f"{place}: after_blocks {list(after_blocks)} must ascend without repeats")
    if is_published(values):
        values = spelt_out(values, state, after_blocks, str(place))
    config = Eagle3Config(**{**_known(values, Eagle3Config, place), "after_blocks": after_blocks})
    if config.draft_vocab_size > config.vocab_size:
        raise UserError(
            f"{place}: draft_vocab_size {config.draft_vocab_size:,} is larger than vocab_size {config.vocab_size:,}"
        )
    return config


def _known(values: dict[str, Any], schema: type[Any], place: Path) -> dict[str, Any]:
    """The values that the schema names; UserError when one without default is missing."""
    fields = dataclasses.fields(schema)
    missing = [f.name for f in fields if f.name not in values and f.default is dataclasses.MISSING]
    if missing:
        raise UserError(f"{place}: lacks {', '.join(missing)}")
    return {f.name: values[f.name] for f in fields if f.name in values}


def _optional(head: Head) -> set[str]:
    """The keys that a file may lack: the target's embedding, and the identity between equal vocabularies."""
    if not isinstance(head, Eagle3Head):
        return set()
    same = head.config.draft_vocab_size == head.config.vocab_size
    return ({EMBEDDING} if head.shares_embedding else set()) | ({"d2t", "t2d"} if same else set())


def _complete(state: dict[str, Tensor], head: Eagle3Head, ends: TargetEnds | None, place: Path) -> None:
    """Adds to state what an EAGLE-3 file may leave out, and checks its draft vocabulary."""
    identity = DraftVocabulary.identity(head.config.vocab_size)
    if not {"d2t", "t2d"} & state.keys():
        state |= {"d2t": identity.d2t, "t2d": identity.t2d}
    elif not {"d2t", "t2d"} <= state.keys():
        raise UserError(f"{place}: has one of d2t and t2d; they go together")
    DraftVocabulary(state["d2t"].long(), state["t2d"].bool()).check(str(place))
    if EMBEDDING not in state:
        if ends is None:
            raise UserError(f"{place}: has no {EMBEDDING!r}, which is the target's; load the head with its target")
        check_fits(head, ends, str(place.parent), "the target")
        state[EMBEDDING] = ends.embedding.detach().cpu()
    elif head.shares_embedding:
        own = state[EMBEDDING]
        shared = ends is not None and ends.embedding.shape == own.shape
        head.saves_embedding = not (shared and torch.equal(ends.embedding.cpu().to(own.dtype), own))  # type: ignore[union-attr]


def _check_state(state: dict[str, Tensor], head: Head, place: Path, optional: set[str]) -> None:
    expected = {name: tuple(shape) for name, shape in _shapes(head).items()}
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


def _shapes(head: Head) -> dict[str, tuple[int, ...]]:
    """The true shapes, also of a module whose parameters DeepSpeed has sharded."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in head.state_dict(keep_vars=True).items()}


def _list(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
