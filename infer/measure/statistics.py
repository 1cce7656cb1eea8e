"""Records -> the rows of summary.json: tau, speedup with its interval, and what was spent.

One counter for every row: the prefill's token belongs to the prefill, so new_tokens - 1 tokens are what wall - prefill
(the decode seconds) bought, in vanilla and in every other method alike.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from aerie.configs.errors import UserError
from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.record import (
    Asked,
    AskedPoint,
    FloatArray,
    Milliseconds,
    PromptKey,
    Record,
    Sampling,
    SummaryRow,
)

RESAMPLES = 2000
VANILLA, ALL_TASKS = "vanilla", "all"
SPANS = ("cumulative", "bucket")
NGRAM = 4  # tokens whose return counts as repetition


@dataclass(frozen=True)
class Group:
    """The answers of one row at one sampling, and vanilla's answers at the same sampling by prompt and turn."""

    records: tuple[Record, ...]
    baseline: dict[PromptKey, Record]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record.status != "ok"]

    @property
    def pairs(self) -> list[tuple[Record, Record]]:
        """(this row's answer, vanilla's) of the prompts that are ok in both."""
        good = [record for record in self.records if record.status == "ok"]
        return [(record, self.baseline[record.prompt_key]) for record in good if record.prompt_key in self.baseline]

    def by_task(self) -> dict[str, "Group"]:
        """The same row for each task alone, in order of appearance."""
        tasks = dict.fromkeys(record.task for record in self.records)
        return {task: replace(self, records=tuple(r for r in self.records if r.task == task)) for task in tasks}


def baselines_of(records: Iterable[Record]) -> dict[Sampling, dict[PromptKey, Record]]:
    """The good answers of the first vanilla row, by sampling and turn."""
    first: dict[Sampling, int] = {}
    baselines: dict[Sampling, dict[PromptKey, Record]] = {}
    for record in sorted(records, key=lambda record: record.row):
        if record.method == VANILLA and first.setdefault(record.sampling, record.row) == record.row:
            answers = baselines.setdefault(record.sampling, {})
            if record.status == "ok":
                answers[record.prompt_key] = record
    return baselines


def group(records: Iterable[Record]) -> list[Group]:
    """One group per (sampling, row): samplings in order of appearance, rows in the recipe's order."""
    members: dict[tuple[Sampling, int], list[Record]] = {}
    for record in records:
        members.setdefault((record.sampling, record.row), []).append(record)
    samplings = list(dict.fromkeys(sampling for sampling, _ in members))
    baselines = baselines_of(record for answers in members.values() for record in answers)
    keys = sorted(members, key=lambda key: (samplings.index(key[0]), key[1]))
    return [Group(tuple(members[key]), baselines.get(key[0], {})) for key in keys]


def main_groups(records: Sequence[Record], asked: Asked | None) -> list[Group]:
    """The groups of the bench's own rows; every record is one's where no suite.json says otherwise."""
    if asked is None:
        return group(records)
    cells = {(cell.row, cell.sampling) for cell in asked.main}
    return group(record for record in records if (record.row, record.sampling) in cells)


