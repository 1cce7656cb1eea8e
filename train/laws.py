"""The target's law at given states, over a draft vocabulary, without ever holding the full vocabulary's logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.target import TargetEnds
from train.losses import TargetLaw

VOCABULARY_CHUNK = 16384  # columns of logits that are held at once


@dataclass(frozen=True)
class DraftedLaw:
    """The target's law at S states."""

    law: TargetLaw  # log p [S, Vd], inside the draft vocabulary and whole
    choice: Tensor  # [S], the likeliest token of the full vocabulary


@torch.no_grad()
def drafted_law(states: Tensor, ends: TargetEnds, ids: Tensor, chunk: int = VOCABULARY_CHUNK) -> DraftedLaw:
    """The law of last_hidden states [S, D] at the draft vocabulary's ascending target ids [Vd].

    The log-sum-exp and the argmax of all V columns are gathered from `chunk` columns at a time, in float32.
    """
    drafted = states.new_empty(states.shape[0], len(ids), dtype=torch.float32)  # [S, Vd]
    normaliser = states.new_full(states.shape[:1], float("-inf"), dtype=torch.float32)  # [S]
    best, choice = normaliser.clone(), torch.zeros_like(normaliser, dtype=torch.long)
    total = ends.lm_head.shape[0]
    firsts = list(range(0, total, chunk))
    borders = torch.searchsorted(ids, torch.tensor([*firsts, total], device=ids.device)).tolist()
    with torch.autocast(states.device.type, enabled=False):
        for number, first in enumerate(firsts):
            logits = ends.logits(states, slice(first, first + chunk)).float()  # [S, chunk]
            normaliser = torch.logaddexp(normaliser, logits.logsumexp(-1))
            highest, place = logits.max(-1)
            choice = torch.where(highest > best, place + first, choice)
            best = torch.maximum(highest, best)
            inside = slice(borders[number], borders[number + 1])
            drafted[:, inside] = logits[:, ids[inside] - first]
    return DraftedLaw(TargetLaw.of_logits(drafted, normaliser), choice)
