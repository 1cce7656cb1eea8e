"""With a draft LM and prompt lookup we write what transformers' assisted generation writes, in the same forwards.

What differs is what comes below a drafted end token: transformers drafts no further there, and this chain does, which
costs draft forwards and changes no token and no forward of the target.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import candidate_generator

from aerie.configs.schema.decode import Method, PromptLookupConfig, published_tree
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.drafters import DraftLMDrafter, PromptLookup
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import drafting
from aerie.model.target import Target
from tests import tiny

SETTINGS: dict[Method, dict[str, Any]] = {
    "sps": {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"},
    "sps-heuristic": {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic"},
    "sps-confidence": {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant"},
}
SETTINGS["sps-confidence"]["assistant_confidence_threshold"] = 0.4
SETTINGS["pld"] = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}


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


def assisted(target: Target, draft: Target, ids: Tensor, method: Method, limits: dict[str, Any]) -> Any:
    """The text of transformers' assisted generation, and how many tokens each forward of the target was given.

    A draft's settings are read from the assistant's generation_config alone; they are set anew for each prompt, for
    its heuristic writes the length that it ends with back.
    """
    given: dict[str, Any] = {**SETTINGS[method], "pad_token_id": 0}
    if method != "pld":
        given = {"assistant_model": draft.model}
        for name, value in {"assistant_confidence_threshold": 0.0, **SETTINGS[method]}.items():
            setattr(draft.model.generation_config, name, value)
    widths: list[int] = []
    hook = target.model.register_forward_pre_hook(
        lambda _, __, keywords: widths.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **given, **limits)
    hook.remove()
    return out[0].tolist(), widths


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("end", [False, True])
def test_answers_and_forwards_are_those_of_transformers(
    method: Method, end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given the prompt and our first token, which the prefill wrote, and may not adapt its threshold."""
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: False)
    target, draft = models()
    tree, lookup = published_tree(method), PromptLookup(PromptLookupConfig(ngram=3, length=4))
    decoder = SpeculativeDecoder(target, drafting(DraftLMDrafter(draft, target), tree) if tree else lookup)
    generator, lengths, refused = torch.Generator().manual_seed(7), set(), 0
    for number in range(12):
        ids = torch.randint(0, 48, (1, 3 + 2 * number), generator=generator)
        limits: dict[str, Any] = {"max_new_tokens": 18 + number % 5}
        drafted: list[list[int]] = []
        if end:
            limits["eos_token_id"] = decoder.generate(ids, do_sample=False, **limits).new_ids[8 + number % 7]
        ours = decoder.generate(
            ids,
            do_sample=False,
            on_cycle=lambda cycle, to=drafted: to.append(cycle.tree.tokens[1:].tolist()),
            **limits,
        )
        if ours.statistics.new_tokens == 1:  # the prefill wrote the end token
            continue
        known = ours.sequences[:, : ids.shape[1] + 1]
        limits["max_new_tokens"] -= 1
        theirs, widths = assisted(target, draft, known, method, limits)
        assert ours.sequences[0].tolist() == theirs
        assert ours.statistics.target_forwards == len(widths)
        verified = [widths[0] - known.shape[1], *(width - 1 for width in widths[1:])]
        # transformers leaves a guess of prompt lookup no room for the bonus token
        assert method == "pld" or verified == [until(tokens, limits.get("eos_token_id")) for tokens in drafted]
        lengths |= set(ours.statistics.accepted)
        refused += 0 in ours.statistics.accepted
    assert len(lengths) > 2 and refused


def until(tokens: list[int], end: int | None) -> int:
    """How many tokens there are up to the first end token, itself included."""
    return tokens.index(end) + 1 if end in tokens else len(tokens)
