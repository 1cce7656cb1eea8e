"""The unroll's attention: both forms are one softmax over the shared causal keys and the slot's own later keys."""

import math

import pytest
import torch
from torch import Tensor

from aerie.model.layers import Documents, dense_attention, spans, unrolled_attention

STEPS = 3


def _made(length: int, heads: int = 4, kv: int = 2, dim: int = 8) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(length)
    sizes = [(2, heads, length, dim), *[(2, kv, length, dim)] * (2 * STEPS)]
    q, *rest = [2.0 * torch.randn(size, generator=generator) for size in sizes]
    for x in (q, *rest):
        x.requires_grad_()
    return q, rest[:STEPS], rest[STEPS:]


def _by_one_mask(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
    """All T x 3T scores under one boolean mask [block-causal | identity | identity]."""
    length, groups = q.shape[2], q.shape[1] // keys[0].shape[1]
    owner = torch.cat([torch.full((last - first,), first) for first, last in spans(documents, length)])
    causal = torch.ones(length, length, dtype=torch.bool).tril() & (owner[:, None] == owner)
    mask = torch.cat([causal, *[torch.eye(length, dtype=torch.bool)] * (len(keys) - 1)], dim=1)
    k, v = (torch.cat(list(part), dim=2).repeat_interleave(groups, dim=1) for part in (keys, values))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def _value_and_gradients(made: tuple[Tensor, list[Tensor], list[Tensor]], out: Tensor) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    q, keys, values = made
    return [out, *torch.autograd.grad((out * weights).sum(), [q, *keys, *values])]


@pytest.mark.parametrize("documents", [None, (5, 1, 20, 8)])
@pytest.mark.parametrize("heads", [2, 4])
def test_merged_and_dense_attention_are_one_masked_softmax_in_value_and_gradient(
    documents: Documents, heads: int
) -> None:
    made = _made(33, heads)
    expected = _value_and_gradients(made, _by_one_mask(*made, documents))
    merged = _value_and_gradients(made, unrolled_attention(*made, documents=documents))
    dense = _value_and_gradients(made, dense_attention(*made, documents=documents, chunk=7))
    for found in (merged, dense):
        for x, y in zip(found, expected, strict=True):
            assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def test_bf16_stays_close_to_float32() -> None:
    made = _made(33)
    half = [x.bfloat16() for x in (made[0], *made[1], *made[2])]
    found = unrolled_attention(half[0], half[1 : 1 + STEPS], half[1 + STEPS :])
    assert found.dtype == torch.bfloat16
    assert (found.float() - _by_one_mask(*made, None)).abs().max() < 0.1


def test_the_last_document_may_be_cut_by_a_slot() -> None:
    assert spans((3, 2, 4), 8) == ((0, 3), (3, 5), (5, 8)) and spans((3, 1), 3) == ((0, 3),)
