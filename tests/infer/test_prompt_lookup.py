"""Prompt lookup finds what transformers finds, costs as many forwards, and writes what the target writes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from aerie.configs.schema.decode import PromptLookupConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.lookup import PromptLookup, continuation
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.model.target import Target
from tests import tiny


def make_target() -> Target:
    """Few tokens, so that it repeats itself."""
    model = tiny.llama(vocab_size=24, hidden_size=16, num_blocks=2, eos_token_id=None)
    return Target(model, TargetConfig(path="tiny"))


def texts(count: int, alphabet: int, seed: int = 7) -> list[Tensor]:
    """Random texts over few tokens, so that n-grams come back."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 5 + alphabet, (1, 2 + 2 * n), generator=generator) for n in range(count)]


def forwards_of_generate(target: Target, ids: Tensor, **settings: Any) -> tuple[list[int], int]:
    """The answer of transformers' generate, and how often it ran the model."""
    calls: list[int] = []
    hook = target.model.register_forward_hook(lambda *_: calls.append(1))
    try:
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    finally:
        hook.remove()
    return out[0].tolist(), len(calls)


@pytest.mark.parametrize(("ngram", "length", "end"), [(2, 10, False), (3, 4, True)])
def test_answers_and_forwards_are_those_of_transformers(ngram: int, length: int, end: bool) -> None:
    """It is given the prompt and our first token, which the prefill wrote; an end token may fall anywhere."""
    target, accepted, plain = make_target(), 0, 0
    decoder = SpeculativeDecoder(target, PromptLookup(PromptLookupConfig(ngram=ngram, length=length)))
    for number, ids in enumerate(texts(20, 16)):
        new = 16 + number % 5
        ending: dict[str, Any] = {}
        ours = decoder.generate(ids, do_sample=False, max_new_tokens=new)
        if end:
            ending = {"eos_token_id": ours.new_ids[8 + number % 7]}
            ours = decoder.generate(ids, do_sample=False, max_new_tokens=new, **ending)
        if ours.statistics.new_tokens == 1:  # the prefill wrote the end token
            continue
        settings = {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": ngram, "pad_token_id": 0, **ending}
        theirs, forwards = forwards_of_generate(
            target, ours.sequences[:, : ids.shape[1] + 1], max_new_tokens=new - 1, **settings
        )
        assert ours.sequences[0].tolist() == theirs
        assert ours.statistics.target_forwards == forwards
        accepted += sum(ours.statistics.accepted)
        plain += sum(tokens == 1 for tokens in ours.statistics.cycle_tokens)
    assert accepted > 8 and plain > 20


def test_matches_are_those_of_transformers_on_random_texts() -> None:
    chance, ends = np.random.default_rng(0), frozenset({0, 1})
    lengths = set()
    for _ in range(400):
        alphabet, size, length = chance.integers(2, 12), int(chance.integers(1, 5)), int(chance.integers(1, 7))
        text = chance.integers(0, alphabet, chance.integers(1, 40))
        ids = torch.tensor(text)[None]
        theirs = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor(sorted(ends)),
            num_output_tokens=length,
            max_matching_ngram_size=size,
            max_length=1000,
        ).get_candidates(ids)[0][0, len(text) :]
        ours = continuation(text, PromptLookupConfig(ngram=size, length=length), ends)
        assert ours == theirs.tolist()
        lengths.add(len(ours))
    assert lengths == set(range(7))


def test_first_and_last_match_and_the_shortest_ngram() -> None:
    text = np.array([1, 2, 7, 1, 2, 8, 2, 9, 1, 2])
    assert continuation(text, PromptLookupConfig(length=1)) == [7]
    assert continuation(text, PromptLookupConfig(length=1, match="last")) == [8]
    assert continuation(text, PromptLookupConfig(length=1, match="last", ngram=1)) == [9]
    assert continuation(np.array([3, 2, 7, 1, 2]), PromptLookupConfig(min_ngram=2)) == []
