"""Records -> the rows of summary.json: tau, speedup with its interval, and what was spent.

One counter for every row: the prefill's token belongs to the prefill, so new_tokens - 1 tokens are what wall - prefill
(the decode seconds) bought, in vanilla and in every other method alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from infer.records import FloatArray, Milliseconds, Record

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
