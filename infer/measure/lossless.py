"""The proof that methods are lossless: greedy answers on the real target, sampled ones by a miniature's exact law."""

import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import chi2
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml, validate
from aerie.configs.schema.decode import METHODS, DynamicConfig, MethodConfig
from aerie.configs.schema.heads import KINDS, TargetConfig
from aerie.configs.schema.measure import PromptsConfig, SamplingConfig
from aerie.data.progress import start_progress
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import Sampler, resolve, token_ids
from aerie.infer.decode.shape import Cycle
from aerie.infer.measure.agreement import Difference, first_difference
from aerie.infer.measure.bench import load_quietly
from aerie.infer.measure.tasks import load_prompts
from aerie.model.checkpoint import new_head, save_head
from aerie.model.heads.eagle import DraftVocabulary
from aerie.model.storage import write_json
from aerie.model.target import Target, load_tokenizer

ALPHA = 1e-3  # chance that a proof fails by bad luck, over all its p-values (Bonferroni)
MIN_DRAWS = 200  # fewer leave the law hardly a cell
EXPECTED = 5.0  # draws that every cell of the chi-square test must expect
SETTINGS = (SamplingConfig(1.0), SamplingConfig(0.6, top_p=0.8))
DRAWS_PER_MINUTE = 30_000  # of a mean method on one core
LENGTHS = (32, 3, 12, 4, 20, 6)  # max_new_tokens of the prompts, in turn
# all drafts refused; all accepted to their deepest node; an end token, or max_new_tokens, inside an accepted path
EDGES = ("rejected", "accepted", "ended", "cut")

VOCABULARY, SEED = 8, 4  # of the miniature
SPREAD = 0.38  # standard deviation of its matrices: three or four likely tokens at each place
DRAFT_NOISE = 0.08  # of the draft LM's matrices around the target's
HEAD_NOISE = 0.12  # of a new head's matrices, whose laws would else be flat, or the target's own
LENGTH = 4  # new tokens of a sampled answer; with fewer no tree has a second level
LONGER = {"sps-heuristic": 5}  # only its second draft depends on what was accepted
# every token once, and n-grams that come back
PROMPT = (1, 5, 3, 4, 1, 6, 3, 2, 7, 0, 5, 4, 2, 6, 1, 7, 3, 0, 4)
GIVEN = read_yaml(Path(__file__).with_name("lossless.yaml"))[0]
MINIATURES = {
    method: validate({"method": method, **keys}, MethodConfig, method, {})
    for method, keys in GIVEN["methods"].items()
}
Answer = tuple[int, ...]
# a prompt [1, T] and the target's longest greedy answer; shorter ones are its beginnings
Reference = tuple[Tensor, list[int]]


@dataclass(frozen=True)
class GreedyResult:
    prompts: int
    identical: int
    edges: dict[str, int]  # answers that met each
    differences: list[Difference]  # the first of each prompt


@dataclass(frozen=True)
class Law:
    temperature: float
    top_p: float
    p_value: float
    accepted_per_answer: float  # drafted tokens; without any there is nothing to prove


@dataclass
class Row:
    """A method, its kind of head (None: without), and what was found."""

    asked: MethodConfig
    kind: str | None
    head: str | None = None  # its directory; None: the sampled proof alone
    greedy: GreedyResult | None = None
    laws: tuple[Law, ...] = ()
    verdict: str = ""
    holds: bool = True

    @property
    def name(self) -> str:
        is_drawn = (
            isinstance(self.asked.tree, DynamicConfig) and self.asked.tree.children == "sampled"
        )
        return f"{self.asked.method} drawn" if is_drawn else self.asked.method


def verdict_of(row: Row, level: float, exact: bool) -> str:
    """`level`: the least p-value; exact: even a difference within rounding fails."""
    differences = row.greedy.differences if row.greedy else []
    wrong = ["greedy"] if any(exact or each.gap > each.rounding for each in differences) else []
    wrong += [f"law at {_setting(law)}" for law in row.laws if not law.p_value >= level]
    if wrong:
        return f"FAILED: {', '.join(wrong)}"
    if row.greedy is None:
        return "lossless in law (no head for greedy)"
    return "lossless up to rounding" if differences else "lossless"


def _setting(sampling: SamplingConfig | Law) -> str:
    return f"T={sampling.temperature:g}" + (f"/p={sampling.top_p:g}" if sampling.top_p < 1 else "")


