"""The proof that methods are lossless: greedy answers token for token, sampled ones by their law.

Greedily every method is compared with transformers' generate on the real target, at the edges too: an end token and
max_new_tokens inside an accepted path. Sampled answers are drawn from a target so small that the exact law of its
answers can be enumerated, and tested for their fit.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import Sampler, resolve, token_ids
from aerie.infer.decode.shape import Cycle, Drafting
from aerie.infer.decode.tree import Tree
from aerie.infer.measure.bench import default_device, prepare
from aerie.infer.measure.tasks import encode, load_prompts
from aerie.model.checkpoint import new_head, save_head
from aerie.model.storage import write_json
from aerie.model.target import Target, load_tokenizer
from aerie.model.vocab import DraftVocabulary

Answer = tuple[int, ...]
Tick = Callable[[], object]
EXPECTED = 5.0  # draws that every cell of the chi-square test must expect
ALPHA = 1e-3  # chance that a proof fails by bad luck, over all its p-values (Bonferroni)
MIN_DRAWS = 200  # fewer leave the law hardly a cell to be wrong in
SETTINGS = (SamplingConfig(1.0), SamplingConfig(0.6, top_p=0.8))
NOT_LOSSLESS = "not lossless (typical acceptance), not tested"

# ------------------------------------------------------------------------------------------------- the exact law


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


# ------------------------------------------------------------------------------------------------- the miniature

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
            target.ends,
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


@dataclass(frozen=True)
class Row:
    """A method and the kind of head that it drafts with (null: it needs none)."""

    asked: MethodConfig
    kind: str | None
    head: str | None = None  # its directory; null where there is none, which leaves the sampled proof


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

    def prove(self, row: Row, sampling: SamplingConfig, draws: int, seed: int, tick: Tick = lambda: None) -> Law:
        """How well so many answers fit; tick is called once an answer."""
        length = LONGER.get(row.asked.method, LENGTH)
        if (length, sampling) not in self._laws:
            self._laws[length, sampling] = answer_law(self.target, self.ids, length, sampling)
        head = None if row.kind is None else str(self._heads / row.kind)
        decoder = remember(make_decoder(self._drafters, MINIATURES.get(row.asked.method, row.asked), head))
        seen, accepted = draw_answers(decoder, self.ids, draws, length, sampling, seed, tick)
        fit = p_value(self._laws[length, sampling], seen)
        return Law(sampling.temperature, sampling.top_p, fit, accepted)


# ------------------------------------------------------------------------------------------------- greedy answers

LENGTHS = (32, 3, 12, 4, 20, 6)  # max_new_tokens of the prompts, in turn
EDGES = ("rejected", "accepted", "ended", "cut")
ROUNDING = 4.0  # in units of eps times the largest logit; storing two logits alone can cost 1
TASKS = (
    "Explain in two sentences what you know about",
    "List three facts about",
    "Write a short story about",
    "Write a Python function that has to do with",
    "Count to ten, and then say something about",
    "Name five words that go with",
)
TOPICS = ("the sea", "prime numbers", "a bicycle", "bread")


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
    ours: int  # -1: the answer ended before
    theirs: int
    gap: float
    rounding: float  # a gap that rounding can make in the target's dtype


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
        return not self.differences or (not exact and all(each.gap <= each.rounding for each in self.differences))


def reference(target: Target, ids: Tensor) -> Reference:
    """The target's own greedy answer to ids [1, T], as long as any that is compared with it."""
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": max(LENGTHS)}
    with torch.inference_mode():
        out = target.model.generate(ids, **settings)
    return Reference(ids, out[0, ids.shape[1] :].tolist())


def compare_greedy(
    decoder: SpeculativeDecoder, references: Sequence[Reference], tick: Tick = lambda: None
) -> GreedyResult:
    """Every prompt answered once, then again with an end token, and with a limit, inside a path that was accepted."""
    result = GreedyResult()
    for number, known in enumerate(references):
        difference = _tries(decoder, known, number, result.edges)
        result.prompts += 1
        result.identical += difference is None
        result.differences += [difference] if difference else []
        tick()
    return result


