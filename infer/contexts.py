"""Speed and tau by context length: answers cut where prompt and answer together reach a length.

Both ways that SVIP (arXiv 2411.18462), tables 2 and 5, can be read: from the start up to a length ("cumulative"), and
between a length and the one before ("bucket"). A length that falls inside a cycle takes its share of the cycle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer.aggregate import Group, identity, ratio_interval
from infer.config import CONTEXT
from infer.diversity import repeats
from infer.records import FloatArray, Record

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
