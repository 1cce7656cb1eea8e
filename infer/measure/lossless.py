"""The target's exact law over short answers, by enumeration, and how well drawn answers fit it."""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import (
    METHODS,
    HeuristicConfig,
    LookaheadConfig,
    MarginalGainConfig,
    Method,
    MethodConfig,
    ProbabilitySumConfig,
    VoteConfig,
)
from aerie.configs.schema.measure import PromptsConfig, SamplingConfig
from aerie.configs.schema.target_and_head import (
    Eagle1Section,
    Eagle3Section,
    HydraSection,
    MedusaSection,
    TargetConfig,
)
from aerie.data.progress import bar
from aerie.infer.decode.engine import Generation, SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import Sampler, resolve, token_ids
from aerie.infer.decode.shape import Cycle, Drafting
from aerie.infer.decode.tree import Tree
from aerie.infer.measure.bench import default_device, prepare
from aerie.infer.measure.tasks import encode, load_prompts
from aerie.infer.report.tables import NOTHING
from aerie.model.checkpoint import new_head, save_head
from aerie.model.storage import write_json
from aerie.model.target import Target, load_tokenizer
from aerie.model.vocab import DraftVocabulary

Answer = tuple[int, ...]
EXPECTED = 5.0  # draws that every cell of the chi-square test must expect


def answer_law(target: Target, ids: Tensor, length: int, sampling: SamplingConfig) -> dict[Answer, float]:
    """The chance of every answer of `length` tokens to the prompt ids [1, T]; impossible ones are left out.

    One plain forward over all prefixes of a length, without a cache: for a vocabulary of a few tokens.
    """
    decoding = resolve(target.generation_config, do_sample=True, **asdict(sampling))
    sampler = Sampler(decoding, torch.Generator())
    law: dict[Answer, float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        tails = torch.tensor(prefixes, dtype=torch.long, device=ids.device).reshape(len(prefixes), -1)
        with torch.inference_mode():
            logits = target.model(torch.cat([ids.expand(len(prefixes), -1), tails], dim=1)).logits[:, -1]
        rows = sampler.law(logits).double().tolist()
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
    tick: Callable[[], object] = lambda: None,
) -> tuple[Counter[Answer], float]:
    """How often each answer of `length` tokens came out of so many draws, and drafted tokens accepted per draw."""
    generator = torch.Generator(ids.device).manual_seed(seed)
    settings: dict[str, Any] = asdict(sampling)
    seen: Counter[Answer] = Counter()
    accepted = 0
    for _ in range(draws):
        out = decoder.generate(ids, max_new_tokens=length, do_sample=True, generator=generator, **settings)
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
        single -= 1  # too little for a cell of its own
    rest = cells[max(single, 0) :]
    pooled = [(sum(expected for expected, _ in rest), sum(count for _, count in rest))] if rest else []
    cells = [*cells[: max(single, 0)], *pooled]
    if len(cells) < 2:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.double) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


VOCABULARY = 8
AFTER_BLOCKS = (0, 1)
SPREAD = 0.38  # standard deviation of the target's matrices: three or four likely tokens at each place
DRAFT_NOISE = 0.08  # of the draft LM's matrices around the target's
HEAD_NOISE = 0.12  # added to every matrix of a new head, whose laws would be flat, or the target's own


def write_miniature(directory: Path, seed: int = 4, vocabulary: int = VOCABULARY) -> TargetConfig:
    """The target under directory/target, its recipe's section returned, and directory/heads/KIND for every kind.

    An EAGLE-3 head has no word for every third token.
    """
    generator = torch.Generator().manual_seed(seed)
    config = TargetConfig(str(directory / "target"), dtype="float32")
    model = _model(generator, vocabulary)
    draft_ids = torch.tensor([token for token in range(vocabulary) if token % 3 != 2])
    _save(model, directory / "target")
    target = Target(model, config)
    for section in (Eagle1Section(), Eagle3Section(), MedusaSection(), HydraSection(prefix_layer=True)):
        three = section.kind == "eagle3"
        head = new_head(
            section,
            target.config,
            target.ends,
            seed,
            after_blocks=AFTER_BLOCKS if three else (),
            vocabulary=DraftVocabulary.of_ids(draft_ids, vocabulary) if three else None,
        )
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2 and name != "embed_tokens.weight":
                _disturb(parameter.data, HEAD_NOISE, generator)
        save_head(head, directory / "heads" / section.kind)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            _disturb(parameter.data, DRAFT_NOISE, generator)
    _save(model, directory / "heads" / "draft_lm")
    return config


