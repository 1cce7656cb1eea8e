"""Records -> the rows of summary.json. The prefill makes the first new token; decoding times are those of the rest."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.bench_files import Milliseconds, Record, SuiteFile, SummaryRow

FloatArray = NDArray[np.float64]
Records = Sequence[Record]
RESAMPLES = 2000
VANILLA, ALL_TASKS = "vanilla", "all"
NGRAM = 4  # tokens whose return counts as repetition


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class Group:
    """The answers of one row at one sampling, and vanilla's at the same."""

    records: tuple[Record, ...]
    baseline: dict[Any, Record]  # by prompt_key

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
    def pairs(self) -> list[tuple[Record, Record]]:
        """(this row's answer, vanilla's) where both are ok."""
        return [
            (one, self.baseline[one.prompt_key])
            for one in self.good
            if one.prompt_key in self.baseline
        ]

    def by_task(self) -> list["Group"]:
        tasks = grouped(self.records, lambda record: record.task)
        return [replace(self, records=tuple(answers)) for answers in tasks.values()]


def group(records: Iterable[Record]) -> list[Group]:
    """One group per (sampling, row), rows in the recipe's order; the first vanilla row is the baseline."""
    groups = []
    for members in grouped(records, lambda record: record.sampling).values():
        rows = [
            answers for _, answers in sorted(grouped(members, lambda record: record.row).items())
        ]
        vanilla = next((answers for answers in rows if answers[0].method == VANILLA), [])
        baseline = {record.prompt_key: record for record in vanilla if record.status == "ok"}
        groups += [Group(tuple(answers), baseline) for answers in rows]
    return groups


def summary_row(members: Group, seed: int = 0) -> SummaryRow:
    """One row of summary.json: counts and times are summed, peak_memory_gib is the largest."""
    named, records = identity(members), members.records
    if members.failed:
        first = members.failed[0]
        count = f"{len(members.failed)} of {len(records)} prompts failed"
        return replace(
            named, status="error", message=f"{count}; first {first.prompt_id!r}: {first.message}"
        )
    names = (
        "new_tokens",
        "target_forwards",
        "draft_forwards",
        "draft_forwards_wasted",
        "draft_nodes",
    )
    sums = {name: sum(getattr(record, name) for record in records) for name in names}
    times = milliseconds(records)
    decode_seconds = (times.wall - times.prefill) / 1000.0
    compared = [record.identical for record in records if record.identical is not None]
    accepted = np.array([kept for record in records for kept in record.accepted], dtype=np.int64)
    tokens, forwards = per_prompt(records).T[:2]
    return replace(
        named,
        **sums,
        tau=tau(records),
        tau_macro=float(np.mean(tokens[forwards > 0] / forwards[forwards > 0]))
        if forwards.any()
        else None,
        accepted_histogram=np.bincount(
            accepted, minlength=(named.tree.levels if named.tree else 0) + 1
        ).tolist(),
        tokens_per_s=(sums["new_tokens"] - len(records)) / decode_seconds
        if decode_seconds > 0
        else None,
        **speedups(members.pairs, seed),
        accept_rate=int(accepted.sum()) / sums["draft_nodes"] if sums["draft_nodes"] else None,
        identical=sum(compared) if compared else None,
        mismatch=len(compared) - sum(compared) if compared else None,
        peak_memory_gib=max(
            (r.peak_memory_gib for r in records if r.peak_memory_gib is not None), default=None
        ),
        ms=times,
    )


def identity(members: Group) -> SummaryRow:
    """A row without figures."""
    first = members.first
    tasks = {record.task for record in members.records}
    # an answer without any draft says R2 even where the row's drafts follow R1 or R3
    drafted = [record for record in members.good if record.draft_nodes]
    names = ("method", "head", "head_path", "tree", "temperature", "top_k", "top_p")
    return SummaryRow(
        task=first.task if len(tasks) == 1 else ALL_TASKS,
        prompts=len({record.prompt for record in members.records}),
        verify=(drafted or members.good or [first])[0].verify,
        **{name: getattr(first, name) for name in names},
    )


