"""The target: any stock `AutoModelForCausalLM`, asked for features, final states and laws; no forked model files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.model.storage import digest, template_path

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TargetEnds:
    """The two ends of the target that a draft head needs: its embedding and its last_hidden -> logits transform."""

    embedding: Tensor  # [V, D]
    lm_head: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    scale: float  # logits are multiplied by it (Cohere's logit_scale, 1 / Granite's logits_scaling)
    softcap: float | None  # cap * tanh(logits / cap) (Gemma)

    def logits(self, last_hidden: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        """Logits [..., V] (or [..., len(rows)]) of states after the final norm [..., D], as the target has them."""
        weight, bias = self.lm_head, self.bias
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        out = nn.functional.linear(last_hidden.to(weight.dtype), weight, bias)
        return transformed(out, self.scale, self.softcap)

    def to(self, device: torch.device | str) -> "TargetEnds":
        bias = None if self.bias is None else self.bias.to(device)
        return TargetEnds(self.embedding.to(device), self.lm_head.to(device), bias, self.scale, self.softcap)


@dataclass(frozen=True)
class TargetOutput:
    """What one forward yields: last_hidden [B, T, D] after the final norm, and the taps [B, T, L*D] (None without)."""

    last_hidden: Tensor
    taps: Tensor | None


class Target:
    """A frozen causal LM with its own final transform."""

    def __init__(self, model: PreTrainedModel, config: TargetConfig) -> None:
        self.model = model.eval().requires_grad_(False)
        self.recipe = config
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        _refuse_recurrent(self.config, config.path)
        self.ends = _ends_of(model, self.config)
        self._check_final_transform()

    @classmethod
    def load(cls, config: TargetConfig, device: torch.device | str | None = None) -> "Target":
        """The target in eval mode; UserError when it cannot be read or is no causal LM with attention alone."""
        hf_config = load_config(config)
        text = hf_config.get_text_config()
        arguments: dict[str, Any] = {"dtype": config.dtype, "revision": config.revision}
        if config.device_map is not None:
            arguments["device_map"] = config.device_map
        if getattr(text, "attn_logit_softcapping", None) is not None:
            arguments["attn_implementation"] = "eager"  # sdpa has no softcap
        try:
            model = AutoModelForCausalLM.from_pretrained(
                config.path, trust_remote_code=config.trust_remote_code, **arguments
            )
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"{config.path}: cannot load the target: {_first_line(error)}") from error
        if config.device_map is None and device is not None:
            model = model.to(device)
        return cls(model, config)

    @property
    def device(self) -> torch.device:
        """Where laws are computed, which is where the draft head lives when the target spans several devices."""
        return self.ends.lm_head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.ends.lm_head.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.ends.embedding.shape[1])

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def generation_config(self) -> GenerationConfig:
        config = self.model.generation_config
        assert config is not None
        return config

    def logits(self, last_hidden: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        """See TargetEnds.logits."""
        return self.ends.logits(last_hidden, rows)

    @torch.inference_mode()
    def features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, after_blocks: tuple[int, ...] = ()
    ) -> TargetOutput:
        """One frozen forward over input_ids [B, T] (right-padded, attention_mask [B, T] with 1 for tokens).

        after_blocks are the residual streams after k blocks, 0 <= k < n (hidden_states[k] of transformers).
        """
        check_taps(after_blocks, self.num_blocks, self.recipe.path)
        out = self.decoder(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=bool(after_blocks)
        )
        # blocks of a target that spans several devices leave their states where they are
        taps = [out.hidden_states[k].to(self.device) for k in after_blocks]
        return TargetOutput(out.last_hidden_state.to(self.device), torch.cat(taps, dim=-1) if taps else None)

    def fingerprint(self) -> str:
        """A digest that changes when the weights of either end or the configuration change."""
        return fingerprint(self.config, self.ends)

    def _check_final_transform(self) -> None:
        """Laws built from a bare LM head are wrong for Gemma, Cohere and Granite: compare ours with the model's own."""
        ids = torch.arange(1, 5, device=self.device).remainder(self.ends.embedding.shape[0])[None]  # [1, 4]
        with torch.inference_mode():
            own = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.logits(self.features(ids).last_hidden).float().to(own.device)
        if not torch.isfinite(own).all():
            raise UserError(
                f"{self.recipe.path}: its logits of the tokens {ids[0].tolist()} are not finite; its weights are "
                f"broken, or target.dtype is too narrow for them (bfloat16, float32)"
            )
        error = (own - ours).abs().max().item()
        if not error <= 1e-3 * max(1.0, own.abs().max().item()):
            raise UserError(
                f"{self.recipe.path}: {type(self.model).__name__} turns its last state into logits in a way that aerie "
                f"does not know (difference {error:.2g}); drafting for it would not be lossless"
            )