def _model(generator: torch.Generator, vocabulary: int) -> LlamaForCausalLM:
    """A Llama that never ends."""
    sizes = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(sizes).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, SPREAD, generator=generator)
    return model


def _disturb(weight: Tensor, noise: float, generator: torch.Generator) -> None:
    weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)


def _save(model: PreTrainedModel, directory: Path) -> None:
    """The model with a tokenizer whose words are letters."""
    model.save_pretrained(directory)
    letters = Tokenizer(
        models.WordLevel({chr(ord("a") + token): token for token in range(model.config.vocab_size)}, unk_token="a")
    )
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(directory)


LENGTHS = (32, 3, 12, 4, 20, 6)  # max_new_tokens of the prompts, in turn
EDGES = ("rejected", "accepted", "ended", "cut")
ROUNDING = 4.0  # in units of eps times the largest logit; storing two logits alone can cost 1


@dataclass(frozen=True)
class Reference:
    """A prompt [1, T] and what the target alone writes after it: generate(do_sample=False).

    Greedy text does not look ahead, so a shorter answer, or one that ends at another end token, is a beginning of it.
    """

    ids: Tensor
    answer: list[int]


@dataclass(frozen=True)
class Difference:
    """The first token that differs, with how far the two tokens' logits are apart in a plain forward."""

    prompt: int
    position: int
    ours: int
    theirs: int
    gap: float
    rounding: float  # a gap that rounding can make in the target's dtype

    @property
    def within_rounding(self) -> bool:
        return self.gap <= self.rounding


@dataclass
class GreedyResult:
    """How many prompts were answered identically every time, and in how many answers each edge case was met.

    rejected: every drafted token was refused. accepted: every draft was accepted down to its deepest node. ended: an
    end token inside an accepted path. cut: max_new_tokens inside a path that a longer answer accepts.
    """

    prompts: int = 0
    identical: int = 0
    edges: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EDGES, 0))
    differences: list[Difference] = field(default_factory=list)

    def holds(self, exact: bool) -> bool:
        """Whether all answers are identical; where they need not be exactly, up to rounding."""
        return not self.differences or (not exact and all(each.within_rounding for each in self.differences))


def reference(target: Target, ids: Tensor) -> Reference:
    """The target's own greedy answer to ids [1, T], as long as any that is compared with it."""
    with torch.inference_mode():
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max(LENGTHS)
        )
    return Reference(ids, out[0, ids.shape[1] :].tolist())


def compare_greedy(
    decoder: SpeculativeDecoder, references: Sequence[Reference], tick: Callable[[], object] = lambda: None
) -> GreedyResult:
    """Every prompt answered once, then again with an end token, and with a limit, inside a path that was accepted."""
    result = GreedyResult()
    for number, known in enumerate(references):
        tries = _Tries(decoder, known, number)
        tries.run("free", max_new_tokens=LENGTHS[number % len(LENGTHS)])
        tries.end_inside_a_path()
        tries.cut_a_path()
        result.prompts += 1
        result.identical += tries.difference is None
        for edge in tries.edges:
            result.edges[edge] += 1
        if tries.difference is not None:
            result.differences.append(tries.difference)
        tick()
    return result


@dataclass(frozen=True)
class _Answer:
    """One answer and its cycles: drafted tokens accepted, and the depth of the deepest one drafted."""

    generation: Generation
    accepted: list[int]
    depths: list[int]

    @property
    def drafts(self) -> list[tuple[int, int]]:
        return [(took, depth) for took, depth in zip(self.accepted, self.depths, strict=True) if depth]

    def paths(self) -> list[tuple[int, int, int]]:
        """For each cycle: how many tokens stood before it, how many of its drafted ones were taken, how many in all."""
        found, before = [], 1
        for accepted, tokens in zip(self.accepted, self.generation.statistics.cycle_tokens, strict=True):
            found.append((before, min(accepted, tokens), tokens))
            before += tokens
        return found