def told_apart(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """The rows; if two differ in the head alone, the variant of their trees names it."""
    same, named = grouped(rows, lambda row: repr((row.method, row.tree))), []
    for row in rows:
        alike = {(other.head, other.head_path) for other in same[repr((row.method, row.tree))]}
        if row.tree is not None and len(alike) > 1:
            by_kind = len({kind for kind, _ in alike}) == len(alike)
            words = f"{row.head} head" if by_kind else f"head {row.head_path or 'of the run'}"
            row = replace(
                row,
                tree=replace(row.tree, variant=", ".join(filter(None, (row.tree.variant, words)))),
            )
        named.append(row)
    return named


def sweep_rows(
    groups: Sequence[Group], own: Sequence[Group], asked: SuiteFile, seed: int
) -> list[SummaryRow]:
    """`sweeps` of summary.json; own: the groups of the bench's own rows, for points by context length."""
    rows = []
    for point in asked.points:
        for members in (
            one
            for one in groups
            if (one.first.row, one.first.sampling) == (point.row, point.sampling)
        ):
            if asked_for := tuple(
                record for record in members.records if record.prompt in point.prompts
            ):
                measured = summary_row(replace(members, records=asked_for), seed)
                rows.append(replace(measured, sweep=point.sweep, key=point.key, value=point.value))
    for members in own:
        rows += context_rows(members, asked.contexts, asked.max_context, seed)
    return rows


def tau(records: Records) -> float | None:
    """New tokens after the prefill's per target forward, bonus included, pooled over prompts."""
    forwards = sum(record.target_forwards for record in records)
    return (
        (sum(record.new_tokens for record in records) - len(records)) / forwards
        if forwards
        else None
    )


def tau_interval(records: Records, seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval of tau over prompts."""
    tokens, forwards = per_prompt(records).T[:2]
    return interval([tokens], [forwards], seed) if forwards.any() else None


def speedups(pairs: Sequence[tuple[Record, Record]], seed: int = 0) -> dict[str, Any]:
    """The speedup fields of a row from (row's answer, vanilla's); the interval is a bootstrap paired by prompt."""
    used = [(mine, base) for mine, base in pairs if mine.new_tokens > 1 and base.new_tokens > 1]
    if not used:
        return dict.fromkeys(
            ("speedup", "speedup_ci95", "speedup_mean_per_prompt", "speedup_with_prefill")
        )
    tokens, _, ms = per_prompt([mine for mine, _ in used]).T
    base_tokens, _, base_ms = per_prompt([base for _, base in used]).T
    mine, base = (
        sum(one.new_tokens for one in side) / milliseconds(side).wall
        for side in zip(*pairs, strict=True)
    )
    return {
        "speedup": float(tokens.sum() * base_ms.sum() / (base_tokens.sum() * ms.sum())),
        "speedup_ci95": interval([tokens, base_ms], [base_tokens, ms], seed),
        "speedup_mean_per_prompt": float(np.mean(tokens * base_ms / (base_tokens * ms))),
        "speedup_with_prefill": mine / base,
    }


def milliseconds(records: Records) -> Milliseconds:
    times = [record.ms for record in records if record.ms is not None]
    return Milliseconds(
        *(sum(getattr(ms, part.name) for ms in times) for part in fields(Milliseconds))
    )


def per_prompt(records: Records) -> FloatArray:
    """[n, 3] tokens after the prefill's, target forwards and decode milliseconds; a prompt's turns are added up."""
    places = {
        prompt: place
        for place, prompt in enumerate(dict.fromkeys(record.prompt for record in records))
    }
    table = np.zeros((len(places), 3))
    for record in records:
        ms = record.ms.wall - record.ms.prefill if record.ms else 0.0
        table[places[record.prompt]] += (record.new_tokens - 1, record.target_forwards, ms)
    return table


def interval(
    above: Sequence[FloatArray], below: Sequence[FloatArray], seed: int = 0
) -> list[float] | None:
    """95 % bootstrap interval over prompts [n] of product(sums above) / product(sums below); None for one prompt."""
    size = len(above[0])
    if size < 2:
        return None
    drawn = (
        np.random.default_rng(seed)
        .multinomial(size, np.full(size, 1.0 / size), size=RESAMPLES)
        .astype(float)
    )
    over, under = (
        np.prod([drawn @ values for values in side], axis=0) for side in (above, below)
    )  # [RESAMPLES]
    low, high = np.percentile(over[under > 0] / under[under > 0], [2.5, 97.5])
    return [float(low), float(high)]


def context_rows(
    members: Group, contexts: Sequence[int], limit: int | None, seed: int = 0
) -> list[SummaryRow]:
    """A row's points of `sweeps` by context length, each from the prompts that it and vanilla both answer that far.

    `repeated`: the share of 4-grams there that the row's own answer had before, as loops are easy to draft.
    """
    if members.failed:
        return []
    # for each n-gram of an answer, by its start, whether the answer has had it before
    repeated = {
        one.prompt_key: pd.Series(ngrams(one.output_ids)).duplicated().tolist()
        for one in members.records
    }
    rows = []
    for place, length in enumerate(contexts):
        for span in ("cumulative", "bucket") if limit is None or length <= limit else ():
            above = contexts[place - 1] if span == "bucket" and place else 0
            pairs, again = [], list[bool]()
            for one, other in members.pairs:
                mine, base = reached(one, above, length), reached(other, above, length)
                if mine is not None and base is not None:
                    pairs.append((mine, base))
                    first = (
                        one.prompt_tokens + NGRAM
                    )  # the context length at which the answer's first n-gram ends
                    again += repeated[one.prompt_key][
                        max(above - first + 1, 0) : max(length - first + 1, 0)
                    ]
            if not pairs:
                continue
            tokens, ms, cycles, accepted, nodes = np.sum(
                [mine for mine, _ in pairs], axis=0
            ).tolist()
            # tokens are as many in both, so that the speedup is a ratio of times
            times, base_times = np.array([(mine[1], base[1]) for mine, base in pairs]).T  # [n]
            point = replace(
                identity(members),
                prompts=len(pairs),
                new_tokens=round(tokens),
                tau=tokens / cycles,
                tokens_per_s=1000 * tokens / ms,
                speedup=float(base_times.sum() / times.sum()),
                speedup_ci95=interval([base_times], [times], seed),
                speedup_mean_per_prompt=float(np.mean(base_times / times)),
                target_forwards=cycles,
                draft_nodes=nodes,
                accept_rate=accepted / nodes if nodes else None,
                repeated=sum(again) / len(again) if again else None,
            )
            rows.append(replace(point, sweep=CONTEXT, key=CONTEXT, value=length, span=span))
    return rows


def reached(record: Record, above: int, length: int) -> FloatArray | None:
    """[5] tokens, ms, cycles, accepted and drafted nodes between two context lengths; None: the answer is shorter."""
    ends = (
        record.prompt_tokens + 1 + np.cumsum((0, *record.cycle_tokens))
    )  # [cycles + 1], the prefill's token is there
    start = max(above, int(ends[0]))
    if start >= length or ends[-1] < length:
        return None
    columns = (
        record.cycle_ms,
        [1.0] * len(record.cycle_tokens),
        record.accepted,
        record.cycle_nodes,
    )
    spent = [
        np.diff(np.interp([start, length], ends, np.cumsum((0.0, *values))))[0]
        for values in columns
    ]
    return np.array([length - start, *spent])


def diversity(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Distinct 4-grams of vanilla's greedy answers; None without any."""
    for members in groups:
        if (
            members.first.method == VANILLA
            and members.first.temperature == 0
            and not members.failed
        ):
            every = [ngram for record in members.records for ngram in ngrams(record.output_ids)]
            counts = {"distinct_4grams": len(set(every)), "total_4grams": len(every)}
            return {"method": VANILLA, "answers": len(members.records), **counts}
    return None


def ngrams(answer: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(answer[start : start + NGRAM]) for start in range(len(answer) - NGRAM + 1)]
