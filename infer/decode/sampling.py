"""The target's distribution at a node, after transformers' logits processors, and draws from it."""

from collections.abc import Callable
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

# Lists of generation settings: applied, of_text, without_effect, neutral.
SETTINGS, _ = read_yaml(Path(__file__).with_name("settings.yaml"))
HONOURED = (*SETTINGS["applied"], *SETTINGS["of_text"])
# The values of settings that neither the caller nor the model's generation_config sets. Every token
# can be drawn, as in the papers, vLLM and SGLang; transformers' `generate` keeps the 50 likeliest.
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 512}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
COLDEST = 1e-6  # logits / temperature stay finite in float32
# Fills the front of shorter texts. No token has this id, so it is in no n-gram and no repetition.
PAD = 2**31 - 1
NUM_TRIALS = 64  # draws, of which `distinct_draws` takes the first k different ones
ENTROPY_WEIGHT = 0.1  # SVIP's c, as measured on the embedded default's EAGLE-1 head
ROWS_PER_NAT = 64  # rows of the table `_log_chances` for each nat of q's entropy


@dataclass(frozen=True)
class Decoding:
    """The settings of one answer; greedy decoding has the values of GREEDY."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    of_text: dict[str, Any] = field(default_factory=dict)  # what makes p depend on the text
    stop_strings: tuple[str, ...] = ()


def resolve(config: GenerationConfig, **overrides: Any) -> Decoding:
    """One answer's settings: the overrides, else the generation_config's values, else DEFAULTS.

    UserError for a setting that a draft tree cannot honour, or a value out of range.
    """
    known = {*HONOURED, *SETTINGS["without_effect"]}
    for name, value in vars(config).items():
        if name not in known and name[0] != "_" and not _is_off(name, value):
            fault = f"generation_config sets {name}={value}, which aerie does not apply"
            raise UserError(f"{fault}; switch it off with --generation.{name} null")
    overrides = _without_none(overrides)
    settings = DEFAULTS | _without_none(vars(config)) | overrides
    for name in DEFAULTS:
        if not isinstance(settings[name], int | float):
            raise UserError(f"{name} must be a number, not {settings[name]!r}")
    # A caller who names a temperature wants to sample.
    do_sample = overrides.get("do_sample", config.do_sample or "temperature" in overrides)
    do_sample = bool(do_sample) and settings["temperature"] > 0.0
    _check_ranges(settings, do_sample)
    # neutral values, so that all greedy answers share their graphs
    if not do_sample:
        settings |= GREEDY
    # Penalties and bans make p differ along a path, and from text to text.
    of_text = {name: settings[name] for name in SETTINGS["of_text"] if name in settings}
    stop_strings = settings.get("stop_strings", ())
    return Decoding(
        do_sample=do_sample,
        temperature=float(settings["temperature"]),
        top_k=int(settings["top_k"]),
        top_p=float(settings["top_p"]),
        min_p=float(settings["min_p"]),
        max_new_tokens=int(settings["max_new_tokens"]),
        eos_token_ids=token_ids(settings.get("eos_token_id")),
        of_text={name: value for name, value in of_text.items() if not _is_off(name, value)},
        stop_strings=(stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings),
    )


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _check_ranges(settings: dict[str, Any], do_sample: bool) -> None:
    temperature = settings["temperature"]
    is_warm = temperature == 0 or COLDEST <= temperature < inf
    ranges = [
        ("temperature", is_warm, f"0 (greedy) or at least {COLDEST:g}"),
        ("max_new_tokens", 1 <= settings["max_new_tokens"] < inf, "at least 1"),
    ]
    if do_sample:
        ranges += [
            ("top_p", 0.0 < settings["top_p"] <= 1.0, "a share in (0, 1]"),
            ("top_k", 0 <= settings["top_k"] < inf, "at least 0, which switches it off"),
            ("min_p", 0.0 <= settings["min_p"] <= 1.0, "a share in [0, 1]"),
        ]
    for name, is_inside, wording in ranges:
        if not is_inside:
            raise UserError(f"{name} must be {wording}, not {settings[name]:g}")


def _is_off(name: str, value: Any) -> bool:
    return value is False or value in (None, [], SETTINGS["neutral"].get(name))


def token_ids(value: Any) -> frozenset[int]:
    """The ids of an eos_token_id, which may be one, several or None."""
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else map(int, value))


class MinLengths(logits_process.MinLengthLogitsProcessor):
    """transformers' processor, made to work on texts of different lengths."""

    def __call__(self, texts: Tensor, scores: Tensor) -> Tensor:
        # the PADs in front of a shorter text do not count
        is_short = (texts != PAD).sum(-1, keepdim=True) < self.min_length
        return torch.where(is_short, super().__call__(texts[:, :0], scores), scores)


