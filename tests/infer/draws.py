"""Sampled answers of a real tiny model against the target's exact law over them."""

from collections import Counter

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from infer.engine import SpeculativeDecoder
from infer.proposer import Proposer
from infer.sampling import Decoding, Sampler
from model.config import TargetConfig
from model.target import Target
from tests import tiny


def tiny_vocabulary() -> Target:
    """A target of 12 tokens that never ends."""
    model = tiny.llama(vocab_size=12, hidden_size=16, num_blocks=2, eos_token_id=None, pad_token_id=None)
    return Target(model, TargetConfig("tiny"))


def joint_law(
    target: Target, ids: Tensor, length: int, temperature: float, top_p: float
) -> dict[tuple[int, ...], float]:
    """The target's exact law over the next `length` tokens after ids [1, T]."""
    sampler = Sampler(Decoding(True, temperature, 0, top_p, 0.0, 8), torch.Generator())
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        paths = list(laws)
        tails = torch.tensor(paths, dtype=torch.long).reshape(len(paths), -1)
        with torch.inference_mode():
            logits = target.model(torch.cat([ids.expand(len(paths), -1), tails], dim=1)).logits[:, -1]
        rows = sampler.law(logits).double().tolist()
        laws = {
            (*path, token): laws[path] * chance
            for path, row in zip(paths, rows, strict=True)
            for token, chance in enumerate(row)
            if chance > 0
        }
    return laws


def draw(
    target: Target, proposer: Proposer, ids: Tensor, draws: int, length: int, temperature: float, top_p: float
) -> tuple[float, float]:
    """p of the draws under the exact law (chi-square; rare answers pooled), and accepted tokens per draw."""
    decoder, generator = SpeculativeDecoder(target, proposer), torch.Generator().manual_seed(3)
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(draws):
        out = decoder.generate(
            ids,
            max_new_tokens=length,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=top_p,
            generator=generator,
        )
        seen[tuple(out.new_ids)] += 1
        accepted += sum(out.statistics.accepted)
    return pvalue(joint_law(target, ids, length, temperature, top_p), seen), accepted / draws


def pvalue(law: dict[tuple[int, ...], float], seen: Counter[tuple[int, ...]]) -> float:
    """p of what was seen under a law, answers expected fewer than 5 times pooled; 0 when the law excludes one."""
    if not seen.keys() <= law.keys():
        return 0.0
    draws = sum(seen.values())
    likely = [path for path, chance in law.items() if chance * draws >= 5]
    observed = [seen[path] for path in likely]
    wanted = [law[path] * draws for path in likely]
    rest = draws - sum(wanted)
    if rest > 1e-6:
        observed, wanted = [*observed, draws - sum(observed)], [*wanted, rest]
    return float(chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)
