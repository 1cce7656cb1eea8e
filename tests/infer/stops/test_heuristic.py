"""The schedule of transformers, with SVIP's cap."""

from types import SimpleNamespace

import pytest
import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from aerie.configs.schema.decode import HeuristicConfig
from aerie.infer.decode.stop import Heuristic, make_stop
from tests.infer.stops.levels import level


def length(rule: Heuristic, most: int = 60) -> int:
    rule.begin()
    return next(depth for depth in range(1, most) if rule.ends(level(depth, [0.5])))


def test_all_accepted_makes_it_two_longer_and_anything_else_one_shorter() -> None:
    rule = Heuristic(HeuristicConfig(), levels=40)
    seen = []
    for accepted in (5, 7, 3, 0, 7, 2):
        gamma = length(rule)
        seen.append(gamma)
        rule.learn(accepted, gamma)
    assert seen == [5, 7, 9, 8, 7, 9] and length(rule) == 8


def test_the_length_stays_between_one_and_the_cap() -> None:
    rule = Heuristic(HeuristicConfig(start=2), levels=6)
    for _ in range(5):
        rule.learn(0, rule.gamma)
    assert length(rule) == rule.gamma == 1  # and a full acceptance makes it 3 at once
    for _ in range(9):
        rule.learn(rule.gamma, rule.gamma)
    assert rule.gamma == 6
    rule.learn(0, 6)
    assert rule.gamma == 5  # the cap leaves nothing to work off
    assert Heuristic(HeuristicConfig(start=9), levels=6).gamma == 6


@pytest.mark.parametrize("across", [False, True])
def test_a_new_prompt_forgets_the_length_unless_told(across: bool) -> None:
    rule = make_stop(HeuristicConfig(across_prompts=across), 40, 41)
    assert isinstance(rule, Heuristic)
    rule.learn(5, 5)
    rule.reset()
    assert rule.gamma == (7 if across else 5)


def test_the_lengths_are_those_of_transformers() -> None:
    """Its own update, on the state that it reads; without its threshold, which needs scikit-learn."""
    settings = SimpleNamespace(num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.0)
    theirs = SimpleNamespace(num_assistant_tokens=5, assistant_generation_config=settings)
    ours = Heuristic(HeuristicConfig(), levels=1000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        gamma = ours.gamma
        accepted = min(gamma, int(torch.randint(2 * gamma + 1, (1,), generator=generator)))
        ours.learn(accepted, gamma)
        AssistedCandidateGenerator.update_candidate_strategy(theirs, None, torch.zeros(1, gamma + 1, 2), accepted)
        assert ours.gamma == theirs.num_assistant_tokens