class _Tries:
    """The answers to one prompt."""

    def __init__(self, decoder: SpeculativeDecoder, known: Reference, number: int) -> None:
        self.decoder, self.known, self.number = decoder, known, number
        self.ends = token_ids(decoder.target.generation_config.eos_token_id)
        self.edges: list[str] = []
        self.difference: Difference | None = None
        self.answer: _Answer | None = None

    def run(self, name: str, max_new_tokens: int, end: int | None = None) -> _Answer:
        accepted: list[int] = []
        depths: list[int] = []

        def watch(cycle: Cycle) -> None:
            tree = cycle.tree
            guessed = tree.depth if tree.passengers is None else tree.depth[~tree.passengers]
            accepted.append(cycle.verdict.accepted)
            depths.append(int(guessed.max()))

        settings: dict[str, Any] = {} if end is None else {"eos_token_id": [end, *self.ends]}
        generation = self.decoder.generate(
            self.known.ids, do_sample=False, max_new_tokens=max_new_tokens, on_cycle=watch, **settings
        )
        wanted = self.known.answer[:max_new_tokens]
        if end is not None and end in wanted:
            wanted = wanted[: wanted.index(end) + 1]
        self._compare(generation.new_ids, wanted)
        found = _Answer(generation, accepted, depths)
        if name == "free":
            self.answer = found
        if found.drafts and not any(took for took, _ in found.drafts):
            self.edges.append("rejected")
        if found.drafts and all(took == depth for took, depth in found.drafts):
            self.edges.append("accepted")
        return found

    def end_inside_a_path(self) -> None:
        """Again, with a token that was drafted and accepted as an end token; one that did not stand before it."""
        assert self.answer is not None
        text = self.answer.generation.new_ids
        for before, taken, _ in self.answer.paths():
            for place in range(before, before + taken):
                if text.index(text[place]) == place and text[place] not in self.ends:
                    again = self.run("ended", len(text), text[place])
                    _, inside, tokens = again.paths()[-1] if again.paths() else (0, 0, 1)
                    self.edges += ["ended"] * (inside == tokens)
                    return

    def cut_a_path(self) -> None:
        """Again, with a limit inside the longest cycle."""
        assert self.answer is not None
        before, taken, tokens = max(self.answer.paths(), key=lambda path: path[2], default=(0, 0, 0))
        if taken and tokens > 1:
            self.run("cut", before + max(1, tokens - 1))
            self.edges.append("cut")

    def _compare(self, ours: list[int], theirs: list[int]) -> None:
        if ours == theirs or self.difference is not None:
            return
        pairs = zip(ours, theirs, strict=False)
        place = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
        one, other = (text[place] if place < len(text) else -1 for text in (ours, theirs))
        gap, rounding = float("inf"), 0.0
        if min(one, other) >= 0:
            gap, rounding = _gap(self.decoder.target, self.known.ids, ours[:place], one, other)
        self.difference = Difference(self.number, place, one, other, gap, rounding)


def _gap(target: Target, ids: Tensor, before: list[int], one: int, other: int) -> tuple[float, float]:
    """How far two tokens' logits are apart after a text, and how far rounding alone can move them."""
    text = torch.cat([ids, torch.tensor([before], dtype=ids.dtype, device=ids.device)], dim=1)
    with torch.inference_mode():
        logits = target.model(text).logits[0, -1].float()
    return float((logits[one] - logits[other]).abs()), ROUNDING * torch.finfo(target.dtype).eps * float(
        logits.abs().max()
    )


if TYPE_CHECKING:
    pass

SETTINGS = (SamplingConfig(1.0), SamplingConfig(0.6, top_p=0.8))
ALPHA = 1e-3  # chance that a proof fails by bad luck, over all its p-values (Bonferroni)
NOT_LOSSLESS = "not lossless (typical acceptance), not tested"


@dataclass(frozen=True)
class Row:
    """A method and the kind of head that it drafts with (null: it needs none)."""

    asked: MethodConfig
    kind: str | None
    head: str | None = None  # its directory; null where there is none, which leaves the sampled proof

    @property
    def is_testable(self) -> bool:
        return self.asked.typical is None

    @property
    def has_all(self) -> bool:
        """Whether a real target can decode with it."""
        return self.kind is None or self.head is not None


