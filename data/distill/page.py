"""summary.html: one page without scripts or requests; every word that came from a model or a file is escaped."""

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.distill.config import DistillConfig
from data.distill.merge import Summary
from data.distill.quality import FLAWS

TEMPLATE = "summary.html.jinja"
BINS = 24
FREQUENT = 24  # tokens named


def render(summary: Summary, config: DistillConfig, title: str, tokenizer: Any) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = lambda value: f"{value:,}"
    environment.filters["percent"] = lambda share: f"{share:.1%}"
    frequent = [(tokenizer.decode([token]), count) for token, count in summary.counts.most_common(FREQUENT)]
    return environment.get_template(TEMPLATE).render(
        title=title,
        summary=summary,
        lengths=summary.quantiles(),
        vocabulary=summary.coverage(),
        flaws=[(name, summary.flaws[name], getattr(config.gate, name)) for name in FLAWS],
        bins=histogram(summary.lengths, config.sampling.max_tokens),
        frequent=frequent,
        sampling=config.sampling,
    )


def histogram(lengths: list[int], most: int) -> list[tuple[int, int, float]]:
    """(first length, how many, height in [0, 1]) of up to BINS equal bins from 0 to the longest answer."""
    top = max([*lengths, min(most, 8)])
    width = math.ceil((top + 1) / BINS)
    counts = [0] * math.ceil((top + 1) / width)
    for length in lengths:
        counts[length // width] += 1
    highest = max(counts) or 1
    return [(place * width, count, count / highest) for place, count in enumerate(counts)]
