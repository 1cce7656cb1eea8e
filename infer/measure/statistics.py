"""Turns records into the rows of summary.json.

The prefill makes the first new token. Decoding times are the times of the other tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.bench_files import Milliseconds, PromptKey, Record, SuiteFile, SummaryRow

FloatArray = NDArray[np.float64]
RESAMPLES = 2000
VANILLA = "vanilla"
SERVED = "served"  # the method of a row that a server answers
ALL_TASKS = "all"
NGRAM = 4  # tokens of an n-gram that counts as repeated
COUNTS = (
    "new_tokens",
    "target_forwards",
    "draft_forwards",
    "draft_forwards_wasted",
    "draft_nodes",
)
SPEEDUPS = ("speedup", "speedup_ci95", "speedup_mean_per_prompt", "speedup_with_prefill")


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


class Pair(NamedTuple):
    """A row's answer to a turn, and vanilla's answer to the same turn."""

    record: Record
    baseline: Record


@dataclass(frozen=True)
class Group:
    """One row's answers at one sampling, and vanilla's good ones."""

    records: tuple[Record, ...]
    baseline: dict[PromptKey, Record]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record.status != "ok"]

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if record.status == "ok"]

    @property
    def pairs(self) -> list[Pair]:
        """The turns that both the row and vanilla answered well."""
        return [
            Pair(record, self.baseline[record.prompt_key])
            for record in self.good
            if record.prompt_key in self.baseline
        ]

    def by_task(self, name_of: Callable[[str], str] = str) -> dict[str, "Group"]:
        """A group for each name that name_of gives to tasks."""
        tasks = grouped(self.records, lambda record: name_of(record.task))
        return {name: replace(self, records=tuple(answers)) for name, answers in tasks.items()}


def group(records: Iterable[Record]) -> list[Group]:
    """A group for each sampling and row, in order; the first vanilla row is the baseline."""
    groups = []
    for answers in grouped(records, lambda record: record.sampling).values():
        by_row = grouped(answers, lambda record: record.row)
        rows = [by_row[number] for number in sorted(by_row)]
        vanilla = next((row for row in rows if row[0].method == VANILLA), [])
        baseline = {record.prompt_key: record for record in vanilla if record.status == "ok"}
        groups += [Group(tuple(row), baseline) for row in rows]
    return groups


def summary_row(members: Group, seed: int = 0) -> SummaryRow:
    """A row of summary.json, with sums of counts and times and the largest peak_memory_gib."""
    row = identity(members)
    records = members.records
    if members.failed:
        first = members.failed[0]
        count = f"{len(members.failed)} of {len(records)} prompts failed"
        message = f"{count}; first {first.prompt_id!r}: {first.message}"
        return replace(row, status="error", message=message)
    sums = {name: sum(getattr(record, name) for record in records) for name in COUNTS}
    times = milliseconds(records)
    compared = [record.identical for record in records if record.identical is not None]
    accepted = list(chain.from_iterable(record.accepted for record in records))
    prompts = per_prompt(records)
    has_cycle = prompts.forwards > 0
    tau_of_prompts = prompts.tokens[has_cycle] / prompts.forwards[has_cycle]
    return replace(
        row,
        **sums,
        **speedups(members.pairs, seed),
        tau=tau(records),
        tau_macro=float(np.mean(tau_of_prompts)) if len(tau_of_prompts) else None,
        accepted_histogram=np.bincount(
            np.array(accepted, dtype=np.int64), minlength=row.tree.levels + 1 if row.tree else 1
        ).tolist(),
        tokens_per_s=_ratio(
            1000.0 * (sums["new_tokens"] - len(records)), times.wall - times.prefill
        ),
        accept_rate=_ratio(sum(accepted), sums["draft_nodes"]),
        identical=sum(compared) if compared else None,
        mismatch=compared.count(False) if compared else None,
        peak_memory_gib=max(
            filter(None, (record.peak_memory_gib for record in records)), default=None
        ),
        ms=times,
    )


def beyond(members: Group, length: int) -> float | None:
    """The share of the texts (prompt and answer) that are longer than `length` tokens."""
    ends = [record.prompt_tokens + record.new_tokens for record in members.good]
    return _ratio(sum(end > length for end in ends), len(ends))


def _ratio(over: float, under: float) -> float | None:
    return over / under if under > 0 else None


def identity(members: Group) -> SummaryRow:
    """The row of summary.json before figures are added."""
    first = members.first
    tasks = {record.task for record in members.records}
    # An answer without drafts says R2 even if the row's drafts follow R1 or R3.
    drafted = [record for record in members.good if record.draft_nodes]
    judged = [*drafted, *members.good, first][0]
    return SummaryRow(
        method=first.method,
        head=first.head,
        head_path=first.head_path,
        task=first.task if len(tasks) == 1 else ALL_TASKS,
        temperature=first.temperature,
        top_k=first.top_k,
        top_p=first.top_p,
        prompts=len({record.prompt for record in members.records}),
        verify=judged.verify,
        tree=first.tree,
    )


def told_apart(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """The rows; where two differ in the head alone, their trees' variants name the head."""
    alike = grouped(rows, lambda row: repr((row.method, row.tree)))
    renamed = []
    for row in rows:
        heads = {(twin.head, twin.head_path) for twin in alike[repr((row.method, row.tree))]}
        if row.tree is not None and len(heads) > 1:
            is_kind_enough = len({kind for kind, _ in heads}) == len(heads)
            words = (
                f"{row.head} head" if is_kind_enough else f"head {row.head_path or 'of the run'}"
            )
            variant = ", ".join(filter(None, (row.tree.variant, words)))
            row = replace(row, tree=replace(row.tree, variant=variant))
        renamed.append(row)
    return renamed


