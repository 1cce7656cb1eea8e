"""Synthetic laws of three tokens in a row: p for a target and q for a draft."""

import torch
from torch import Tensor

from aerie.infer.decode.sampling import Decoding, Sampler

torch.set_num_threads(1)  # tests run beside other work: one thread each
VOCAB, LENGTH = 5, 3
SETTINGS = [(1.0, 1.0), (0.6, 0.8)]  # temperature, top-p


def sampler(temperature: float, top_p: float, seed: int = 11) -> Sampler:
    return Sampler(Decoding(temperature > 0, temperature, 0, top_p, 0.0, 8), torch.Generator().manual_seed(seed))


class World:
    """The laws after any prefix: entry n of `target` and `draft` is [V, .., V] with n + 1 axes, processors applied.

    Target and draft differ by about as much as they agree.
    """

    def __init__(self, temperature: float, top_p: float, seed: int = 5) -> None:
        dice, chosen = torch.Generator().manual_seed(seed), sampler(temperature, top_p)
        self.target: list[Tensor] = []
        self.draft: list[Tensor] = []
        for place in range(LENGTH):
            logits = 0.8 * torch.randn(VOCAB**place, VOCAB, generator=dice)
            guess = logits + 0.8 * torch.randn(logits.shape, generator=dice)
            self.target.append(chosen.law(logits).view((VOCAB,) * (place + 1)))
            self.draft.append(chosen.law(guess).view((VOCAB,) * (place + 1)))
