"""What drafting and verifying cost on this machine, and what cycles cost at these prices."""

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

# levels, k, nodes: a shallow and a deep tree of each k, which give the cost of the first level and
# that of each further one
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
TIMED_TOKENS = 128  # new tokens of one timed answer, at most
WARM_UP = 12  # new tokens


class LevelCost(NamedTuple):
    first: float
    further: float  # each


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one cycle's parts; k and nodes in between are interpolated."""

    draft: dict[int, LevelCost]  # by k
    verify: dict[int, float]  # by nodes: a target forward over them with the choice among them
    rest: float  # what a drafting cycle costs beside them (committing)
    plain: float  # a whole cycle without drafting

    def price(self, counts: CycleCounts, k: int) -> float:
        """Milliseconds of these cycles of a tree of this k."""
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
    """What a drafter's trees cost on the first prompts [1, T]: medians over answers."""
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
    # more nodes never cost less: the middle between the rising curves below and above the values
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
    """A line through the times of two trees of one k, over their mean levels."""
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
    """Each decoder's answers to prompts [1, T], up to TIMED_TOKENS long.

    The decoders take turns, so whatever else the machine does slows all alike. All answers are
    equally long, because an answer's last trees are short, and cost less.
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
                number = (repetition + turn) % len(decoders)  # another decoder begins each time
                answers[number].append(decoders[number].generate(prompt, **settings).statistics)
            progress.update()
    return answers


def cycle_ms(answers: Sequence[Statistics], phases: Sequence[str] = CYCLE_PHASES) -> float:
    """Milliseconds of these phases of a mean decoding cycle: the median over answers."""
    means = []
    for answer in answers:
        ms = sum(answer.ms[name] for name in phases)
        means.append(ms / max(answer.target_forwards, 1))
    return statistics.median(means)