def sweep_rows(
    groups: Sequence[Group], bench_groups: Sequence[Group], suite: SuiteFile, seed: int
) -> list[SummaryRow]:
    """The rows of `sweeps` in summary.json.

    bench_groups: of the bench's own rows, for points by context length.
    """
    group_of = {(members.first.row, members.first.sampling): members for members in groups}
    rows = []
    for point in suite.points:
        members = group_of.get((point.row, point.sampling))
        if members is None:  # the bench ended before it measured this point
            continue
        records = [record for record in members.records if record.prompt in point.prompts]
        if not records:
            continue
        row = summary_row(replace(members, records=tuple(records)), seed)
        rows.append(replace(row, sweep=point.sweep, key=point.key, value=point.value))
    for members in bench_groups:
        rows += context_rows(members, suite.contexts, suite.max_context, seed)
    return rows


def tau(records: Sequence[Record]) -> float | None:
    """New tokens per target forward, pooled over prompts, without the prefill and its token."""
    tokens = sum(record.new_tokens for record in records) - len(records)
    return _ratio(tokens, sum(record.target_forwards for record in records))


def tau_interval(records: Sequence[Record], seed: int = 0) -> list[float] | None:
    """The 95 % bootstrap interval of tau over prompts; None if no prompt has a cycle."""
    prompts = per_prompt(records)
    if not prompts.forwards.any():
        return None
    return interval([prompts.tokens], [prompts.forwards], seed)


def speedups(pairs: Sequence[Pair], seed: int = 0) -> dict[str, Any]:
    """The speedup fields of a row, with a bootstrap interval paired by prompt.

    They are None for a server's row, because vanilla ran in another engine.
    """
    decoded = [pair for pair in pairs if min(pair.record.new_tokens, pair.baseline.new_tokens) > 1]
    if not decoded or decoded[0].record.method == SERVED:
        return dict.fromkeys(SPEEDUPS)
    row = per_prompt([pair.record for pair in decoded])
    base = per_prompt([pair.baseline for pair in decoded])
    speed = _speed_with_prefill([pair.record for pair in pairs])
    base_speed = _speed_with_prefill([pair.baseline for pair in pairs])
    return {
        "speedup": float(row.tokens.sum() * base.ms.sum() / (base.tokens.sum() * row.ms.sum())),
        "speedup_ci95": interval([row.tokens, base.ms], [base.tokens, row.ms], seed),
        "speedup_mean_per_prompt": float(np.mean(row.tokens * base.ms / (base.tokens * row.ms))),
        "speedup_with_prefill": speed / base_speed,
    }


def _speed_with_prefill(records: Sequence[Record]) -> float:
    return sum(record.new_tokens for record in records) / milliseconds(records).wall


def milliseconds(records: Sequence[Record]) -> Milliseconds:
    times = [record.ms for record in records if record.ms is not None]
    return Milliseconds(
        *(sum(getattr(ms, part.name) for ms in times) for part in fields(Milliseconds))
    )


class SumsByPrompt(NamedTuple):
    """Sums over the turns of each prompt [n]."""

    tokens: FloatArray  # without the prefill's
    forwards: FloatArray  # of the target, without the prefill's
    ms: FloatArray  # of decoding


def per_prompt(records: Sequence[Record]) -> SumsByPrompt:
    sums: dict[tuple[str, str], FloatArray] = {}
    for record in records:
        ms = record.ms.wall - record.ms.prefill if record.ms else 0.0
        counts = np.array([record.new_tokens - 1, record.target_forwards, ms])
        sums[record.prompt] = sums.get(record.prompt, 0.0) + counts
    return SumsByPrompt(*np.array(list(sums.values())).reshape(-1, 3).T)