def run_verify(
    options: Namespace,
    config: TargetConfig,
    heads: dict[str, str],
    prompts: PromptsConfig | None = None,
    threads: int | None = None,
) -> int:
    """The command `verify`; 1 if a row fails. heads: directories by kind."""
    if options.prompts < 1 or options.draws < MIN_DRAWS:
        raise UserError(f"--prompts, --draws: at least 1 prompt and {MIN_DRAWS} draws are needed")
    named = [
        validate({"method": name.strip()}, MethodConfig, "--methods", {})
        for name in options.methods.split(",")
    ]
    for asked in named[:]:
        if isinstance(asked.tree, DynamicConfig):
            named.append(replace(asked, tree=replace(asked.tree, children="sampled")))
    rows: list[Row] = []
    for asked in named:
        kinds = METHODS[asked.method].heads
        there = [Row(asked, kind, heads[kind]) for kind in kinds if kind in heads]
        rows += there or [Row(asked, kinds[0] if kinds else None)]
    if options.plan:
        print(f"verify: {config.path} in {config.dtype}: {', '.join(row.name for row in rows)}")
        return 0
    work = f"{options.prompts} prompts on the target, {len(SETTINGS)} x {options.draws:,} draws on a miniature"
    minutes = f"about {len(rows) * len(SETTINGS) * options.draws / DRAWS_PER_MINUTE:.1f} min for all draws"
    print(f"verify: {len(rows)} methods, each: {work}; {minutes}", file=sys.stderr, flush=True)
    target = load_quietly(config, threads)
    texts = [f"{task} {topic}." for topic in GIVEN["topics"] for task in GIVEN["tasks"]]
    if prompts is not None:
        texts = [
            prompt.turns[0]
            for prompt in load_prompts(replace(prompts, num_prompts=options.prompts))
        ]
    plain = SpeculativeDecoder(target)
    plain.tokenizer = load_tokenizer(config)
    references = [
        reference(target, plain.encode(text).to(target.device)) for text in texts[: options.prompts]
    ]
    drafters, level = Drafters(target), ALPHA / (len(rows) * len(SETTINGS))
    with (
        tempfile.TemporaryDirectory() as directory,
        start_progress(len(rows), "rows", "verify") as progress,
    ):
        of_text = resolve(
            target.generation_config
        ).of_text  # its lists name tokens that a miniature lacks
        laws = {name: value for name, value in of_text.items() if isinstance(value, int | float)}
        sampled = SampledProver(Path(directory), laws)
        for row in rows:
            if row.kind is None or row.head is not None:
                row.greedy = compare_greedy(make_decoder(drafters, row.asked, row.head), references)
            row.laws = tuple(
                sampled.prove(row.asked, row.kind, each, options.draws, options.seed)
                for each in SETTINGS
            )
            progress.update()
    for row in rows:
        row.verdict = verdict_of(row, level, exact=target.dtype == torch.float32)
        row.holds = not row.verdict.startswith("FAILED")
    print(table(rows))
    holds = all(row.holds for row in rows)
    if options.json is not None:
        found: dict[str, Any] = {"schema": 1, "target": config.path, "dtype": config.dtype}
        found |= {
            "draws": options.draws,
            "seed": options.seed,
            "p_values": sum(len(row.laws) for row in rows),
        }
        found |= {
            "family_error": ALPHA,
            "rows": [{"method": row.asked.method, **asdict(row)} for row in rows],
        }
        write_json(options.json, found | {"holds": holds})
    return 0 if holds else 1


def table(rows: Sequence[Row]) -> str:
    width = max([14, *(len(row.name) for row in rows)]) + 1
    line = f"{{:{width}}}{{:10}}{{:18}}{{:10}}{{:14}}{{}}".format
    lines = [
        line(
            "method",
            "head",
            "greedy identical",
            *(f"p {_setting(each)}" for each in SETTINGS),
            "verdict",
        )
    ]
    notes = []
    for row in rows:
        p_values = [f"{law.p_value:.3g}" for law in row.laws] or ["–", "–"]
        identical = f"{row.greedy.identical}/{row.greedy.prompts}" if row.greedy else "–"
        lines.append(line(row.name, row.kind or "–", identical, *p_values, row.verdict))
        for each in row.greedy.differences if row.greedy else ():
            place = f"{row.name}: prompt {each.prompt}, new token {each.position}"
            apart = f"logits {each.gap:.3g} apart (rounding: up to {each.rounding:.3g})"
            notes.append(f"{place}: {each.ours} instead of {each.theirs}, {apart}")
    return "\n".join([*lines, *notes])


