"""What every layout reads into and writes from: a head's configuration and tensors by this project's names.

Also the parts of config.json that all layouts share: typed values, Llama's sizes, RoPE, and the numbers of the taps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.heads import HEADS, AnyConfig
from aerie.model.heads.eagle import TAP_CONVENTION, Eagle1Config, Eagle3Config

T = TypeVar("T", int, float, bool, dict[str, Any])
SPECULATIVE_TOKENS = 5  # a server's drafts per cycle where nobody says (speculators' own default for EAGLE-3)


@dataclass(frozen=True)
class HeadFiles:
    """A head's directory as read: config.json and every tensor of the weights."""

    config_place: Path
    values: dict[str, Any]
    weights_place: Path
    tensors: dict[str, Tensor]
    after_blocks: tuple[int, ...] | None = None  # the taps to take where the files name none


@dataclass(frozen=True)
class HeadContent:
    """A head as the project knows it; tensors still lack what a file may leave out (embedding, equal vocabularies)."""

    config: AnyConfig
    tensors: dict[str, Tensor]
    guesses: tuple[str, ...] = ()  # what the files leave open and what was taken, a sentence each
    is_embedding_optional: bool = False  # a file without one means the target's
    speculative_tokens: int | None = None  # a server's drafts per cycle, where the files say

    @property
    def kind(self) -> str:
        return next(name for name, kind in HEADS.items() if kind.config is type(self.config))

    @property
    def eagle(self) -> Eagle1Config | Eagle3Config:
        """The configuration of an EAGLE head, the only kind that servers' layouts carry; UserError for another."""
        if not isinstance(self.config, Eagle1Config | Eagle3Config):
            raise UserError(f"--to: servers' layouts carry EAGLE heads, and this is a {self.kind} head")
        return self.config


@dataclass(frozen=True)
class Destination:
    """What a written head has to know of its target and of its server."""

    target: str  # what servers are told to load
    architectures: tuple[str, ...]
    num_blocks: int
    max_position_embeddings: int
    speculative_tokens: int | None = None  # a server's drafts per cycle (default: the head's own)


@dataclass(frozen=True)
class Export:
    """The files of one layout: config.json, the tensors, and what a reader of it would have to be told."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    pickled: bool = False
    notes: tuple[str, ...] = ()


def refuse(layout: str, what: str, instead: str) -> UserError:
    """The error for a head that a layout's readers would silently misread."""
    return UserError(f"--to {layout}: cannot carry {what}; {instead}")


def refuse_options(layout: str, config: Eagle3Config, flags: tuple[str, ...], instead: str) -> None:
    """UserError for a head with an option, or more than one layer, that the layout's readers would drop."""
    for name in flags:
        if getattr(config, name):
            raise refuse(layout, f"{name}, which its reader does not know", instead)
    if config.num_hidden_layers > 1:
        raise refuse(layout, f"{config.num_hidden_layers} layers, of which its reader takes one", instead)


WORDS = {
    int: "a positive whole number",
    float: "a positive number",
    bool: "true or false, without quotes",
    dict: "a table of keys or null",
}
DEPTHS = ("num_hidden_layers", "num_heads", "num_layers")  # layers are built one by one: a limit against nonsense


def take(values: dict[str, Any], name: str, kind: type[T], place: Path, default: Any = None) -> T:
    """values[name] as a positive int or float, a bool or a table; a missing or null one is the default.

    UserError, which names the file at place, for another type, and for a missing value without default.
    """
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise UserError(f"{place}: lacks {name}")
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not (0 < value < math.inf if is_number and kind in (int, float) else isinstance(value, kind)):
        raise UserError(f"{place}: {name} is {value!r}; it must be {WORDS[kind]}")
    most = 1024 if name in DEPTHS else 2**24
    if kind is int and value > most:
        raise UserError(f"{place}: {name} is {value:,}; no head has more than {most:,}")
    return kind(value)


def renamed(tensors: dict[str, Tensor], rename: Callable[[str], str], place: Path) -> dict[str, Tensor]:
    """The tensors under their new names; UserError where two of the file at place would be one."""
    origin: dict[str, str] = {}
    for name in tensors:
        other = origin.setdefault(rename(name), name)
        if other != name:
            raise UserError(
                f"{place}: {other!r} and {name!r} are the same tensor of a head by two names; take out the one that is "
                f"not its own"
            )
    return {new: tensors[old] for new, old in origin.items()}


