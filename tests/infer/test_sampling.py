"""Settings are resolved as transformers would, and a law is processed as transformers does."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from aerie.configs.errors import UserError
from aerie.infer.decode.sampling import Sampler, resolve
from tests import tiny


def test_what_is_not_asked_comes_from_the_generation_config() -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=33, eos_token_id=[3, 4]
    )
    decoding = resolve(config)
    assert (decoding.do_sample, decoding.temperature, decoding.top_k, decoding.top_p) == (True, 0.7, 20, 0.9)
    assert decoding.max_new_tokens == 33 and decoding.eos_token_ids == {3, 4}
    asked = resolve(config, top_k=0, temperature=1.0, eos_token_id=7)
    assert (asked.temperature, asked.top_k, asked.top_p, asked.eos_token_ids) == (1.0, 0, 0.9, {7})


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 0.0, "do_sample": True}, {"do_sample": False}])
def test_temperature_zero_is_argmax(asked: dict[str, Any]) -> None:
    decoding = resolve(GenerationConfig(do_sample=True, temperature=0.7), **asked)
    assert not decoding.do_sample and decoding.temperature == 0.0
    assert resolve(GenerationConfig(), temperature=0.5).do_sample  # an explicit temperature samples
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert Sampler(decoding, torch.Generator()).choose(logits).tolist() == [1]


def test_the_law_is_the_one_that_generate_samples_from() -> None:
    """Temperature, then top-k, then top-p, then min-p: compared with the scores that generate returns."""
    model = tiny.llama(eos_token_id=None)
    ids = torch.tensor([[7, 8, 9]])
    settings: dict[str, Any] = {"temperature": 0.6, "top_k": 12, "top_p": 0.8, "min_p": 0.05}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=1,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    decoding = resolve(model.generation_config, do_sample=True, **settings)
    law = Sampler(decoding, torch.Generator()).law(out.logits[0])
    torch.testing.assert_close(law, out.scores[0].softmax(-1))
    assert (law > 0).sum() < 12  # top-p cut more than top-k did


@pytest.mark.parametrize("settings", [{"no_repeat_ngram_size": 3}, {"num_beams": 2}, {"typical_p": 0.9}])
def test_settings_that_look_back_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        resolve(GenerationConfig(**settings))
