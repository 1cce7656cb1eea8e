"""What every layout reads into and writes from: a head's configuration and its tensors, by this project's names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from aerie.configs.errors import UserError
from aerie.model.heads import HEADS, AnyConfig
from aerie.model.heads.eagle import TAP_CONVENTION, Eagle1Config, Eagle3Config
from aerie.model.heads.multi_token import HydraConfig, MedusaConfig

EagleConfig = Eagle1Config | Eagle3Config
SPECULATIVE_TOKENS = 5  # a server's drafts per cycle where nobody says (speculators' own default for EAGLE-3)


@dataclass(frozen=True)
class HeadFiles:
    """A head's directory as read: config.json and every tensor of the weights."""

    config_place: Path
    values: dict[str, Any]
    weights_place: Path
    tensors: dict[str, Tensor]
    after_blocks: tuple[int, ...] | None = None  # the taps to take where the files name none

    @property
    def architecture(self) -> str:
        """The first of config.json's architectures, or ''."""
        found = self.values.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else ""


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
        return next(kind for kind, classes in HEADS.items() if classes.config is type(self.config))

    @property
    def eagle(self) -> EagleConfig:
        """The configuration of an EAGLE head, the only kind that servers' layouts carry; UserError for another."""
        if isinstance(self.config, MedusaConfig | HydraConfig):
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


MOST, MOST_LAYERS = 2**24, 1024  # beyond any size of a model; layers are built one by one
DEPTHS = ("num_hidden_layers", "num_heads", "num_layers")