def summary_row(members: Group, seed: int = 0) -> SummaryRow:
    """One row of summary.json.

    ms are sums over the prompts and their turns, as new_tokens and target_forwards are; peak_memory_gib is the
    largest; identical and mismatch count answers.
    """
    named, records = identity(members), members.records
    if members.failed:
        first = members.failed[0]
        count = f"{len(members.failed)} of {len(records)} prompts failed"
        return replace(named, status="error", message=f"{count}; first {first.prompt_id!r}: {first.message}")
    new_tokens = sum(record.new_tokens for record in records)
    nodes = sum(record.draft_nodes for record in records)
    times = milliseconds(records)
    decode_seconds = (times.wall - times.prefill) / 1000.0
    memory = [record.peak_memory_gib for record in records if record.peak_memory_gib is not None]
    compared = [record.identical for record in records if record.identical is not None]
    return replace(
        named,
        new_tokens=new_tokens,
        tau=tau(records),
        tau_macro=tau_macro(records),
        accepted_histogram=accepted_histogram(records),
        tokens_per_s=(new_tokens - len(records)) / decode_seconds if decode_seconds > 0 else None,
        **speedups(members.pairs, seed),
        target_forwards=sum(record.target_forwards for record in records),
        draft_forwards=sum(record.draft_forwards for record in records),
        draft_forwards_wasted=sum(record.draft_forwards_wasted for record in records),
        draft_nodes=nodes,
        accept_rate=sum(sum(record.accepted) for record in records) / nodes if nodes else None,
        identical=sum(compared) if compared else None,
        mismatch=len(compared) - sum(compared) if compared else None,
        peak_memory_gib=max(memory, default=None),
        ms=times,
    )


def row(members: Group, seed: int = 0) -> dict[str, Any]:
    """The row as summary.json has it."""
    return summary_row(members, seed).as_dict()


def identity(members: Group) -> SummaryRow:
    """What a row is of: method, head, task, sampling, number of prompts, rule and tree; no figure."""
    first = members.first
    tasks = {record.task for record in members.records}
    tree = first.tree
    if tree is not None and tree.shape == "chain":  # one child per node, whatever k the recipe leaves standing
        tree = replace(tree, k=1, nodes=tree.levels + 1)
    # The rule that judged the drafts: one that is not lossless is named as soon as one answer has it, and an answer
    # without drafts says nothing where others drafted.
    good = [record for record in members.records if record.status == "ok"]
    rules = [record.verify for record in good if "not lossless" in record.verify]
    rules += [record.verify for record in good if record.draft_nodes] + [record.verify for record in good]
    return SummaryRow(
        method=first.method,
        head=first.head,
        head_path=first.head_path,
        task=first.task if len(tasks) == 1 else ALL_TASKS,
        temperature=first.temperature,
        top_k=first.top_k,
        top_p=first.top_p,
        prompts=len({record.prompt for record in members.records}),
        verify=(rules or [first.verify])[0],
        tree=tree,
    )


