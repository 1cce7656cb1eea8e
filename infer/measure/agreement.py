"""Compares greedy answers, and says whether rounding explains their first difference."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aerie.infer.decode.sampling import Sampler, resolve
from aerie.infer.measure.bench_files import Record
from aerie.model.target import Target

ROUNDING = 4.0  # in units of eps times the largest logit


@dataclass(frozen=True)
class Difference:
    """The first token at which two answers differ, and the gap between the two tokens' logits.

    A plain forward of the target gives the logits.
    """

    prompt: int
    position: int
    ours: int  # -1: our answer ended here
    theirs: int  # -1: their answer ended here
    gap: float  # between the two logits; infinite if one answer ended
    rounding: float  # the largest gap that rounding can make in the target's dtype

    @property
    def margin(self) -> float:
        """gap / rounding. Rounding explains the difference if the margin is at most 1."""
        return self.gap / self.rounding if self.rounding else float("inf")


def first_difference(
    target: Target, ids: Tensor, prompt: int, ours: Sequence[int], theirs: Sequence[int]
) -> Difference:
    """The first difference between two unequal answers to ids [1, T]. prompt: its number."""
    pairs = enumerate(itertools.zip_longest(ours, theirs, fillvalue=-1))
    position, tokens = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    our_token, their_token = tokens
    if -1 in tokens:
        return Difference(prompt, position, our_token, their_token, float("inf"), 0.0)
    text = torch.tensor([[*ids[0].tolist(), *ours[:position]]], device=ids.device)
    sampler = Sampler(resolve(target.generation_config), torch.Generator(), ids[0])
    with torch.inference_mode():
        raw = target.model(text).logits[:, -1].float()  # [1, V]
        logits = sampler.after(text, raw)[0]  # [V]
    gap = float((logits[our_token] - logits[their_token]).abs())
    rounding = ROUNDING * torch.finfo(target.dtype).eps * float(raw.abs().max())
    return Difference(prompt, position, our_token, their_token, gap, rounding)


def with_margin(target: Target, record: Record, answer: Sequence[int]) -> Record:
    """The record with its margin to another answer. In float32 it stays without a margin.

    A record that differs from two answers keeps the larger margin. The margin is infinite (null in
    JSON) if one answer ended earlier.
    """
    if target.dtype == torch.float32:  # here rounding excuses no difference
        return record
    ids = torch.tensor([record.prompt_ids], device=target.device)
    margin = first_difference(target, ids, 0, record.output_ids, answer).margin
    return replace(record, margin=max(margin, record.margin or 0.0))
