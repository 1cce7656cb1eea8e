"""The target's law at a node, after transformers' logits processors, and draws from it."""

from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.generation import logits_process

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.infer.decode.tree import Tree
from aerie.model.storage import first_line

SETTINGS = read_yaml(Path(__file__).with_name("settings.yaml"))[
    0
]  # applied, of_text, without_effect, neutral
HONOURED = (*SETTINGS["applied"], *SETTINGS["of_text"])
ENDS: dict[str, Any] = {"eos_token_id": (), "stop_strings": ()}
TRIALS = 64  # draws, of which `distinct_draws` takes the first k different ones
ENTROPY_WEIGHT = 0.1  # SVIP's c, as measured on the embedded default's EAGLE-1 head
STEPS = 64  # rows per nat of entropy, in the table of drawn children's chances
COLDEST = 1e-6  # logits / temperature stay finite in float32


@dataclass(frozen=True)
class Decoding:
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    of_text: dict[str, Any] = field(
        default_factory=dict
    )  # settings that make p depend on the text, by name
    stop_strings: tuple[str, ...] = ()


def resolve(config: GenerationConfig, **asked: Any) -> Decoding:
    """One answer's settings; UserError for one that a draft tree cannot honour."""
    known = {*HONOURED, *SETTINGS["without_effect"]}
    for name, value in vars(config).items():
        if not (name in known or name[0] == "_" or _is_off(name, value)):
            fix = f"switch it off with --generation.{name} null"
            raise UserError(
                f"generation_config sets {name}={value}, which aerie does not apply; {fix}"
            )
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 512}
    # what was asked, else the model's own setting, else the default
    values: dict[str, Any] = {
        name: next(
            value
            for value in (asked.get(name), getattr(config, name, None), default)
            if value is not None
        )
        for name, default in (defaults | dict.fromkeys(SETTINGS["of_text"], False) | ENDS).items()
    }
    numbers = [values[name] for name in defaults]
    for name, value in zip(defaults, numbers, strict=True):
        if not isinstance(value, int | float):
            raise UserError(f"{name} must be a number, not {value!r}")
    temperature, top_p, top_k, min_p, max_new_tokens = numbers
    given = asked.get("do_sample")
    do_sample = (
        (bool(config.do_sample) or asked.get("temperature") is not None)
        if given is None
        else bool(given)
    )
    do_sample = do_sample and temperature > 0.0
    is_warm = temperature == 0 or COLDEST <= temperature < inf
    for name, value, is_right, range_ in (
        ("temperature", temperature, is_warm, f"0 (greedy) or at least {COLDEST:g}"),
        ("max_new_tokens", max_new_tokens, 1 <= max_new_tokens < inf, "at least 1"),
        ("top_p", top_p, not do_sample or 0.0 < top_p <= 1.0, "a share in (0, 1]"),
        ("top_k", top_k, not do_sample or 0 <= top_k < inf, "at least 0, which switches it off"),
        ("min_p", min_p, not do_sample or 0.0 <= min_p <= 1.0, "a share in [0, 1]"),
    ):
        if not is_right:
            raise UserError(f"{name} must be {range_}, not {value:g}")
    if not do_sample:
        temperature, top_k, top_p, min_p = 0.0, 0, 1.0, 0.0
    settings = (float(temperature), int(top_k), float(top_p), float(min_p), int(max_new_tokens))
    of_text = {
        name: value for name in SETTINGS["of_text"] if not _is_off(name, value := values[name])
    }
    stops = values["stop_strings"]
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    return Decoding(do_sample, *settings, token_ids(values["eos_token_id"]), of_text, stops)


def _is_off(name: str, value: Any) -> bool:
    return value is False or value in (None, [], SETTINGS["neutral"].get(name))


def token_ids(value: Any) -> frozenset[int]:
    return (
        frozenset()
        if value is None
        else frozenset([value] if isinstance(value, int) else map(int, value))
    )


PAD = (
    2**31 - 1
)  # fills the front of shorter texts; no token has this id, so it is in no n-gram and no repetition


class Shortest(logits_process.MinLengthLogitsProcessor):
    """transformers' processor, for texts of different lengths."""

    def __call__(self, texts: Tensor, scores: Tensor) -> Tensor:
        is_short = (texts != PAD).sum(-1, keepdim=True) < self.min_length
        return torch.where(is_short, super().__call__(texts[:, :0], scores), scores)


