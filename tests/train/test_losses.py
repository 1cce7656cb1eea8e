"""The loss functions against values worked out by hand."""

import math

import pytest
import torch

from train import losses


def _laws(draft: list[list[float]], target: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(log q, p) through logits that are off by a constant, as every model's are."""
    return losses.log_law(torch.tensor(draft).log() + 3.0), losses.law(torch.tensor(target).log() - 2.0)


def test_smooth_l1_eagle_section_4_1() -> None:
    predicted, true = torch.tensor([[0.5, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
    # beta 1: 0.5 * 0.5^2 = 0.125 and 3 - 0.5 = 2.5; the mean over two entries; the second slot adds nothing
    assert losses.smooth_l1(predicted, true).item() == pytest.approx((0.125 + 2.5) / 2)


def test_soft_cross_entropy_eagle_section_4_1() -> None:
    laws = _laws([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]], [[0.5, 0.25, 0.25], [1.0 - 2e-30, 1e-30, 1e-30]])
    first = 0.5 * math.log(4) + 0.25 * math.log(4) + 0.25 * math.log(2)
    assert losses.soft_cross_entropy(*laws).item() == pytest.approx(first + math.log(2), rel=1e-6)


def test_soft_cross_entropy_is_least_where_the_laws_agree() -> None:
    target = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    same = losses.soft_cross_entropy(losses.log_law(target), losses.law(target))
    other = losses.soft_cross_entropy(losses.log_law(target + 0.1 * torch.arange(7)), losses.law(target))
    assert same < other


def test_acceptance_leviathan_theorem_3_5() -> None:
    laws = _laws([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], [[0.25, 0.25, 0.5], [0.2, 0.2, 0.6]])
    assert losses.acceptance(*laws).item() == pytest.approx(0.75 + 1.0)


def test_greedy_agreement_counts_equal_choices() -> None:
    laws = _laws([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], [[0.4, 0.3, 0.3], [0.5, 0.2, 0.3]])
    assert losses.greedy_agreement(*laws).item() == 1


def test_cross_entropy_is_a_sum_over_slots() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    assert losses.cross_entropy(logits, torch.tensor([2, 1])).item() == pytest.approx(math.log(4) - math.log(0.8))


def test_bf16_laws_are_made_and_summed_in_float32() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1)).bfloat16()
    laws = losses.log_law(logits), losses.law(logits)
    assert losses.soft_cross_entropy(*laws).dtype == torch.float32
    assert losses.acceptance(*laws).item() == pytest.approx(64, rel=1e-5)