@dataclass(frozen=True)
class Law:
    """How well sampled answers at one setting fit the target's law."""

    temperature: float
    top_p: float
    p_value: float
    accepted_per_answer: float  # drafted tokens; without any there is nothing to prove


@dataclass(frozen=True)
class Proof:
    """What was found about one row."""

    row: Row
    greedy: "GreedyResult | None"  # null: there was no head
    laws: tuple[Law, ...]
    verdict: str
    holds: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.row.asked.method,
            "kind": self.row.kind,
            "head": self.row.head,
            "greedy": None if self.greedy is None else asdict(self.greedy),
            "laws": [asdict(law) for law in self.laws],
            "verdict": self.verdict,
            "holds": self.holds,
        }


def rows_of(methods: Sequence[Method], heads: dict[str, str], others: Sequence[MethodConfig] = ()) -> list[Row]:
    """A row for each method and each kind of head that it drafts with and that is there; else one without a head.

    heads: directories by kind. others: a recipe's rows, of which those with typical acceptance come last.
    """
    found = []
    for asked in (*map(MethodConfig, methods), *(other for other in others if other.typical is not None)):
        kinds = METHODS[asked.method].heads
        there = [Row(asked, kind, heads[kind]) for kind in kinds if kind in heads]
        found += there or [Row(asked, kinds[0] if kinds else None)]
    return found


def conclude(row: Row, greedy: "GreedyResult | None", laws: tuple[Law, ...], level: float, exact: bool) -> Proof:
    """A row's proof, which fails with a p-value below `level` or with greedy answers that differ.

    exact: also where they differ by no more than rounding.
    """
    if not row.is_testable:
        return Proof(row, None, (), NOT_LOSSLESS, True)
    wrong = [f"law at {setting_text(law.temperature, law.top_p)}" for law in laws if not law.p_value >= level]
    if greedy is not None and not greedy.holds(exact):
        wrong.insert(0, "greedy")
    if wrong:
        return Proof(row, greedy, laws, f"FAILED: {', '.join(wrong)}", False)
    if greedy is None:
        return Proof(row, greedy, laws, "lossless in law (no head for greedy)", True)
    return Proof(row, greedy, laws, "lossless up to rounding" if greedy.differences else "lossless", True)


def table(proofs: Sequence[Proof]) -> str:
    """The proofs as text, with a line for each greedy difference below."""
    settings = [f"p {setting_text(each.temperature, each.top_p)}" for each in SETTINGS]
    lines = [["method", "head", "greedy identical", *settings, "verdict"]]
    notes = []
    for proof in proofs:
        row, greedy = proof.row, proof.greedy
        identical = NOTHING if greedy is None else f"{greedy.identical}/{greedy.prompts}"
        p_values = [f"{law.p_value:.3g}" for law in proof.laws] or [NOTHING] * len(SETTINGS)
        lines.append([row.asked.method, row.kind or NOTHING, identical, *p_values, proof.verdict])
        for each in greedy.differences if greedy else ():
            notes.append(
                f"{row.asked.method}: prompt {each.prompt}, new token {each.position}: {each.ours} instead of "
                f"{each.theirs}, logits {each.gap:.3g} apart (rounding: up to {each.rounding:.3g})"
            )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["─" * width for width in widths])
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, *notes])


def setting_text(temperature: float, top_p: float) -> str:
    """'T=1', or 'T=0.6/p=0.8'."""
    return f"T={temperature:g}" + (f"/p={top_p:g}" if top_p < 1 else "")


