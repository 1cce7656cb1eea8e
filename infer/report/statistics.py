"""Records -> the rows of summary.json: tau, speedup with its interval, and what was spent.

One counter for every row: the prefill's token belongs to the prefill, so new_tokens - 1 tokens are what wall - prefill
(the decode seconds) bought, in vanilla and in every other method alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aerie.configs.errors import UserError
from aerie.configs.schema.measure import CONTEXT
from aerie.infer.measure.record import FloatArray, Milliseconds, Record, told_apart
from aerie.infer.report.tables import label

RESAMPLES = 2000
VANILLA = "vanilla"
PARTS = ("prefill", "draft", "verify", "commit", "other", "wall")
ALL_TASKS = "all"
PromptKey = tuple[str, str, int]  # task, prompt_id, turn
Sampling = tuple[float, int, float]  # temperature, top_k, top_p


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
        return [
            (r, self.baseline[r.prompt_key]) for r in self.records if r.prompt_key in self.baseline and r.status == "ok"
        ]

    def by_task(self) -> dict[str, "Group"]:
        """The same row for each task alone, in order of appearance."""
        tasks = dict.fromkeys(record.task for record in self.records)
        return {task: replace(self, records=tuple(r for r in self.records if r.task == task)) for task in tasks}


def baselines_of(records: Iterable[Record]) -> dict[Sampling, dict[PromptKey, Record]]:
    """The good answers of the first vanilla row, by sampling and turn."""
    found: dict[Sampling, dict[PromptKey, Record]] = {}
    chosen: dict[Sampling, int] = {}
    for record in sorted(records, key=lambda record: record.row):
        if record.method == VANILLA and chosen.setdefault(record.sampling, record.row) == record.row:
            answers = found.setdefault(record.sampling, {})
            if record.status == "ok":
                answers[record.prompt_key] = record
    return found


def group(records: Iterable[Record]) -> list[Group]:
    """One group per (sampling, row): samplings in order of appearance, rows in the recipe's order."""
    found: dict[tuple[Sampling, int], list[Record]] = {}
    for record in records:
        found.setdefault((record.sampling, record.row), []).append(record)
    samplings = list(dict.fromkeys(sampling for sampling, _ in found))
    baselines = baselines_of(record for members in found.values() for record in members)
    keys = sorted(found, key=lambda key: (samplings.index(key[0]), key[1]))
    return [Group(tuple(found[key]), baselines.get(key[0], {})) for key in keys]


def row(members: Group, seed: int = 0) -> dict[str, Any]:
    """One row of summary.json. With a failed prompt: its identity, status "error" and a message, and no figure.

    ms are sums over the prompts and their turns, as new_tokens and target_forwards are; peak_memory_gib is the
    largest; identical and mismatch count answers.
    """
    named = identity(members)
    if members.failed:
        return {**named, "status": "error", "message": _failure(members)}
    records = members.records
    new_tokens = sum(record.new_tokens for record in records)
    forwards = sum(record.target_forwards for record in records)
    nodes = sum(record.draft_nodes for record in records)
    times = milliseconds(records)
    decode_seconds = (times.wall - times.prefill) / 1000.0
    memory = [record.peak_memory_gib for record in records if record.peak_memory_gib is not None]
    return {
        **named,
        "new_tokens": new_tokens,
        "tau": tau(records),
        "tau_macro": tau_macro(records),
        "accepted_histogram": accepted_histogram(records),
        "tokens_per_s": (new_tokens - len(records)) / decode_seconds if decode_seconds > 0 else None,
        **speedups(members.pairs, seed),
        "target_forwards": forwards,
        "draft_forwards": sum(record.draft_forwards for record in records),
        "draft_forwards_wasted": sum(record.draft_forwards_wasted for record in records),
        "draft_nodes": nodes,
        "accept_rate": sum(sum(record.accepted) for record in records) / nodes if nodes else None,
        "identical": _count(records, "identical", True),
        "mismatch": _count(records, "identical", False),
        "peak_memory_gib": max(memory, default=None),
        "ms": {part: getattr(times, part) for part in PARTS},
        "status": "ok",
    }


def tau(records: Sequence[Record]) -> float | None:
    """New tokens after the prefill's per target forward, bonus included, pooled over prompts (vanilla: 1.0)."""
    forwards = sum(record.target_forwards for record in records)
    return (sum(record.new_tokens for record in records) - len(records)) / forwards if forwards else None


