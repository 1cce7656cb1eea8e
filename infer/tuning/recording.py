"""One recording answers for every tree: the widest draft at each place of a text, none of which is verified.

What an EAGLE head or a draft LM drafts at a place depends on the text before it alone (true features replace its own
guesses at every commit), not on the tree that led there. So a text that the target writes token by token, with a full
draft noted at each place, holds what any narrower tree would have drafted and had accepted (infer/tuning/replay.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.engine import SpeculativeDecoder
from infer.proposer import Drafting
from infer.sampling import Sampler
from infer.shape import Drafter
from infer.stop import Constant, Stop
from infer.tree import Tree, root_only

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Recording:
    """The drafts at the P places of some answers: L levels, at most K rows (expanded nodes) a level, K children a row.

    Row r of level l + 1 is below the node with flat index frontier[:, l, r] (row * K + child) of level l; level 0 has
    one row, below the root. Children stand by falling confidence.
    """

    tokens: Integers  # [P, L, K, K] the target's ids; -1 where there is no node
    survival: Floats  # [P, L, K, K] log survival; -inf where there is no node
    frontier: Integers  # [P, L - 1, K]
    text: Integers  # [P, L] what the target wrote after each place; -1 beyond the answer's end
    answer: Integers  # [P] which answer the place belongs to; its places stand in order
    left: Integers  # [P] tokens that the answer still had after the place's root
    allowed: Integers  # [P] tokens that max_new_tokens still allowed after the place's root

    @property
    def levels(self) -> int:
        return self.tokens.shape[1]

    @property
    def k(self) -> int:
        return self.tokens.shape[2]


class Recorder:
    """A shape that drafts `levels` levels of k rows and hands out the root alone."""

    def __init__(self, levels: int, k: int) -> None:
        self.levels, self.k = levels, k
        self.stop: Stop = Constant(levels)
        self.tokens: list[Tensor] = []  # of each place [L, K, K]
        self.survival: list[Tensor] = []
        self.frontier: list[Tensor] = []  # [L - 1, K]

    @property
    def max_nodes(self) -> int:
        return 1

    @property
    def draft_slots(self) -> int:
        return self.levels * self.k

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        del max_levels, sampler
        k = self.k
        tokens = torch.full((self.levels, k, k), -1, dtype=torch.long)
        survival = torch.full((self.levels, k, k), -torch.inf)
        frontier = torch.zeros(self.levels - 1, k, dtype=torch.long)
        log_q, above = drafter.start(), torch.zeros(1, device=root.device)
        for level in range(self.levels):
            chances, columns = log_q.topk(min(k, log_q.shape[-1]), dim=-1)  # [rows, k]
            rows, width = chances.shape
            grown, named = above[:, None] + chances, drafter.target_ids(columns)
            tokens[level, :rows, :width], survival[level, :rows, :width] = named.cpu(), grown.cpu()
            if level == self.levels - 1:
                break
            best = grown.flatten().topk(min(k, rows * width)).indices
            frontier[level, : best.shape[0]] = (best // width * k + best % width).cpu()
            log_q = drafter.step(named.flatten()[best], best // width)
            above = grown.flatten()[best]
        self.tokens.append(tokens)
        self.survival.append(survival)
        self.frontier.append(frontier)
        return root_only(root)


def record(
    decoder: SpeculativeDecoder, prompts: Sequence[Tensor], levels: int, k: int, max_new_tokens: int, seed: int = 0
) -> Recording:
    """The drafts of a decoder's drafter at every place of the greedy answers to prompts of token ids [1, T]."""
    assert isinstance(decoder.proposer, Drafting), "only a drafter in a shape can be recorded"
    parts: list[Recording] = []
    for number, ids in enumerate(prompts):
        recorder = Recorder(levels, k)
        watching = SpeculativeDecoder(decoder.target, Drafting(decoder.proposer.drafter, recorder))
        answer = watching.generate(ids, max_new_tokens=max_new_tokens, do_sample=False).new_ids
        if recorder.tokens:
            parts.append(_part(recorder, answer, number, max_new_tokens))
    return joined(parts)


def joined(parts: Sequence[Recording]) -> Recording:
    """Recordings of the same levels and k as one."""
    names = ("tokens", "survival", "frontier", "text", "answer", "left", "allowed")
    return Recording(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _part(recorder: Recorder, answer: list[int], number: int, max_new_tokens: int) -> Recording:
    places, levels = len(recorder.tokens), recorder.levels  # the last token, or the last but one, has no draft
    padded = np.array([*answer, *([-1] * levels)], dtype=np.int64)
    place = np.arange(places)
    return Recording(
        tokens=torch.stack(recorder.tokens).numpy(),
        survival=torch.stack(recorder.survival).numpy(),
        frontier=torch.stack(recorder.frontier).numpy(),
        text=padded[place[:, None] + 1 + np.arange(levels)],
        answer=np.full(places, number),
        left=len(answer) - 1 - place,
        allowed=max_new_tokens - 1 - place,
    )