class Sampler:
    """The target's distributions after transformers' processors, and draws from them."""

    def __init__(
        self, decoding: Decoding, generator: torch.Generator, prompt: Tensor | None = None
    ) -> None:
        """prompt [T]: needed if the distributions depend on the text."""
        self.decoding = decoding
        self.generator = generator
        # prompt and answer, where the distributions depend on them
        self.text = None if prompt is None else prompt.long()
        self._prompt_length = 0 if prompt is None else len(prompt)
        self._text_processors: list[Any] = []  # made when first needed
        self._warpers: list[Any] = []  # in transformers' order
        if decoding.do_sample:
            if decoding.temperature != 1.0:
                self._warpers.append(logits_process.TemperatureLogitsWarper(decoding.temperature))
            if decoding.top_k > 0:
                self._warpers.append(logits_process.TopKLogitsWarper(decoding.top_k))
            if decoding.top_p < 1.0:
                self._warpers.append(logits_process.TopPLogitsWarper(decoding.top_p))
            if decoding.min_p > 0.0:
                self._warpers.append(logits_process.MinPLogitsWarper(decoding.min_p))

    def law(self, logits: Tensor) -> Tensor:
        """p [N, V] in float32, of logits [N, V]."""
        return self._warped(logits).softmax(-1)

    def log_law(self, logits: Tensor, are_logarithms: bool = False) -> Tensor:
        """log p [N, V], -inf where a processor removed the token.

        are_logarithms: the logits are log probabilities already.
        """
        scores = self._warped(logits)
        return scores if are_logarithms and not self._warpers else scores.log_softmax(-1)

    def _warped(self, logits: Tensor) -> Tensor:
        scores = logits.float()
        # a LogitsProcessorList would inspect their signatures at every call
        for warp in self._warpers:
            scores = warp(None, scores)
        return scores

    def choose(self, logits: Tensor) -> Tensor:
        """The target's tokens [N]: its argmax, or a draw from p."""
        return draw(self.law(logits), self.generator) if self.decoding.do_sample else argmax(logits)

    # --- distributions that depend on the text: penalties, bans, minimal lengths

    def follow(self, tokens: Tensor) -> None:
        """Appends tokens [n] to the text."""
        if self.decoding.of_text and self.text is not None:
            self.text = torch.cat([self.text, tokens])

    def with_text(self, logits: Tensor, tree: Tree | None = None) -> Tensor:
        """Logits [N, V] after the processors that read the text and each node's path.

        Without a tree, logits [1, V] after the text alone.
        """
        if not self.decoding.of_text or self.text is None:
            return logits
        if tree is None:
            return self.after(self.text[None], logits)
        return self.after(self._texts_of(tree, self.text), logits)

    @staticmethod
    def _texts_of(tree: Tree, text: Tensor) -> Tensor:
        """The text and each node's path [N, T + levels], with PAD before shorter ones."""
        count = len(tree)
        levels = tree.levels
        if tree.passengers is not None:  # passengers may stand deeper than `levels`
            levels = count - 1
        # A path's node of depth d goes to column d, and nodes beside the path go to the last
        # column. That column is cut off below, and so is column 0: the text ends with the root.
        columns = torch.where(tree.mask, tree.depth, levels + 1)  # [N, N]
        paths = tree.tokens.new_full((count, levels + 2), PAD)
        paths.scatter_(1, columns, tree.tokens.expand(count, -1))
        texts = torch.cat([text.expand(count, -1), paths[:, 1:-1]], dim=1)  # [N, T + levels]
        # levels - d PADs follow a path of depth d: rotate the row until they stand in front.
        length = texts.shape[1]
        columns = torch.arange(length, device=texts.device) - (levels - tree.depth)[:, None]
        return texts.gather(1, columns % length)

    def after(self, texts: Tensor, logits: Tensor) -> Tensor:
        """Logits [N, V] in float32 after the processors that read texts [N, T].

        As in transformers' `generate`, they run before those of the draw (temperature, top-k, ...).
        """
        try:
            if not self._text_processors:
                self._text_processors = self._make_text_processors(logits.device)
            scores = logits.float()
            for process in self._text_processors:
                scores = process(texts, scores)
        except (TypeError, ValueError) as error:
            settings = [f"{name}={value}" for name, value in self.decoding.of_text.items()]
            refused = f"transformers refuses {', '.join(settings)}"
            raise UserError(f"{refused}: {first_line(error)}") from error
        return scores

    def _make_text_processors(self, device: torch.device) -> list[Any]:
        """The processors that look at the text, in transformers' order."""
        process = logits_process
        prompt_length = self._prompt_length
        ends = sorted(self.decoding.eos_token_ids)
        make: dict[str, Callable[[Any], Any]] = {
            "sequence_bias": process.SequenceBiasLogitsProcessor,
            "repetition_penalty": process.RepetitionPenaltyLogitsProcessor,
            "no_repeat_ngram_size": process.NoRepeatNGramLogitsProcessor,
            "bad_words_ids": lambda words: process.NoBadWordsLogitsProcessor(words, ends or None),
            "min_length": lambda least: MinLengths(least, ends, device),
            "min_new_tokens": lambda least: MinLengths(prompt_length + least, ends, device),
            "suppress_tokens": lambda ids: process.SuppressTokensLogitsProcessor(ids, device),
            "begin_suppress_tokens": lambda ids: process.SuppressTokensAtBeginLogitsProcessor(
                ids, prompt_length, device
            ),
        }
        if not ends:  # a minimal length only forbids end tokens
            del make["min_length"], make["min_new_tokens"]
        of_text = self.decoding.of_text
        return [make[name](of_text[name]) for name in make if name in of_text]


