"""The streamed target law against the full vocabulary's softmax."""

from dataclasses import replace

import pytest
import torch

from aerie.train.losses import drafted_law
from tests import tiny

ENDS = tiny.ends()


@pytest.mark.parametrize("chunk", [7, 64, 320, 1000])
@pytest.mark.parametrize("ids", [torch.arange(0, 320, 3), torch.tensor([0, 1, 318, 319]), torch.arange(320)])
def test_streaming_the_vocabulary_is_its_softmax_and_argmax(ids: torch.Tensor, chunk: int) -> None:
    states = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    ends = replace(ENDS, scale=0.7, softcap=20.0, bias=torch.randn(320, generator=torch.Generator().manual_seed(1)))
    logits = ends.logits(states)
    found = drafted_law(states, ends, ids, chunk)
    torch.testing.assert_close(found.law.whole, logits.log_softmax(-1)[:, ids], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.law.inside, logits[:, ids].log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert found.choice.equal(logits.argmax(-1))


def test_equal_logits_choose_the_first_token_as_argmax_does() -> None:
    ends = replace(ENDS, lm_head=torch.zeros(320, 32))
    assert drafted_law(torch.ones(2, 32), ends, torch.arange(5), chunk=9).choice.tolist() == [0, 0]


def test_no_states_and_no_drafted_tokens_are_no_trouble() -> None:
    assert drafted_law(torch.zeros(0, 32), ENDS, torch.arange(5)).law.whole.shape == (0, 5)
    found = drafted_law(torch.ones(2, 32), ENDS, torch.arange(0))
    assert found.law.inside.shape == (2, 0) and found.choice.equal(ENDS.logits(torch.ones(2, 32)).argmax(-1))
