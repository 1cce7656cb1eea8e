"""Judges the papers' claims by the rules of claims.yaml, with 95 % intervals over prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from aerie.configs.read import read_yaml
from aerie.infer.measure.bootstrap import Estimate
from aerie.infer.papers.evidence import Entry, Evidence, estimates_by_head
from aerie.infer.papers.published import published_range

REGISTER = read_yaml(Path(__file__).with_name("claims.yaml"))[0]
MOST_PROMPTS = 100_000  # if a claim needs more prompts, their number is not told
FEWEST_PROMPTS = 6  # for a verdict: by chance, five prompts agree once in 16, more than 5 %


@dataclass(frozen=True)
class ClaimLine:
    """A claim for one head at one temperature, for details.json."""

    number: int
    id: str
    paper: str
    place: str  # in the paper
    claim: str
    published: str
    verdict: str = "open"  # or "holds", "does not hold", "out of reach"
    why: str = ""
    head: str | None = None
    temperature: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    prompts: int | None = None
    ours: str | None = None  # the value and its interval in words


def all_claims() -> list[dict[str, Any]]:
    """All claims with their papers, in the register's order."""
    claims = []
    for paper, entries in REGISTER["claims"].items():
        claims += [{"paper": paper, **entry} for entry in entries]
    return claims


def judge_claims(evidence: Evidence) -> list[ClaimLine]:
    """A line for each claim, head and temperature."""
    lines = []
    for number, claim in enumerate(all_claims(), start=1):
        for temperature in claim.get("temperatures", [0]):
            published = claim.get("published", "")
            if not isinstance(published, str):
                published = published_range(published, temperature, claim.get("as") == "ratio")
            line = ClaimLine(
                number, claim["id"], claim["paper"], claim["place"], claim["claim"], published
            )
            if "out_of_reach" in claim:
                lines.append(replace(line, verdict="out of reach", why=claim["out_of_reach"]))
                continue
            line = replace(line, temperature=temperature)
            estimates = estimates_by_head(evidence, claim, temperature)
            for head, measured in estimates.items():
                verdict, why = judge_estimate(claim, measured)
                figures: dict[str, Any] = {"head": head, "verdict": verdict, "why": why}
                figures |= measured._asdict()
                if measured.prompts < 2:  # the interval is infinite, which JSON cannot hold
                    figures |= {"low": None, "high": None}
                lines.append(replace(line, ours=estimate_words(claim, measured), **figures))
            if not estimates:
                lines.append(replace(line, why=f"Not measured: {claim['needs']}."))
    return lines


def estimate_words(claim: Entry, measured: Estimate) -> str:
    """The figure in words, such as '+0.48 [+0.20 to +0.70] unit'."""
    is_difference = "against" in claim and "as" not in claim
    form = claim.get("form", "{:+.2f}" if is_difference else "{:.2f}")
    if measured.prompts < 2:
        interval = "one prompt"
    elif 0 < measured.high - measured.low < np.inf:
        interval = f"{form.format(measured.low)} to {form.format(measured.high)}"
    else:  # all resamples agree
        interval = f"the same on all {measured.prompts} prompts"
    return f"{form.format(measured.value)} [{interval}] {claim.get('unit', '')}"


def judge_estimate(claim: Entry, measured: Estimate) -> tuple[str, str]:
    """The verdict by the rules of claims.yaml, and the reason."""
    low = claim.get("at_least", -np.inf)
    high = claim.get("at_most", np.inf)
    effect = claim.get("effect", 0.0)
    is_share = claim.get("statistic") == "share"
    if is_share and (low == 1 or high == 0):  # a claim about every answer or law
        if not low <= measured.value <= high:
            return "does not hold", "One counterexample is enough."
        if measured.prompts > 1:
            return "holds", f"No counterexample on {measured.prompts} prompts."
    if measured.prompts < FEWEST_PROMPTS:
        return "open", f"Too few prompts: a verdict needs at least {FEWEST_PROMPTS}."
    limits = [(low, f"at least {low:g}"), (high, f"at most {high:g}")]
    within = " and ".join(words for limit, words in limits if np.isfinite(limit))
    is_inside = low <= measured.low and measured.high <= high
    touches = measured.low == low or measured.high == high
    if is_inside and not (effect and touches):
        return "holds", f"The whole interval is {within}."
    if measured.high < low or measured.low > high:
        return "does not hold", f"No part of the interval is {within}."
    if measured.high < low + effect or measured.low > high - effect:
        why = f"The interval ends less than {effect:g} beyond the limit, which is too little."
        return "does not hold", why
    needed = prompts_needed(claim, measured)
    how_many = f"{needed:,}" if needed else f"more than {MOST_PROMPTS:,}"
    why = f"only part of the interval is {within}; {how_many} prompts would settle it."
    return "open", f"Too few prompts: {why}"


def prompts_needed(claim: Entry, measured: Estimate) -> int | None:
    """How many prompts would settle the claim; None: more than MOST_PROMPTS.

    They make half the interval half the effect or, without one, the value's distance to the limit.
    """
    limits = (claim.get("at_least", -np.inf), claim.get("at_most", np.inf))
    distance = min(abs(measured.value - limit) for limit in limits)
    margin = np.float64(claim.get("effect", 0.0) / 2 or distance)
    with np.errstate(all="ignore"):
        if claim.get("statistic") == "share" and measured.value in (0, 1):
            needed = np.log(0.025) / np.log1p(-margin)  # the exact interval ends at 0.025^(1/n)
        else:
            needed = measured.prompts * ((measured.high - measured.low) / 2 / margin) ** 2
    return max(FEWEST_PROMPTS, ceil(needed)) if needed < MOST_PROMPTS else None


def claims_table(lines: Sequence[ClaimLine]) -> str:
    """A table in Markdown with one line for each claim."""
    text = "| claim | published | here [95 %] | prompts | verdict | why |\n"
    text += "|---|---|---|---|---|---|\n"
    for line in lines:
        cells = [
            f"{line.number}. {line.claim} ({line.paper}, {line.place})",
            line.published,
            f"{line.ours} ({line.head}, T {line.temperature:g})" if line.ours else "",
            str(line.prompts or ""),
            f"**{line.verdict}**",
            line.why,
        ]
        text += f"| {' | '.join(cell.replace('|', '/') or '–' for cell in cells)} |\n"
    return text
