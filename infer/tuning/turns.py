"""Timed answers of several decoders in turn, freed from the machine's own pace."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from data.progress import bar
from infer.engine import SpeculativeDecoder, Statistics

TOKENS = 48  # new tokens of one timed answer


def in_turns(
    decoders: Sequence[SpeculativeDecoder], prompts: Sequence[Tensor], repetitions: int, name: str
) -> list[list[Statistics]]:
    """Greedy answers of each decoder to the prompts [1, T], so many times; the first decoder is vanilla.

    Vanilla answers in every turn, and what the others take counts in its cycles of that turn: a machine that other work
    slows down for a while slows all of a turn. The times given back are scaled to vanilla's median turn.
    """
    for decoder in decoders:
        decoder.generate(prompts[0], max_new_tokens=12, do_sample=False)
    turns: list[list[Statistics]] = []
    with bar(repetitions * len(prompts), "turns", name) as progress:
        for turn in range(repetitions):
            for prompt in prompts:
                order = [(turn + offset) % len(decoders) for offset in range(len(decoders))]
                answers = {
                    place: decoders[place]
                    .generate(prompt, max_new_tokens=TOKENS, do_sample=False, timed=True)
                    .statistics
                    for place in order
                }
                turns.append([answers[place] for place in range(len(decoders))])
                progress.update()
    return [list(answers) for answers in zip(*paced(turns), strict=True)]


def paced(turns: Sequence[Sequence[Statistics]]) -> list[list[Statistics]]:
    """Turns of answers, vanilla's first, with times as if vanilla had taken the same in each: its median."""
    usual = statistics.median(cycle_ms(turn[0]) for turn in turns)
    return [[_scaled(one, usual / cycle_ms(turn[0])) for one in turn] for turn in turns]


def cycle_ms(one: Statistics) -> float:
    """Milliseconds of a mean cycle, the prefill apart."""
    return (one.ms["wall"] - one.ms["prefill"]) / max(one.target_forwards, 1)


def _scaled(one: Statistics, factor: float) -> Statistics:
    return replace(one, ms={phase: value * factor for phase, value in one.ms.items()})