def reference(target: Target, ids: Tensor) -> Reference:
    """The target's own greedy answer to ids [1, T]."""
    settings = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": max(LENGTHS),
    }
    if target.generation_config.stop_strings:
        settings["tokenizer"] = load_tokenizer(target.recipe)
    with torch.inference_mode():
        out = target.model.generate(ids, **settings)
    return ids, out[0, ids.shape[1] :].tolist()


def compare_greedy(decoder: SpeculativeDecoder, references: Sequence[Reference]) -> GreedyResult:
    """Answers each prompt once, then with an end token, and with a limit, inside an accepted path."""
    edges, count = dict.fromkeys(EDGES, 0), len(references)
    differences = [
        each
        for number in range(count)
        for each in _tries(decoder, references[number], number, edges)[:1]
    ]
    return GreedyResult(count, count - len(differences), edges, differences)


def _tries(
    decoder: SpeculativeDecoder, known: Reference, number: int, edges: dict[str, int]
) -> list[Difference]:
    """The first difference of each answer to one prompt; counts the edge cases."""
    (ids, answer), ends = known, token_ids(decoder.target.generation_config.eos_token_id)
    least = decoder.target.generation_config.min_new_tokens or 0  # no end token can stand before
    differences: list[Difference] = []

    def run(
        max_new_tokens: int, end: int | None = None
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """The answer; per cycle the tokens before it, draft tokens taken, and all."""
        cycles: list[tuple[int, int, int]] = []
        drafted: list[tuple[int, int]] = []  # accepted tokens and the deepest drafted node

        def watch(cycle: Cycle) -> None:
            tree, accepted = cycle.tree, cycle.verdict.accepted
            depth = int(
                (tree.depth if tree.passengers is None else tree.depth[~tree.passengers]).max()
            )
            drafted.extend([(accepted, depth)] if depth else [])
            before = cycle.position + 1 - ids.shape[1]
            cycles.append((before, min(accepted, cycle.new_tokens), cycle.new_tokens))

        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
        settings |= {} if end is None else {"eos_token_id": [end, *ends]}
        ours = decoder.generate(ids, on_cycle=watch, **settings).new_ids
        wanted = answer[:max_new_tokens]
        if end in wanted:
            wanted = wanted[: wanted.index(end) + 1]
        if ours != wanted:
            differences.append(first_difference(decoder.target, ids, number, ours, wanted))
        edges["rejected"] += bool(drafted) and not any(took for took, _ in drafted)
        edges["accepted"] += bool(drafted) and all(took == depth for took, depth in drafted)
        return ours, cycles

    text, cycles = run(LENGTHS[number % len(LENGTHS)])
    # again, with an end token that was drafted and accepted, and did not stand before
    taken = [place for before, took, _ in cycles for place in range(before, before + took)]
    end = next(
        (at for at in taken if text.index(text[at]) == at >= least and text[at] not in ends), None
    )
    if end is not None:
        _, again = run(len(text), text[end])
        edges["ended"] += bool(again) and again[-1][1] == again[-1][2]
    # again, with a limit inside the longest cycle
    before, took, tokens = max(cycles, key=lambda cycle: cycle[2], default=(0, 0, 0))
    if took and tokens > 1:
        run(before + tokens - 1)
        edges["cut"] += 1
    return differences


class SampledProver:
    """Compares sampled answers with their law, on a miniature that it writes into a directory.

    generation: what its generation_config sets; model_type, prompt: the miniature's.
    """

    def __init__(
        self,
        directory: Path,
        generation: dict[str, Any] | None = None,
        model_type: str = "llama",
        prompt: Sequence[int] = PROMPT,
    ) -> None:
        config = write_miniature(directory, model_type=model_type)
        self.target, self.ids = (
            Target.load(replace(config, generation=generation or {})),
            torch.tensor([prompt]),
        )
        self._heads, self._drafters = directory / "heads", Drafters(self.target)
        self._law = cache(partial(answer_law, self.target, self.ids))

    def decoder(self, asked: MethodConfig, kind: str | None) -> SpeculativeDecoder:
        small = MINIATURES.get(asked.method, asked)
        if isinstance(asked.tree, DynamicConfig) and isinstance(small.tree, DynamicConfig):
            small = replace(small, tree=replace(small.tree, children=asked.tree.children))
        return make_decoder(self._drafters, small, kind and str(self._heads / kind))

    def prove(
        self, asked: MethodConfig, kind: str | None, sampling: SamplingConfig, draws: int, seed: int
    ) -> Law:
        length = LONGER.get(asked.method, LENGTH)
        decoder, generator = self.decoder(asked, kind), torch.Generator().manual_seed(seed)
        settings: dict[str, Any] = {
            **asdict(sampling),
            "max_new_tokens": length,
            "generator": generator,
        }
        drawn = [decoder.generate(self.ids, **settings) for _ in range(draws)]
        seen = Counter(tuple(out.new_ids) for out in drawn)
        accepted = sum(sum(out.statistics.accepted) for out in drawn) / draws
        return Law(
            sampling.temperature,
            sampling.top_p,
            p_value(self._law(length, sampling), seen),
            accepted,
        )


def write_miniature(
    directory: Path, vocabulary: int = VOCABULARY, model_type: str = "llama"
) -> TargetConfig:
    """Writes directory/target, a model that never ends, and directory/heads/KIND; EAGLE-3 lacks every third token."""
    generator = torch.Generator().manual_seed(SEED)
    config = AutoConfig.for_model(model_type, vocab_size=vocabulary, **GIVEN["model"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    words = {chr(97 + token): token for token in range(vocabulary - 1)} | {
        "<|endoftext|>": vocabulary - 1
    }  # Qwen's
    letters = Tokenizer(models.WordLevel(words, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()

    def save(name: str) -> None:
        model.save_pretrained(directory / name)
        PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(directory / name)

    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    for matrix in matrices:
        matrix.data.normal_(0.0, SPREAD, generator=generator)
    save("target")
    written = TargetConfig(str(directory / "target"), dtype="float32")
    target = Target(model, written)
    drafted = DraftVocabulary.of_ids(
        torch.tensor([token for token in range(vocabulary) if token % 3 != 2]), vocabulary
    )
    given: dict[str, Any] = {
        "hydra": {"prefix_layer": True},
        "block": {"mask_token_id": 0, "markov_rank": 4},
    }
    for kind in KINDS:
        if kind == "draft_lm":
            for matrix in matrices:
                matrix.data.add_(torch.randn(matrix.shape, generator=generator), alpha=DRAFT_NOISE)
            save("heads/draft_lm")
            continue
        section: Any = KINDS[kind](**given.get(kind, {}))
        more: dict[str, Any] = {"after_blocks": (0, 1)} if section.reads_taps else {}
        more |= {"vocabulary": drafted} if kind == "eagle3" else {}
        head = new_head(section, target.config, target.vocab, SEED, **more)
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2 and name != "embed_tokens.weight":
                parameter.data.add_(
                    torch.randn(parameter.shape, generator=generator), alpha=HEAD_NOISE
                )
        save_head(head, directory / "heads" / kind)
    return written


def answer_law(
    target: Target, ids: Tensor, length: int, sampling: SamplingConfig
) -> dict[Answer, float]:
    """The chance of every answer of `length` tokens to ids [1, T], by plain forwards over all prefixes."""
    sampler = Sampler(
        resolve(target.generation_config, **asdict(sampling)), torch.Generator(), ids[0]
    )
    law: dict[Answer, float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        tails = torch.tensor(prefixes, dtype=torch.long, device=ids.device).reshape(
            len(prefixes), -1
        )
        texts = torch.cat([ids.expand(len(prefixes), -1), tails], dim=1)
        with torch.inference_mode():
            logits = sampler.after(texts, target.model(texts).logits[:, -1])
        rows = zip(prefixes, sampler.law(logits).double().tolist(), strict=True)  # [prefixes, V]
        chances = [
            ((*prefix, token), law[prefix] * p)
            for prefix, row in rows
            for token, p in enumerate(row)
        ]
        law = {answer: chance for answer, chance in chances if chance > 0}
    return law


def p_value(law: dict[Answer, float], seen: Counter[Answer]) -> float:
    """The p-value of Pearson's chi-square test, rare answers pooled; 0 if the law excludes a seen answer."""
    if not seen.keys() <= law.keys():
        return 0.0
    draws = seen.total()
    cells = sorted(((chance * draws, seen[answer]) for answer, chance in law.items()), reverse=True)
    single = sum(expected >= EXPECTED for expected, _ in cells)
    if 0 < sum(expected for expected, _ in cells[single:]) < EXPECTED:
        single = max(single - 1, 0)
    if rest := cells[single:]:
        cells = [
            *cells[:single],
            (sum(expected for expected, _ in rest), sum(count for _, count in rest)),
        ]
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    return float(chi2.sf(statistic, len(cells) - 1)) if len(cells) > 1 else 1.0
