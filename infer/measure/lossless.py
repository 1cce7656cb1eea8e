"""Proves that methods are lossless.

It compares greedy answers on the real target, and sampled answers with a miniature's exact law.
"""

import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import chi2
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml, validate
from aerie.configs.schema.data import RenderConfig
from aerie.configs.schema.decode import METHODS, DynamicConfig, MethodConfig
from aerie.configs.schema.heads import KINDS, TargetConfig
from aerie.configs.schema.measure import PromptsConfig, SamplingConfig
from aerie.data.progress import start_progress
from aerie.data.rendering import recipe_tokenizer
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics, make_decoder
from aerie.infer.decode.find_head import check_levels
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.roles import Cycle
from aerie.infer.decode.sampling import Sampler, resolve, token_ids
from aerie.infer.measure.agreement import Difference, first_difference
from aerie.infer.measure.bench import load_quietly
from aerie.infer.measure.tasks import load_prompts
from aerie.infer.measure.tree_shape import aligned
from aerie.model.checkpoint import new_head, save_head
from aerie.model.heads.eagle import DraftVocabulary
from aerie.model.storage import write_json
from aerie.model.target import Target
from aerie.model.target_files import load_tokenizer

ALPHA = 1e-3  # the chance that a proof fails by bad luck, over all its p-values (Bonferroni)
MIN_DRAWS = 200  # with fewer draws the chi-square test has hardly a cell
EXPECTED = 5.0  # the least expected draws in a cell of the chi-square test
PROOF_SAMPLINGS = (SamplingConfig(1.0), SamplingConfig(0.6, top_p=0.8))
LENGTHS = (32, 3, 12, 4, 20, 6)  # the prompts take these max_new_tokens in turn
# All drafts are refused; all are accepted to their deepest node; an end token stands inside an
# accepted path; max_new_tokens ends inside one.
EDGES = ("rejected", "accepted", "ended", "cut")

VOCABULARY = 8  # the miniature's
SEED = 4
HEAD_SETTINGS = {
    "hydra": {"prefix_layer": True},
    "block": {"mask_token_id": 0, "markov_rank": 4},
}
LENGTH = 4  # new tokens of a sampled answer; shorter answers leave no room for a second level
LONGER = {"sps-heuristic": 5}  # its rule first acts on the second draft
# The prompt has every token, and n-grams that come back.
PROMPT = (1, 5, 3, 4, 1, 6, 3, 2, 7, 0, 5, 4, 2, 6, 1, 7, 3, 0, 4)
DECODED = read_yaml(Path(__file__).with_name("lossless.yaml"))[0]
MINIATURES = {
    method: validate({"method": method, **keys}, MethodConfig, method, {})
    for method, keys in DECODED["methods"].items()
}
AnswerLaw = dict[tuple[int, ...], float]  # an answer's tokens -> the answer's chance


class GreedyReference(NamedTuple):
    """A prompt and the target's longest greedy answer; shorter answers are its beginnings."""

    ids: Tensor  # [1, T]
    answer: list[int]


@dataclass(frozen=True)
class GreedyResult:
    prompts: int
    identical: int
    edges: dict[str, int]  # how many answers met each of EDGES
    differences: list[Difference]  # at most one a prompt


@dataclass(frozen=True)
class LawTest:
    temperature: float
    top_p: float
    p_value: float
    accepted_per_answer: float  # draft tokens; at 0 the test proves nothing


@dataclass
class ProofRow:
    """A method with its proofs."""

    config: MethodConfig
    kind: str | None  # of its head; None: the method has no head
    head: str | None = None  # the head's directory; None: only sampled answers are tested
    greedy: GreedyResult | None = None
    laws: tuple[LawTest, ...] = ()
    verdict: str = ""
    holds: bool = True

    @property
    def name(self) -> str:
        tree = self.config.tree
        is_drawn = isinstance(tree, DynamicConfig) and tree.children == "sampled"
        return f"{self.config.method} drawn" if is_drawn else self.config.method

    def judge(self, least_p_value: float, is_exact: bool) -> None:
        """Sets `verdict` and `holds`. is_exact: rounding excuses no difference."""
        differences = self.greedy.differences if self.greedy else []
        failures = [
            f"law at {_setting(law)}"
            for law in self.laws
            if not law.p_value >= least_p_value  # a NaN fails, too
        ]
        if any(is_exact or difference.gap > difference.rounding for difference in differences):
            failures.insert(0, "greedy")
        self.holds = not failures
        if failures:
            self.verdict = f"FAILED: {', '.join(failures)}"
        elif self.greedy is None:
            self.verdict = "lossless in law (no head for greedy)"
        else:
            self.verdict = "lossless up to rounding" if differences else "lossless"


