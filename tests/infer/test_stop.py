"""A rule that looks at a drawn token may end the draft behind it, but not take it back."""

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from aerie.configs.schema.decode import (
    ConfidenceConfig,
    EntropyConfig,
    MarginalGainConfig,
    ProbabilitySumConfig,
    StopConfig,
    VoteConfig,
)
from aerie.infer.decode.stop import Stop, make_stop
from aerie.infer.decode.tree import Level

VOCAB, DRAWS = 5, 100_000
RULES: dict[str, StopConfig] = {
    "confidence": ConfidenceConfig(threshold=0.25),
    "probability_sum": ProbabilitySumConfig(checks=(1, 2), threshold=0.2),
    "vote": VoteConfig(signals=("probability",), probability_threshold=0.2),
    "marginal_gain": MarginalGainConfig(threshold=0.25),
}
# h between the entropies of the second token's laws: the rule stops below some first tokens, not below others
ENTROPY = EntropyConfig(c=1.0, h=1.1)


class Chains:
    """Chains of up to two tokens over laws p and q of each prefix, verified by rule R1, all draws at once."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.p1, self.q1 = self._laws(1)[0], self._laws(1)[0]
        self.p2, self.q2 = self._laws(VOCAB), self._laws(VOCAB)

    def _laws(self, rows: int) -> Tensor:
        return (1.2 * torch.randn(rows, VOCAB, generator=self.generator)).softmax(-1)

    def _draw(self, laws: Tensor) -> Tensor:
        return torch.multinomial(laws, 1, generator=self.generator)[:, 0]

    def stops(self, rule: Stop) -> tuple[Tensor, Tensor]:
        """Whether the rule ends the chain at its first token [V], and at its second [V, V]."""
        first, second = torch.zeros(VOCAB).bool(), torch.zeros(VOCAB, VOCAB).bool()
        row = torch.zeros(1, dtype=torch.long)
        for x in range(VOCAB):
            for y in range(VOCAB):
                rule.begin()
                a, b = self.q1[x : x + 1].log(), self.q2[x, y : y + 1].log()
                first[x] = rule.ends(Level(1, self.q1.log()[None], row, row, row, a, a, row, a))
                second[x, y] = rule.ends(Level(2, self.q2[x].log()[None], row, row, row, b, a + b, row, a + b))
        return first, second

    def texts(self, rule: Stop, drop: bool) -> Tensor:
        """The first two tokens of the output, as x * V + y [DRAWS]; drop: the last token of an ended chain is cut."""
        first, second = self.stops(rule)
        x = self._draw(self.q1.expand(DRAWS, -1))
        y = self._draw(self.q2[x])
        length = torch.where(first[x], 1, 2) if not drop else torch.where(first[x], 0, torch.where(second[x, y], 1, 2))
        one, accepted = self._verify(x, self.p1.expand(DRAWS, -1), self.q1.expand(DRAWS, -1), length >= 1)
        two, _ = self._verify(y, self.p2[one], self.q2[x], accepted & (length >= 2))
        return one * VOCAB + two

    def _verify(self, token: Tensor, p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """R1: the token with chance min(1, p/q), else one from (p - q)+; one from p where nothing was drafted."""
        at = token[:, None]
        accepted = drafted & (torch.rand(DRAWS, generator=self.generator) < (p.gather(1, at) / q.gather(1, at))[:, 0])
        rest = torch.where(drafted[:, None], (p - q).clamp(min=0.0) + 1e-12, p)
        return torch.where(accepted, token, self._draw(rest)), accepted

    def p_value(self, texts: Tensor) -> float:
        law = (self.p1[:, None] * self.p2).double().flatten()
        seen = torch.bincount(texts, minlength=VOCAB**2)
        return float(chisquare(seen.numpy(), (law / law.sum() * DRAWS).numpy()).pvalue)


def made(stop: StopConfig) -> Stop:
    return make_stop(stop, levels=2, nodes=3)


@pytest.mark.parametrize("name", RULES)
def test_with_the_doubted_token_kept_the_output_has_the_targets_law(name: str) -> None:
    chains = Chains(seed=4)
    first, second = chains.stops(made(RULES[name]))
    assert 0 < int(first.sum()) < VOCAB and int(second.sum()) > 0  # the rule does look at the tokens
    assert chains.p_value(chains.texts(made(RULES[name]), drop=False)) > 1e-3


@pytest.mark.parametrize("name", RULES)
def test_a_token_dropped_after_a_look_at_it_biases_the_output(name: str) -> None:
    chains = Chains(seed=4)
    assert chains.p_value(chains.texts(made(RULES[name]), drop=True)) < 1e-6


def test_the_entropy_rule_sees_laws_only_and_may_leave_the_uncertain_token_out() -> None:
    chains = Chains(seed=4)
    first, second = chains.stops(made(ENTROPY))
    assert (
        0 < int(second[:, 0].sum()) < VOCAB and bool((second == second[:, :1]).all()) and len(set(first.tolist())) == 1
    )
    for drop in (False, True):
        assert chains.p_value(chains.texts(made(ENTROPY), drop)) > 1e-3
