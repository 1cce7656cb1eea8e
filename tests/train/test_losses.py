"""The loss functions against values worked out by hand, and the streamed law against the softmax."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.train import Eagle3Train, LossName
from aerie.train import losses
from aerie.train.losses import LOSSES, TargetLaw, drafted_law
from tests import tiny

VOCAB = tiny.vocab()


def _laws(draft: list[list[float]], target: list[list[float]]) -> tuple[Tensor, Tensor]:
    """(log q, log p) through logits that are off by a constant, as every model's are."""
    return losses.log_law(torch.tensor(draft).log() + 3.0), losses.log_law(torch.tensor(target).log() - 2.0)


def jsd(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    return LOSSES["jsd"](log_q, TargetLaw.of_logits(log_p), Eagle3Train(jsd_beta=beta))


def test_smooth_l1_eagle_section_4_1() -> None:
    predicted, true = torch.tensor([[0.5, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
    # beta 1: 0.5 * 0.5^2 = 0.125 and 3 - 0.5 = 2.5; the mean over two entries
    assert losses.smooth_l1(predicted, true).tolist() == pytest.approx([(0.125 + 2.5) / 2, 0.0])


def test_soft_cross_entropy_eagle_section_4_1() -> None:
    laws = _laws([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]], [[0.5, 0.25, 0.25], [1.0 - 2e-30, 1e-30, 1e-30]])
    first = 0.5 * math.log(4) + 0.25 * math.log(4) + 0.25 * math.log(2)
    assert losses.soft_cross_entropy(laws[0], laws[1].exp()).tolist() == pytest.approx([first, math.log(2)], rel=1e-6)


def test_kl_and_reverse_kl() -> None:
    log_q, log_p = _laws([[0.25, 0.25, 0.5]], [[0.5, 0.25, 0.25]])
    # p log(p / q) = 0.5 log 2 + 0 - 0.25 log 2; the other way 0.25 log(1/2) + 0 + 0.5 log 2: the same by symmetry
    assert losses.kl(log_q, log_p).item() == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert losses.kl(log_p, log_q).item() == pytest.approx(0.25 * math.log(2), rel=1e-6)
    log_q, log_p = _laws([[0.9, 0.1]], [[0.5, 0.5]])
    assert losses.kl(log_q, log_p).item() == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5), rel=1e-6)
    assert losses.kl(log_p, log_q).item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)


def test_jensen_shannon_of_distillspec() -> None:
    log_q, log_p = _laws([[0.25, 0.75]], [[0.75, 0.25]])
    # m = 0.4 p + 0.6 q = (0.45, 0.55)
    kl_p = 0.75 * math.log(0.75 / 0.45) + 0.25 * math.log(0.25 / 0.55)
    kl_q = 0.25 * math.log(0.25 / 0.45) + 0.75 * math.log(0.75 / 0.55)
    found = jsd(log_q, log_p, 0.4).item()
    assert found == pytest.approx(0.4 * kl_p + 0.6 * kl_q, rel=1e-5)
    assert jsd(log_p, log_p, 0.3).item() == pytest.approx(0.0, abs=1e-6)
    halves = jsd(log_q, log_p, 0.5), jsd(log_p, log_q, 0.5)
    assert halves[0].item() == pytest.approx(halves[1].item(), rel=1e-6)


def test_jensen_shannon_is_bounded_where_laws_have_nothing_in_common_and_still_pulls() -> None:
    target = losses.log_law(torch.tensor([[0.0, 30.0]]))
    logits = torch.tensor([[8.0, 0.0]], requires_grad=True)
    loss = jsd(losses.log_law(logits), target, 0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-2) and loss.item() < math.log(2)
    assert logits.grad is not None and logits.grad[0, 0] > 0 > logits.grad[0, 1]


def test_acceptance_leviathan_theorem_3_5() -> None:
    laws = _laws([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], [[0.25, 0.25, 0.5], [0.2, 0.2, 0.6]])
    assert losses.acceptance(*laws).tolist() == pytest.approx([0.75, 1.0])
    assert losses.negative_log_alpha(*laws).tolist() == pytest.approx([-math.log(0.75), 0.0], abs=1e-6)


