"""Settings are resolved, and laws processed, as in transformers."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig

from aerie.infer.decode.sampling import Sampler, distinct_draws, draw, resolve
from tests import tiny
from tests.infer.laws import node_paths, tree_of


def test_defaults() -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=33, eos_token_id=[3, 4]
    )
    decoding = resolve(config)
    assert (decoding.do_sample, decoding.temperature, decoding.top_k, decoding.top_p) == (
        True,
        0.7,
        20,
        0.9,
    )
    assert decoding.max_new_tokens == 33 and decoding.eos_token_ids == {3, 4}
    asked = resolve(config, top_k=0, temperature=1.0, eos_token_id=7)
    assert (asked.temperature, asked.top_k, asked.top_p, asked.eos_token_ids) == (1.0, 0, 0.9, {7})


@pytest.mark.parametrize(
    "asked", [{"temperature": 0.0}, {"temperature": 0.0, "do_sample": True}, {"do_sample": False}]
)
def test_greedy(asked: dict[str, Any]) -> None:
    decoding = resolve(GenerationConfig(do_sample=True, temperature=0.7), **asked)
    assert not decoding.do_sample and decoding.temperature == 0.0
    assert resolve(GenerationConfig(), temperature=0.5).do_sample  # an explicit temperature samples
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert Sampler(decoding, torch.Generator()).choose(logits).tolist() == [1]


CUTS = {"temperature": 0.6, "top_k": 12, "top_p": 0.8, "min_p": 0.05}


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_p": 0.95}, CUTS], ids=str)
def test_law(settings: dict[str, Any]) -> None:
    """The law is that of generate's scores: temperature, then top-k, then top-p, then min-p.

    A generation_config without top_k leaves all of 320 tokens, as generate does with top_k 0;
    no other default of generate changes the law.
    """
    model = tiny.llama(eos_token_id=None, initializer_range=0.02)
    model.generation_config = GenerationConfig(do_sample=True, **settings)
    ids = torch.tensor([[7, 8, 9]])

    def generate(**told: Any) -> Any:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, pad_token_id=0,
            output_scores=True, output_logits=True, return_dict_in_generate=True, **told,
        )  # fmt: skip

    def ours(**told: Any) -> torch.Tensor:
        decoding = resolve(model.generation_config, **told)
        return Sampler(decoding, torch.Generator()).law(generate().logits[0])

    most = settings.get("top_k", 0)
    torch.testing.assert_close(ours(), generate(top_k=most).scores[0].softmax(-1))
    torch.testing.assert_close(ours(top_k=50), generate(top_k=50).scores[0].softmax(-1))
    assert (ours() > 0).sum() > 50 >= (ours(top_k=50) > 0).sum() or most


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 9},
        {"bad_words_ids": [[3], [4, 5], [1, 2, 0]]},
        {
            "sequence_bias": [[[3], 2.0], [[4, 5], -3.0]],
            "repetition_penalty": 0.8,
        },  # their order matters
        {"min_length": 8, "eos_token_id": [1, 2]},
        {
            "min_new_tokens": 2,
            "suppress_tokens": [0, 4],
            "begin_suppress_tokens": [3],
            "eos_token_id": 2,
        },
    ],
)
@pytest.mark.parametrize("length", [2, 7])
def test_laws_of_text(settings: dict[str, Any], length: int) -> None:
    """The same as transformers' own processors, given only that text."""
    model, dice = tiny.llama(vocab_size=6), torch.Generator().manual_seed(length)
    config = GenerationConfig(**{"do_sample": False, "eos_token_id": None, **settings})
    model._prepare_special_tokens(config)
    theirs = model._get_logits_processor(config, input_ids_seq_length=length)
    prompt, answer = torch.randint(6, (length,), generator=dice), torch.tensor([3, 4])
    ours = Sampler(resolve(config), dice, prompt)
    ours.with_text(torch.zeros(1, 6))
    ours.follow(answer[:1])
    ours.follow(answer[1:])
    tree = tree_of([4, 5, 3, 1, 5, 3, 2, 4, 0], [0, 0, 0, 1, 1, 2, 3, 5, 6])
    logits = torch.randn(9, 6, generator=dice)
    texts = [
        torch.cat([prompt, answer, torch.tensor(path, dtype=torch.long)])[None]
        for path in node_paths(tree)
    ]
    wanted = [theirs(text, row[None]) for text, row in zip(texts, logits, strict=True)]
    torch.testing.assert_close(ours.with_text(logits, tree), torch.cat(wanted), rtol=0, atol=0)
    first, alone = Sampler(resolve(config), dice, prompt), logits[:1]
    torch.testing.assert_close(first.with_text(alone), theirs(prompt[None], alone), rtol=0, atol=0)