def _setting(sampling: SamplingConfig | LawTest) -> str:
    top_p = f"/p={sampling.top_p:g}" if sampling.top_p < 1 else ""
    return f"T={sampling.temperature:g}{top_p}"


def run_verify(
    options: Namespace,
    config: TargetConfig,
    heads: dict[str, str],
    prompts: PromptsConfig,
    render: RenderConfig = RenderConfig(),  # noqa: B008
    threads: int | None = None,
) -> int:
    """Runs the command `verify`; returns 1 if a row fails, else 0.

    heads: their directories by kind.
    """
    if options.prompts < 1 or options.draws < MIN_DRAWS:
        raise UserError(
            f"--prompts {options.prompts} --draws {options.draws}: "
            f"verify needs at least 1 prompt and {MIN_DRAWS} draws"
        )
    rows = rows_to_prove(options.methods.split(","), heads)
    if options.plan:
        print(f"verify: {config.path} in {config.dtype}: {', '.join(row.name for row in rows)}")
        return 0
    print(
        f"verify: {len(rows)} methods, each with {options.prompts} prompts on the target and "
        f"{len(PROOF_SAMPLINGS)} x {options.draws:,} draws on a miniature",
        file=sys.stderr,
        flush=True,
    )
    target = load_quietly(config, threads)
    prove_rows(rows, target, recipe_tokenizer(config, render), prompts, options)
    least = ALPHA / (len(rows) * len(PROOF_SAMPLINGS))
    for row in rows:
        row.judge(least, is_exact=target.dtype == torch.float32)
    print(proof_table(rows))
    holds = all(row.holds for row in rows)
    if options.json is not None:
        facts = {
            "schema": 1,
            "target": config.path,
            "dtype": config.dtype,
            "draws": options.draws,
            "seed": options.seed,
            "p_values": sum(len(row.laws) for row in rows),
            "family_error": ALPHA,
            "rows": [proof_facts(row) for row in rows],
            "holds": holds,
        }
        write_json(options.json, facts)
    return int(not holds)


def rows_to_prove(methods: Sequence[str], heads: dict[str, str]) -> list[ProofRow]:
    """A row for each method with each of its heads; drawn dynamic trees come last."""
    configs = [
        validate({"method": name.strip()}, MethodConfig, "--methods", {}) for name in methods
    ]
    drawn = [
        replace(config, tree=replace(config.tree, children="sampled"))
        for config in configs
        if isinstance(config.tree, DynamicConfig)
    ]
    rows = []
    for config in (*configs, *drawn):
        kinds = METHODS[config.method].heads
        with_head = [ProofRow(config, kind, heads[kind]) for kind in kinds if kind in heads]
        rows += with_head or [ProofRow(config, kinds[0] if kinds else None)]
    return rows