class Sampler:
    """Draws tokens from the target's laws; prompt [T]: needed if these depend on the text."""

    def __init__(
        self, decoding: Decoding, generator: torch.Generator, prompt: Tensor | None = None
    ) -> None:
        self.decoding, self.generator = decoding, generator
        self.text = (
            None if prompt is None else prompt.long()
        )  # prompt and answer, where laws depend on them
        self._start, self._of_text = 0 if prompt is None else len(prompt), list[Any]()
        # in transformers' order
        steps: tuple[tuple[bool, Any, float], ...] = (
            (
                decoding.temperature != 1.0,
                logits_process.TemperatureLogitsWarper,
                decoding.temperature,
            ),
            (decoding.top_k > 0, logits_process.TopKLogitsWarper, decoding.top_k),
            (decoding.top_p < 1.0, logits_process.TopPLogitsWarper, decoding.top_p),
            (decoding.min_p > 0.0, logits_process.MinPLogitsWarper, decoding.min_p),
        )
        self._processors = [
            make(value) for is_on, make, value in steps if is_on and decoding.do_sample
        ]

    def law(self, logits: Tensor) -> Tensor:
        """p [N, V] in float32 after the processors, of logits [N, V]."""
        return self._scores(logits).softmax(-1)

    def log_law(self, logits: Tensor, are_logarithms: bool = False) -> Tensor:
        """log p [N, V], -inf where a processor removed the token; are_logarithms: the logits are log probabilities."""
        scores = self._scores(logits)
        return scores if are_logarithms and not self._processors else scores.log_softmax(-1)

    def _scores(self, logits: Tensor) -> Tensor:
        scores = logits.float()
        # a LogitsProcessorList would inspect their signatures at every call
        for processor in self._processors:
            scores = processor(None, scores)
        return scores

    def follow(self, tokens: Tensor) -> None:
        """Appends tokens [n] to the text."""
        if self.decoding.of_text and self.text is not None:
            self.text = torch.cat([self.text, tokens])

    def with_text(self, logits: Tensor, tree: Tree | None = None) -> Tensor:
        """`after` for a tree's nodes: logits [N, V], of the text and each path; without a tree [1, V], of the text."""
        if not self.decoding.of_text or self.text is None:
            return logits
        if tree is None:
            return self.after(self.text[None], logits)
        # paths without the root, and behind them PAD, which then goes to the front
        count, levels = len(tree), tree.levels if tree.passengers is None else len(tree) - 1
        length = len(self.text) + levels
        places = torch.where(tree.mask, tree.depth, levels + 1)  # [N, N]; the root's is 0
        paths = tree.tokens.new_full((count, levels + 2), PAD).scatter_(
            1, places, tree.tokens.expand(count, -1)
        )
        texts = torch.cat([self.text.expand(count, -1), paths[:, 1:-1]], dim=1)  # [N, T + levels]
        columns = torch.arange(length, device=texts.device) - (levels - tree.depth)[:, None]
        return self.after(texts.gather(1, columns % length), logits)

    def after(self, texts: Tensor, logits: Tensor) -> Tensor:
        """Logits [N, V] in float32 after the processors that read texts [N, T]; PAD precedes shorter texts."""
        # in the order of `generate`: these first, then the draw's own (temperature, top-k, ...) in `law`
        try:
            self._of_text = self._of_text or self._text_processors(logits.device)
            scores = logits.float()
            for processor in self._of_text:
                scores = processor(texts, scores)
        except (TypeError, ValueError) as error:
            asked = ", ".join(f"{name}={value}" for name, value in self.decoding.of_text.items())
            raise UserError(f"transformers refuses {asked}: {first_line(error)}") from error
        return scores

    def _text_processors(self, device: torch.device) -> list[Any]:
        """In transformers' order."""
        start, ends = self._start, sorted(self.decoding.eos_token_ids)
        make: dict[str, Any] = {
            "sequence_bias": logits_process.SequenceBiasLogitsProcessor,
            "repetition_penalty": logits_process.RepetitionPenaltyLogitsProcessor,
            "no_repeat_ngram_size": logits_process.NoRepeatNGramLogitsProcessor,
            "bad_words_ids": lambda words: logits_process.NoBadWordsLogitsProcessor(
                words, ends or None
            ),
            "min_length": lambda least: Shortest(least, ends, device),
            "min_new_tokens": lambda least: Shortest(start + least, ends, device),
            "suppress_tokens": lambda ids: logits_process.SuppressTokensLogitsProcessor(
                ids, device
            ),
            "begin_suppress_tokens": lambda ids: (
                logits_process.SuppressTokensAtBeginLogitsProcessor(ids, start, device)
            ),
        }
        given = self.decoding.of_text
        # without an end token there is nothing that a minimal length could forbid
        return [
            make[name](given[name])
            for name in make
            if name in given and (ends or name[:4] != "min_")
        ]

    def choose(self, logits: Tensor) -> Tensor:
        return draw(self.law(logits), self.generator) if self.decoding.do_sample else argmax(logits)