def tau_macro(records: Sequence[Record]) -> float | None:
    """The mean over prompts of each prompt's own tau; prompts that ended at the prefill's token have none."""
    costs = _per_prompt(records, [(record.new_tokens - 1, record.target_forwards) for record in records])
    costs = costs[costs[:, 1] > 0]
    return float(np.mean(costs[:, 0] / costs[:, 1])) if len(costs) else None


def tau_interval(records: Sequence[Record], seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval of tau over prompts."""
    costs = _per_prompt(records, [(record.new_tokens - 1, record.target_forwards) for record in records])
    if len(costs) < 2 or not costs[:, 1].any():
        return None
    return ratio_interval(costs[:, 0], costs[:, 1], seed)


def speedups(pairs: Sequence[tuple[Record, Record]], seed: int = 0) -> dict[str, Any]:
    """speedup, its 95 % interval, the mean of the prompts' own speedups, and the speedup with the prefill counted.

    The interval is a paired bootstrap: a resampled prompt brings the method's answers to its turns and vanilla's. With
    the prefill counted, all new_tokens are the tokens of the whole wall time. None where no prompt is ok in both.
    """
    used = [(mine, base) for mine, base in pairs if mine.new_tokens > 1 and base.new_tokens > 1]
    if not used:
        return dict.fromkeys(("speedup", "speedup_ci95", "speedup_mean_per_prompt", "speedup_with_prefill"))
    tokens, seconds = _decode([mine for mine, _ in used])
    base_tokens, base_seconds = _decode([base for _, base in used])
    weights = _resamples(len(tokens), seed)  # [R, n]
    own_rate = (weights @ tokens) * (weights @ base_seconds)
    base_rate = (weights @ base_tokens) * (weights @ seconds)
    return {
        "speedup": float(tokens.sum() * base_seconds.sum() / (base_tokens.sum() * seconds.sum())),
        "speedup_ci95": _interval(own_rate, base_rate) if len(tokens) > 1 else None,
        "speedup_mean_per_prompt": float(np.mean(tokens * base_seconds / (base_tokens * seconds))),
        "speedup_with_prefill": _rate_with_prefill(mine for mine, _ in pairs) / _rate_with_prefill(b for _, b in pairs),
    }


def accepted_histogram(records: Sequence[Record]) -> list[int]:
    """Entry a is the number of cycles in which a draft tokens were kept; as long as the tree is deep, plus one."""
    tree = records[0].tree
    accepted = np.array([kept for record in records for kept in record.accepted], dtype=np.int64)
    return [int(count) for count in np.bincount(accepted, minlength=(tree.levels if tree else 0) + 1)]


def milliseconds(records: Sequence[Record]) -> Milliseconds:
    """The parts of wall-clock summed over prompts."""
    return Milliseconds(**{part: sum(getattr(r.ms, part) for r in records if r.ms is not None) for part in PARTS})


def identity(members: Group) -> dict[str, Any]:
    """What a row of summary.json is of: method, head, task, sampling, number of prompts, rule and tree."""
    first = members.first
    tasks = {record.task for record in members.records}
    tree = None
    if first.tree is not None:
        # a chain has one child per node, whatever k the recipe leaves standing
        k = 1 if first.tree.shape == "chain" else first.tree.k
        tree = {**first.tree.settings, "shape": first.tree.shape, "levels": first.tree.levels, "k": k}
        tree["nodes"] = first.tree.levels + 1 if first.tree.shape == "chain" else first.tree.nodes
        tree |= {"text": first.tree.text} if first.tree.text else {}
        tree |= {"variant": first.tree.variant} if first.tree.variant else {}
    return {
        "method": first.method,
        "head": first.head,
        "head_path": first.head_path,
        "task": first.task if len(tasks) == 1 else ALL_TASKS,
        "temperature": first.temperature,
        "top_k": first.top_k,
        "top_p": first.top_p,
        "prompts": len({record.prompt for record in members.records}),
        "verify": _rule(members),
        "tree": tree,
    }


def _rule(members: Group) -> str:
    """The rule that judged the row's drafts; an answer without drafts is asked only where there is no other.

    What is not lossless is said as soon as one answer says it.
    """
    rules = [record.verify for record in members.records if record.status == "ok"]
    drafted = [record.verify for record in members.records if record.status == "ok" and record.draft_nodes]
    labelled = [rule for rule in rules if "not lossless" in rule]
    return (labelled or drafted or rules or [members.first.verify])[0]


def _failure(members: Group) -> str:
    first = members.failed[0]
    return f"{len(members.failed)} of {len(members.records)} prompts failed; first {first.prompt_id!r}: {first.message}"


def _count(records: Sequence[Record], name: str, value: bool) -> int | None:
    """How many records have this value; None where none was compared (sampled rows)."""
    compared = [getattr(record, name) for record in records if getattr(record, name) is not None]
    return sum(found is value for found in compared) if compared else None


def _decode(records: Sequence[Record]) -> tuple[FloatArray, FloatArray]:
    """Tokens after the prefill's and the decode milliseconds, one entry per prompt."""
    table = _per_prompt(records, [(r.new_tokens - 1, r.ms.wall - r.ms.prefill if r.ms else 0.0) for r in records])
    return table[:, 0], table[:, 1]


def _per_prompt(records: Sequence[Record], costs: Sequence[tuple[float, float]]) -> FloatArray:
    """The costs of the records [n, 2], those of one prompt's turns added up."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(record.prompt for record in records))}
    table = np.zeros((len(places), 2))
    for record, cost in zip(records, costs, strict=True):
        table[places[record.prompt]] += cost
    return table


def _rate_with_prefill(records: Iterable[Record]) -> float:
    rows = [(record.new_tokens, record.ms.wall) for record in records if record.ms is not None]
    return sum(tokens for tokens, _ in rows) / sum(wall for _, wall in rows)


def ratio_interval(numerators: FloatArray, denominators: FloatArray, seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval over prompts of sum(numerators) / sum(denominators); null for a single prompt."""
    if len(numerators) < 2:
        return None
    weights = _resamples(len(numerators), seed)  # [R, n]
    return _interval(weights @ numerators, weights @ denominators)


def _resamples(size: int, seed: int) -> FloatArray:
    """How often each prompt is drawn in each resample: [RESAMPLES, size]."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(size, np.full(size, 1.0 / size), size=RESAMPLES).astype(np.float64)


def _interval(numerators: FloatArray, denominators: FloatArray) -> list[float]:
    valid = denominators > 0  # a resample of prompts without one decode step has no ratio
    low, high = np.percentile(numerators[valid] / denominators[valid], [2.5, 97.5])
    return [float(low), float(high)]


Key = tuple[float, int, float, str, str]


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


def names(records: Sequence[Record], rows: Sequence[int]) -> str:
    """'row 2 (eagle2, 6 levels, k 10, 60 nodes)': the rows as tables name them, each once."""
    groups = group(records)
    every = told_apart([identity(members) for members in groups])
    found = {
        members.first.row: f"row {members.first.row} ({label(one, every)})"
        for members, one in zip(groups, every, strict=True)
    }
    return " and ".join(found.get(row, f"row {row}") for row in dict.fromkeys(rows))


def tau_difference(records: Sequence[Record], of: Sequence[int], against: Sequence[int], seed: int = 0) -> Difference:
    """The difference of tau between two sets of rows (numbers of bench.rows), each pooled over its rows.

    A row may stand for one of several seeds: a resampled prompt brings the answers of all rows of both sets. UserError
    for rows that were not measured, or that do not have all prompts.
    """
    if len({record.sampling for record in records}) > 1:
        settings = sorted({record.temperature for record in records})
        raise UserError(f"the bench has several samplings (temperatures {settings}); choose one with --temperature")
    ours, theirs = _per_prompt_compare(records, of), _per_prompt_compare(records, against)
    if ours.keys() != theirs.keys():
        missing = sorted(ours.keys() ^ theirs.keys())[0]
        raise UserError(
            f"rows {list(of)} and {list(against)}: prompt {missing[-1]!r} is not in both; measure it in all"
        )
    keys = sorted(ours)
    mine, other = np.array([ours[key] for key in keys]), np.array([theirs[key] for key in keys])  # [n, 2]
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(keys), size=(RESAMPLES, len(keys)))
    found = _tau(mine[drawn].sum(1)) - _tau(other[drawn].sum(1))
    low, high = np.percentile(found, [2.5, 97.5])
    one, two = float(_tau(mine.sum(0)[None])[0]), float(_tau(other.sum(0)[None])[0])
    return Difference(one, two, one - two, (float(low), float(high)), len(keys))


def _per_prompt_compare(records: Sequence[Record], rows: Sequence[int]) -> dict[Key, NDArray[np.float64]]:
    """Tokens after the prefill's and target forwards of each prompt and sampling, summed over the rows."""
    found: dict[Key, NDArray[np.float64]] = {}
    for row in rows:
        members = [record for record in records if record.row == row and record.status == "ok"]
        if not members:
            raise UserError(f"row {row}: nothing was measured; rows are counted from 0 as in bench.rows")
        for record in members:
            key = (*record.sampling, *record.prompt)
            cost = np.array([record.new_tokens - 1, record.target_forwards], dtype=np.float64)
            found[key] = found.get(key, np.zeros(2)) + cost
    return found


def _tau(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    return sums[:, 0] / np.maximum(sums[:, 1], 1.0)


SPANS = ("cumulative", "bucket")
NGRAM = 4  # tokens whose return counts as repetition


@dataclass(frozen=True)
class Reached:
    """What one answer took from one context length to another."""

    tokens: float
    ms: float
    cycles: float
    accepted: float
    nodes: float


def context_rows(members: Group, contexts: Sequence[int], limit: int | None, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of `sweeps` for one row of the bench, up to the limit (what the target was trained for).

    A length counts the prompts at which both this row's answer and vanilla's get that far; without any it is left out.
    `repeated` is the share of the 4-grams there that the row's own answer has had before: long answers that loop are
    easy to draft. A row that failed, and records of an older version without times of cycles, have no rows.
    """
    if members.failed or any(record.target_forwards and not record.cycle_ms for record in members.records):
        return []
    said_before = {record.prompt_key: repeats(record.output_ids, NGRAM) for record in members.records}
    rows = []
    for place, length in enumerate(contexts):
        if limit is not None and length > limit:
            break
        for span in SPANS:
            above = contexts[place - 1] if span == "bucket" and place else 0
            pairs = []
            again: list[bool] = []
            for one, other in members.pairs:
                mine, base = reached(one, above, length), reached(other, above, length)
                if mine and base:
                    pairs.append((mine, base))
                    again += _between(said_before[one.prompt_key], one.prompt_tokens, above, length)
            if pairs:
                share = {"repeated": sum(again) / len(again) if again else None}
                rows.append({**identity(members), **_figures(pairs, seed), **share, **_place(length, span)})
    return rows


def _between(said_before: Sequence[bool], prompt_tokens: int, above: int, length: int) -> Sequence[bool]:
    """Those of an answer's n-grams that end behind context length `above`, up to `length`."""
    first = prompt_tokens + NGRAM  # the context length at which the first one ends
    return said_before[max(above - first + 1, 0) : max(length - first + 1, 0)]


def reached(record: Record, above: int, length: int) -> Reached | None:
    """What the answer took from context length `above`, or its own start, to `length`; null where it ends before."""
    ends = record.prompt_tokens + 1 + np.cumsum((0, *record.cycle_tokens))  # [cycles + 1], the prefill's token is there
    start = max(above, int(ends[0]))
    if start >= length or ends[-1] < length:
        return None

    def between(values: Sequence[float]) -> float:
        totals: FloatArray = np.cumsum((0.0, *values))
        low, high = np.interp([start, length], ends, totals)
        return float(high - low)

    cycles = between([1.0] * len(record.cycle_tokens))
    return Reached(
        length - start, between(record.cycle_ms), cycles, between(record.accepted), between(record.cycle_nodes)
    )


def _figures(pairs: Sequence[tuple[Reached, Reached]], seed: int) -> dict[str, Any]:
    """Sums over the prompts; tokens are as many in both, so that the speedup is a ratio of times."""
    mine = {
        name: sum(getattr(one, name) for one, _ in pairs) for name in ("tokens", "ms", "cycles", "accepted", "nodes")
    }
    times = np.array([(one.ms, base.ms) for one, base in pairs])  # [n, 2]
    return {
        "prompts": len(pairs),
        "new_tokens": round(mine["tokens"]),
        "tau": mine["tokens"] / mine["cycles"],
        "tokens_per_s": 1000 * mine["tokens"] / mine["ms"],
        "speedup": float(times[:, 1].sum() / times[:, 0].sum()),
        "speedup_ci95": ratio_interval(times[:, 1], times[:, 0], seed),
        "speedup_mean_per_prompt": float(np.mean(times[:, 1] / times[:, 0])),
        "target_forwards": mine["cycles"],
        "draft_nodes": mine["nodes"],
        "accept_rate": mine["accepted"] / mine["nodes"] if mine["nodes"] else None,
        "status": "ok",
    }


def _place(length: int, span: str) -> dict[str, Any]:
    return {"sweep": CONTEXT, "key": CONTEXT, "value": length, "span": span}


def distinct_ngrams(answers: Iterable[Sequence[int]], size: int = 4) -> tuple[int, int]:
    """(distinct n-grams, all n-grams) pooled over the answers; n-grams do not cross from one answer to the next."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for answer in answers:
        ngrams = [tuple(answer[start : start + size]) for start in range(len(answer) - size + 1)]
        seen.update(ngrams)
        total += len(ngrams)
    return len(seen), total


def repeats(answer: Sequence[int], size: int = 4) -> list[bool]:
    """For each n-gram of one answer, by where it starts, whether the answer has had it before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for start in range(len(answer) - size + 1):
        ngram = tuple(answer[start : start + size])
        found.append(ngram in seen)
        seen.add(ngram)
    return found


def repeated_share(answers: Iterable[Sequence[int]], size: int = 4) -> float | None:
    """The share of n-grams that their own answer has had before, pooled over the answers; null without any n-gram.

    Other than `distinct_ngrams` it does not count what two answers share, nor does it grow with their number.
    """
    found = [again for answer in answers for again in repeats(answer, size)]
    return sum(found) / len(found) if found else None


def prompt_lookup_cycles(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    max_ngram: int = 3,
    num_tokens: int = 10,
    latest: bool = False,
) -> list[int]:
    """New tokens of each cycle that prompt lookup would have needed for this greedy output.

    At T = 0 a draft token is accepted iff it is the output's next token, so the output alone decides and no target
    runs. A cycle's draft is what followed the leftmost (latest: the last) earlier occurrence of the context's final
    n-gram, n = max_ngram down to 1, at most num_tokens, shorter where the context ends. The output's first token
    belongs to the prefill. Source: prompt lookup decoding, with the short continuations that transformers allows.
    """
    context = [*prompt_ids, *output_ids[:1]]
    known: dict[tuple[int, ...], int] = {}  # n-gram -> where its continuation starts
    indexed = 0
    cycles: list[int] = []
    done = 1
    while done < len(output_ids):
        # the context's own final n-gram has no continuation yet and stays out
        for end in range(indexed + 1, len(context)):
            for size in range(1, min(max_ngram, end) + 1):
                ngram = tuple(context[end - size : end])
                if latest or ngram not in known:
                    known[ngram] = end
        indexed = max(indexed, len(context) - 1)
        draft = _draft(context, known, max_ngram, num_tokens)
        rest = output_ids[done:]
        accepted = 0
        while accepted < min(len(draft), len(rest)) and draft[accepted] == rest[accepted]:
            accepted += 1
        new = min(accepted + 1, len(rest))
        context.extend(rest[:new])
        done += new
        cycles.append(new)
    return cycles


def prompt_lookup_tau(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    max_ngram: int = 3,
    num_tokens: int = 10,
    latest: bool = False,
) -> float:
    """Tau that prompt lookup would reach on this greedy output; 1.0 where nothing was decoded after the prefill."""
    cycles = prompt_lookup_cycles(prompt_ids, output_ids, max_ngram, num_tokens, latest)
    return sum(cycles) / len(cycles) if cycles else 1.0


def pooled_prompt_lookup_tau(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], latest: bool = False) -> float:
    """Tau of prompt lookup over (prompt_ids, output_ids) pairs, pooled over their cycles as every tau here."""
    cycles = [new for prompt, output in pairs for new in prompt_lookup_cycles(prompt, output, latest=latest)]
    return sum(cycles) / len(cycles) if cycles else 1.0


def _draft(context: list[int], known: dict[tuple[int, ...], int], max_ngram: int, num_tokens: int) -> list[int]:
    for size in range(min(max_ngram, len(context)), 0, -1):
        start = known.get(tuple(context[-size:]))
        if start is not None:
            return context[start : start + num_tokens]
    return []
