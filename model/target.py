"""The target: a stock causal LM, or the text part of a model that also reads images or sound.

It gives features, logits, and the weights that heads share.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import cached_file

from aerie.configs.errors import UserError, rank, warn
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

# Loading a target of more bytes is announced. The check of a target of more parameters is kept
# (infer/decode/check.py).
LARGE = 10**8
# what `Target.difference` tolerates; narrower dtypes: 0.25
TOLERANCE = {torch.float64: 3e-3, torch.float32: 3e-3, torch.float16: 0.1}
# The keys of config.json that scale a target's logits, before a softcap.
FACTORS = ("logit_scale", "output_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
# Kinds whose models in transformers leave out the scale of their text part.
WITHOUT_THE_SCALE = ("aya_vision", "cohere2_vision")


@dataclass(frozen=True)
class VocabWeights:
    """The target's weights that draft heads share."""

    embedding: Tensor  # [V, D]
    lm_head: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    scale: float  # a factor of logits (Cohere's logit_scale, 1 / Granite's logits_scaling)
    softcap: float | None  # cap * tanh(logits / cap) (Gemma)
    # [D] the weight of the RMS norm that makes last_hidden; only if a recipe starts a head with it
    final_norm: Tensor | None = None

    def logits(self, last_hidden: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        """Logits [..., V], or only those of `rows`, from states [..., D] after the final norm."""
        rows = slice(None) if rows is None else rows
        weight = self.lm_head[rows]
        bias = None if self.bias is None else self.bias[rows]
        out = nn.functional.linear(last_hidden.to(weight.dtype), weight, bias)
        return transformed(out, self.scale, self.softcap)

    def to(self, device: torch.device | str) -> "VocabWeights":
        return replace(
            self,
            embedding=self.embedding.to(device),
            lm_head=self.lm_head.to(device),
            bias=None if self.bias is None else self.bias.to(device),
        )


@dataclass(frozen=True)
class TargetOutput:
    last_hidden: Tensor  # [B, T, D], after the final norm
    taps: Tensor | None  # [B, T, L*D]


class Target:
    """A frozen causal LM; UserError if its logits are not those of its LM head on last_hidden."""

    def __init__(self, model: PreTrainedModel, config: TargetConfig) -> None:
        self.model = model.eval().requires_grad_(False)
        self.recipe = config
        self.config = model.config.get_text_config()
        self.decoder = _decoder(model)
        self.decodes = set[str]()  # the forms of drafts that infer.decode.check has shown lossless
        self.rope_switch = rope_switch(self.config)
        embedding, lm_head = _vocab_layers(model, config.path)
        bias = getattr(lm_head, "bias", None)
        self.vocab = VocabWeights(
            embedding.weight.detach(),
            lm_head.weight.detach(),
            None if bias is None else bias.detach(),
            *final_transform(model.config),
        )
        self.dtype = self.vocab.lm_head.dtype
        self.hidden_size = int(self.vocab.embedding.shape[1])
        self.num_blocks = int(self.config.num_hidden_layers)
        self.generation_config = cast(GenerationConfig, model.generation_config)
        self._check_logits()
        if self.config is not model.config and not model.config.is_encoder_decoder:
            self._keep_the_text_part()

    @torch.inference_mode()
    def _keep_the_text_part(self) -> None:
        """Frees what reads images or sound: decoder and LM head alone make the logits."""
        needed = {self.decoder, self.model.get_output_embeddings()}
        freed: list[tuple[nn.Module, str, nn.Module]] = []
        # The list grows while it is read: modules that contain a needed one are searched in turn.
        parents: list[nn.Module] = [self.model]
        for parent in parents:
            for name, child in parent.named_children():
                if child in needed:
                    continue
                if any(part in needed for part in child.modules()):
                    parents.append(child)
                else:
                    freed.append((parent, name, child))
        for parent, name, _ in freed:
            setattr(parent, name, nn.Module())  # to call it is an error
        try:
            self.model(input_ids=torch.ones(1, 2, dtype=torch.long, device=self.device))
        except Exception:  # Gemma-3n's forward calls these parts for text, too
            for parent, name, child in freed:
                setattr(parent, name, child)

    def _check_logits(self) -> None:
        """UserError if the LM head on last_hidden does not give the model's own logits."""
        name = f"{self.recipe.path}: {family(self.model)}"
        ids = torch.arange(1, 5, device=self.device)[None]  # [1, 4]
        try:
            with torch.inference_mode():
                expected = self.model(input_ids=ids, use_cache=False).logits.float()
                logits = self.logits(self.features(ids).last_hidden).float().to(expected.device)
        except Exception as error:  # a model that is no plain causal LM may raise anything
            raise UserError(f"{name} gives no logits: {first_line(error)}") from error
        difference = (expected - logits).abs().max().item()
        # `not <=` also refuses logits that are not finite
        if not difference <= 1e-3 * max(1.0, expected.abs().max().item()):
            raise UserError(
                f"{name}: its logits differ from the LM head's by {difference:.2g} (nan: broken "
                "weights, or target.dtype is too narrow); drafting would not be lossless"
            )

    @classmethod
    def load(cls, config: TargetConfig, device: torch.device | str | None = None) -> "Target":
        """The target on a device, or spread by config.device_map; UserError if it does not load."""
        # With the last two settings, the loading info also lists weights of other shapes.
        arguments = {
            "dtype": config.dtype,
            **_source(config),
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        if config.device_map is not None:
            arguments["device_map"] = config.device_map
        hf_config = load_config(config)
        text_config = hf_config.get_text_config()
        if getattr(text_config, "attn_logit_softcapping", None) is not None:
            arguments["attn_implementation"] = "eager"  # sdpa has no softcap
        size = weights_size(config)
        if size >= LARGE and rank() == 0:
            print(f"loading {config.path} ({size / 1e9:.1f} GB)", file=sys.stderr, flush=True)
        end_ids = target_end_ids(
            config
        )  # refuses a damaged generation_config.json, which transformers ignores
        with _readable(config, "load the target"):
            model, info = auto_class(hf_config).from_pretrained(config.path, **arguments)
            require_whole(model, info, config.path)
        for name, value in config.generation.items():
            if not hasattr(model.generation_config, name):
                raise UserError(
                    f"target.generation: {name} is no setting of transformers' GenerationConfig"
                )
            setattr(model.generation_config, name, value)
        with _readable(config, "run the target"):
            if config.device_map is None and device is not None:
                model = model.to(device)
            target = cls(model, config)
        rows = len(target.vocab.embedding)
        outside = sorted(end_ids - {*range(rows)})
        if outside:
            warn(
                f"{config.path}: generation_config: eos_token_id {outside} "
                f"is none of its {rows:,} tokens"
            )
        return target

    @property
    def device(self) -> torch.device:
        """The device of the LM head, which is also the draft head's."""
        return self.vocab.lm_head.device

    def logits(self, last_hidden: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        return self.vocab.logits(last_hidden, rows)

    @torch.inference_mode()
    def features(self, input_ids: Tensor, after_blocks: tuple[int, ...] = ()) -> TargetOutput:
        """One forward over right-padded input_ids [B, T].

        after_blocks: the taps, as indices of transformers' hidden_states.
        """
        # No mask: causal attention never sees the padding on its right. transformers keeps only the
        # states of these blocks.
        out = self.decoder(
            input_ids=input_ids, use_cache=False, output_hidden_states=[*after_blocks]
        )
        # The blocks may be on other devices.
        taps = [out.hidden_states[k].to(self.device) for k in after_blocks]
        return TargetOutput(
            out.last_hidden_state.to(self.device), torch.cat(taps, dim=-1) if taps else None
        )

    def difference(self, logits: Tensor, expected: Tensor) -> float | None:
        """How far logits [..., V] are from expected ones; None: within the dtype's rounding.

        The measure is the root mean square error, relative to the expected logits' deviation.
        """
        logits = logits.float()
        expected = expected.float().to(logits.device)
        errors = (logits - expected).square().mean(-1).sqrt()  # [...]
        errors = errors / expected.std(-1).clamp_min(1e-9)
        # In a narrow dtype a router may choose other experts at single tokens. The median ignores
        # these.
        is_exact = self.dtype in (torch.float32, torch.float64)
        error = float(errors.max() if is_exact else errors.median())
        return None if error <= TOLERANCE.get(self.dtype, 0.25) else error

    def fingerprint(self) -> str:
        return fingerprint(self.recipe, self.config, self.vocab)


def require_whole(model: PreTrainedModel, info: Mapping[str, Any], path: str) -> None:
    """UserError for weights that are missing, misshapen or misread; warns of unread ones.

    info: the loading info of transformers' from_pretrained.
    """
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    for name, shape, expected in sorted(info["mismatched_keys"]):
        wrong.append(f"{name} is {[*shape]}, not {[*expected]}")
    tied = model.get_expanded_tied_weights_keys(all_submodels=True).keys()
    for name in sorted(tied - model.all_tied_weights_keys):  # transformers unties unequal ones
        wrong.append(f"{name} is not tied as tie_word_embeddings says")
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    unread: list[str] = []
    for name in sorted(info["unexpected_keys"]):
        # an extra bias or scale; the scales of a server's cache are harmless
        if name.rpartition(".")[0] in owners and not name.endswith((".k_scale", ".v_scale")):
            wrong.append(f"{name} has no place in the model")
        else:
            unread.append(name)
    if wrong:
        others = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
        raise UserError(
            f"{path}: its weights do not fit its config.json: {', '.join(wrong[:3])}{others}; "
            "fetch both again, or mend config.json"
        )
    if unread:
        warn(
            f"{path}: transformers does not read {len(unread):,} weights of its files: "
            f"{unread[0]} has no place in {type(model).__name__}"
        )


def family(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def transformed(out: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The LM head's outputs after the target's scale and softcap."""
    if scale != 1.0:
        out = out * scale
    return out if softcap is None else torch.tanh(out / softcap) * softcap


def final_transform(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) of the logits of a model with this config."""
    text_config = config.get_text_config()
    scale = 1.0
    if config.model_type not in WITHOUT_THE_SCALE:
        for factor in FACTORS:
            scale *= float(getattr(text_config, factor, None) or 1.0)
        for divisor in DIVISORS:
            scale /= float(getattr(text_config, divisor, None) or 1.0)
    softcap = getattr(text_config, "final_logit_softcapping", None)
    return scale, None if softcap is None else float(softcap)


def local_device() -> str:
    """The GPU that a launcher gave this process, or 'cpu'."""
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return gpu if torch.cuda.is_available() else "cpu"


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


def load_config(config: TargetConfig) -> Any:
    """transformers' configuration; UserError also if a local target's weights are missing."""
    quieten()
    with _readable(config, "read the target's configuration"):
        hf_config = AutoConfig.from_pretrained(config.path, **_source(config))
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
            with _readable(config, f"read {name}"):
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


def load_tokenizer(config: TargetConfig) -> Any:
    with _readable(config, "load the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(config.path, **_source(config))
    if config.chat_template is not None:
        with _readable(config, f"read target.chat_template {config.chat_template}"):
            tokenizer.chat_template = template_path(config.chat_template).read_text("utf-8")
    return tokenizer


def target_end_ids(config: TargetConfig, tokenizer: Any = None) -> set[int]:
    """EOS ids of the tokenizer, if given, and of the generation config, if there is one."""
    ids = {getattr(tokenizer, "eos_token_id", None)}
    with _readable(config, "read generation_config.json"):
        if _file(config, "generation_config.json") is not None:
            generation = GenerationConfig.from_pretrained(config.path, revision=config.revision)
            stops = generation.eos_token_id
            ids.update(stops if isinstance(stops, list) else [stops])
        return {int(number) for number in ids if number is not None}


def weight_files(config: TargetConfig) -> tuple[list[str], dict[str, str]]:
    """The names of the files that transformers reads, and of each tensor's shard, if any."""
    with _readable(config, "find the weights"):
        for name in TARGET_WEIGHTS:
            path = _file(config, name)
            if path is not None and path.suffix == ".json":
                shards = weight_map(path)
                return sorted(set(shards.values())), shards
            if path is not None:
                return [path.name], {}
        return [], {}


def _file(config: TargetConfig, name: str) -> Path | None:
    local = Path(config.path, name)
    if os.path.lexists(local) and not local.is_file():
        raise UserError(f"{local}: is no regular file, or a broken link; fetch it again")
    path = cached_file(
        config.path, name, revision=config.revision, _raise_exceptions_for_missing_entries=False
    )
    return None if path is None else Path(path)


def skeleton(config: TargetConfig) -> Any:
    """The target's model on the meta device: shapes without weights."""
    with _readable(config, "build the target"), torch.device("meta"):
        hf_config = load_config(config)
        return auto_class(hf_config).from_config(
            hf_config, trust_remote_code=config.trust_remote_code
        )


def load_vocab(config: TargetConfig) -> tuple[Any, VocabWeights]:
    """The text config and the VocabWeights; it reads the decoder blocks only if it must."""
    hf_config = load_config(config)
    text_config = hf_config.get_text_config()
    tensors = _stored_vocab(config)
    if tensors is None:
        target = Target.load(config)
        return target.config, target.vocab
    # With dtype auto, the configuration's dtype counts, else the file's.
    dtype = getattr(torch, config.dtype, None) or getattr(text_config, "dtype", None)
    dtype = dtype or tensors["embedding"].dtype
    weights = {role: tensor.to(dtype) for role, tensor in tensors.items()}
    return text_config, VocabWeights(
        weights["embedding"],
        weights["lm_head"],
        weights.get("bias"),
        *final_transform(hf_config),
    )


def _stored_vocab(config: TargetConfig) -> dict[str, Tensor] | None:
    """The tensors "embedding", "lm_head" and, if there is one, "bias", from safetensors files.

    None if another format, or other names or shapes, make it necessary to load the whole model.
    """
    model = skeleton(config)
    embedding, lm_head = _vocab_layers(model, config.path)
    weights = {"embedding": embedding.weight, "lm_head": lm_head.weight}
    if getattr(lm_head, "bias", None) is not None:
        weights["bias"] = lm_head.bias
    # Of tied weights this is the first name, which is the one in the file.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stored: dict[str, Tensor] = {}
    for role, weight in weights.items():
        tensor = _stored(config, names[id(weight)])
        if tensor is None or tensor.shape != weight.shape:
            return None
        stored[role] = tensor
    return stored


def _stored(config: TargetConfig, name: str) -> Tensor | None:
    """The tensor with this name, if a safetensors file has it."""
    _, shards = weight_files(config)
    with _readable(config, "load the target"):
        file = _file(config, shards.get(name, WEIGHTS))
        if file is not None and file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt") as handle:
                if name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                    return handle.get_tensor(name).clone()
    return None


@torch.no_grad()
def final_norm(config: TargetConfig) -> Tensor:
    """The weight [D] of the RMS norm that makes last_hidden; UserError for another kind of norm."""
    model = skeleton(config)
    norm = _final_norm(config, model)
    if norm is not None and getattr(norm, "bias", None) is None:
        norm = norm.float()
        weight = cast(Tensor, norm.weight)
        width = len(weight)
        x = torch.linspace(0.0, 1.0, width)
        for factor in (weight, weight + 1.0):  # Gemma's files store it minus one
            expected = nn.functional.rms_norm(x, (width,), factor)
            if torch.allclose(norm(x), expected, rtol=1e-3, atol=1e-3):
                return factor.detach()
    raise UserError(
        f"head.norm_init: {config.path}: {family(model)} ends in no RMS norm; leave norm_init out"
    )


def _final_norm(config: TargetConfig, model: Any) -> nn.Module | None:
    """The norm that makes last_hidden, with the files' weights; None: the model has no such norm.

    model: without weights.
    """
    with _readable(config, "read the final norm"):
        width = model.get_input_embeddings().weight.shape[1]
        norms = [
            name
            for name, part in _decoder(model).named_children()
            if getattr(getattr(part, "weight", None), "shape", None) == (width,)
        ]
        if not norms:
            return None
        norm: nn.Module = getattr(_decoder(model), norms[-1])  # if there are several, the last
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        weights = {
            role: _stored(config, names[id(parameter)])
            for role, parameter in norm.named_parameters()
        }
        if any(weight is None for weight in weights.values()):  # another format, or other names
            norm = getattr(Target.load(config).decoder, norms[-1]).cpu()
        else:
            norm.load_state_dict(weights, assign=True)
        return norm.requires_grad_(False)


@dataclass(frozen=True)
class TargetShell:
    """A target without its blocks: only what comes before and after them."""

    recipe: TargetConfig
    config: Any  # the text part's
    vocab: VocabWeights
    norm: nn.Module  # makes last_hidden of the last block's output

    @property
    def dtype(self) -> torch.dtype:
        return self.vocab.lm_head.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.vocab.embedding.shape[1])

    def fingerprint(self) -> str:
        return fingerprint(self.recipe, self.config, self.vocab)


def load_shell(config: TargetConfig) -> TargetShell:
    """The shell; it reads the blocks only if it must. UserError if no norm follows the blocks."""
    text_config, vocab = load_vocab(config)
    model = skeleton(config)
    norm = _final_norm(config, model)
    if norm is None:
        raise UserError(f"{config.path}: {family(model)} has no norm after its blocks")
    return TargetShell(config, text_config, vocab, norm.to(vocab.lm_head.dtype))


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


def _vocab_layers(model: Any, path: str) -> tuple[Any, Any]:
    """The embedding and the LM head of a model's text part."""
    try:
        layers = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:
        layers = None, None
    if None in layers:
        raise UserError(
            f"{path}: transformers finds no embedding or no LM head in {family(model)}; "
            "name the checkpoint of its text model"
        )
    return layers


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder  # Llama 4 names no decoder


def _source(config: TargetConfig) -> dict[str, Any]:
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


@contextmanager
def _readable(config: TargetConfig, what: str) -> Iterator[None]:
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
