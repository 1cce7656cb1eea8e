"""Sampled answers against their exact law, on a target so small that the law of its answers can be enumerated."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from aerie.configs.schema.decode import (
    HeuristicConfig,
    LookaheadConfig,
    MarginalGainConfig,
    MethodConfig,
    ProbabilitySumConfig,
    VoteConfig,
)
from aerie.configs.schema.measure import SamplingConfig
from aerie.configs.schema.target_and_head import (
    Eagle1Section,
    Eagle3Section,
    HydraSection,
    MedusaSection,
    TargetConfig,
)
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import Sampler, resolve
from aerie.infer.decode.shape import Drafting
from aerie.infer.decode.tree import Tree
from aerie.model.checkpoint import new_head, save_head
from aerie.model.target import Target
from aerie.model.vocab import DraftVocabulary

Answer = tuple[int, ...]
Tick = Callable[[], object]
EXPECTED = 5.0  # draws that every cell of the chi-square test must expect
VOCABULARY = 8
SPREAD = 0.38  # standard deviation of the target's matrices: three or four likely tokens at each place
DRAFT_NOISE = 0.08  # of the draft LM's matrices around the target's
HEAD_NOISE = 0.12  # added to every matrix of a new head, whose laws would be flat, or the target's own
LENGTH = 4  # new tokens of a sampled answer; with fewer no tree has a second level, and no stop rule a say
LONGER = {"sps-heuristic": 5}  # its second draft is the first to depend on what was accepted
SMALL: dict[str, Any] = {"k": 2, "nodes": 5}  # of a vocabulary of 8 the published trees would hold nearly everything
# what ends trees of two levels now and then, as the published thresholds do deeper ones
EARLY_VOTE = VoteConfig(probability_threshold=0.7, momentum_threshold=0.7, declines=1)
MINIATURES = {
    "sps-heuristic": MethodConfig.of("sps-heuristic", stop=HeuristicConfig(start=2)),
    "eagle2": MethodConfig.of("eagle2", **SMALL),
    "eagle3": MethodConfig.of("eagle3", **SMALL),
    "deagle": MethodConfig.of("deagle", **SMALL, stop=EARLY_VOTE),
    "svip": MethodConfig.of("svip", **SMALL),
    "ddd": MethodConfig.of("ddd", **SMALL, stop=ProbabilitySumConfig(checks=(1, 2), threshold=0.7)),
    "opt-tree": MethodConfig.of("opt-tree", **SMALL, stop=MarginalGainConfig(threshold=0.7)),
    "lookahead": MethodConfig(
        "lookahead", lookahead=LookaheadConfig(ngram=3, window=5, guesses=7, pool_from_text=True)
    ),
}


def write_miniature(directory: Path, seed: int = 4, vocabulary: int = VOCABULARY) -> TargetConfig:
    """The target under directory/target, its recipe's section returned, and directory/heads/KIND for every kind.

    The target is a Llama that never ends. An EAGLE-3 head has no word for every third token.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = {"vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    for matrix in matrices:
        matrix.data.normal_(0.0, SPREAD, generator=generator)
    _save(model, directory / "target")
    config = TargetConfig(str(directory / "target"), dtype="float32")
    target = Target(model, config)
    draft_ids = torch.tensor([token for token in range(vocabulary) if token % 3 != 2])
    for section in (Eagle1Section(), Eagle3Section(), MedusaSection(), HydraSection(prefix_layer=True)):
        three = section.kind == "eagle3"
        head = new_head(
            section,
            target.config,
            target.vocab,
            seed,
            after_blocks=(0, 1) if three else (),
            vocabulary=DraftVocabulary.of_ids(draft_ids, vocabulary) if three else None,
        )
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2 and name != "embed_tokens.weight":
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=HEAD_NOISE)
        save_head(head, directory / "heads" / section.kind)
    for matrix in matrices:
        matrix.data.add_(torch.randn(matrix.shape, generator=generator), alpha=DRAFT_NOISE)
    _save(model, directory / "heads" / "draft_lm")
    return config


