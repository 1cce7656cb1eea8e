"""Speculative sampling with a draft LM writes what transformers' assisted generation writes, in as many forwards."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import candidate_generator

from infer.config import Method
from infer.decoders import drafting
from infer.drafters.draft_lm import DraftLMDrafter
from infer.engine import SpeculativeDecoder
from infer.methods import METHODS
from model.config import TargetConfig
from model.target import Target
from tests import tiny

SETTINGS: dict[Method, dict[str, Any]] = {
    "sps": {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"},
    "sps-heuristic": {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic_transient"},
    "sps-confidence": {
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    },
}


def models(noise: float = 0.02) -> tuple[Target, Target]:
    """A target, and a draft LM that often agrees with it. Without a pad token: transformers hides it from the draft."""
    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 16, "num_blocks": 2}
    sizes |= {"eos_token_id": None, "pad_token_id": None}
    target, draft = (Target(tiny.llama(**sizes), TargetConfig("tiny")) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    for side in (target, draft):
        side.model.lm_head.weight.data.mul_(5.0)  # laws that are now and then sure of a token
    for parameter in draft.model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return target, draft


def assisted(target: Target, draft: Target, ids: Tensor, settings: dict[str, Any], **limits: Any) -> tuple[Any, int]:
    """The text of transformers' assisted generation, and how often it ran the target.

    Its settings are read from the assistant's generation_config alone; they are set anew for each prompt.
    """
    for name, value in {"assistant_confidence_threshold": 0.0, **settings}.items():
        setattr(draft.model.generation_config, name, value)
    calls: list[int] = []
    hook = target.model.register_forward_hook(lambda *_: calls.append(1))
    mask = torch.ones_like(ids)
    try:
        out = target.model.generate(ids, attention_mask=mask, do_sample=False, assistant_model=draft.model, **limits)
    finally:
        hook.remove()
    return out[0].tolist(), len(calls)


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("end", [False, True])
def test_answers_and_forwards_are_those_of_transformers(
    method: Method, end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given the prompt and our first token, which the prefill wrote, and may not adapt its threshold."""
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: False)
    target, draft = models()
    tree = METHODS[method].tree
    assert tree is not None
    decoder = SpeculativeDecoder(target, drafting(DraftLMDrafter(draft, target), tree))
    generator, lengths, refused = torch.Generator().manual_seed(7), set(), 0
    for number in range(10):
        ids = torch.randint(0, 48, (1, 3 + 2 * number), generator=generator)
        limits: dict[str, Any] = {"max_new_tokens": 18 + number % 5}
        ours = decoder.generate(ids, do_sample=False, **limits)
        if end:
            limits["eos_token_id"] = ours.new_ids[8 + number % 7]
            ours = decoder.generate(ids, do_sample=False, **limits)
        if ours.statistics.new_tokens == 1:  # the prefill wrote the end token
            continue
        known = ours.sequences[:, : ids.shape[1] + 1]
        limits["max_new_tokens"] -= 1
        theirs, forwards = assisted(target, draft, known, SETTINGS[method], **limits)
        assert ours.sequences[0].tolist() == theirs
        assert ours.statistics.target_forwards == forwards
        lengths |= set(ours.statistics.accepted)
        refused += 0 in ours.statistics.accepted
    assert len(lengths) > 3 and refused
