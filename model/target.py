"""The target: a stock causal LM, or the text part of a model that also reads images or sound.

It gives features, logits, and the weights that heads share.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from aerie.configs.errors import UserError, rank, warn
from aerie.configs.schema.heads import TargetConfig
from aerie.model.storage import first_line
from aerie.model.target_files import (
    auto_class,
    fingerprint,
    load_config,
    readable,
    rope_switch,
    skeleton,
    source_arguments,
    stored_tensors,
    target_end_ids,
    weights_size,
)
from aerie.model.vocab_weights import VocabWeights, final_transform

# Loading a target of more bytes is announced. The check of a target of more parameters is kept
# (infer/decode/check.py).
LARGE = 10**8
# what `Target.difference` tolerates; narrower dtypes: 0.25
TOLERANCE = {torch.float64: 3e-3, torch.float32: 3e-3, torch.float16: 0.1}


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
            **source_arguments(config),
            "device_map": config.device_map,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        hf_config = load_config(config)
        text_config = hf_config.get_text_config()
        if getattr(text_config, "attn_logit_softcapping", None) is not None:
            arguments["attn_implementation"] = "eager"  # sdpa has no softcap
        size = weights_size(config)
        if size >= LARGE and rank() == 0:
            print(f"loading {config.path} ({size / 1e9:.1f} GB)", file=sys.stderr, flush=True)
        # This refuses a damaged generation_config.json, which transformers would ignore.
        end_ids = target_end_ids(config)
        with readable(config, "load the target"):
            model, info = auto_class(hf_config).from_pretrained(config.path, **arguments)
            require_whole(model, info, config.path)
        for name, value in config.generation.items():
            if not hasattr(model.generation_config, name):
                raise UserError(
                    f"target.generation: {name} is no setting of transformers' GenerationConfig"
                )
            setattr(model.generation_config, name, value)
        with readable(config, "run the target"):
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


def family(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def local_device() -> str:
    """The GPU that a launcher gave this process, or 'cpu'."""
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return gpu if torch.cuda.is_available() else "cpu"


# --- parts of a target: its blocks are read only if they must be ----------------------------------


def load_vocab(config: TargetConfig) -> tuple[Any, VocabWeights]:
    """The text config and the VocabWeights; it reads the decoder blocks only if it must."""
    hf_config = load_config(config)
    text_config = hf_config.get_text_config()
    model = skeleton(config)
    embedding, lm_head = _vocab_layers(model, config.path)
    parameters = {"embedding": embedding.weight, "lm_head": lm_head.weight}
    if getattr(lm_head, "bias", None) is not None:
        parameters["bias"] = lm_head.bias
    tensors = stored_tensors(config, model, parameters)
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
    with readable(config, "read the final norm"):
        width = model.get_input_embeddings().weight.shape[1]
        norms = [
            name
            for name, part in _decoder(model).named_children()
            if getattr(getattr(part, "weight", None), "shape", None) == (width,)
        ]
        if not norms:
            return None
        norm: nn.Module = getattr(_decoder(model), norms[-1])  # if there are several, the last
        weights = stored_tensors(config, model, dict(norm.named_parameters()))
        if weights is None:
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