def told_apart(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """The rows; those that differ in nothing but their head have it in their tree's variant."""
    heads: dict[str, set[tuple[str | None, str | None]]] = {}
    for one in rows:
        heads.setdefault(repr((one.method, one.tree)), set()).add((one.head, one.head_path))
    named = []
    for one in rows:
        alike = heads[repr((one.method, one.tree))]
        if one.tree is not None and len(alike) > 1:
            kinds = {kind for kind, _ in alike}
            words = f"{one.head} head" if len(kinds) == len(alike) else f"head {one.head_path or 'of the run'}"
            variant = f"{one.tree.variant}, {words}" if one.tree.variant else words
            one = replace(one, tree=replace(one.tree, variant=variant))
        named.append(one)
    return named


def members_of(records: Sequence[Record], point: AskedPoint) -> tuple[Record, ...]:
    """The answers that a point of a sweep asked."""
    prompts = set(point.prompts)
    return tuple(r for r in records if r.row == point.row and r.sampling == point.sampling and r.prompt in prompts)


def sweep_rows(
    records: Sequence[Record], asked: Asked | None, seed: int = 0
) -> tuple[list[SummaryRow], list[dict[str, Any]]]:
    """`sweeps` of summary.json, and what details.json says of each in the same order."""
    if asked is None:
        return [], []
    baselines = baselines_of(records)
    rows, details = [], []
    for point in asked.points:
        answers = members_of(records, point)
        if answers:
            measured = summary_row(Group(answers, baselines.get(point.sampling, {})), seed)
            rows.append(replace(measured, sweep=point.sweep, key=point.key, value=point.value))
            details.append({"tau_ci95": tau_interval(answers, seed) if measured.status == "ok" else None})
    for members in main_groups(records, asked) if asked.contexts else []:
        spans = context_rows(members, asked.contexts, asked.max_context, seed)
        rows += spans
        details += [{"tau_ci95": None}] * len(spans)
    return rows, details


def tau(records: Sequence[Record]) -> float | None:
    """New tokens after the prefill's per target forward, bonus included, pooled over prompts (vanilla: 1.0)."""
    forwards = sum(record.target_forwards for record in records)
    return (sum(record.new_tokens for record in records) - len(records)) / forwards if forwards else None


def tau_macro(records: Sequence[Record]) -> float | None:
    """The mean over prompts of each prompt's own tau; prompts that ended at the prefill's token have none."""
    tokens, forwards = _per_prompt(records, _tokens_and_forwards).T
    return float(np.mean(tokens[forwards > 0] / forwards[forwards > 0])) if forwards.any() else None


def tau_interval(records: Sequence[Record], seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval of tau over prompts."""
    tokens, forwards = _per_prompt(records, _tokens_and_forwards).T
    return ratio_interval(tokens, forwards, seed) if forwards.any() else None


def speedups(pairs: Sequence[tuple[Record, Record]], seed: int = 0) -> dict[str, Any]:
    """speedup, its 95 % interval, the mean of the prompts' own speedups, and the speedup with the prefill counted.

    The interval is a paired bootstrap: a resampled prompt brings the method's answers to its turns and vanilla's. With
    the prefill counted, all new_tokens are the tokens of the whole wall time. None where no prompt is ok in both.
    """
    used = [(mine, base) for mine, base in pairs if mine.new_tokens > 1 and base.new_tokens > 1]
    if not used:
        return dict.fromkeys(("speedup", "speedup_ci95", "speedup_mean_per_prompt", "speedup_with_prefill"))
    tokens, seconds = _per_prompt([mine for mine, _ in used], _tokens_and_ms).T
    base_tokens, base_seconds = _per_prompt([base for _, base in used], _tokens_and_ms).T
    weights = resamples(len(tokens), seed)  # [R, n]
    rate = (weights @ tokens) * (weights @ base_seconds)
    base_rate = (weights @ base_tokens) * (weights @ seconds)

    def rate_with_prefill(side: int) -> float:
        answers = [pair[side] for pair in pairs]
        return sum(answer.new_tokens for answer in answers) / milliseconds(answers).wall

    return {
        "speedup": float(tokens.sum() * base_seconds.sum() / (base_tokens.sum() * seconds.sum())),
        "speedup_ci95": interval(rate, base_rate) if len(tokens) > 1 else None,
        "speedup_mean_per_prompt": float(np.mean(tokens * base_seconds / (base_tokens * seconds))),
        "speedup_with_prefill": rate_with_prefill(0) / rate_with_prefill(1),
    }


def accepted_histogram(records: Sequence[Record]) -> list[int]:
    """Entry a is the number of cycles in which a draft tokens were kept; as long as the tree is deep, plus one."""
    tree = records[0].tree
    accepted = np.array([kept for record in records for kept in record.accepted], dtype=np.int64)
    return [int(count) for count in np.bincount(accepted, minlength=(tree.levels if tree else 0) + 1)]


def milliseconds(records: Sequence[Record]) -> Milliseconds:
    """The parts of wall-clock summed over prompts."""
    times = [record.ms for record in records if record.ms is not None]
    return Milliseconds(*(sum(getattr(ms, part.name) for ms in times) for part in fields(Milliseconds)))


def _tokens_and_forwards(record: Record) -> tuple[float, float]:
    return record.new_tokens - 1, record.target_forwards


def _tokens_and_ms(record: Record) -> tuple[float, float]:
    return record.new_tokens - 1, record.ms.wall - record.ms.prefill if record.ms else 0.0


def _per_prompt(records: Sequence[Record], costs: Callable[[Record], tuple[float, float]]) -> FloatArray:
    """The costs of the records [n, 2], those of one prompt's turns added up."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(record.prompt for record in records))}
    table = np.zeros((len(places), 2))
    for record in records:
        table[places[record.prompt]] += costs(record)
    return table


def ratio_interval(numerators: FloatArray, denominators: FloatArray, seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval over prompts of sum(numerators) / sum(denominators); null for a single prompt."""
    if len(numerators) < 2:
        return None
    weights = resamples(len(numerators), seed)  # [R, n]
    return interval(weights @ numerators, weights @ denominators)


def resamples(size: int, seed: int) -> FloatArray:
    """How often each prompt is drawn in each resample: [RESAMPLES, size]."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(size, np.full(size, 1.0 / size), size=RESAMPLES).astype(np.float64)


def interval(numerators: FloatArray, denominators: FloatArray) -> list[float]:
    """The middle 95 % of the resamples' ratios; a resample of prompts without one decode step has none."""
    valid = denominators > 0
    low, high = np.percentile(numerators[valid] / denominators[valid], [2.5, 97.5])
    return [float(low), float(high)]


@dataclass(frozen=True)
class Difference:
    """tau of the rows `of` (pooled) against that of the rows `against`, and their difference."""

    of: float
    against: float
    difference: float
    ci95: tuple[float, float]
    prompts: int

    def text(self) -> str:
        """One line."""
        low, high = self.ci95
        return (
            f"tau {self.of:.3f} against {self.against:.3f}: {self.difference:+.3f} [{low:+.3f}, {high:+.3f}] "
            f"(95 %, paired bootstrap over {self.prompts} prompts)"
        )


def tau_difference(records: Sequence[Record], of: Sequence[int], against: Sequence[int], seed: int = 0) -> Difference:
    """The difference of tau between two sets of rows (numbers of bench.rows), each pooled over its rows.

    A row may stand for one of several seeds: a resampled prompt brings the answers of all rows of both sets. UserError
    for rows that were not measured, or that do not have all prompts.
    """
    if len({record.sampling for record in records}) > 1:
        settings = sorted({record.temperature for record in records})
        raise UserError(f"the bench has several samplings (temperatures {settings}); choose one with --temperature")
    sides = []
    for rows in (of, against):
        answers = []
        for number in rows:
            measured = [record for record in records if record.row == number and record.status == "ok"]
            if not measured:
                raise UserError(f"row {number}: nothing was measured; rows are counted from 0 as in bench.rows")
            answers += measured
        sides.append(sorted(answers, key=lambda record: record.prompt))
    missing = {record.prompt for record in sides[0]} ^ {record.prompt for record in sides[1]}
    if missing:
        prompt = sorted(missing)[0][-1]
        raise UserError(f"rows {list(of)} and {list(against)}: prompt {prompt!r} is not in both; measure it in all")
    mine, other = (_per_prompt(answers, _tokens_and_forwards) for answers in sides)  # [n, 2]
    drawn = np.random.default_rng(seed).integers(len(mine), size=(RESAMPLES, len(mine)))

    def ratio(sums: FloatArray) -> FloatArray:
        return sums[..., 0] / np.maximum(sums[..., 1], 1.0)

    low, high = np.percentile(ratio(mine[drawn].sum(1)) - ratio(other[drawn].sum(1)), [2.5, 97.5])
    one, two = float(ratio(mine.sum(0))), float(ratio(other.sum(0)))
    return Difference(one, two, one - two, (float(low), float(high)), len(mine))


@dataclass(frozen=True)
class Reached:
    """What one answer took from one context length to another."""

    tokens: float
    ms: float
    cycles: float
    accepted: float
    nodes: float


def context_rows(members: Group, contexts: Sequence[int], limit: int | None, seed: int = 0) -> list[SummaryRow]:
    """Points of `sweeps` for one row of the bench, up to the limit (what the target was trained for).

    A length counts the prompts at which both this row's answer and vanilla's get that far; without any it is left out.
    `repeated` is the share of the 4-grams there that the row's own answer has had before: long answers that loop are
    easy to draft. A row that failed, and records of an older version without times of cycles, have no points.
    """
    if members.failed or any(record.target_forwards and not record.cycle_ms for record in members.records):
        return []
    said_before = {record.prompt_key: repeats(record.output_ids) for record in members.records}
    rows = []
    for place, length in enumerate(contexts):
        for span in SPANS if limit is None or length <= limit else ():
            above = contexts[place - 1] if span == "bucket" and place else 0
            pairs = []
            again: list[bool] = []
            for one, other in members.pairs:
                mine, base = reached(one, above, length), reached(other, above, length)
                if mine and base:
                    pairs.append((mine, base))
                    first = one.prompt_tokens + NGRAM  # the context length at which the answer's first n-gram ends
                    again += said_before[one.prompt_key][max(above - first + 1, 0) : max(length - first + 1, 0)]
            if not pairs:
                continue
            tokens, ms, cycles, accepted, nodes = (
                sum(getattr(mine, part.name) for mine, _ in pairs) for part in fields(Reached)
            )
            # tokens are as many in both, so that the speedup is a ratio of times
            times = np.array([(mine.ms, base.ms) for mine, base in pairs])  # [n, 2]
            rows.append(
                replace(
                    identity(members),
                    prompts=len(pairs),
                    new_tokens=round(tokens),
                    tau=tokens / cycles,
                    tokens_per_s=1000 * tokens / ms,
                    speedup=float(times[:, 1].sum() / times[:, 0].sum()),
                    speedup_ci95=ratio_interval(times[:, 1], times[:, 0], seed),
                    speedup_mean_per_prompt=float(np.mean(times[:, 1] / times[:, 0])),
                    target_forwards=cycles,
                    draft_nodes=nodes,
                    accept_rate=accepted / nodes if nodes else None,
                    repeated=sum(again) / len(again) if again else None,
                    sweep=CONTEXT,
                    key=CONTEXT,
                    value=length,
                    span=span,
                )
            )
    return rows


def reached(record: Record, above: int, length: int) -> Reached | None:
    """What the answer took from context length `above`, or its own start, to `length`; null where it ends before."""
    ends = record.prompt_tokens + 1 + np.cumsum((0, *record.cycle_tokens))  # [cycles + 1], the prefill's token is there
    start = max(above, int(ends[0]))
    if start >= length or ends[-1] < length:
        return None

    def between(values: Sequence[float]) -> float:
        low, high = np.interp([start, length], ends, np.cumsum((0.0, *values)))
        return float(high - low)

    columns = (record.cycle_ms, [1.0] * len(record.cycle_tokens), record.accepted, record.cycle_nodes)
    return Reached(length - start, *map(between, columns))


def distinct_ngrams(answers: Iterable[Sequence[int]], size: int = NGRAM) -> tuple[int, int]:
    """(distinct n-grams, all n-grams) pooled over the answers; n-grams do not cross from one answer to the next."""
    ngrams = [tuple(answer[at : at + size]) for answer in answers for at in range(len(answer) - size + 1)]
    return len(set(ngrams)), len(ngrams)


def repeats(answer: Sequence[int], size: int = NGRAM) -> list[bool]:
    """For each n-gram of one answer, by where it starts, whether the answer has had it before."""
    seen: set[tuple[int, ...]] = set()
    again = []
    for start in range(len(answer) - size + 1):
        ngram = tuple(answer[start : start + size])
        again.append(ngram in seen)
        seen.add(ngram)
    return again


def repeated_share(answers: Iterable[Sequence[int]], size: int = NGRAM) -> float | None:
    """The share of n-grams that their own answer has had before, pooled over the answers; null without any n-gram.

    Other than `distinct_ngrams` it does not count what two answers share, nor does it grow with their number.
    """
    again = [one for answer in answers for one in repeats(answer, size)]
    return sum(again) / len(again) if again else None
