"""What ends a draft, compared on one head: SVIP's draft lengths (arXiv 2411.18462, section 3), and rules for trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.table import sampling_text

NAMES = {
    "constant": "constant",
    "heuristic": "heuristic (+2, −1)",
    "entropy": "SVIP (entropy)",
    "confidence": "confidence",
    "vote": "DEAGLE (vote)",
    "probability_sum": "DDD (probability sum)",
    "marginal_gain": "OPT-Tree (marginal gain)",
}
# SVIP, table 3: mean speedup of QwQ 32B with a draft of 1.5B on MATH-500, GPQA and AIME. Section 2 decodes QwQ
# greedily, table 3 does not say how: greedy is our reading.
PUBLISHED = {"sps": 1.49, "sps-heuristic": 1.28, "sps-svip": 1.71}


@dataclass(frozen=True)
class Policy:
    """One rule's row of the summary; means are over the cycles."""

    name: str
    row: dict[str, Any]
    levels: float  # drafted in a cycle: a chain's draft length
    published: float | None  # speedup


@dataclass(frozen=True)
class Policies:
    """The rules of one head's chains or trees at one sampling."""

    title: str
    chain: bool
    rules: tuple[Policy, ...]


def policy_tables(rows: Sequence[dict[str, Any]]) -> list[Policies]:
    """A table for each head, shape and sampling of the summary's rows that has two rules or more; chains first."""
    groups: dict[tuple[bool, str, str], list[Policy]] = {}
    for row in rows:
        tree = row["tree"]
        if row["status"] != "ok" or not tree or "stop" not in tree or not row["target_forwards"]:
            continue
        if tree["shape"] in ("chain", "dynamic"):
            place = (tree["shape"] == "chain", row["head_path"] or row["head"], sampling_text(row))
            groups.setdefault(place, []).append(_policy(row))
    tables = [
        Policies(f"{head}, {'chains' if chain else 'trees'}, T {sampling}", chain, tuple(rules))
        for (chain, head, sampling), rules in groups.items()
        if len({rule.row["tree"]["stop"]["rule"] for rule in rules}) > 1
    ]
    return sorted(tables, key=lambda table: not table.chain)


def published_method(row: dict[str, Any]) -> str | None:
    """The method of SVIP's table 3 that a row stands beside: its own, as it is in the paper, greedy; null: none."""
    as_published = row["tree"]["shape"] == "chain" and not row["tree"].get("variant") and not row["temperature"]
    return row["method"] if as_published and row["method"] in PUBLISHED else None


def _policy(row: dict[str, Any]) -> Policy:
    rule = row["tree"]["stop"]["rule"]
    published = PUBLISHED.get(published_method(row) or "")
    return Policy(NAMES.get(rule, rule), row, row["draft_forwards"] / row["target_forwards"], published)
