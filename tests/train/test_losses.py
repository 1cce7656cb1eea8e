"""The loss functions against values computed by hand, and the chunked law against the softmax."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.heads import Eagle3Train, LossName
from aerie.train.losses import LOSSES, TargetLaw, drafted_law, smooth_l1
from tests import tiny

VOCAB = tiny.vocab()


def kl(p: list[float], q: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


LOGITS = torch.tensor([[0.5, 0.3, 0.2]]).log() + 7.0  # logits are known up to a constant
WHOLE = (TargetLaw.of_logits(LOGITS), [0.5, 0.3, 0.2], [0.6, 0.1, 0.3], 0.5 + 0.1 + 0.2)
CUT_LAW = TargetLaw.of_logits(LOGITS[:, :2], LOGITS.logsumexp(-1))
CUT = (CUT_LAW, [0.625, 0.375], [0.8, 0.2], 0.5 + 0.2)


@pytest.mark.parametrize(("whole", "p", "q", "alpha"), [WHOLE, CUT])
def test_losses_by_hand(whole: TargetLaw, p: list[float], q: list[float], alpha: float) -> None:
    """p = (0.5, 0.3, 0.2) over three tokens; a cut draft vocabulary has the first two."""
    mixture = [0.4 * x + 0.6 * y for x, y in zip(p, q, strict=True)]
    mix = math.exp(-2.0 * alpha)
    expected = {
        "soft_cross_entropy": -sum(x * math.log(y) for x, y in zip(p, q, strict=True)),
        "kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": 0.4 * kl(p, mixture) + 0.6 * kl(q, mixture),
        "total_variation": 1 - alpha,
        "negative_log_alpha": -math.log(alpha),
        "lk_hybrid": mix * kl(p, q) + (1 - mix) * (1 - alpha),
    }
    assert expected.keys() == set(get_args(LossName))
    log_q = (torch.tensor([q, q]).log() + 3.0).log_softmax(-1)
    law = replace(whole, slots=torch.tensor([0, 0]))
    settings = Eagle3Train(jsd_beta=0.4, lk_eta=2.0)
    found = {name: LOSSES[name](log_q, law, settings).tolist() for name in expected}  # type: ignore[index]
    assert found == {
        name: pytest.approx([value, value], rel=1e-5) for name, value in expected.items()
    }
    # beta 1: 0.5 * 0.5^2 = 0.125 and 3 - 0.5 = 2.5; the mean over two entries
    near = smooth_l1(torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2)).item()
    assert near == pytest.approx((0.125 + 2.5) / 2)


def test_lk_hybrid() -> None:
    """Lk hybrid mixes by a constant of each slot."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    logits, plain = (
        torch.tensor([[0.3, 0.1, 2.0], [0.2, 0.0, 1.0]], requires_grad=True) for _ in range(2)
    )
    LOSSES["lk_hybrid"](
        logits.log_softmax(-1), TargetLaw.of_logits(p.log()), Eagle3Train(lk_eta=3.0)
    ).sum().backward()
    q = plain.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    mix = torch.exp(-3.0 * alpha).detach()
    (mix * (p * (p / q).log()).sum(-1) + (1 - mix) * (1 - alpha)).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad)


@pytest.mark.parametrize(
    ("name", "value"), [("negative_log_alpha", 200.0 - math.log(2)), ("jsd", math.log(2))]
)
def test_no_common_mass(name: LossName, value: float) -> None:
    """Laws without common mass still pull."""
    logits = torch.tensor(
        [[200.0, 0.0] if name == "negative_log_alpha" else [8.0, 0.0]], requires_grad=True
    )
    target = TargetLaw.of_logits(torch.tensor([[0.0, 200.0]]))
    loss = LOSSES[name](logits.log_softmax(-1), target, Eagle3Train())
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, rel=1e-2)
    assert logits.grad is not None and logits.grad[0, 0] > 0 > logits.grad[0, 1]


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize(
    "ids", [torch.arange(0, 320, 3), torch.tensor([0, 1, 318, 319]), torch.arange(0)]
)
def test_drafted_law(ids: Tensor, chunk: int) -> None:
    """Streaming the vocabulary is its softmax and argmax."""
    states, bias = (
        torch.randn(9, 32, generator=torch.Generator().manual_seed(0)),
        torch.arange(320) / 100,
    )
    target = replace(VOCAB, scale=0.7, softcap=20.0, bias=bias)
    logits = target.logits(states)
    law, choice = drafted_law(states, target, ids, chunk)
    torch.testing.assert_close(law.whole, logits.log_softmax(-1)[:, ids], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(law.inside, logits[:, ids].log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert choice.equal(logits.argmax(-1)) and drafted_law(states[:0], target, ids)[
        0
    ].whole.shape == (0, len(ids))
    equal = replace(VOCAB, lm_head=torch.zeros(320, 32))
    assert (
        drafted_law(states, equal, ids, chunk)[1].tolist() == [0] * 9
    )  # the first of equals, as argmax
