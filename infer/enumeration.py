"""The target's exact law over short answers, by enumeration, and how well drawn answers fit it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from infer.config import SamplingConfig
from infer.engine import SpeculativeDecoder
from infer.sampling import Sampler, resolve
from model.target import Target

Answer = tuple[int, ...]
EXPECTED = 5.0  # draws that every cell of the chi-square test must expect


def answer_law(target: Target, ids: Tensor, length: int, sampling: SamplingConfig) -> dict[Answer, float]:
    """The chance of every answer of `length` tokens to the prompt ids [1, T]; impossible ones are left out.

    One plain forward over all prefixes of a length, without a cache: for a vocabulary of a few tokens.
    """
    decoding = resolve(target.generation_config, do_sample=True, **asdict(sampling))
    sampler = Sampler(decoding, torch.Generator())
    law: dict[Answer, float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        tails = torch.tensor(prefixes, dtype=torch.long, device=ids.device).reshape(len(prefixes), -1)
        with torch.inference_mode():
            logits = target.model(torch.cat([ids.expand(len(prefixes), -1), tails], dim=1)).logits[:, -1]
        rows = sampler.law(logits).double().tolist()
        law = {
            (*prefix, token): law[prefix] * chance
            for prefix, row in zip(prefixes, rows, strict=True)
            for token, chance in enumerate(row)
            if chance > 0
        }
    return law


def draw_answers(
    decoder: SpeculativeDecoder,
    ids: Tensor,
    draws: int,
    length: int,
    sampling: SamplingConfig,
    seed: int,
    tick: Callable[[], object] = lambda: None,
) -> tuple[Counter[Answer], float]:
    """How often each answer of `length` tokens came out of so many draws, and drafted tokens accepted per draw."""
    generator = torch.Generator(ids.device).manual_seed(seed)
    settings: dict[str, Any] = asdict(sampling)
    seen: Counter[Answer] = Counter()
    accepted = 0
    for _ in range(draws):
        out = decoder.generate(ids, max_new_tokens=length, do_sample=True, generator=generator, **settings)
        seen[tuple(out.new_ids)] += 1
        accepted += sum(out.statistics.accepted)
        tick()
    return seen, accepted / draws


def p_value(law: dict[Answer, float], seen: Counter[Answer]) -> float:
    """The chance that draws from the law fit it as badly as those seen: Pearson's chi-square test.

    Answers expected fewer than 5 times are one cell together. 0 where something came out that the law excludes.
    """
    if not seen.keys() <= law.keys():
        return 0.0
    draws = sum(seen.values())
    cells = sorted(((chance * draws, seen[answer]) for answer, chance in law.items()), reverse=True)
    single = sum(expected >= EXPECTED for expected, _ in cells)
    if 0 < sum(expected for expected, _ in cells[single:]) < EXPECTED:
        single -= 1  # too little for a cell of its own
    rest = cells[max(single, 0) :]
    pooled = [(sum(expected for expected, _ in rest), sum(count for _, count in rest))] if rest else []
    cells = [*cells[: max(single, 0)], *pooled]
    if len(cells) < 2:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.double) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