def _save(model: PreTrainedModel, directory: Path) -> None:
    """The model with a tokenizer whose words are letters."""
    model.save_pretrained(directory)
    words = {chr(ord("a") + token): token for token in range(model.config.vocab_size)}
    letters = Tokenizer(models.WordLevel(words, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(directory)


def answer_law(target: Target, ids: Tensor, length: int, sampling: SamplingConfig) -> dict[Answer, float]:
    """The chance of every answer of `length` tokens to the prompt ids [1, T]; impossible ones are left out.

    One plain forward over all prefixes of a length, without a cache: for a vocabulary of a few tokens.
    """
    sampler = Sampler(resolve(target.generation_config, do_sample=True, **asdict(sampling)), torch.Generator())
    law: dict[Answer, float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        tails = torch.tensor(prefixes, dtype=torch.long, device=ids.device).reshape(len(prefixes), -1)
        with torch.inference_mode():
            logits = target.model(torch.cat([ids.expand(len(prefixes), -1), tails], dim=1)).logits[:, -1]
        rows = sampler.law(logits).double().tolist()  # [prefixes, V]
        law = {
            (*prefix, token): law[prefix] * chance
            for prefix, row in zip(prefixes, rows, strict=True)
            for token, chance in enumerate(row)
            if chance > 0
        }
    return law


def draw_answers(
    decoder: SpeculativeDecoder,
    ids: Tensor,
    draws: int,
    length: int,
    sampling: SamplingConfig,
    seed: int,
    tick: Tick = lambda: None,
) -> tuple[Counter[Answer], float]:
    """How often each answer of `length` tokens came out of so many draws, and drafted tokens accepted per draw."""
    settings: dict[str, Any] = {**asdict(sampling), "do_sample": True, "max_new_tokens": length}
    generator = torch.Generator(ids.device).manual_seed(seed)
    seen: Counter[Answer] = Counter()
    accepted = 0
    for _ in range(draws):
        out = decoder.generate(ids, generator=generator, **settings)
        seen[tuple(out.new_ids)] += 1
        accepted += sum(out.statistics.accepted)
        tick()
    return seen, accepted / draws


def p_value(law: dict[Answer, float], seen: Counter[Answer]) -> float:
    """The chance that draws from the law fit it as badly as those seen: Pearson's chi-square test.

    Answers expected fewer than 5 times are one cell together. 0 where something came out that the law excludes.
    """
    if not seen.keys() <= law.keys():
        return 0.0
    draws = sum(seen.values())
    cells = sorted(((chance * draws, seen[answer]) for answer, chance in law.items()), reverse=True)
    single = sum(expected >= EXPECTED for expected, _ in cells)
    if 0 < sum(expected for expected, _ in cells[single:]) < EXPECTED:
        single = max(single - 1, 0)  # too little for a cell of its own
    if rest := cells[single:]:
        cells = [*cells[:single], (sum(expected for expected, _ in rest), sum(count for _, count in rest))]
    if len(cells) < 2:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.double) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


class Remembered:
    """Stands for an object whose answers depend on the calls since the first of `calls`, and on nothing else.

    A history of calls that was there before is answered from memory; another one is put to the object itself.
    """

    def __init__(self, inner: Any, calls: tuple[str, ...], silent: tuple[str, ...]) -> None:
        """silent: those of the calls that have no answer; they wait until one has."""
        self._inner, self._calls, self._silent = inner, calls, silent
        self._answers: dict[Any, Any] = {}
        self._key: Any = ()
        self._history: list[tuple[str, tuple[Any, ...]]] = []
        self._told = 0  # how many calls of this history the object has had

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in self._calls else getattr(self._inner, name)

    def _call(self, name: str, *given: Any) -> Any:
        if name == self._calls[0]:
            self._key, self._history, self._told = (), [], 0
        self._history.append((name, given))
        self._key = (self._key, name, *map(_hashable, given))
        if name in self._silent:
            return None
        if self._key not in self._answers:
            for earlier, arguments in self._history[self._told : -1]:
                getattr(self._inner, earlier)(*arguments)
            self._told = len(self._history)
            self._answers[self._key] = getattr(self._inner, name)(*given)
        return self._answers[self._key]


def _hashable(argument: Any) -> Any:
    if isinstance(argument, Tree):
        return tuple(map(_hashable, (argument.tokens, argument.depth, argument.mask)))
    if isinstance(argument, Tensor):
        return (*argument.shape, argument.cpu().numpy().tobytes())
    return tuple(argument) if isinstance(argument, list) else argument


def remember(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The same decoder, whose target and drafter compute nothing twice: for many short answers to one prompt."""
    decoder.lm = Remembered(decoder.lm, ("prefill", "extend", "keep"), ("keep",))  # type: ignore[assignment]
    if isinstance(decoder.proposer, Drafting):
        calls = ("reset", "commit", "start", "step")
        decoder.proposer.drafter = Remembered(decoder.proposer.drafter, calls, calls[:2])  # type: ignore[assignment]
    return decoder


@dataclass(frozen=True)
class Law:
    """How well sampled answers at one setting fit the target's law."""

    temperature: float
    top_p: float
    p_value: float
    accepted_per_answer: float  # drafted tokens; without any there is nothing to prove


class SampledProver:
    """Compares sampled answers with their law, on a miniature that it writes into a directory."""

    def __init__(self, directory: Path) -> None:
        self.target = Target.load(write_miniature(directory))
        self._heads = directory / "heads"
        self._drafters = Drafters(self.target)
        self._laws: dict[tuple[int, SamplingConfig], dict[Answer, float]] = {}
        # every token once, and n-grams that come back
        self.ids = torch.tensor([[1, 5, 3, 4, 1, 6, 3, 2, 7, 0, 5, 4, 2, 6, 1, 7, 3, 0, 4]])

    def prove(
        self,
        asked: MethodConfig,
        kind: str | None,
        sampling: SamplingConfig,
        draws: int,
        seed: int,
        tick: Tick = lambda: None,
    ) -> Law:
        """How well so many answers fit; tick is called once an answer."""
        length = LONGER.get(asked.method, LENGTH)
        if (length, sampling) not in self._laws:
            self._laws[length, sampling] = answer_law(self.target, self.ids, length, sampling)
        head = None if kind is None else str(self._heads / kind)
        decoder = remember(make_decoder(self._drafters, MINIATURES.get(asked.method, asked), head))
        seen, accepted = draw_answers(decoder, self.ids, draws, length, sampling, seed, tick)
        fit = p_value(self._laws[length, sampling], seen)
        return Law(sampling.temperature, sampling.top_p, fit, accepted)