def argmax(logits: Tensor) -> Tensor:
    """The first largest entry's index [N] in each row."""
    is_plain = logits.dtype == torch.float32 and not logits.requires_grad
    if logits.device.type == "cpu" and is_plain and not torch.compiler.is_compiling():
        return torch.from_numpy(logits.numpy().argmax(-1))  # faster than torch's
    return logits.argmax(-1)


def entropy(law: Tensor) -> Tensor:
    """H in nats [..] of distributions [.., V]."""
    return torch.special.entr(law).sum(-1)


def race(law: Tensor, generator: torch.Generator) -> Tensor:
    """p / Exponential(1) [N, V] of each law [N, V].

    The columns of its largest values, in order, are draws without replacement.
    """
    return law / torch.empty_like(law).exponential_(generator=generator)


def draw(law: Tensor, generator: torch.Generator) -> Tensor:
    """One token [N] from each row of law [N, V], which need not be normalised."""
    if law.device.type != "cpu":
        return race(law, generator).argmax(-1)
    # A row needs one random number, where a race needs one for each token. The drawn token is the
    # first whose running sum exceeds the number; searchsorted finds it, because running sums
    # ascend. They are float64, because a token may be rarer than 2**-24.
    sums = law.cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(law), 1, generator=generator, dtype=torch.float64) * sums[:, -1:]
    tokens = torch.searchsorted(sums, uniform, right=True)[:, 0]
    return tokens.clamp_(max=law.shape[1] - 1)  # no id beyond V, even if the law is NaN


def distinct_draws(law: Tensor, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most k draws without replacement from each law [r, V], in order.

    Returns the columns [r, k], and whether each is missing [r, k]. The draws are the first k
    different ones of NUM_TRIALS draws with replacement, because `race` would need V random numbers.
    Whether a draw is missing does not depend on which token it would have been.
    """
    count = max(NUM_TRIALS, k)
    sums = law.cumsum(-1)
    uniform = torch.rand(len(law), count, generator=generator, device=law.device) * sums[:, -1:]
    trials = torch.searchsorted(sums, uniform, right=True)  # [r, count] as in `draw`
    # Sorted, equal tokens stand side by side, the earliest trial first as the sort is stable.
    ascending, order = trials.sort(stable=True)
    is_new = F.pad(ascending[:, 1:] != ascending[:, :-1], (1, 0), value=True)
    first = torch.where(is_new, order, count)  # the trial of each new token
    first = first.topk(k, largest=False).values  # [r, k] the trials of the k earliest
    return trials.gather(1, first.clamp(max=count - 1)), first == count


def draw_children(
    log_q: Tensor, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """k draws without replacement from each law q [r, Vd], in order.

    Returns log chances [r, k], columns [r, k] and q. The j-th chance estimates how often the j-th
    draw is the accepted one; it is -inf if there is no j-th draw. It falls with j, and depends on q
    alone, not on the drawn tokens.
    """
    q = log_q.exp()
    columns, missing = distinct_draws(q, k, generator)
    nats = -torch.linalg.vecdot(q, log_q.clamp(min=-100.0))  # [r] entropy; not 0 * -inf
    table = _log_chances(k, q.device)
    chances = table.index_select(0, (nats * ROWS_PER_NAT).long().clamp_(0, len(table) - 1))
    return chances.masked_fill_(missing, float("-inf")), columns, q


@cache
def _log_chances(k: int, device: torch.device) -> Tensor:
    """The log chance [rows, k] that the j-th draw is the accepted one, by q's entropy."""
    # The first draw is accepted with chance 1 - TV(p, q), about f = 1 - sqrt(c H(q)) (SVIP, arXiv
    # 2411.18462, equation 6); the j-th, if all before it are refused, with f / j. A measured table
    # is better by at most 1 % of log loss.
    nats = torch.arange(ROWS_PER_NAT / ENTROPY_WEIGHT) / ROWS_PER_NAT
    first = (1.0 - (ENTROPY_WEIGHT * nats).sqrt()).clamp(0.05, 0.99)  # f
    # j draws are all refused with the chance (1 - f) (1 - f / 2) ... (1 - f / j)
    refused = (1.0 - first[:, None] / torch.arange(1, k + 1)).cumprod(-1)  # [rows, k]
    return (F.pad(refused[:, :-1], (1, 0), value=1.0) - refused).log().to(device)