def interval(
    above: Sequence[FloatArray], below: Sequence[FloatArray], seed: int = 0
) -> list[float] | None:
    """The 95 % bootstrap interval over prompts of product(sums above) / product(sums below).

    Each array [n] has a value for each prompt. None for a single prompt.
    """
    size = len(above[0])
    if size < 2:
        return None
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(size, np.full(size, 1.0 / size), size=RESAMPLES).astype(float)
    over = np.prod([drawn @ values for values in above], axis=0)  # [RESAMPLES]
    under = np.prod([drawn @ values for values in below], axis=0)
    low, high = np.percentile(over[under > 0] / under[under > 0], [2.5, 97.5])
    return [float(low), float(high)]


# --- by context length ---


def context_rows(
    members: Group, contexts: Sequence[int], limit: int | None, seed: int = 0
) -> list[SummaryRow]:
    """A row's points of `sweeps` by context length.

    A cumulative point counts an answer up to a length, a bucket from the length before it.
    """
    if members.failed or members.first.method == SERVED:  # a server times no cycle
        return []
    rows = []
    for before, length in pairwise([0, *contexts]):
        if limit is not None and length > limit:
            continue
        for span, above in (("cumulative", 0), ("bucket", before)):
            row = context_row(members, above, length, seed)
            if row is not None:
                rows.append(replace(row, sweep=CONTEXT, key=CONTEXT, value=length, span=span))
    return rows


class Stretch(NamedTuple):
    """An answer's counts between two context lengths."""

    tokens: float
    ms: float
    cycles: float
    accepted: float  # accepted draft tokens
    nodes: float  # drafted nodes


def context_row(members: Group, above: int, length: int, seed: int) -> SummaryRow | None:
    """The point of the prompts whose answers by the row and by vanilla reach `length`, or None.

    `repeated` is the share of 4-grams that the answer had before: loops are easy to draft.
    """
    stretches, base_ms, repeats = [], [], list[bool]()
    for record, baseline in members.pairs:
        stretch = stretch_of(record, above, length)
        base_stretch = stretch_of(baseline, above, length)
        if stretch is not None and base_stretch is not None:
            stretches.append(stretch)
            base_ms.append(base_stretch.ms)
            first = record.prompt_tokens + NGRAM  # the context at which the first n-gram ends
            is_repeated = repeated_ngrams(record.output_ids)
            repeats += is_repeated[max(above - first + 1, 0) : max(length - first + 1, 0)]
    if not stretches:
        return None
    total = Stretch(*np.sum(stretches, axis=0).tolist())
    # Both stretches have equally many tokens, so the speedup is a ratio of times.
    times = np.array([stretch.ms for stretch in stretches])  # [n]
    base_times = np.array(base_ms)
    return replace(
        identity(members),
        prompts=len(stretches),
        new_tokens=round(total.tokens),
        tau=total.tokens / total.cycles,
        tokens_per_s=1000 * total.tokens / total.ms,
        speedup=float(base_times.sum() / times.sum()),
        speedup_ci95=interval([base_times], [times], seed),
        speedup_mean_per_prompt=float(np.mean(base_times / times)),
        target_forwards=total.cycles,
        draft_nodes=total.nodes,
        accept_rate=_ratio(total.accepted, total.nodes),
        repeated=_ratio(sum(repeats), len(repeats)),
    )


def stretch_of(record: Record, above: int, length: int) -> Stretch | None:
    """The answer's counts between these contexts; None if it is shorter."""
    # [cycles + 1] the context before the first cycle (with the prefill's token) and after each
    ends = record.prompt_tokens + 1 + np.cumsum((0, *record.cycle_tokens))
    start = max(above, int(ends[0]))
    if start >= length or ends[-1] < length:
        return None

    def spent(by_cycle: Sequence[float]) -> float:
        totals = np.cumsum((0.0, *by_cycle))
        at_start, at_end = np.interp([start, length], ends, totals)
        return float(at_end - at_start)

    return Stretch(
        tokens=length - start,
        ms=spent(record.cycle_ms),
        cycles=spent([1.0] * len(record.cycle_tokens)),
        accepted=spent(record.accepted),
        nodes=spent(record.cycle_nodes),
    )


def repeated_ngrams(answer: Sequence[int]) -> list[bool]:
    """For each n-gram of the answer: whether the answer had it before."""
    earlier = set[tuple[int, ...]]()
    repeats = []
    for start in range(len(answer) - NGRAM + 1):
        ngram = tuple(answer[start : start + NGRAM])
        repeats.append(ngram in earlier)
        earlier.add(ngram)
    return repeats
