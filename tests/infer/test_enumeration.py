"""The enumerated law is the target's own, and the test of fit is Pearson's."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from aerie.configs.schema.measure import SamplingConfig
from aerie.infer.measure.lossless import answer_law, p_value
from tests.infer.draws import tiny_vocabulary

IDS = torch.tensor([[1, 5, 3]])
LAW = {(0,): 0.5, (1,): 0.3, (2,): 0.19, (3,): 0.008, (4,): 0.002}


def test_the_law_of_an_answer_is_the_product_of_its_tokens_laws() -> None:
    target = tiny_vocabulary()
    law = answer_law(target, IDS, 3, SamplingConfig(0.7))
    assert len(law) == 12**3 and math.isclose(sum(law.values()), 1.0, rel_tol=1e-6)
    answer = (4, 0, 9)
    with torch.inference_mode():
        text = torch.cat([IDS, torch.tensor([answer])], dim=1)
        laws = (target.model(text).logits[0, 2:5] / 0.7).softmax(-1)
    assert law[answer] == pytest.approx(math.prod(float(laws[n, token]) for n, token in enumerate(answer)), rel=1e-4)


def test_the_processors_leave_out_answers_and_the_rest_is_a_law() -> None:
    law = answer_law(tiny_vocabulary(), IDS, 3, SamplingConfig(0.6, top_p=0.8))
    assert 1 < len(law) < 12**3 and math.isclose(sum(law.values()), 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("draws", [200, 1000, 5000])
def test_p_is_that_of_pearsons_test_with_rare_answers_pooled(draws: int) -> None:
    chance = np.random.default_rng(draws)
    seen = chance.multinomial(draws, list(LAW.values()))
    singles = {200: 2, 1000: 3, 5000: 5}[draws]  # those of 200 and 1000 that expect 5 and more, but the last
    wanted = np.array([chance * draws for chance in LAW.values()])
    cells = [[*side[:singles], side[singles:].sum()] if singles < 5 else side for side in (seen, wanted)]
    ours = p_value(LAW, Counter({answer: int(count) for answer, count in zip(LAW, seen, strict=True)}))
    assert ours == pytest.approx(float(chisquare(*cells).pvalue), rel=1e-9)


def test_p_values_of_true_draws_are_spread_evenly_and_those_of_other_laws_are_not() -> None:
    chance = np.random.default_rng(0)
    ours, others = [], []
    for _ in range(400):
        for found, law in ((ours, list(LAW.values())), (others, [0.4, 0.4, 0.19, 0.008, 0.002])):
            seen = chance.multinomial(1000, law)
            found.append(p_value(LAW, Counter({a: int(count) for a, count in zip(LAW, seen, strict=True) if count})))
    assert 0.4 < np.mean(ours) < 0.6 and 0.05 < np.mean(np.array(ours) < 0.1) < 0.15
    assert max(others) < 1e-3


def test_an_answer_that_the_law_excludes_is_certain_proof() -> None:
    assert p_value(LAW, Counter({(0,): 500, (1,): 300, (2,): 190, (9,): 1})) == 0.0
    assert p_value({(0,): 1.0}, Counter({(0,): 10})) == 1.0