def prove_rows(
    rows: list[ProofRow],
    target: Target,
    tokenizer: Any,
    prompts: PromptsConfig,
    options: Namespace,
) -> None:
    """Answers greedy prompts on the target, and draws answers on a miniature, for every row."""
    plain = SpeculativeDecoder(target)
    plain.tokenizer = tokenizer
    references = [
        greedy_reference(target, plain.encode(text).to(target.device))
        for text in proof_texts(prompts, options.prompts)
    ]
    drafters = LoadedHeads(target)
    # Settings that are lists may name tokens that the miniature lacks.
    of_text = resolve(target.generation_config).of_text
    laws = {name: value for name, value in of_text.items() if isinstance(value, int | float)}
    with (
        tempfile.TemporaryDirectory() as directory,
        start_progress(len(rows), "rows", "verify") as progress,
    ):
        sampled = SampledProver(Path(directory), laws)
        for row in rows:
            if row.kind is None or row.head is not None:
                config = check_levels(row.config, row.head, "verify")
                decoder = make_decoder(drafters, config, row.head)
                row.greedy = compare_greedy(decoder, references)
            row.laws = tuple(
                sampled.prove(row.config, row.kind, sampling, options.draws, options.seed)
                for sampling in PROOF_SAMPLINGS
            )
            progress.update()


def proof_texts(prompts: PromptsConfig, count: int) -> list[str]:
    """The first turns of the recipe's prompts, or else made-up tasks."""
    if prompts.path or prompts.tasks:
        chosen = load_prompts(replace(prompts, num_prompts=count))
        return [prompt.turns[0] for prompt in chosen[:count]]
    pairs = product(DECODED["topics"], DECODED["tasks"])
    return [f"{task} {topic}." for topic, task in pairs][:count]


def proof_facts(row: ProofRow) -> dict[str, Any]:
    values = asdict(row)
    return {"method": row.config.method, "asked": values.pop("config"), **values}


def proof_table(rows: Sequence[ProofRow]) -> str:
    """A table with a line for each row, then a line for each difference."""
    p_names = (f"p {_setting(sampling)}" for sampling in PROOF_SAMPLINGS)
    lines = []
    notes = []
    for row in rows:
        p_values = [f"{law.p_value:.3g}" for law in row.laws] or ["–"] * len(PROOF_SAMPLINGS)
        identical = f"{row.greedy.identical}/{row.greedy.prompts}" if row.greedy else "–"
        lines.append([row.name, row.kind or "–", identical, *p_values, row.verdict])
        for difference in row.greedy.differences if row.greedy else ():
            notes.append(
                f"{row.name}: prompt {difference.prompt}, new token {difference.position}: "
                f"{difference.ours} instead of {difference.theirs}; their logits are "
                f"{difference.gap:.3g} apart (rounding makes up to {difference.rounding:.3g})"
            )
    headings = ["method", "head", "greedy identical", *p_names, "verdict"]
    return "\n".join([aligned(headings, lines), *notes])


# --- greedy answers ---


def greedy_reference(target: Target, ids: Tensor) -> GreedyReference:
    """transformers' greedy answer to ids [1, T]."""
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": max(LENGTHS)}
    if target.generation_config.stop_strings:
        settings["tokenizer"] = load_tokenizer(target.recipe)
    with torch.inference_mode():
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return GreedyReference(ids, out[0, ids.shape[1] :].tolist())


def compare_greedy(
    decoder: SpeculativeDecoder, references: Sequence[GreedyReference]
) -> GreedyResult:
    """Answers each prompt; again with an end token or a limit inside an accepted path."""
    edges = dict.fromkeys(EDGES, 0)
    differences = []
    for number, reference in enumerate(references):
        trials = GreedyTrials(decoder, reference, number, edges)
        trials.run()
        differences += trials.differences[:1]
    return GreedyResult(len(references), len(references) - len(differences), edges, differences)


