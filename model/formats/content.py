"""What all layouts share: a head's content, Llama's sizes, RoPE and the taps."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.heads import TargetConfig
from aerie.model.heads import HEADS, AnyConfig
from aerie.model.heads.eagle import TAP_CONVENTION, Eagle1Config, Eagle3Config
from aerie.model.layers import Rotary, fixed_scaling, yarn_factor
from aerie.model.storage import first_line
from aerie.model.target import load_vocab
from aerie.model.target_files import default_taps, load_config, other_weights, target_end_ids
from aerie.model.vocab_weights import VocabWeights

ConfigT = TypeVar("ConfigT", bound=AnyConfig)
TARGET_DTYPE = "target_dtype"  # a key under "aerie" in an export's config.json
SPECULATIVE_TOKENS = 5  # speculators' default for EAGLE-3
VLLM_FAULTS = {  # by option and value: what vLLM 0.32 does with it
    ("bias", True): "vLLM drops fc.bias in silence, and drafts rubbish",
    ("markov_head", "gated"): "vLLM stops at the tensor gate_proj of markov_head: gated",
}
RenameRule = tuple[str, str | Callable[[re.Match[str]], str]]  # pattern and replacement of re.sub


@dataclass(frozen=True)
class HeadFiles:
    config_path: Path
    values: dict[str, Any]
    weights_path: Path
    tensors: dict[str, Tensor]
    after_blocks: tuple[int, ...] | None = None  # used if the files name no taps


@dataclass(frozen=True)
class HeadContent:
    """A head with our names for its tensors, without those that its file leaves out."""

    config: AnyConfig
    tensors: dict[str, Tensor]
    guesses: tuple[str, ...] = ()  # sentences about what the files do not say
    is_embedding_optional: bool = False  # if the file has none, it is the target's
    speculative_tokens: int | None = None  # how many tokens a server drafts per cycle

    @property
    def kind(self) -> str:
        return next(name for name, kind in HEADS.items() if kind.config is type(self.config))

    @property
    def drafts(self) -> int:
        """How many tokens a server shall draft per cycle: what the file says, else all it can."""
        config: Any = self.config
        levels: int = getattr(config, "num_heads", SPECULATIVE_TOKENS)
        places: int = getattr(config, "num_drafted", levels)
        return self.speculative_tokens or places

    @property
    def method(self) -> str:
        """vLLM's name of the head's method; "": vLLM has none."""
        return "dspark" if getattr(self.config, "markov_rank", 0) else HEADS[self.kind].method


@dataclass(frozen=True)
class TargetFacts:
    """A target without its decoder blocks."""

    path: str
    text_config: Any
    vocab: VocabWeights
    name: str  # what servers shall load
    architectures: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, path: str, name: str | None = None) -> "TargetFacts":
        config = TargetConfig(path)
        architectures = tuple(load_config(config).architectures or ())
        text_config, vocab = load_vocab(config)
        return cls(
            path, text_config, vocab, name or path, architectures, tuple(target_end_ids(config))
        )

    def other_weights(self, recorded: str | None) -> str | None:
        return other_weights(recorded, TargetConfig(self.path), self.text_config, self.vocab)

    @property
    def default_taps(self) -> tuple[int, ...] | None:
        return default_taps(self.text_config.num_hidden_layers)


Export = tuple[dict[str, Any], dict[str, Tensor], list[str]]


class Formats(NamedTuple):
    """How other programs lay out a kind of head."""

    # (files, layout) -> the head's content
    read: Callable[[HeadFiles, str], HeadContent]
    # (layout, config, target if known): UserError for what the layout's readers would drop or
    # misread
    refuse: Callable[[str, Any, TargetFacts | None], None]
    # (layout, head, target) -> config.json's values, tensors and notes
    write: Callable[[str, HeadContent, TargetFacts], Export]


def vllm_faults(config: AnyConfig) -> list[str]:
    """Why vLLM does not draft as this head does, although the layout can carry the head."""
    return [
        fault
        for (option, value), fault in VLLM_FAULTS.items()
        if getattr(config, option, None) == value
    ]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nested(values: Any, *keys: str) -> dict[str, Any]:
    """The table under nested keys; {} if there is none."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def renamed(tensors: dict[str, Tensor], rules: Sequence[RenameRule]) -> dict[str, Tensor]:
    """The tensors, renamed by each rule in turn; an empty new name drops the tensor."""
    for pattern, replacement in rules:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    tensors.pop("", None)
    return tensors


def proposed_tokens(values: dict[str, Any]) -> int | None:
    """How many tokens servers draft per cycle, if speculators' config.json says so."""
    proposals = nested(values, "speculators_config").get("proposal_methods")
    return proposals[0].get("speculative_tokens") if proposals else None