def unread(values: dict[str, Any]) -> tuple[str, ...]:
    """A sentence for each key, at any level, that changes how a head drafts and that this project does not follow."""
    sentences = []
    for part in (values, values.get("transformer_layer_config"), values.get("eagle_config")):
        if not isinstance(part, dict):
            continue
        kinds = part.get("layer_types") if isinstance(part.get("layer_types"), list) else []
        other_kinds = sorted({str(kind) for kind in kinds or ()} - {"full_attention"})
        if other_kinds:
            sentences.append(f"layer_types names {', '.join(other_kinds)}: it drafts with full attention here")
        window = part.get("sliding_window")
        if window is not None and part.get("use_sliding_window", True) and (not kinds or other_kinds):
            sentences.append(f"sliding_window is {window}: it drafts with full attention here")
        if part.get("parallel_drafting"):
            sentences.append("parallel_drafting is true: it was trained to draft several tokens at once")
        if part.get("quantization_config"):
            sentences.append("quantization_config is there: the weights are read as they lie, without its scales")
    return tuple(dict.fromkeys(sentences))


# -------------------------------------------------------------------------------------------------------------- taps

NUMBERED = "eagle_aux_hidden_state_layer_ids"
COUNTS_OUTPUTS = "LlamaForCausalLMEagle3"  # the architecture of SpecForge's exports and of SGLang's draft module


def read_taps(
    values: dict[str, Any], fallback: tuple[int, ...] | None, place: Path, is_speculators: bool = False
) -> tuple[tuple[int, ...], str | None]:
    """after_blocks and, where the files leave it open, a sentence about what was taken.

    Two numberings circulate: entries of hidden_states, and outputs of blocks (one less). fallback are the taps to take
    where the files name none; numbers that mean these in either numbering are theirs.
    """
    if values.get("after_blocks") is not None:
        if values.get("tap_convention") != TAP_CONVENTION:
            raise UserError(
                f"{place}: tap_convention is {values.get('tap_convention')!r}; after_blocks must be entries of "
                f"transformers' hidden_states ({TAP_CONVENTION!r})"
            )
        return _ascending(values["after_blocks"], "after_blocks", place), None
    numbers = _numbers(values, place)
    if numbers is None and fallback is None:
        raise UserError(
            f"{place}: does not say which of the target's states this head reads; load it with its target, or add "
            f'"after_blocks" (entries of transformers\' hidden_states) and "tap_convention": "{TAP_CONVENTION}"'
        )
    if numbers is None:
        assert fallback is not None
        return fallback, f"names no taps; {list(fallback)} are taken (entries of hidden_states)"
    ids = _ascending(numbers, NUMBERED, place)
    if is_speculators:
        return ids, None
    outputs = tuple(k + 1 for k in ids)
    counts_outputs = fallback is not None and values.get("architectures") == [COUNTS_OUTPUTS]
    is_output = outputs == fallback or (ids != fallback and (ids[0] == 1 or counts_outputs))
    taps, what = (outputs, "outputs of blocks") if is_output else (ids, "entries of hidden_states")
    return taps, f"{NUMBERED} {list(ids)} are taken as {what}: the head reads hidden_states {list(taps)}"


def open_taps(values: dict[str, Any], place: Path) -> str | None:
    """What config.json alone leaves open; None where it names the states that the head reads.

    "unnamed": it names none. "ambiguous": it names some, in a numbering that only the target's number of blocks tells.
    """
    if values.get("after_blocks") is not None:
        return None
    numbers = _numbers(values, place)
    if numbers is None:
        return "unnamed"
    begins_with_one = isinstance(numbers, list) and numbers[:1] == [1]
    return "ambiguous" if values.get("architectures") == [COUNTS_OUTPUTS] and not begins_with_one else None


def _numbers(values: dict[str, Any], place: Path) -> Any:
    top = values.get(NUMBERED)
    return take(values, "eagle_config", dict, place, {}).get(NUMBERED) if top is None else top


def _ascending(numbers: Any, name: str, place: Path) -> tuple[int, ...]:
    if not isinstance(numbers, list | tuple) or not all(type(k) is int and k >= 0 for k in numbers):
        raise UserError(f"{place}: {name} is {numbers!r}; it must be a list of block numbers")
    if not numbers or list(numbers) != sorted(set(numbers)):
        raise UserError(f"{place}: {name} {list(numbers)} must ascend without repeats")
    return tuple(numbers)