@dataclass
class GreedyTrials:
    """Answers one prompt, and notes differences from the reference and the edges met."""

    decoder: SpeculativeDecoder
    reference: GreedyReference
    number: int  # of the prompt
    edges: dict[str, int]  # `run` adds to these counts
    differences: list[Difference] = field(default_factory=list)

    def run(self) -> None:
        text, statistics = self.answer(LENGTHS[self.number % len(LENGTHS)])
        end = self.accepted_token(text, statistics)
        if end is not None:
            again = self.answer(len(text), end)[1]
            is_cut = again.accepted[-1:] == again.cycle_tokens[-1:]  # no bonus token follows
            self.edges["ended"] += bool(again.accepted) and is_cut
        counts = statistics.cycle_tokens
        if counts:
            longest = counts.index(max(counts))
            if statistics.accepted[longest] and counts[longest] > 1:
                self.answer(sum(counts[: longest + 1]))  # the prefill's token, and all but one
                self.edges["cut"] += 1

    def answer(self, max_new_tokens: int, end: int | None = None) -> tuple[list[int], Statistics]:
        """The decoder's answer with its statistics; end: an additional end token."""
        ids = self.reference.ids
        drafts: list[tuple[int, int]] = []  # (accepted tokens, depth of the deepest drafted node)

        def watch(cycle: Cycle) -> None:
            tree = cycle.tree
            depths = tree.depth if tree.passengers is None else tree.depth[~tree.passengers]
            if depths.any():
                drafts.append((cycle.verdict.accepted, int(depths.max())))

        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
        expected = self.reference.answer[:max_new_tokens]
        if end is not None:
            settings["eos_token_id"] = [end, *self.end_ids()]
            if end in expected:
                expected = expected[: expected.index(end) + 1]
        generation = self.decoder.generate(ids, on_cycle=watch, **settings)
        ours = generation.new_ids
        if ours != expected:
            target = self.decoder.target
            self.differences.append(first_difference(target, ids, self.number, ours, expected))
        if drafts:
            self.edges["rejected"] += not any(accepted for accepted, _ in drafts)
            self.edges["accepted"] += all(accepted == deepest for accepted, deepest in drafts)
        return ours, generation.statistics

    def accepted_token(self, text: Sequence[int], statistics: Statistics) -> int | None:
        """The first accepted draft token of the answer that can serve as an end token, or None."""
        least = self.decoder.target.generation_config.min_new_tokens or 0  # no end token before
        start = 1  # of the cycle's tokens; the prefill made token 0
        for count, accepted in zip(statistics.cycle_tokens, statistics.accepted, strict=True):
            for position in range(start, start + accepted):
                token = text[position]
                is_new = text.index(token) == position  # or the answer would end earlier
                if is_new and position >= least and token not in self.end_ids():
                    return token
            start += count
        return None

    def end_ids(self) -> frozenset[int]:
        return token_ids(self.decoder.target.generation_config.eos_token_id)


# --- sampled answers ---


class SampledProver:
    """Compares sampled answers with their law, on a miniature that it writes into a directory.

    generation: settings for the miniature's generation_config. prompt: token ids.
    """

    def __init__(
        self,
        directory: Path,
        generation: dict[str, Any] | None = None,
        model_type: str = "llama",
        prompt: Sequence[int] = PROMPT,
    ) -> None:
        config = write_miniature(directory, model_type=model_type)
        self.target = Target.load(replace(config, generation=generation or {}))
        self.ids = torch.tensor([prompt])  # [1, T]
        self._heads = directory / "heads"
        self._drafters = LoadedHeads(self.target)
        self._law = cache(partial(answer_law, self.target, self.ids))

    def decoder(self, config: MethodConfig, kind: str | None) -> SpeculativeDecoder:
        """A decoder with the method, and with a tree that suits the miniature."""
        small = MINIATURES.get(config.method, config)
        if isinstance(config.tree, DynamicConfig) and isinstance(small.tree, DynamicConfig):
            small = replace(small, tree=replace(small.tree, children=config.tree.children))
        head = kind and str(self._heads / kind)
        return make_decoder(self._drafters, check_levels(small, head, "verify"), head)

    def prove(
        self,
        config: MethodConfig,
        kind: str | None,
        sampling: SamplingConfig,
        draws: int,
        seed: int,
    ) -> LawTest:
        """Draws answers with a method, and tests them against the target's law."""
        length = LONGER.get(config.method, LENGTH)
        decoder = self.decoder(config, kind)
        generator = torch.Generator().manual_seed(seed)
        counts: Counter[tuple[int, ...]] = Counter()
        accepted = 0
        for _ in range(draws):
            answer = decoder.generate(
                self.ids, max_new_tokens=length, generator=generator, **asdict(sampling)
            )
            counts[tuple(answer.new_ids)] += 1
            accepted += sum(answer.statistics.accepted)
        return LawTest(
            sampling.temperature,
            sampling.top_p,
            p_value=p_value(self._law(length, sampling), counts),
            accepted_per_answer=accepted / draws,
        )