NUMBERED = "eagle_aux_hidden_state_layer_ids"
COUNTS_OUTPUTS = "LlamaForCausalLMEagle3"  # SpecForge's and SGLang's architecture
DEFAULT_POSITIONS = 2048  # the default of SafeAILab's EConfig
ATTENTION_FACTOR = "attn_factor"  # as vLLM and SGLang read it
LLAMA_KEYS = (  # Llama's keys that EAGLE heads have
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim vocab_size hidden_act rms_norm_eps max_position_embeddings rope_theta"
).split()


def configured(schema: type[ConfigT], values: dict[str, Any], path: Path) -> ConfigT:
    """A head's checked configuration; a value of None stands for the default.

    UserError for a value that is wrong, or that heads do not support.
    """
    present = {name: value for name, value in values.items() if value is not None}
    config: Any = validate(present, schema, str(path), {})
    for name, size in vars(config).items():
        if isinstance(size, int | float) and not isinstance(size, bool):
            _check_size(name, size, path)
    if getattr(config, "hidden_act", "silu") != "silu":
        raise UserError(f"{path}: hidden_act is {config.hidden_act!r}; heads have 'silu'")
    try:
        if getattr(config, "rope_theta", None) is not None:
            Rotary(config)
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(
            f"{path}: rope_scaling {config.rope_scaling}: {first_line(error)}"
        ) from error
    return config


def _check_size(name: str, size: Any, path: Path) -> None:
    """UserError for a size with which the head could not be built, or would fill the memory."""
    limit: float = 2**10 if name.startswith("num_") else 2**24
    if isinstance(size, float):
        limit = math.inf
    # the size must be above this
    below = -1 if name.endswith(("_id", "_rank")) else int(name == "block_size")
    if not below < size < limit:
        raise UserError(f"{path}: {name} is {size:,}; it must be above {below} and below {limit:,}")


def read_sizes(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The sizes of an EAGLE or block head; their defaults are those of SafeAILab's EConfig."""
    width = values.get("hidden_size")
    heads = values.get("num_attention_heads")
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": values.get("max_sequence_length") or DEFAULT_POSITIONS,
    }
    if isinstance(width, int) and isinstance(heads, int) and heads:
        sizes["head_dim"] = width // heads
    sizes |= {name: values[name] for name in LLAMA_KEYS if values.get(name) is not None}
    theta, scaling = read_rope(values, path)
    return {**sizes, "rope_theta": theta, "rope_scaling": scaling}


def read_rope(values: dict[str, Any], path: Path) -> tuple[float, dict[str, Any] | None]:
    """RoPE's base and scaling, from the keys of transformers 4 or 5.

    The default base is the published 10,000, not the target's.
    """
    parameters = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling") or {}
    tables = {"rope_parameters": parameters, "rope_scaling": scaling, "config.json": values}
    bases = {name: table["rope_theta"] for name, table in tables.items() if table.get("rope_theta")}
    if len(set(bases.values())) > 1:
        spelt = ", ".join(f"{base} in {name}" for name, base in bases.items())
        raise UserError(f"{path}: rope_theta is {spelt}; keep the one of the head's training")
    scaling = dict(scaling or parameters)
    scaling.pop("rope_theta", None)
    partial = scaling.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise UserError(
            f"{path}: partial_rotary_factor is {partial}, which is not supported: "
            "heads rotate all of each attention head"
        )
    if "type" in scaling:  # the key of transformers 4
        scaling.setdefault("rope_type", scaling.pop("type"))
    context = values.get("max_position_embeddings") or values.get("max_sequence_length")
    try:
        if ATTENTION_FACTOR in scaling:
            factor = scaling[ATTENTION_FACTOR] * yarn_factor(scaling["factor"])
            scaling.setdefault("attention_factor", factor)
        complete = fixed_scaling(scaling, context or DEFAULT_POSITIONS)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: rope_scaling {scaling}: {first_line(error)}") from error
    is_plain = scaling.get("rope_type", "default") == "default"
    return next(iter(bases.values()), 10000.0), None if is_plain else complete or scaling


