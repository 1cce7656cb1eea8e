"""The oracle length of one cycle has the law that the target's own choices give it."""

import pytest
import torch

from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.proposer import Cycle
from aerie.infer.decode.tree import Proposal, Tree, ancestors
from aerie.infer.decode.verify import Verdict
from aerie.infer.measure.oracle import oracle_length
from tests.infer.calibration.test_acceptance import P, Q, rows, sampler

TRIALS = 1500


def chain(tokens: list[int], proposal: Proposal | None = None) -> Tree:
    count = len(tokens) + 1
    line, zero = torch.arange(count), torch.zeros(count)
    parents = (line - 1).clamp(min=0)
    mask = ancestors(parents, count - 1)
    return Tree(torch.tensor([0, *tokens]), parents, line, mask, zero, zero, count - 1, count - 1, proposal)


def lengths(cycle: Cycle, tree: Tree) -> list[float]:
    """The shares of the oracle lengths 0, 1, ... of a tree with the law P at every node."""
    generator = torch.Generator().manual_seed(0)
    logits = P.log().expand(len(tree), -1)
    found = torch.tensor([oracle_length(cycle, tree, logits, generator) for _ in range(TRIALS)])
    shares: list[float] = (torch.bincount(found, minlength=len(tree)).double() / TRIALS).tolist()
    return shares


def cycle_of(tree: Tree, verdict: Verdict, rule: str, temperature: float = 1.0) -> Cycle:
    logits = P.log().expand(len(tree), -1)
    return Cycle(tree, TargetStep(logits, logits, None), verdict, sampler(temperature), rule)


def test_after_a_wholly_accepted_chain_the_longer_ones_tokens_are_judged() -> None:
    deep = chain([0, 1, 1, 2], Proposal("R1", rows(Q, 5)))
    policy = chain([0], Proposal("R1", rows(Q, 2)))
    found = lengths(cycle_of(policy, Verdict([0, 1], [0], 3), "R1"), deep)
    # token 1 is taken with .3 / .6, twice; token 2 always
    assert found == pytest.approx([0.0, 0.5, 0.25, 0.0, 0.25], abs=0.04)


def test_a_refused_chain_has_its_own_length_and_another_chain_is_not_followed() -> None:
    deep = chain([0, 1, 1, 2], Proposal("R1", rows(Q, 5)))
    policy = chain([0, 1], Proposal("R1", rows(Q, 3)))
    assert lengths(cycle_of(policy, Verdict([0, 1], [0], 3), "R1"), deep)[1] == 1.0
    other = chain([2], Proposal("R1", rows(Q, 2)))
    assert lengths(cycle_of(other, Verdict([0, 1], [2], 3), "R1"), deep)[1] == 1.0


def test_where_the_target_chooses_its_known_choices_are_kept_and_the_rest_is_drawn() -> None:
    deep, policy = chain([0, 1, 0, 0]), chain([0])
    found = lengths(cycle_of(policy, Verdict([0, 1], [0], 1), "R2"), deep)  # the bonus token is the deep chain's second
    assert found == pytest.approx([0.0, 0.0, 0.5, 0.25, 0.25], abs=0.04)
    assert lengths(cycle_of(policy, Verdict([0, 1], [0], 2), "R2"), deep)[1] == 1.0


def test_greedy_choices_are_argmax_and_the_policys_own_depth_is_never_undercut() -> None:
    deep, policy = chain([0, 0, 0, 1]), chain([0])
    assert lengths(cycle_of(policy, Verdict([0, 1], [0], 0), "R0", 0.0), deep)[3] == 1.0
    pruned = chain([1, 0])  # reranking dropped the policy's path from the deeper tree
    assert lengths(cycle_of(policy, Verdict([0, 1], [0], 0), "R0", 0.0), pruned)[1] == 1.0