def write_miniature(
    directory: Path, vocabulary: int = VOCABULARY, model_type: str = "llama"
) -> TargetConfig:
    """Writes a model without end token to directory/target, and heads to directory/heads/KIND.

    EAGLE-3's draft vocabulary lacks every third token.
    """
    generator = torch.Generator().manual_seed(SEED)
    config = AutoConfig.for_model(model_type, vocab_size=vocabulary, **DECODED["model"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    words = {chr(97 + token): token for token in range(vocabulary - 1)}
    words["<|endoftext|>"] = vocabulary - 1  # Qwen's
    letters = Tokenizer(models.WordLevel(words, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()

    def save_model(name: str) -> None:
        model.save_pretrained(directory / name)
        PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(directory / name)

    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    for matrix in matrices:
        # This deviation makes three or four tokens likely at each position.
        matrix.data.normal_(0.0, 0.38, generator=generator)
    save_model("target")
    target_config = TargetConfig(str(directory / "target"), dtype="float32")
    target = Target(model, target_config)
    drafted = torch.tensor([token for token in range(vocabulary) if token % 3 != 2])
    for kind in KINDS:
        if kind == "draft_lm":
            for matrix in matrices:
                add_noise(matrix, 0.08, generator)
            save_model("heads/draft_lm")
            continue
        section: Any = KINDS[kind](**HEAD_SETTINGS.get(kind, {}))  # type: ignore[arg-type]
        settings: dict[str, Any] = {"after_blocks": (0, 1)} if section.reads_taps else {}
        if kind == "eagle3":
            settings["vocabulary"] = DraftVocabulary.of_ids(drafted, vocabulary)
        head = new_head(section, target.config, target.vocab, SEED, **settings)
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2 and name != "embed_tokens.weight":
                # Without noise a new head's laws are flat, or equal to the target's.
                add_noise(parameter, 0.12, generator)
        save_head(head, directory / "heads" / kind)
    return target_config


def add_noise(matrix: Tensor, deviation: float, generator: torch.Generator) -> None:
    matrix.data.add_(torch.randn(matrix.shape, generator=generator), alpha=deviation)


def answer_law(target: Target, ids: Tensor, length: int, sampling: SamplingConfig) -> AnswerLaw:
    """The chance of every answer of `length` tokens to ids [1, T], by forwards of all prefixes."""
    decoding = resolve(target.generation_config, **asdict(sampling))
    sampler = Sampler(decoding, torch.Generator(), ids[0])
    law: AnswerLaw = {(): 1.0}
    for _ in range(length):
        prefixes = torch.tensor(list(law), dtype=torch.long, device=ids.device)  # [n, written]
        texts = torch.cat([ids.expand(len(law), -1), prefixes.view(len(law), -1)], dim=1)
        with torch.inference_mode():
            logits = sampler.after(texts, target.model(texts).logits[:, -1])  # [n, V]
        longer: AnswerLaw = {}
        for prefix, p in zip(law, sampler.law(logits).double().tolist(), strict=True):
            for token, chance in enumerate(p):
                if law[prefix] * chance > 0:
                    longer[(*prefix, token)] = law[prefix] * chance
        law = longer
    return law


def p_value(law: AnswerLaw, counts: Counter[tuple[int, ...]]) -> float:
    """The p-value of Pearson's chi-square test, which pools rare answers.

    It is 0 if an answer was drawn that the law excludes.
    """
    if not counts.keys() <= law.keys():
        return 0.0
    draws = counts.total()
    cells = sorted((chance * draws, counts[answer]) for answer, chance in law.items())
    expected_rare = 0.0
    counted_rare = 0
    while cells and (cells[0][0] < EXPECTED or 0 < expected_rare < EXPECTED):
        expected, counted = cells.pop(0)
        expected_rare += expected
        counted_rare += counted
    if expected_rare:
        cells.append((expected_rare, counted_rare))
    if len(cells) == 1:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