def write_sizes(
    config: Eagle1Config | Eagle3Config, target: TargetFacts
) -> tuple[dict[str, Any], list[str]]:
    """The keys of config.json that all layouts share, and notes."""
    notes = []
    scaling = config.rope_scaling or {}
    positions = config.max_position_embeddings
    target_positions = int(getattr(target.text_config, "max_position_embeddings", 0) or 0)
    # Beyond the head's positions servers draft nothing, or noise. So the longer number is written,
    # if RoPE does not depend on it.
    if target_positions > positions and scaling.get("rope_type") in (None, "linear", "llama3"):
        notes.append(
            f"max_position_embeddings {positions:,} is written as {target_positions:,}, "
            "the target's: servers stop drafting there"
        )
        positions = target_positions
    if "attention_factor" in scaling:  # vLLM and SGLang read another key
        factor = scaling["attention_factor"] / yarn_factor(scaling["factor"])
        scaling = {**scaling, ATTENTION_FACTOR: factor}
    return {
        "model_type": "llama",
        **{name: getattr(config, name) for name in LLAMA_KEYS},
        "max_position_embeddings": positions,
        "rope_scaling": dict(scaling) or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
    }, notes


def tap_numbers(values: dict[str, Any]) -> Any:
    """The taps of a config.json in its own numbering; None if it names none."""
    return values.get(NUMBERED) or nested(values, "eagle_config").get(NUMBERED)


def read_taps(
    values: dict[str, Any],
    fallback: tuple[int, ...] | None,
    path: Path,
    is_speculators: bool = False,
) -> tuple[tuple[int, ...], list[str]]:
    """after_blocks (the fallback if config.json names none), and what was guessed.

    Two numberings are in use: entries of hidden_states, and outputs of blocks, which are one less.
    """
    after_blocks = values.get("after_blocks")
    numbers = tap_numbers(values)
    _check_numbers("after_blocks", after_blocks, path)
    _check_numbers(NUMBERED, numbers, path)
    fix = f'entries of transformers\' hidden_states with "tap_convention": {TAP_CONVENTION!r}'
    if after_blocks is not None:
        if values.get("tap_convention") != TAP_CONVENTION:
            raise UserError(
                f"{path}: tap_convention is {values.get('tap_convention')!r}; "
                f"after_blocks must be {fix}"
            )
        return tuple(after_blocks), []
    if numbers is None:
        if fallback is None:
            raise UserError(
                f"{path}: names no taps; load the head with its target, "
                f'or add "after_blocks", {fix}'
            )
        return fallback, [f"names no taps; {list(fallback)} are taken (entries of hidden_states)"]
    entries = tuple(numbers)
    if is_speculators:
        return entries, []
    taps, what = entries, "entries of hidden_states"
    if _counts_outputs(entries, fallback, values.get("architectures")):
        taps, what = tuple(number + 1 for number in numbers), "outputs of blocks"
    return taps, [
        f"{NUMBERED} {numbers} are taken as {what}, so the head reads hidden_states {list(taps)}"
    ]


def _check_numbers(name: str, numbers: Any, path: Path) -> None:
    is_list = isinstance(numbers, list) and all(type(number) is int for number in numbers)
    is_ascending = is_list and numbers and numbers[0] >= 0 and numbers == sorted(set(numbers))
    if numbers is not None and not is_ascending:
        raise UserError(
            f"{path}: {name} is {numbers!r}; block numbers must be a list, and must ascend "
            "without repeats"
        )


def _counts_outputs(
    numbers: tuple[int, ...], default_taps: tuple[int, ...] | None, architectures: Any
) -> bool:
    """Whether the numbers count outputs of blocks.

    If they are the target's default taps, these tell; else the first number and the architecture.
    """
    if default_taps in (numbers, tuple(number + 1 for number in numbers)):
        return default_taps != numbers
    is_trained_so = default_taps is not None and architectures == [COUNTS_OUTPUTS]
    return numbers[0] == 1 or is_trained_so


def unread(values: dict[str, Any]) -> tuple[str, ...]:
    """A sentence for each key that matters to drafting, but that aerie ignores."""
    sentences: dict[str, Any] = {}  # whether it applies
    parts = [values, nested(values, "transformer_layer_config"), nested(values, "eagle_config")]
    for part in parts:
        kinds = part.get("layer_types") or []
        window = part.get("sliding_window")
        others = sorted({str(kind) for kind in kinds} - {"full_attention"})
        is_windowed = window is not None and part.get("use_sliding_window", True)
        is_windowed = is_windowed and (others or not kinds)
        for sentence, applies in (
            (f"layer_types names {', '.join(others)}: aerie's attention is full", others),
            (f"sliding_window is {window}: aerie's attention is full", is_windowed),
            ("parallel_drafting: aerie drafts token by token", part.get("parallel_drafting")),
            (
                "quantization_config: aerie reads the weights as they are",
                part.get("quantization_config"),
            ),
        ):
            if applies:
                sentences[sentence] = True
    return tuple(sentences)