LENGTH = 4  # new tokens of a sampled answer; with fewer no tree has a second level, and no stop rule a say
LONGER: dict[Method, int] = {"sps-heuristic": 5}  # its second draft is the first to depend on what was accepted
# what ends trees of two levels now and then, as the published thresholds do deeper ones
EARLY_VOTE = VoteConfig(probability_threshold=0.7, momentum_threshold=0.7, declines=1)
SMALL: dict[str, Any] = {"k": 2, "nodes": 5}  # of a vocabulary of 8 the published trees would hold nearly everything
MINIATURES: dict[Method, MethodConfig] = {
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
TASKS = (
    "Explain in two sentences what you know about",
    "List three facts about",
    "Write a short story about",
    "Write a Python function that has to do with",
    "Count to ten, and then say something about",
    "Name five words that go with",
)
TOPICS = ("the sea", "prime numbers", "a bicycle", "bread")


class GreedyProver:
    """Compares greedy answers on one target."""

    def __init__(self, config: TargetConfig, prompts: PromptsConfig | None, count: int) -> None:
        """The first prompts of a file, or questions of its own; transformers answers them here."""
        self.target = Target.load(config, default_device())
        self._drafters = Drafters(self.target)
        tokenizer = load_tokenizer(config)
        texts = [f"{task} {topic}." for topic in TOPICS for task in TASKS][:count]
        if prompts is not None:
            texts = [prompt.text for prompt in load_prompts(replace(prompts, num_prompts=count))[:count]]
        self.references = []
        with bar(len(texts), "prompts", "generate") as progress:
            for text in texts:
                self.references.append(reference(self.target, _ids(text, tokenizer, self.target)))
                progress.update()

    @property
    def is_exact(self) -> bool:
        """Whether a difference is a failure whatever its size."""
        return self.target.dtype == torch.float32

    def prove(self, row: Row, tick: Callable[[], object] = lambda: None) -> GreedyResult:
        """The row's answers beside the target's own; tick is called once a prompt."""
        return compare_greedy(make_decoder(self._drafters, row.asked, row.head), self.references, tick)


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
        self, row: Row, sampling: SamplingConfig, draws: int, seed: int, tick: Callable[[], object] = lambda: None
    ) -> Law:
        """How well so many answers fit; tick is called once an answer."""
        length = LONGER.get(row.asked.method, LENGTH)
        if (length, sampling) not in self._laws:
            self._laws[length, sampling] = answer_law(self.target, self.ids, length, sampling)
        head = None if row.kind is None else str(self._heads / row.kind)
        decoder = remember(make_decoder(self._drafters, MINIATURES.get(row.asked.method, row.asked), head))
        seen, accepted = draw_answers(decoder, self.ids, draws, length, sampling, seed, tick)
        fit = p_value(self._laws[length, sampling], seen)
        return Law(sampling.temperature, sampling.top_p, fit, accepted)


def prove(rows: Sequence[Row], greedy: GreedyProver, draws: int, seed: int) -> list[Proof]:
    """The proof of every row, its sampled part from so many answers at each setting."""
    tested = [row for row in rows if row.is_testable]
    level = ALPHA / max(1, len(tested) * len(SETTINGS))
    steps = len(tested) * draws * len(SETTINGS) + sum(row.has_all for row in tested) * len(greedy.references)
    proofs = []
    with tempfile.TemporaryDirectory() as directory, bar(steps, "answers", "verify") as progress:
        sampled = SampledProver(Path(directory))
        for row in rows:
            result = greedy.prove(row, progress.update) if row.is_testable and row.has_all else None
            settings = SETTINGS if row.is_testable else ()
            laws = tuple(sampled.prove(row, each, draws, seed, progress.update) for each in settings)
            proofs.append(conclude(row, result, laws, level, greedy.is_exact))
    return proofs


def _ids(text: str, tokenizer: Any, target: Target) -> Tensor:
    """A prompt [1, T] in the target's chat template, or as it is where there is none."""
    if getattr(tokenizer, "chat_template", None) is not None:
        return encode(text, tokenizer, target)
    ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError(f"{target.recipe.path}: its tokenizer makes nothing of {text!r}; give a recipe with prompts")
    return torch.tensor([ids], device=target.device)


MIN_DRAWS = 200  # fewer leave the law hardly a cell to be wrong in


