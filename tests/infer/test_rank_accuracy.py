"""Ranks are counted where they were asked, and a drafter that knows the answer has accuracy one at rank 0."""

import pytest
import torch

from aerie.configs.schema.decode import StaticConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposer import Cycle, Drafting
from aerie.infer.decode.shape import make_shape
from aerie.infer.measure.rebuilt_tree import RankCollector, best_choices
from tests.infer.test_engine import Prophet, greedy, make_target, prompts

TREE = StaticConfig(choices="eagle1", children="best")


def collected(answer_of: str, temperature: float = 0.0) -> tuple[RankCollector, list[Cycle]]:
    """The ranks of a prophet ("right"), or of one whose first guess is always wrong ("second")."""
    target, ids = make_target(), prompts(3)[-1]
    answer = greedy(target, ids, 30)[0][ids.shape[1] :]
    prophet = Prophet(answer, 320)
    if answer_of == "second":
        law = prophet._law

        def second(rows: int) -> torch.Tensor:
            right = law(rows)
            right[:, int(right[0].argmax()) ^ 1] = 1.0  # another token stands before the right one
            return right

        prophet._law = second  # type: ignore[method-assign]
    collector, cycles = RankCollector(5, 4), []

    def watch(cycle: Cycle) -> None:
        if len(cycle.tree) > 1:
            collector(cycle)
            cycles.append(cycle)

    SpeculativeDecoder(target, Drafting(prophet, make_shape(TREE))).generate(
        ids, temperature=temperature, top_k=0, max_new_tokens=24, on_cycle=watch
    )
    return collector, cycles


def test_a_prophets_first_rank_is_always_right() -> None:
    accuracy = collected("right")[0].accuracy()
    assert [row[0] for row in accuracy] == [1.0] * 5
    assert all(share == 0.0 for row in accuracy for share in row[1:])
    assert best_choices(accuracy, 25) == ((0,), (0, 0), (0, 0, 0), (0,) * 4, (0,) * 5)


def test_a_second_guess_that_is_right_is_rank_one() -> None:
    accuracy = collected("second")[0].accuracy()
    assert [row[1] for row in accuracy[:2]] == [1.0, 1.0] and accuracy[0][0] == 0.0
    assert best_choices(accuracy, 2) == ((1,), (1, 1))


def test_where_sampled_a_rank_counts_with_the_targets_probability() -> None:
    collector, cycles = collected("right", temperature=1.0)
    first = [float(cycle.sampler.law(cycle.step.logits)[0, cycle.tree.tokens[1]]) for cycle in cycles]
    assert collector.accuracy()[0][0] == pytest.approx(sum(first) / len(first))
