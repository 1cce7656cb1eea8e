"""Measures what drafting and verifying cost on this machine, and prices cycles with it."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from torch import Generator, Tensor

from aerie.configs.schema.decode import DynamicConfig
from aerie.configs.schema.measure import SamplingConfig
from aerie.data.progress import start_progress
from aerie.infer.decode.engine import SpeculativeDecoder, Statistics
from aerie.infer.decode.proposers import tree_proposer
from aerie.infer.decode.roles import Drafter
from aerie.infer.measure.bench import CYCLE_PHASES
from aerie.infer.measure.replay import CycleCounts
from aerie.model.target import Target

# levels, k, nodes. A shallow and a deep tree of each k give the cost of the first level and the
# cost of each further level.
PRICED_TREES = (
    (2, 1, 2),
    (8, 1, 4),
    (2, 2, 6),
    (8, 2, 8),
    (2, 4, 12),
    (8, 4, 16),
    (2, 8, 24),
    (8, 8, 32),
    (2, 10, 48),
    (8, 10, 60),
)
PRICED_PROMPTS = 2
PRICE_REPETITIONS = 3
TIMED_TOKENS = 128  # the most new tokens of a timed answer
WARM_UP = 12  # new tokens


class LevelCost(NamedTuple):
    """Milliseconds."""

    first: float  # of the first level
    further: float  # of each further level


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a cycle; costs of other k and nodes are interpolated."""

    draft: dict[int, LevelCost]  # by k
    verify: dict[int, float]  # by nodes: the target's forward over the nodes, and verification
    rest: float  # of a cycle with a draft, beside drafting and verifying (mostly the commit)
    plain: float  # of a whole cycle without a draft

    def price(self, counts: CycleCounts, k: int) -> float:
        """Milliseconds of these cycles, which drafted trees of this k."""
        widths = sorted(self.draft)
        first = np.interp(k, widths, [self.draft[width].first for width in widths])
        further = np.interp(k, widths, [self.draft[width].further for width in widths])
        sizes = sorted(self.verify)
        by_size = [self.verify[size] for size in sizes]
        verify, root_alone = np.interp([counts.nodes, 1], sizes, by_size)
        further_levels = max(counts.draft_levels - counts.draft_trees, 0)
        ms = counts.draft_trees * (first + verify) + further_levels * further
        ms += (counts.target_forwards - counts.draft_trees) * root_alone
        return float(ms + counts.target_forwards * self.rest)


def measure_costs(
    target: Target, drafter: Drafter, prompts: Sequence[Tensor], max_new_tokens: int
) -> Costs:
    """The costs of a drafter's trees on the first prompts [1, T], as medians over answers."""
    trees = [
        DynamicConfig(levels=min(levels, drafter.max_levels), k=k, nodes=nodes)
        for levels, k, nodes in PRICED_TREES
    ]
    decoders = [SpeculativeDecoder(target)]
    decoders += [SpeculativeDecoder(target, tree_proposer(drafter, tree)) for tree in trees]
    plain, *drafted = time_in_turns(
        decoders, prompts[:PRICED_PROMPTS], PRICE_REPETITIONS, "costs", max_new_tokens
    )
    draft = {}
    for number in range(0, len(trees), 2):
        draft[trees[number].k] = _level_cost(drafted[number], drafted[number + 1])
    verify = np.array([cycle_ms(answers, ["verify"]) for answers in (plain, *drafted)])
    # More nodes never cost less: take the middle between the rising curves below and above.
    below = np.minimum.accumulate(verify[::-1])[::-1]
    verify = (np.maximum.accumulate(verify) + below) / 2
    sizes = [1, *(tree.nodes for tree in trees)]
    return Costs(
        draft=draft,
        verify=dict(zip(sizes, verify.tolist(), strict=True)),
        rest=cycle_ms(list(chain.from_iterable(drafted)), ["commit", "other"]),
        plain=cycle_ms(plain),
    )


def _level_cost(shallow: Sequence[Statistics], deep: Sequence[Statistics]) -> LevelCost:
    """Fits a line to the drafting times of two trees of one k over their mean levels."""
    levels = []
    times = []
    for answers in (shallow, deep):
        levels.append(statistics.mean(a.draft_levels / a.target_forwards for a in answers))
        times.append(cycle_ms(answers, ["draft"]))
    slope = max(float(np.polyfit(levels, times, 1)[0]), 0.0)
    first_levels = np.array(times) - slope * (np.array(levels) - 1)
    return LevelCost(float(first_levels.mean()), slope)


def time_in_turns(
    decoders: Sequence[SpeculativeDecoder],
    prompts: Sequence[Tensor],
    repetitions: int,
    label: str,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> list[list[Statistics]]:
    """The statistics of each decoder's answers, up to TIMED_TOKENS long, to prompts [1, T].

    The decoders take turns, so other work on the machine slows all alike. All answers get the same
    limit, because the last trees of an answer are small and cost less.
    """
    settings: dict[str, Any] = {
        "max_new_tokens": min(max_new_tokens, TIMED_TOKENS),
        **asdict(SamplingConfig(temperature)),
        "generator": Generator(decoders[0].target.device).manual_seed(0),
        "timed": True,
    }
    for decoder in decoders:
        decoder.generate(prompts[0], **{**settings, "max_new_tokens": WARM_UP})
    answers: list[list[Statistics]] = [[] for _ in decoders]
    with start_progress(repetitions * len(prompts), "turns", label) as progress:
        for repetition, prompt in product(range(repetitions), prompts):
            for turn in range(len(decoders)):
                number = (repetition + turn) % len(decoders)  # each repetition begins with another
                answers[number].append(decoders[number].generate(prompt, **settings).statistics)
            progress.update()
    return answers


def cycle_ms(answers: Sequence[Statistics], phases: Sequence[str] = CYCLE_PHASES) -> float:
    """Milliseconds that these phases take in a cycle: the median over answers of their means."""
    means = []
    for answer in answers:
        ms = sum(answer.ms[name] for name in phases)
        means.append(ms / max(answer.target_forwards, 1))
    return statistics.median(means)