def _tries(decoder: SpeculativeDecoder, known: Reference, number: int, edges: dict[str, int]) -> Difference | None:
    """The first difference in the answers to one prompt; counts the edge cases that they meet."""
    ends = token_ids(decoder.target.generation_config.eos_token_id)
    differences: list[Difference] = []

    def run(max_new_tokens: int, end: int | None = None) -> tuple[list[int], list[tuple[int, int, int]]]:
        """The answer; and for each cycle the tokens before it, those of its draft that were taken, and all of it."""
        drafts: list[tuple[int, int]] = []  # accepted tokens and the deepest drafted node

        def watch(cycle: Cycle) -> None:
            tree = cycle.tree
            depth = tree.depth if tree.passengers is None else tree.depth[~tree.passengers]
            drafts.append((cycle.verdict.accepted, int(depth.max())))

        settings: dict[str, Any] = {} if end is None else {"eos_token_id": [end, *ends]}
        settings |= {"do_sample": False, "max_new_tokens": max_new_tokens}
        out = decoder.generate(known.ids, on_cycle=watch, **settings)
        wanted = known.answer[:max_new_tokens]
        if end is not None and end in wanted:
            wanted = wanted[: wanted.index(end) + 1]
        if out.new_ids != wanted:
            differences.append(_difference(decoder.target, known.ids, number, out.new_ids, wanted))
        drafted = [(took, depth) for took, depth in drafts if depth]
        edges["rejected"] += bool(drafted) and not any(took for took, _ in drafted)
        edges["accepted"] += bool(drafted) and all(took == depth for took, depth in drafted)
        paths, before = [], 1
        for (took, _), tokens in zip(drafts, out.statistics.cycle_tokens, strict=True):
            paths.append((before, min(took, tokens), tokens))
            before += tokens
        return out.new_ids, paths

    text, paths = run(LENGTHS[number % len(LENGTHS)])
    # again, with an end token that was drafted and accepted, and did not stand before
    taken = [place for before, took, _ in paths for place in range(before, before + took)]
    end = next((at for at in taken if text.index(text[at]) == at and text[at] not in ends), None)
    if end is not None:
        _, again = run(len(text), text[end])
        edges["ended"] += bool(again) and again[-1][1] == again[-1][2]
    # again, with a limit inside the longest cycle
    before, took, tokens = max(paths, key=lambda path: path[2], default=(0, 0, 0))
    if took and tokens > 1:
        run(before + max(1, tokens - 1))
        edges["cut"] += 1
    return differences[0] if differences else None


def _difference(target: Target, ids: Tensor, number: int, ours: list[int], theirs: list[int]) -> Difference:
    shared = min(len(ours), len(theirs))
    place = next((at for at in range(shared) if ours[at] != theirs[at]), shared)
    one, other = (text[place] if place < len(text) else -1 for text in (ours, theirs))
    if min(one, other) < 0:
        return Difference(number, place, one, other, float("inf"), 0.0)
    text = torch.cat([ids, torch.tensor([ours[:place]], dtype=ids.dtype, device=ids.device)], dim=1)
    with torch.inference_mode():
        logits = target.model(text).logits[0, -1].float()
    rounding = ROUNDING * torch.finfo(target.dtype).eps * float(logits.abs().max())
    return Difference(number, place, one, other, float((logits[one] - logits[other]).abs()), rounding)


# ------------------------------------------------------------------------------------------------- the proof


@dataclass(frozen=True)
class Proof:
    """What was found about one row."""

    row: Row
    greedy: GreedyResult | None  # null: there was no head
    laws: tuple[Law, ...]
    verdict: str
    holds: bool


def conclude(row: Row, greedy: GreedyResult | None, laws: tuple[Law, ...], level: float, exact: bool) -> Proof:
    """A row's proof, which fails with a p-value below `level` or with greedy answers that differ.

    exact: also where they differ by no more than rounding.
    """
    if row.asked.typical is not None:
        return Proof(row, None, (), NOT_LOSSLESS, True)
    wrong = [] if greedy is None or greedy.holds(exact) else ["greedy"]
    wrong += [f"law at {_setting(law)}" for law in laws if not law.p_value >= level]
    if wrong:
        return Proof(row, greedy, laws, f"FAILED: {', '.join(wrong)}", False)
    if greedy is None:
        return Proof(row, greedy, laws, "lossless in law (no head for greedy)", True)
    return Proof(row, greedy, laws, "lossless up to rounding" if greedy.differences else "lossless", True)


def prove(rows: Sequence[Row], target: Target, references: Sequence[Reference], draws: int, seed: int) -> list[Proof]:
    """The proof of every row, its sampled part from so many answers at each setting."""
    tested = [row for row in rows if row.asked.typical is None]
    level = ALPHA / max(1, len(tested) * len(SETTINGS))
    drafting = [row for row in tested if row.kind is None or row.head is not None]  # that the real target decodes with
    drafters, proofs = Drafters(target), []
    steps = len(tested) * draws * len(SETTINGS) + len(drafting) * len(references)
    with tempfile.TemporaryDirectory() as directory, bar(steps, "answers", "verify") as progress:
        sampled = SampledProver(Path(directory))
        for row in rows:
            greedy, laws = None, tuple[Law, ...]()
            if row in drafting:
                greedy = compare_greedy(make_decoder(drafters, row.asked, row.head), references, progress.update)
            if row in tested:
                laws = tuple(sampled.prove(row, setting, draws, seed, progress.update) for setting in SETTINGS)
            proofs.append(conclude(row, greedy, laws, level, exact=target.dtype == torch.float32))
    return proofs


