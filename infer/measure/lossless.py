"""The proof that methods are lossless: greedy answers token for token, sampled ones by their law.

Greedily every method is compared with transformers' generate on the real target, at the edges too: an end token and
max_new_tokens inside an accepted path. Sampled answers are drawn from a target so small that the exact law of its
answers can be enumerated, and tested for their fit.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import (
    METHODS,
    MethodConfig,
)
from aerie.configs.schema.measure import PromptsConfig, SamplingConfig
from aerie.configs.schema.target_and_head import (
    TargetConfig,
)
from aerie.data.stage import bar
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import token_ids
from aerie.infer.decode.shape import Cycle
from aerie.infer.measure.bench import default_device, prepare
from aerie.infer.measure.miniature import Law, SampledProver, Tick
from aerie.infer.measure.tasks import encode, load_prompts
from aerie.model.storage import write_json
from aerie.model.target import Target, load_tokenizer

ALPHA = 1e-3  # chance that a proof fails by bad luck, over all its p-values (Bonferroni)
MIN_DRAWS = 200  # fewer leave the law hardly a cell to be wrong in
SETTINGS = (SamplingConfig(1.0), SamplingConfig(0.6, top_p=0.8))
NOT_LOSSLESS = "not lossless (typical acceptance), not tested"
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


@dataclass(frozen=True)
class Row:
    """A method and the kind of head that it drafts with (null: it needs none)."""

    asked: MethodConfig
    kind: str | None
    head: str | None = None  # its directory; null where there is none, which leaves the sampled proof


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
                laws = tuple(
                    sampled.prove(row.asked, row.kind, setting, draws, seed, progress.update) for setting in SETTINGS
                )
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