@dataclass(frozen=True)
class Options:
    """What is proven, and how thoroughly."""

    methods: tuple[Method, ...]
    prompts: int
    draws: int
    seed: int
    json: Path | None
    plan: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `verify` beside those of every command."""
    parser.add_argument("--head", type=Path, action="append", default=[], help="a head directory; one of each kind")
    parser.add_argument("--methods", default=",".join(METHODS), help="eagle2,sps,...; default: all")
    parser.add_argument("--prompts", type=int, default=20, help="prompts answered greedily (default 20)")
    parser.add_argument("--draws", type=int, default=2000, help="sampled answers for each p-value (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled answers")
    parser.add_argument("--json", type=Path, help="write what was found to this file too")


def options_of(arguments: argparse.Namespace) -> Options:
    """The options as given; UserError for one that proves nothing."""
    names = [name.strip() for name in arguments.methods.split(",") if name.strip()]
    foreign = [name for name in names if name not in METHODS]
    if foreign or not names:
        wrong = foreign[0] if foreign else "nothing"
        raise UserError(f"--methods {arguments.methods}: {wrong} is no method; methods are {', '.join(METHODS)}")
    if arguments.prompts < 1:
        raise UserError(f"--prompts {arguments.prompts}: at least one prompt is needed")
    if arguments.draws < MIN_DRAWS:
        raise UserError(f"--draws {arguments.draws}: at least {MIN_DRAWS} are needed to tell a law from another")
    methods = cast(tuple[Method, ...], tuple(dict.fromkeys(names)))
    return Options(methods, arguments.prompts, arguments.draws, arguments.seed, arguments.json, arguments.plan)


def demonstrate(
    options: Options,
    target: TargetConfig,
    heads: dict[str, str],
    prompts: PromptsConfig | None = None,
    others: Sequence[MethodConfig] = (),
    threads: int | None = None,
) -> int:
    """Proves, prints and writes what was asked for; 1 when any row fails, else 0.

    heads: directories by kind. prompts: where they come from, null: questions of its own. others: a recipe's rows.
    """
    rows = rows_of(options.methods, heads, others)
    if options.plan:
        names = [f"{row.asked.method} ({row.kind})" if row.kind else row.asked.method for row in rows]
        print(
            f"verify: {target.path} in {target.dtype}, {options.prompts} prompts greedily and 2 x {options.draws} "
            f"sampled answers for each of {len(rows)} rows: {', '.join(names)}"
        )
        return 0
    prepare(threads)

    greedy = GreedyProver(target, prompts, options.prompts)
    proofs = prove(rows, greedy, options.draws, options.seed)
    print(table(proofs))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, _record(options, target, proofs))
    return 0 if all(proof.holds for proof in proofs) else 1


def _record(options: Options, target: TargetConfig, proofs: Sequence[Proof]) -> dict[str, object]:
    return {
        "schema": 1,
        "target": target.path,
        "dtype": target.dtype,
        "draws": options.draws,
        "seed": options.seed,
        "p_values": sum(len(proof.laws) for proof in proofs),
        "family_error": ALPHA,
        "rows": [proof.as_dict() for proof in proofs],
        "holds": all(proof.holds for proof in proofs),
    }


class Memo:
    """Stands for an object whose answers depend on its calls since the first of `calls`, and on nothing else.

    Calls that were made before, in this order, are answered from memory; the object is given the others.
    """

    def __init__(self, inner: Any, calls: tuple[str, ...]) -> None:
        self._inner, self._calls = inner, calls
        self._known: dict[Any, tuple[Any, dict[Any, Any]]] = {}  # call -> its answer, and the calls after it
        self._here, self._history, self._told = self._known, list[tuple[str, tuple[Any, ...]]](), 0

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in self._calls else getattr(self._inner, name)

    def _call(self, name: str, *given: Any) -> Any:
        if name == self._calls[0]:
            self._here, self._history, self._told = self._known, [], 0
        self._history.append((name, given))
        key = (name, *map(_key, given))
        if key not in self._here:
            for earlier, arguments in self._history[self._told :]:  # what it has not been told of this history
                answer = getattr(self._inner, earlier)(*arguments)
            self._told = len(self._history)
            self._here[key] = answer, {}
        answer, self._here = self._here[key]
        return answer


def _key(value: Any) -> Any:
    if isinstance(value, Tree):
        return tuple(map(_key, (value.tokens, value.depth, value.mask)))
    if isinstance(value, Tensor):
        return value.shape, value.cpu().numpy().tobytes()
    return tuple(value) if isinstance(value, list) else value


def remember(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The same decoder, whose models run once for each text and tree: for many short answers to one prompt."""
    decoder.lm = Memo(decoder.lm, ("prefill", "extend", "keep"))  # type: ignore[assignment]
    if isinstance(decoder.proposer, Drafting):
        decoder.proposer.drafter = Memo(decoder.proposer.drafter, ("reset", "commit", "start", "step"))
    return decoder