def test_refused_by_transformers() -> None:
    for setting in (
        {"repetition_penalty": -1.0},
        {"suppress_tokens": 5},
        {"sequence_bias": [[[99], 1.0]]},
    ):
        config = GenerationConfig()
        vars(config).update(setting)
        sampler = Sampler(resolve(config), torch.Generator(), torch.tensor([1]))
        tiny.refused(
            f"transformers refuses {next(iter(setting))}=", sampler.with_text, torch.zeros(1, 6)
        )


NOT_APPLIED = [
    {"num_beams": 2},
    {"typical_p": 0.9},
    {"top_h": 0.5},
    {"new_law": 1},
    {"dola_layers": "high"},
    {"forced_eos_token_id": 0},
    {"token_healing": True},
]
SAMPLED = {"do_sample": True}
OUT_OF_RANGE = [
    {"temperature": 1e-40, **SAMPLED},
    {"min_p": 1.5, **SAMPLED},
    {"top_k": -1, **SAMPLED},
    {"temperature": float("nan"), **SAMPLED},
    {"top_p": "0.9", **SAMPLED},
    {"max_new_tokens": 0},
]


@pytest.mark.parametrize("settings", NOT_APPLIED + OUT_OF_RANGE)
def test_refused(
    settings: dict[str, Any],
) -> None:
    config = GenerationConfig()
    vars(config).update(settings)  # a file's values; transformers does not check all
    tiny.refused(rf"^(generation_config sets )?{next(iter(settings))}", resolve, config)


def test_without_effect() -> None:
    settings: dict[str, Any] = {
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "repetition_penalty": 1.0,
        "max_length": 20,
    }
    assert resolve(GenerationConfig(use_cache=False, suppress_tokens=[], **settings)) == resolve(
        GenerationConfig()
    )


def test_draws() -> None:
    laws = torch.tensor([[0.0, 5.0, 0.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1e-30, 0.0]])
    tokens = draw(laws.repeat(20_000, 1), torch.Generator().manual_seed(5)).view(-1, 2)
    counts = tokens[:, 0].bincount(minlength=6)
    assert (
        counts[[0, 2, 5]].sum() == 0
        and chisquare(counts[[1, 3, 4]], 20_000 * laws[0, [1, 3, 4]] / 10).pvalue > 1e-3
    )
    assert bool((tokens[:, 1] == 4).all())


def test_distinct_draws() -> None:
    """Even if a third draw is often missing: those that exist have the law of a third draw."""
    law = torch.tensor([0.56, 0.4, 0.03, 0.01])
    columns, missing = distinct_draws(law.expand(20_000, -1), 3, torch.Generator().manual_seed(3))
    counts = (~missing).sum(-1)
    assert bool((counts[:5] >= 2).all()) and 0.05 < float((counts < 3).float().mean()) < 0.5
    seen = Counter(map(tuple, columns[counts == 3].tolist()))
    found = Counter(map(tuple, columns[counts >= 2, :2].tolist()))
    for first, second in itertools.permutations(range(4), 2):
        chance = float(law[first] * law[second] / (1 - law[first]))
        assert abs(found[first, second] - 20_000 * chance) < 5 * math.sqrt(20_000 * chance) + 1
    known = seen[0, 1, 2] + seen[0, 1, 3]
    assert abs(seen[0, 1, 2] - 0.75 * known) < 5 * math.sqrt(known)
    certain = distinct_draws(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), 3, torch.Generator())
    assert certain[0][0, 0] == 1 and certain[1].tolist() == [[False, True, True]]