def transformed(out: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logits from what an LM head returns: times scale, then softcap * tanh(logits / softcap)."""
    if scale != 1.0:
        out = out * scale
    return out if softcap is None else torch.tanh(out / softcap) * softcap


def load_config(config: TargetConfig) -> Any:
    """The target's transformers configuration."""
    _require_directory(config)
    try:
        return AutoConfig.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{config.path}: cannot read the target's configuration: {_first_line(error)}") from error


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer, with target.chat_template put in when the recipe names one.

    A directory with a tokenizer and no weights will do: a target that is trained from scratch begins with it.
    """
    _require_directory(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{config.path}: cannot load the tokenizer: {_first_line(error)}") from error
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    return tokenizer


def load_ends(config: TargetConfig, dtype: torch.dtype | None = None) -> tuple[Any, TargetEnds]:
    """The text configuration and the two ends alone, read from the safetensors files without loading the trunk.

    Training on cached features needs no more: 2 GB instead of 140 for a 70B target. Targets whose files name their
    tensors otherwise than their modules fall back to loading everything.
    """
    hf_config = load_config(config)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    names = {id(parameter): name for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    input_end, output_end = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    if input_end is None or output_end is None:
        raise UserError(f"{config.path}: {type(skeleton).__name__} has no embedding or no LM head")
    wanted = {"embedding": names[id(input_end.weight)]}
    if not hf_config.get_text_config().tie_word_embeddings:
        wanted["lm_head"] = names[id(output_end.weight)]
    if getattr(output_end, "bias", None) is not None:
        wanted["bias"] = names[id(output_end.bias)]
    found = _read_tensors(config, set(wanted.values()))
    if found is None:
        target = Target.load(config)
        return target.config, target.ends
    text = hf_config.get_text_config()
    dtype = dtype or _dtype(config.dtype, text, found[wanted["embedding"]])
    tensors = {role: found[name].to(dtype) for role, name in wanted.items()}
    embedding = tensors["embedding"]
    scale, softcap = final_transform(text)
    return text, TargetEnds(embedding, tensors.get("lm_head", embedding), tensors.get("bias"), scale, softcap)


def fingerprint(text_config: Any, ends: TargetEnds, dtype: torch.dtype | None = None) -> str:
    """A digest of the configuration's sizes and of samples of both ends' weights, where given rounded to dtype."""
    facts = {k: getattr(text_config, k, None) for k in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    samples = [_sample(ends.embedding, dtype), _sample(ends.lm_head, dtype)]
    return digest([facts, samples])


def fingerprints(text_config: Any, ends: TargetEnds) -> set[str]:
    """The fingerprints of a target whose weights lose nothing but digits on the way to another dtype."""
    return {fingerprint(text_config, ends, dtype) for dtype in (None, torch.bfloat16, torch.float16)}


def default_taps(num_blocks: int, path: str = "target") -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high taps (2, n // 2, n - 3); UserError below 7 blocks, where they collapse."""
    if num_blocks < 7:
        raise UserError(
            f"{path}: has {num_blocks} blocks, and the default taps (2, n//2, n-3) need at least 7; name its taps in "
            f"features.after_blocks, for example {list(range(1, num_blocks))[-3:]}"
        )
    return (2, num_blocks // 2, num_blocks - 3)


def taps_of(kind: str, after_blocks: tuple[int, ...] | None, num_blocks: int, path: str) -> tuple[int, ...]:
    """The taps that a head of this kind is given: the recipe's, or for null none, and the default ones for EAGLE-3.

    UserError for a tap that the target does not have, and for an EAGLE-3 head without any.
    """
    if after_blocks is None:
        after_blocks = default_taps(num_blocks, path) if kind == "eagle3" else ()
    if kind == "eagle3" and not after_blocks:
        raise UserError("features.after_blocks: empty, but an eagle3 head fuses at least one tap; leave the key out")
    check_taps(after_blocks, num_blocks, path)
    return after_blocks


def check_taps(after_blocks: tuple[int, ...], num_blocks: int, path: str) -> None:
    """UserError for a tap outside 0 <= k < n."""
    wrong = [k for k in after_blocks if not 0 <= k < num_blocks]
    if wrong:
        raise UserError(
            f"features.after_blocks: {wrong[0]} is no tap of {path}, which has {num_blocks} blocks "
            f"(0 is the embedding, {num_blocks - 1} the deepest; the state after the last block is last_hidden)"
        )


def _ends_of(model: PreTrainedModel, text_config: Any) -> TargetEnds:
    input_end, output_end = model.get_input_embeddings(), model.get_output_embeddings()
    if input_end is None or output_end is None:
        raise UserError(f"{type(model).__name__} has no embedding or no LM head: it is no causal LM")
    scale, softcap = final_transform(text_config)
    bias = getattr(output_end, "bias", None)
    return TargetEnds(
        input_end.weight.detach(), output_end.weight.detach(), None if bias is None else bias.detach(), scale, softcap
    )


def final_transform(text_config: Any) -> tuple[float, float | None]:
    """(scale, softcap) from the names that the families use; checked against the model's own forward at load."""
    scale = float(getattr(text_config, "logit_scale", None) or 1.0)
    scale /= float(getattr(text_config, "logits_scaling", None) or 1.0)
    softcap = getattr(text_config, "final_logit_softcapping", None)
    return scale, None if softcap is None else float(softcap)


def _refuse_recurrent(text_config: Any, path: str) -> None:
    kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    foreign = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if foreign or "chunked_attention" in kinds:
        raise UserError(
            f"{path}: has {', '.join(sorted(foreign or kinds))} layers; "
            f"a draft tree needs plain attention in every layer"
        )


def _read_tensors(config: TargetConfig, names: set[str]) -> dict[str, Tensor] | None:
    """The named tensors from a local or Hub directory, or None when the files do not name them so."""
    options = {"revision": config.revision, "_raise_exceptions_for_missing_entries": False}
    single = cached_file(config.path, WEIGHTS, **options)
    index = None if single else cached_file(config.path, INDEX, **options)
    if single:
        places = dict.fromkeys(names, str(single))
    elif index:
        from aerie.model.storage import read_json

        table = read_json(Path(index))["weight_map"]
        if not names <= set(table):
            return None
        places = {name: str(cached_file(config.path, table[name], revision=config.revision)) for name in names}
    else:
        return None
    tensors = {}
    for name, place in places.items():
        with safe_open(place, framework="pt") as handle:
            if name not in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                return None
            tensors[name] = handle.get_tensor(name).clone()
    return tensors


def _dtype(name: str, text_config: Any, stored: Tensor) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return getattr(text_config, "dtype", None) or stored.dtype


def _sample(weight: Tensor, dtype: torch.dtype | None = None) -> list[float]:
    flat = weight.detach().reshape(-1)
    step = max(1, flat.numel() // 64)
    return [round(float(value), 5) for value in flat[::step][:64].to(dtype or weight.dtype).float().cpu()]


def _require_directory(config: TargetConfig) -> None:
    """UserError for a path that can be no Hub id and is not there."""
    path = Path(config.path)
    if not path.exists() and (path.is_absolute() or config.path.startswith(".") or config.path.count("/") > 1):
        raise UserError(f"{config.path}: no such target directory")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def read_template(path: str) -> str:
    """The chat template in a .jinja file, found as template_path does."""
    try:
        return template_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"target.chat_template: {path}: cannot read the chat template: {error}") from error


Vocabulary = Mapping[str, int]  # a tokenizer's get_vocab()


def require_same_token_ids(draft: Vocabulary, target: Vocabulary, num_rows: int, draft_name: str, name: str) -> None:
    """UserError unless the draft LM draft_name, with num_rows embeddings, reads token ids as the target `name` does.

    A token that both have must have one id, an id that both use must be one token, and the draft LM must have a row for
    every token of the target. Rows that pad either vocabulary, and added tokens of one side, are no difference.
    """
    tokens = {number: token for token, number in target.items()}
    for token, number in draft.items():
        other = target.get(token, number)
        if other != number or tokens.get(number, token) != token:
            found = f"token {token!r} has id {number}, in {name} "
            found += f"it has id {other}" if other != number else f"that is {tokens[number]!r}"
            raise UserError(
                f"{draft_name}: tokenizer: {found}; a draft LM shares the tokenizer of its target, so choose another"
            )
    missing = [token for token, number in target.items() if number >= num_rows]
    if missing:
        raise UserError(
            f"{draft_name}: has {num_rows:,} token embeddings, and {name} has tokens beyond them ({missing[0]!r}, id "
            f"{target[missing[0]]:,}); choose a draft LM of the same vocabulary"
        )