def _cut_target() -> TargetLaw:
    """p = (0.5, 0.3, 0.2) over three tokens, of which the draft vocabulary has the first two."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log() + 7.0
    return TargetLaw.of_logits(logits[:, :2], logits.logsumexp(-1))


def test_a_cut_law_is_renormalised_inside_and_keeps_its_mass_as_a_whole() -> None:
    target = _cut_target()
    assert target.inside.exp().tolist()[0] == pytest.approx([0.625, 0.375])
    assert target.whole.exp().tolist()[0] == pytest.approx([0.5, 0.3])
    assert target.at(torch.tensor([0, 0])).whole.shape == (2, 2)


def _jensen_shannon(p: list[float], q: list[float]) -> float:
    mixture = [(first + second) / 2 for first, second in zip(p, q, strict=True)]
    divergences = [sum(x * math.log(x / m) for x, m in zip(law, mixture, strict=True)) for law in (p, q)]
    return sum(divergences) / 2


def test_each_name_takes_its_form_of_a_cut_law() -> None:
    target, log_q = _cut_target(), torch.tensor([[0.8, 0.2]]).log()
    alpha = 0.5 + 0.2
    mix = math.exp(-3.0 * alpha)
    kl = 0.625 * math.log(0.625 / 0.8) + 0.375 * math.log(0.375 / 0.2)
    expected = {
        "soft_cross_entropy": -0.625 * math.log(0.8) - 0.375 * math.log(0.2),
        "kl": kl,
        "reverse_kl": 0.8 * math.log(0.8 / 0.625) + 0.2 * math.log(0.2 / 0.375),
        "jsd": _jensen_shannon([0.625, 0.375], [0.8, 0.2]),
        "total_variation": 1 - alpha,
        "negative_log_alpha": -math.log(alpha),
        "lk_hybrid": mix * kl + (1 - mix) * (1 - alpha),
    }
    assert expected.keys() == set(get_args(LossName))
    for name, value in expected.items():
        found = LOSSES[name](log_q, target, Eagle3Train())  # type: ignore[index]
        assert found.shape == (1,) and found.item() == pytest.approx(value, rel=1e-5), name


def test_lk_hybrid_mixes_by_a_constant_of_each_slot() -> None:
    target = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]).log()
    logits = torch.tensor([[0.3, 0.1, 2.0], [0.2, 0.0, 1.0]], requires_grad=True)
    LOSSES["lk_hybrid"](losses.log_law(logits), TargetLaw.of_logits(target), Eagle3Train(lk_eta=3.0)).sum().backward()
    expected = torch.zeros_like(logits)
    for slot in range(2):
        q, p = logits.detach()[slot].softmax(-1), target[slot].exp()
        lower = (q < p).float()  # alpha grows with q where q is below p
        mix = torch.exp(-3.0 * torch.minimum(p, q).sum())
        slope = q * (lower - (q * lower).sum())  # d alpha / d logits
        expected[slot] = mix * (q - p) - (1 - mix) * slope
    torch.testing.assert_close(logits.grad, expected)


def test_laws_without_common_mass_still_pull_negative_log_alpha() -> None:
    target = losses.log_law(torch.tensor([[0.0, 200.0]]))
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    loss = losses.negative_log_alpha(losses.log_law(logits), target)
    loss.sum().backward()
    assert loss.item() == pytest.approx(200.0 - math.log(2), rel=1e-5)
    assert logits.grad is not None and logits.grad.abs().max() > 0.4


def test_bf16_laws_are_made_and_compared_in_float32() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1)).bfloat16()
    law = losses.log_law(logits)
    assert losses.soft_cross_entropy(law, law.exp()).dtype == torch.float32
    assert losses.acceptance(law, law).sum().item() == pytest.approx(64, rel=1e-5)


@pytest.mark.parametrize("chunk", [7, 64, 1000])
@pytest.mark.parametrize("ids", [torch.arange(0, 320, 3), torch.tensor([0, 1, 318, 319]), torch.arange(320)])
def test_streaming_the_vocabulary_is_its_softmax_and_argmax(ids: Tensor, chunk: int) -> None:
    states, bias = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)), torch.arange(320) / 100
    target = replace(VOCAB, scale=0.7, softcap=20.0, bias=bias)
    logits = target.logits(states)
    law, choice = drafted_law(states, target, ids, chunk)
    torch.testing.assert_close(law.whole, logits.log_softmax(-1)[:, ids], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(law.inside, logits[:, ids].log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert choice.equal(logits.argmax(-1))
    equal = replace(VOCAB, lm_head=torch.zeros(320, 32))
    assert drafted_law(states, equal, ids, chunk)[1].tolist() == [0] * 9  # of equals the first, as argmax has it


def test_no_states_and_no_drafted_tokens_are_no_trouble() -> None:
    assert drafted_law(torch.zeros(0, 32), VOCAB, torch.arange(5))[0].whole.shape == (0, 5)
    law, choice = drafted_law(torch.ones(2, 32), VOCAB, torch.arange(0))
    assert law.inside.shape == (2, 0) and choice.equal(VOCAB.logits(torch.ones(2, 32)).argmax(-1))
