"""The target's law at one node: transformers' own processors, in transformers' order, then a token."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aerie.configs.errors import UserError

NEUTRAL = {  # settings of a generation_config that no draft tree honours, with the value that switches them off
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": None,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "penalty_alpha": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": None,
    "max_time": None,
    "watermarking_config": None,
}
MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class Decoding:
    """The settings of one generation, resolved: what was asked for, else the target's generation_config."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "eos_token_ids": sorted(self.eos_token_ids)}


def resolve(config: GenerationConfig, **asked: Any) -> Decoding:
    """Decoding from transformers' argument names; UserError for a setting that a draft tree cannot honour.

    Temperature 0 means argmax. An explicit temperature switches sampling on unless do_sample says otherwise.
    """
    for name, neutral in NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise UserError(
                f"generation_config sets {name}={value}, which aerie does not apply; set it to {neutral} to go on"
            )
    value = {
        name: _first(asked.get(name), getattr(config, name, None))
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    temperature = 1.0 if value["temperature"] is None else float(value["temperature"])
    if temperature < 0:
        raise UserError(f"temperature must not be negative, not {temperature:g}")
    do_sample = asked.get("do_sample")
    if do_sample is None:
        do_sample = bool(config.do_sample) or asked.get("temperature") is not None
    do_sample = bool(do_sample) and temperature > 0.0
    decoding = Decoding(
        do_sample=do_sample,
        temperature=temperature if do_sample else 0.0,
        top_k=int(value["top_k"] or 0) if do_sample else 0,
        top_p=float(value["top_p"] if value["top_p"] is not None else 1.0) if do_sample else 1.0,
        min_p=float(value["min_p"] or 0.0) if do_sample else 0.0,
        max_new_tokens=int(_first(asked.get("max_new_tokens"), config.max_new_tokens, MAX_NEW_TOKENS)),
        eos_token_ids=_ids(_first(asked.get("eos_token_id"), config.eos_token_id)),
    )
    _check(decoding)
    return decoding


def processors(decoding: Decoding) -> LogitsProcessorList:
    """transformers' processors for these settings; every one looks at a single row of logits."""
    chain = LogitsProcessorList()
    if decoding.do_sample:
        if decoding.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(decoding.temperature))
        if decoding.top_k > 0:
            chain.append(TopKLogitsWarper(decoding.top_k))
        if decoding.top_p < 1.0:
            chain.append(TopPLogitsWarper(decoding.top_p))
        if decoding.min_p > 0.0:
            chain.append(MinPLogitsWarper(decoding.min_p))
    return chain


class Sampler:
    """Chooses one token per row of logits: the argmax, or a draw from the processed law."""

    def __init__(self, decoding: Decoding, generator: torch.Generator) -> None:
        self.decoding = decoding
        self.generator = generator
        self._processors = processors(decoding)

    def law(self, logits: Tensor) -> Tensor:
        """p [N, V] in float32 after the processors."""
        return self._scores(logits).softmax(-1)

    def log_law(self, logits: Tensor) -> Tensor:
        """log p [N, V]: -inf only where a processor struck the token out."""
        return self._scores(logits).log_softmax(-1)

    def _scores(self, logits: Tensor) -> Tensor:
        scores = logits.float()
        for processor in self._processors:  # their list would look into each one's signature, every time
            scores = processor(None, scores)
        return scores

    def choose(self, logits: Tensor) -> Tensor:
        """One token per row [N]."""
        if not self.decoding.do_sample:
            return argmax(logits)
        return draw(self.law(logits), self.generator)


def argmax(logits: Tensor) -> Tensor:
    """The first largest entry of each row [N]. On a CPU torch looks at one entry at a time, and numpy at several."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and not logits.requires_grad:
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def race(law: Tensor, generator: torch.Generator) -> Tensor:
    """p / Exponential(1) [N, V]: in descending order, draws from each row's law [N, V] without replacement.

    A token without a chance has 0 and comes last. No synchronisation.
    """
    return law / torch.empty_like(law).exponential_(generator=generator)


def draw(law: Tensor, generator: torch.Generator) -> Tensor:
    """One token [N] from each row of law [N, V], which need not be normalised."""
    return race(law, generator).argmax(-1)


def _check(decoding: Decoding) -> None:
    if decoding.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, not {decoding.max_new_tokens}")
    if not 0.0 < decoding.top_p <= 1.0:
        raise UserError(f"top_p is a share in (0, 1], not {decoding.top_p}")
    if decoding.top_k < 0:
        raise UserError(f"top_k must not be negative (0 switches it off), not {decoding.top_k}")


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else [int(v) for v in value])