# ---------------------------------------------------------------------------------------------------- sizes and RoPE

ROPE_THETA = 10000.0  # the training code ignores the target's base, so a head without the key was trained with this
MAX_POSITIONS = 2048
ROPE_WORDS = ("rope_type", "attn_factors", "short_factor", "long_factor", "truncate")  # of its table, no numbers
ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ANY_LENGTH = (None, "linear", "llama3")  # kinds of RoPE whose frequencies do not depend on max_position_embeddings


def read_sizes(values: dict[str, Any], place: Path) -> dict[str, Any]:
    """The fields that Eagle1Config and Eagle3Config have in common.

    Defaults: as many key heads as heads, hidden_size / heads, 1e-6, 2,048 positions, a plain RoPE of base 10,000.
    Source: SafeAILab's EConfig.
    """
    if values.get("hidden_act", "silu") != "silu":
        raise UserError(f"{place}: hidden_act is {values['hidden_act']!r}; heads have 'silu'")
    if take(values, "mlp_bias", bool, place, False):
        raise UserError(f"{place}: mlp_bias is true; heads have no biases in their MLP")
    heads, width = take(values, "num_attention_heads", int, place), take(values, "hidden_size", int, place)
    positions = (
        "max_position_embeddings" if values.get("max_position_embeddings") is not None else "max_sequence_length"
    )
    theta, scaling = read_rope(values, place)
    return {
        "hidden_size": width,
        "intermediate_size": take(values, "intermediate_size", int, place),
        "num_attention_heads": heads,
        "num_key_value_heads": take(values, "num_key_value_heads", int, place, heads),
        "head_dim": take(values, "head_dim", int, place, width // heads or None),
        "num_hidden_layers": take(values, "num_hidden_layers", int, place, 1),
        "vocab_size": take(values, "vocab_size", int, place),
        "rms_norm_eps": take(values, "rms_norm_eps", float, place, 1e-6),
        "max_position_embeddings": take(values, positions, int, place, MAX_POSITIONS),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def read_rope(values: dict[str, Any], place: Path) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from the keys of transformers 4 (rope_scaling, "type") and 5 (rope_parameters)."""
    parameters, scaling = (take(values, name, dict, place, {}) for name in ("rope_parameters", "rope_scaling"))
    tables = {"config.json": values, "rope_parameters": parameters, "rope_scaling": scaling}
    bases = {name: take(table, "rope_theta", float, place) for name, table in tables.items() if table.get("rope_theta")}
    if len(set(bases.values())) > 1:
        spelt = ", ".join(f"{base:g} in {name}" for name, base in bases.items())
        raise UserError(f"{place}: rope_theta is {spelt}; the head was trained with one of them: take out the other")
    theta = next(iter(bases.values()), ROPE_THETA)
    scaling = {k: v for k, v in (scaling or parameters).items() if k != "rope_theta"}
    kind = scaling.pop("type", None)
    scaling = {"rope_type": kind, **scaling} if kind else scaling
    if scaling.get("rope_type", "default") == "default":
        return theta, None
    kind = str(scaling["rope_type"])
    missing = [name for name in ROPE_NUMBERS.get(kind, ()) if scaling.get(name) is None]
    for name, value in scaling.items():
        is_number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if name not in ROPE_WORDS and not is_number:
            raise UserError(f"{place}: rope_scaling of type {kind!r}: {name} is {value!r}, no number")
    if missing:
        raise UserError(f"{place}: rope_scaling of type {kind!r}: lacks {missing[0]}")
    return theta, scaling


def write_sizes(config: Eagle1Config | Eagle3Config, destination: Destination) -> tuple[dict[str, Any], list[str]]:
    """The keys of config.json for every reader (RoPE in both spellings), and notes.

    max_position_embeddings is the longer of the head's and the target's: servers draft nothing, or noise, beyond it.
    """
    notes, positions = [], config.max_position_embeddings
    kind = (config.rope_scaling or {}).get("rope_type")
    if destination.max_position_embeddings > positions and kind in ANY_LENGTH:
        notes.append(
            f"max_position_embeddings {positions:,} is written as {destination.max_position_embeddings:,}, the "
            f"target's: servers cannot draft beyond it (the head was not trained there)"
        )
        positions = destination.max_position_embeddings
    scaling = config.rope_scaling
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else dict(scaling),
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
    }, notes
