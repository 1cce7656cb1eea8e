"""Synthetic laws of three tokens in a row, p for a target and q for a draft, and the test that an output has law p."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from aerie.infer.decode.sampling import Decoding, Sampler, draw

torch.set_num_threads(1)  # tests run beside other work: one thread each
VOCAB = 5
LENGTH = 3
DRAWS = 100_000
SETTINGS = [(1.0, 1.0), (0.6, 0.8)]  # temperature, top-p


def sampler(temperature: float, top_p: float, seed: int = 11) -> Sampler:
    return Sampler(Decoding(temperature > 0, temperature, 0, top_p, 0.0, 8), torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class World:
    """The laws after any prefix: entry n of `target` and `draft` is [V, .., V] with n + 1 axes, processors applied."""

    target: list[Tensor]
    draft: list[Tensor]
    raw: list[Tensor]  # the target's laws without the processors
    generator: torch.Generator

    def p(self, prefix: Tensor) -> Tensor:
        """p [B, V] after prefixes [B, n]."""
        return self.target[prefix.shape[1]][tuple(prefix.T)].expand(len(prefix), -1)

    def q(self, prefix: Tensor) -> Tensor:
        return self.draft[prefix.shape[1]][tuple(prefix.T)].expand(len(prefix), -1)

    def unprocessed(self, prefix: Tensor) -> Tensor:
        return self.raw[prefix.shape[1]][tuple(prefix.T)].expand(len(prefix), -1)

    def completed(self, tokens: Tensor, known: Tensor) -> Tensor:
        """Tokens [B, 3] whose first `known` [B] are given, the others written by the target alone."""
        tokens = tokens.clone()
        for place in range(LENGTH):
            own = draw(self.p(tokens[:, :place]), self.generator)
            tokens[:, place] = torch.where(known > place, tokens[:, place], own)
        return tokens


def world(temperature: float, top_p: float, seed: int = 5) -> World:
    """Laws in which target and draft differ by about as much as they agree."""
    dice = torch.Generator().manual_seed(seed)
    chosen, plain = sampler(temperature, top_p), sampler(1.0, 1.0)
    target, draft, raw = [], [], []
    for place in range(LENGTH):
        logits = 0.8 * torch.randn(VOCAB**place, VOCAB, generator=dice)
        guess = logits + 0.8 * torch.randn(logits.shape, generator=dice)
        shape = (VOCAB,) * (place + 1)
        target.append(chosen.law(logits).view(shape))
        draft.append(chosen.law(guess).view(shape))
        raw.append(plain.law(logits).view(shape))
    return World(target, draft, raw, chosen.generator)


def p_value(laws: World, tokens: Tensor) -> float:
    """Chi-square of tokens [B, 3] against the target's exact joint law; 0 when something impossible came out."""
    p = [law.double() for law in laws.target]
    joint = (p[0][:, None, None] * p[1][:, :, None] * p[2]).flatten().numpy()
    index = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    seen = torch.bincount(index, minlength=VOCAB**LENGTH).numpy()
    if seen[joint == 0].any():
        return 0.0
    likely = joint * len(tokens) >= 5
    observed = np.append(seen[likely], seen[~likely].sum())
    wanted = np.append(joint[likely], joint[~likely].sum()) * len(tokens)
    if wanted[-1] < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