def table(proofs: Sequence[Proof]) -> str:
    """The proofs as text, with a line for each greedy difference below."""
    lines = [["method", "head", "greedy identical", *(f"p {_setting(each)}" for each in SETTINGS), "verdict"]]
    notes = []
    for proof in proofs:
        row, greedy = proof.row, proof.greedy
        identical = "–" if greedy is None else f"{greedy.identical}/{greedy.prompts}"
        p_values = [f"{law.p_value:.3g}" for law in proof.laws] or ["–"] * len(SETTINGS)
        lines.append([row.asked.method, row.kind or "–", identical, *p_values, proof.verdict])
        for each in greedy.differences if greedy else ():
            notes.append(
                f"{row.asked.method}: prompt {each.prompt}, new token {each.position}: {each.ours} instead of "
                f"{each.theirs}, logits {each.gap:.3g} apart (rounding: up to {each.rounding:.3g})"
            )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["─" * width for width in widths])
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, *notes])


def _setting(sampling: SamplingConfig | Law) -> str:
    """'T=1', or 'T=0.6/p=0.8'."""
    return f"T={sampling.temperature:g}" + (f"/p={sampling.top_p:g}" if sampling.top_p < 1 else "")


def rows_of(methods: Sequence[str], heads: dict[str, str], others: Sequence[MethodConfig] = ()) -> list[Row]:
    """A row for each method and each kind of head that it drafts with and that is there; else one without a head.

    heads: directories by kind. others: a recipe's rows, of which those with typical acceptance come last.
    """
    named: list[Any] = [name.strip() for name in methods if name.strip()]
    rows = []
    for asked in (*map(MethodConfig, dict.fromkeys(named)), *(other for other in others if other.typical is not None)):
        kinds = METHODS[asked.method].heads
        there = [Row(asked, kind, heads[kind]) for kind in kinds if kind in heads]
        rows += there or [Row(asked, kinds[0] if kinds else None)]
    return rows


def check_options(options: argparse.Namespace) -> None:
    """UserError for options of `verify` that prove nothing."""
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    foreign = [name for name in names if name not in METHODS]
    if foreign or not names:
        wrong = foreign[0] if foreign else "nothing"
        raise UserError(f"--methods {options.methods}: {wrong} is no method; methods are {', '.join(METHODS)}")
    if options.prompts < 1:
        raise UserError(f"--prompts {options.prompts}: at least one prompt is needed")
    if options.draws < MIN_DRAWS:
        raise UserError(f"--draws {options.draws}: at least {MIN_DRAWS} are needed to tell a law from another")


def demonstrate(
    options: argparse.Namespace,
    config: TargetConfig,
    heads: dict[str, str],
    prompts: PromptsConfig | None = None,
    others: Sequence[MethodConfig] = (),
    threads: int | None = None,
) -> int:
    """Proves, prints and writes what the options of `verify` ask for; 1 when any row fails, else 0.

    heads: directories by kind. prompts: where they come from, null: questions of its own. others: a recipe's rows.
    """
    rows = rows_of(options.methods.split(","), heads, others)
    if options.plan:
        names = [f"{row.asked.method} ({row.kind})" if row.kind else row.asked.method for row in rows]
        print(
            f"verify: {config.path} in {config.dtype}, {options.prompts} prompts greedily and 2 x {options.draws} "
            f"sampled answers for each of {len(rows)} rows: {', '.join(names)}"
        )
        return 0
    prepare(threads)
    target, tokenizer = Target.load(config, default_device()), load_tokenizer(config)
    texts = [f"{task} {topic}." for topic in TOPICS for task in TASKS][: options.prompts]
    if prompts is not None:
        loaded = load_prompts(replace(prompts, num_prompts=options.prompts))
        texts = [prompt.text for prompt in loaded[: options.prompts]]
    references = []
    with bar(len(texts), "prompts", "generate") as progress:
        for text in texts:
            references.append(reference(target, _ids(text, tokenizer, target)))
            progress.update()
    proofs = prove(rows, target, references, options.draws, options.seed)
    print(table(proofs))
    holds = all(proof.holds for proof in proofs)
    if options.json is not None:
        found: dict[str, Any] = {"schema": 1, "target": config.path, "dtype": config.dtype}
        found |= {"draws": options.draws, "seed": options.seed, "p_values": sum(len(proof.laws) for proof in proofs)}
        found |= {"family_error": ALPHA, "rows": [_facts(proof) for proof in proofs], "holds": holds}
        write_json(options.json, found)
    return 0 if holds else 1


def _facts(proof: Proof) -> dict[str, Any]:
    row = proof.row
    values = asdict(proof) | {"method": row.asked.method, "kind": row.kind, "head": row.head}
    return {name: values[name] for name in ("method", "kind", "head", "greedy", "laws", "verdict", "holds")}


def _ids(text: str, tokenizer: Any, target: Target) -> Tensor:
    """A prompt [1, T] in the target's chat template, or as it is where there is none."""
    if getattr(tokenizer, "chat_template", None) is not None:
        return encode(text, tokenizer, target)
    ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError(f"{target.recipe.path}: its tokenizer makes nothing of {text!r}; give a recipe with prompts")
    return torch.tensor([ids], device=target.device)
