"""What a target's files say: it is read without loading the model."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import cached_file

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe
from aerie.model.hub import hub_answer, quieten, require_target, weights_digests
from aerie.model.storage import (
    TARGET_WEIGHTS,
    WEIGHTS,
    digest,
    first_line,
    read_json,
    template_path,
    weight_map,
)
from aerie.model.vocab_weights import VocabWeights


@contextmanager
def readable(config: TargetConfig, what: str) -> Iterator[None]:
    """Turns whatever a library raises into a UserError: files can be broken in any way."""
    require_target(config.path)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = first_line(error)
        if not isinstance(error, OSError | ValueError | ImportError | SafetensorError):
            text = f"{type(error).__name__}: {text}"
        why = hub_answer(error) or f"cannot {what}: {text}"
        if "trust_remote_code" in str(error):
            why = "has code of its own; read the code, then add --target.trust_remote_code true"
        elif "config.json" in text and "JSON file" not in text:
            why += (
                " (a target must be a whole model: merge a LoRA adapter into its model first; "
                "GGUF is not read)"
            )
        raise UserError(f"{config.path}: {why}") from error


def source_arguments(config: TargetConfig) -> dict[str, Any]:
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def _file(config: TargetConfig, name: str) -> Path | None:
    local = Path(config.path, name)
    if os.path.lexists(local) and not local.is_file():
        raise UserError(f"{local}: is no regular file, or a broken link; fetch it again")
    path = cached_file(
        config.path, name, revision=config.revision, _raise_exceptions_for_missing_entries=False
    )
    return None if path is None else Path(path)


# --- the configuration ----------------------------------------------------------------------------


def load_config(config: TargetConfig) -> Any:
    """transformers' configuration; UserError also if a local target's weights are missing."""
    quieten()
    with readable(config, "read the target's configuration"):
        hf_config = AutoConfig.from_pretrained(config.path, **source_arguments(config))
        for part in (hf_config, hf_config.get_text_config()):
            settings = getattr(part, "quantization_config", None)
            # transformers skips a quantisation that it does not know.
            if isinstance(settings, dict) and not AutoHfQuantizer.supports_quant_method(settings):
                raise ValueError(
                    f"quantization_config: quant_method {settings.get('quant_method')!r} "
                    "is not known"
                )
    if not Path(config.path).is_dir():
        return hf_config
    # A local target must have weights, and no truncated file.
    names, _ = weight_files(config)
    if not names:
        raise UserError(
            f"{config.path}: holds no weights; fetch {WEIGHTS}, or its shards and their index"
        )
    for name in names:
        if not name.endswith(".bin"):
            with readable(config, f"read {name}"):
                safe_open(Path(config.path, name), framework="pt")
    return hf_config


def auto_class(hf_config: Any) -> Any:
    """The class that builds the model: a causal LM, else one that also reads images or sound."""
    kind = type(hf_config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(hf_config, "auto_map", None):
        return AutoModelForCausalLM
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    if hasattr(hf_config, "vision_config") or hasattr(hf_config, "audio_config"):
        raise UserError(
            f"{hf_config.model_type} reads images or sound, and transformers builds no model of it "
            "with a text part; name the checkpoint of its text model"
        )
    return AutoModelForCausalLM


def skeleton(config: TargetConfig) -> Any:
    """The target's model on the meta device: shapes without weights."""
    with readable(config, "build the target"), torch.device("meta"):
        hf_config = load_config(config)
        return auto_class(hf_config).from_config(
            hf_config, trust_remote_code=config.trust_remote_code
        )


def only_trains(hf_config: Any) -> str | None:
    """A sentence if some layers are not plain attention (recurrent ones), else None."""
    text = hf_config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or [])} | {text.model_type} & {"rwkv", "xlstm"}
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if not others:
        return None
    return (
        f"{text.model_type} has {others} layers, and drafts need plain attention: "
        "heads can be trained and exported for it, but aerie does not decode with it"
    )


def context_of(text_config: Any) -> int | None:
    """How many tokens the target can read; None: not known."""
    mpt = getattr(text_config, "max_seq_len", None)
    return getattr(text_config, "max_position_embeddings", None) or mpt


def rope_switch(text_config: Any) -> int | None:
    """The position of LongRoPE's switch; None: the target has no LongRoPE.

    A forward that reaches this position rotates all its rows by other factors.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for part in (parameters, *parameters.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            return int(part["original_max_position_embeddings"])
    return None


# --- the weights ----------------------------------------------------------------------------------


def weights_size(config: TargetConfig) -> int:
    """Bytes of the weights, downloaded or not; 0 if unknown."""
    directory, revision = Path(config.path), config.revision
    if directory.is_dir():
        files = [*directory.glob("model*.safetensors")] or [*directory.glob("pytorch_model*.bin")]
        return sum(file.stat().st_size for file in files)
    with suppress(OSError):  # fails if the weights are several files
        return int(hf_hub_download(config.path, WEIGHTS, revision=revision, dry_run=True).file_size)
    with suppress(OSError, UserError, LookupError):
        index = hf_hub_download(config.path, f"{WEIGHTS}.index.json", revision=revision)
        return int(read_json(Path(index))["metadata"]["total_size"])
    return 0


def weight_files(config: TargetConfig) -> tuple[list[str], dict[str, str]]:
    """The names of the files that transformers reads, and of each tensor's shard, if any."""
    with readable(config, "find the weights"):
        for name in TARGET_WEIGHTS:
            path = _file(config, name)
            if path is not None and path.suffix == ".json":
                shards = weight_map(path)
                return sorted(set(shards.values())), shards
            if path is not None:
                return [path.name], {}
        return [], {}