def argmax(logits: Tensor) -> Tensor:
    """The first largest entry's place [N] in each row."""
    # on a CPU numpy is faster
    is_plain = (
        logits.device.type == "cpu" and logits.dtype == torch.float32 and not logits.requires_grad
    )
    if is_plain and not torch.compiler.is_compiling():
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def race(law: Tensor, generator: torch.Generator) -> Tensor:
    """p / Exponential(1) [N, V]: its descending order is that of draws without replacement from each law [N, V]."""
    return law / torch.empty_like(law).exponential_(generator=generator)


def draw(law: Tensor, generator: torch.Generator) -> Tensor:
    """One token [N] from each row of law [N, V], which need not be normalised."""
    if law.device.type != "cpu":
        return race(law, generator).argmax(-1)
    # one random number per row (a race takes one per token); float64, as tokens may be rarer than 2**-24
    cumulative = law.cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(law), 1, generator=generator, dtype=torch.float64) * cumulative[:, -1:]
    # a broken law (NaN) must not give an id beyond it
    return torch.searchsorted(cumulative, uniform, right=True)[:, 0].clamp_(max=law.shape[1] - 1)


def distinct_draws(law: Tensor, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most k draws without replacement from each law [r, V], in order: columns [r, k], and which are missing [r, k].

    They are the first k different ones of TRIALS draws with replacement: TRIALS random numbers where
    `race` takes V. That a draw is missing does not depend on which token it would have been.
    """
    cumulative = law.cumsum(-1)
    count = max(TRIALS, k)
    uniform = (
        torch.rand(len(law), count, generator=generator, device=law.device) * cumulative[:, -1:]
    )
    trials = torch.searchsorted(cumulative, uniform, right=True)  # [r, count]
    alike, order = trials.sort(stable=True)
    is_new = F.pad(alike[:, 1:] != alike[:, :-1], (1, 0), value=True)
    first = (
        torch.where(is_new, order, count).topk(k, largest=False).values
    )  # [r, k] the trials that drew them
    return trials.gather(1, first.clamp(max=count - 1)), first == count


def draw_children(
    log_q: Tensor, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """k draws without replacement from each law q [r, Vd], in order: log chances and columns [r, k], and q.

    The j-th chance estimates how often the j-th draw is the accepted one. It falls with j and depends on q alone, not
    on the tokens drawn. -inf: there is no j-th draw.
    """
    q = log_q.exp()
    columns, missing = distinct_draws(q, k, generator)
    entropy = -torch.linalg.vecdot(q, log_q.clamp(min=-100.0))  # not 0 * -inf
    table = _log_chances(k, q.device)
    chances = table.index_select(0, (entropy * STEPS).long().clamp_(0, len(table) - 1))
    return chances.masked_fill_(missing, float("-inf")), columns, q


@cache
def _log_chances(k: int, device: torch.device) -> Tensor:
    """The log chance that the j-th draw is the accepted one [entropies, k]; STEPS rows per nat of q's entropy."""
    # The first draw is accepted with chance 1 - TV(p, q), about 1 - sqrt(c H(q)) (SVIP, arXiv 2411.18462, equation 6);
    # the j-th, if all before it are refused, with 1/j of that. A measured table is better by at most 1 % of log loss.
    nats = torch.arange(STEPS / ENTROPY_WEIGHT) / STEPS
    first = (1.0 - (ENTROPY_WEIGHT * nats).sqrt()).clamp(0.05, 0.99)
    # j draws are all refused with the chance (1 - f) (1 - f / 2) ... (1 - f / j)
    refused = (1.0 - first[:, None] / torch.arange(1, k + 1)).cumprod(-1)  # [entropies, k]
    return (F.pad(refused[:, :-1], (1, 0), value=1.0) - refused).log().to(device)


def entropy(law: Tensor) -> Tensor:
    """H in nats [..] of laws [.., V]."""
    return torch.special.entr(law).sum(-1)