def whole(values: dict[str, Any], name: str, place: Path, default: int | None = None) -> int:
    """A positive whole number; UserError where it is none, or missing without a default."""
    value = _found(values, name, place, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{place}: {name} is {value!r}; it must be a positive whole number")
    most = MOST_LAYERS if name in DEPTHS else MOST
    if value > most:
        raise UserError(f"{place}: {name} is {value:,}; no head has more than {most:,}")
    return value


def number(values: dict[str, Any], name: str, place: Path, default: float | None = None) -> float:
    """A positive finite number; UserError where it is none, or missing without a default."""
    value = _found(values, name, place, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{place}: {name} is {value!r}; it must be a positive number")
    return float(value)


def flag(values: dict[str, Any], name: str, place: Path, default: bool = False) -> bool:
    """True or false; UserError for anything else, a word in quotes included."""
    value = _found(values, name, place, default)
    if not isinstance(value, bool):
        raise UserError(f"{place}: {name} is {value!r}; it must be true or false, without quotes")
    return value


def table(values: dict[str, Any], name: str, place: Path) -> dict[str, Any]:
    """A table of keys, empty where there is none; UserError for anything else."""
    value = _found(values, name, place, {})
    if not isinstance(value, dict):
        raise UserError(f"{place}: {name} is {value!r}; it must be a table of keys or null")
    return dict(value)


def _found(values: dict[str, Any], name: str, place: Path, default: Any) -> Any:
    value = values.get(name)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"{place}: lacks {name}")
    return value


def renamed(tensors: dict[str, Tensor], rename: Callable[[str], str], place: Path) -> dict[str, Tensor]:
    """The tensors under their new names; UserError where two of the file at place would be one."""
    made: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for name, value in tensors.items():
        new = rename(name)
        if new in made:
            raise UserError(
                f"{place}: {origin[new]!r} and {name!r} are the same tensor of a head by two names; take out the one "
                f"that is not its own"
            )
        made[new], origin[new] = value, name
    return made


NESTED = ("transformer_layer_config", "eagle_config")
FULL = "full_attention"


def unread(values: dict[str, Any]) -> tuple[str, ...]:
    """A sentence for each, wherever in the file it stands."""
    found: list[str] = []
    for part in (values, *(values[name] for name in NESTED if isinstance(values.get(name), dict))):
        found += _of_a_table(part)
    return tuple(dict.fromkeys(found))


def _of_a_table(values: dict[str, Any]) -> list[str]:
    found = []
    kinds = values.get("layer_types")
    odd = sorted({str(kind) for kind in kinds} - {FULL}) if isinstance(kinds, list) else []
    if odd:
        found.append(f"layer_types names {', '.join(odd)}: it drafts with full attention here")
    window = values.get("sliding_window")
    is_used = values.get("use_sliding_window", True) and not (isinstance(kinds, list) and not odd)
    if window is not None and is_used:
        found.append(f"sliding_window is {window}: it drafts with full attention here")
    if values.get("parallel_drafting"):
        found.append("parallel_drafting is true: it was trained to draft several tokens at once, and drafts one here")
    if values.get("quantization_config"):
        found.append("quantization_config is there: the weights are read as they lie, without its scales")
    return found


NUMBERED = "eagle_aux_hidden_state_layer_ids"
COUNTS_OUTPUTS = "LlamaForCausalLMEagle3"  # the architecture of SpecForge's exports and of SGLang's draft module


def read_taps(
    values: dict[str, Any], fallback: tuple[int, ...] | None, place: Path, is_speculators: bool = False
) -> tuple[tuple[int, ...], str | None]:
    """after_blocks and, where the files leave it open, a sentence about what was taken.

    fallback are the taps to take where the files name none; numbers that mean these in either numbering are theirs.
    UserError where there is nothing to go by.
    """
    if values.get("after_blocks") is not None:
        return _own(values, place), None
    found = values.get(NUMBERED)
    if found is None:
        found = table(values, "eagle_config", place).get(NUMBERED)
    if found is None:
        if fallback is None:
            raise UserError(
                f"{place}: does not say which of the target's states this head reads; load it with its target, or add "
                f'"after_blocks" (entries of transformers\' hidden_states) and "tap_convention": "{TAP_CONVENTION}"'
            )
        return fallback, f"names no taps; {list(fallback)} are taken (entries of hidden_states)"
    ids = _ascending(found, NUMBERED, place)
    if is_speculators:
        return ids, None
    outputs = tuple(k + 1 for k in ids)
    theirs = fallback is not None and values.get("architectures") == [COUNTS_OUTPUTS]
    is_output = outputs == fallback or (ids != fallback and (ids[0] == 1 or theirs))
    taps, what = (outputs, "outputs of blocks") if is_output else (ids, "entries of hidden_states")
    return taps, f"{NUMBERED} {list(ids)} are taken as {what}: the head reads hidden_states {list(taps)}"


def open_taps(values: dict[str, Any], place: Path) -> str | None:
    """What config.json alone leaves open, None where it names the states that the head reads.

    "unnamed": it names none. "ambiguous": it names some, in a numbering that only the target's number of blocks tells.
    """
    if values.get("after_blocks") is not None:
        return None
    found = values.get(NUMBERED)
    if found is None:
        found = table(values, "eagle_config", place).get(NUMBERED)
    if found is None:
        return "unnamed"
    begins_with_one = isinstance(found, list) and found[:1] == [1]
    return "ambiguous" if values.get("architectures") == [COUNTS_OUTPUTS] and not begins_with_one else None


def _own(values: dict[str, Any], place: Path) -> tuple[int, ...]:
    if values.get("tap_convention") != TAP_CONVENTION:
        raise UserError(
            f"{place}: tap_convention is {values.get('tap_convention')!r}; after_blocks must be entries of "
            f"transformers' hidden_states ({TAP_CONVENTION!r})"
        )
    return _ascending(values["after_blocks"], "after_blocks", place)


def _ascending(found: Any, name: str, place: Path) -> tuple[int, ...]:
    if not isinstance(found, list | tuple) or not all(type(k) is int and k >= 0 for k in found):
        raise UserError(f"{place}: {name} is {found!r}; it must be a list of block numbers")
    if not found or list(found) != sorted(set(found)):
        raise UserError(f"{place}: {name} {list(found)} must ascend without repeats")
    return tuple(found)


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
    Source: SafeAILab's EConfig. UserError for what is missing or no number.
    """
    if values.get("hidden_act", "silu") != "silu":
        raise UserError(f"{place}: hidden_act is {values['hidden_act']!r}; heads have 'silu'")
    if flag(values, "mlp_bias", place):
        raise UserError(f"{place}: mlp_bias is true; heads have no biases in their MLP")
    heads, width = whole(values, "num_attention_heads", place), whole(values, "hidden_size", place)
    own = values.get("max_position_embeddings") is not None
    positions = "max_position_embeddings" if own else "max_sequence_length"
    theta, scaling = read_rope(values, place)
    return {
        "hidden_size": width,
        "intermediate_size": whole(values, "intermediate_size", place),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(values, "num_key_value_heads", place, heads),
        "head_dim": whole(values, "head_dim", place, width // heads or None),
        "num_hidden_layers": whole(values, "num_hidden_layers", place, 1),
        "vocab_size": whole(values, "vocab_size", place),
        "rms_norm_eps": number(values, "rms_norm_eps", place, 1e-6),
        "max_position_embeddings": whole(values, positions, place, MAX_POSITIONS),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def read_rope(values: dict[str, Any], place: Path) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from the keys of transformers 4 (rope_scaling, "type") and 5 (rope_parameters)."""
    parameters, scaling = (table(values, name, place) for name in ("rope_parameters", "rope_scaling"))
    tables = {"config.json": values, "rope_parameters": parameters, "rope_scaling": scaling}
    bases = {name: number(found, "rope_theta", place) for name, found in tables.items() if found.get("rope_theta")}
    if len(set(bases.values())) > 1:
        told = ", ".join(f"{base:g} in {name}" for name, base in bases.items())
        raise UserError(f"{place}: rope_theta is {told}; the head was trained with one of them: take out the other")
    theta = next(iter(bases.values()), ROPE_THETA)
    scaling = {k: v for k, v in (scaling or parameters).items() if k != "rope_theta"}
    kind = scaling.pop("type", None)
    scaling = {"rope_type": kind, **scaling} if kind else scaling
    if scaling.get("rope_type", "default") == "default":
        return theta, None
    odd = [name for name, value in scaling.items() if name not in ROPE_WORDS and not _is_number_or_null(value)]
    missing = [name for name in ROPE_NUMBERS.get(str(scaling["rope_type"]), ()) if scaling.get(name) is None]
    if odd or missing:
        what = f"{odd[0]} is {scaling[odd[0]]!r}, no number" if odd else f"lacks {missing[0]}"
        raise UserError(f"{place}: rope_scaling of type {scaling['rope_type']!r}: {what}")
    return theta, scaling


def write_sizes(config: EagleConfig, destination: Destination) -> tuple[dict[str, Any], list[str]]:
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


def _is_number_or_null(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