def stored_tensors(
    config: TargetConfig, model: Any, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """The tensors of some of the model's parameters, from safetensors files.

    None if another format, or other names or shapes, make it necessary to load the whole model.
    """
    # Of tied weights this is the first name, which is the one in the file.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stored: dict[str, Tensor] = {}
    for role, parameter in parameters.items():
        tensor = _stored_tensor(config, names[id(parameter)])
        if tensor is None or tensor.shape != parameter.shape:
            return None
        stored[role] = tensor
    return stored


def _stored_tensor(config: TargetConfig, name: str) -> Tensor | None:
    """The tensor with this name, if a safetensors file has it."""
    _, shards = weight_files(config)
    with readable(config, "load the target"):
        file = _file(config, shards.get(name, WEIGHTS))
        if file is not None and file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt") as handle:
                if name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                    return handle.get_tensor(name).clone()
    return None


def fingerprint(config: TargetConfig, text_config: Any, vocab: VocabWeights) -> str:
    """A digest of sizes and of the weights' files; of sampled weights, if there are no files."""
    names: list[str] = []
    with suppress(UserError):  # a model that the caller loaded may have no files
        names, _ = weight_files(config)
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    sizes = {key: getattr(text_config, key, None) for key in keys}
    if names:
        files = sorted(weights_digests(config.path, config.revision, names))
        return f"sha256:{digest([sizes, files])}"
    numbers = torch.stack([vocab.embedding, vocab.lm_head]).flatten()
    return digest([sizes, numbers[:: max(1, len(numbers) // 128)].float().tolist()])


def other_weights(
    recorded: str | None, config: TargetConfig, text_config: Any, vocab: VocabWeights
) -> str | None:
    """A sentence if a head or cache records another target than config's, else None."""
    if recorded is None:
        return None
    known = fingerprint(config, text_config, vocab)
    # A model without files cannot be compared with a record of files.
    if recorded == known or (":" in recorded and ":" not in known):
        return None
    return (
        f"was made for a target with other weight files than {config.path} "
        f"(fingerprint {recorded}, not {known})"
    )


# --- tokens ---------------------------------------------------------------------------------------


def load_tokenizer(config: TargetConfig) -> Any:
    with readable(config, "load the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(config.path, **source_arguments(config))
    if config.chat_template is not None:
        with readable(config, f"read target.chat_template {config.chat_template}"):
            tokenizer.chat_template = template_path(config.chat_template).read_text("utf-8")
    return tokenizer


def target_end_ids(config: TargetConfig, tokenizer: Any = None) -> set[int]:
    """EOS ids of the tokenizer, if given, and of the generation config, if there is one."""
    ids = {getattr(tokenizer, "eos_token_id", None)}
    with readable(config, "read generation_config.json"):
        if _file(config, "generation_config.json") is not None:
            generation = GenerationConfig.from_pretrained(config.path, revision=config.revision)
            stops = generation.eos_token_id
            ids.update(stops if isinstance(stops, list) else [stops])
        return {int(number) for number in ids if number is not None}


def require_same_token_ids(
    draft: Mapping[str, int], target: Mapping[str, int], num_rows: int, draft_name: str, name: str
) -> None:
    """UserError unless a draft LM with num_rows embeddings reads token ids as the target does.

    name: the target's.
    """
    tokens = {number: token for token, number in target.items()}
    fix = "choose a draft LM with the target's tokenizer"
    for token, number in draft.items():
        if target.get(token, number) != number or tokens.get(number, token) != token:
            raise UserError(
                f"{draft_name}: token {token!r} has id {number} in its tokenizer, "
                f"and another in that of {name}; {fix}"
            )
    if max(tokens, default=0) >= num_rows:
        raise UserError(
            f"{draft_name}: has {num_rows:,} token embeddings, "
            f"and {name} has tokens beyond them; {fix}"
        )


# --- the taps of a target with so many blocks -----------------------------------------------------


def default_taps(num_blocks: int) -> tuple[int, ...] | None:
    """EAGLE-3's low, middle and high taps; None: too few blocks."""
    return (2, num_blocks // 2, num_blocks - 3) if num_blocks >= 7 else None


def taps_of(recipe: Recipe, num_blocks: int) -> tuple[int, ...]:
    """The recipe's taps; by default EAGLE-3's, or none for kinds that read none."""
    path, taps = recipe.target.path, recipe.features.after_blocks
    if taps is None:
        taps = default_taps(num_blocks) if recipe.head.reads_taps else ()
    if taps is None:
        raise UserError(
            f"{path}: has {num_blocks} blocks, "
            "and the default taps (2, n//2, n-3) need at least 7; "
            "name its taps in features.after_blocks"
        )
    if recipe.head.reads_taps and not taps:
        raise UserError(
            f"features.after_blocks is empty: head {recipe.head.kind} needs at least one tap; "
            "leave the key out"
        )
    if max(taps, default=0) >= num_blocks:
        raise UserError(
            f"features.after_blocks: {max(taps)} is no tap of {path}, which has {num_blocks} "
            f"blocks; name taps up to {num_blocks - 1}"
        )
    return taps
