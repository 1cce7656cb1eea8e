"""A node's chance is what its rule gives it, by hand and by repeated verification."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.proposer import Cycle
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.tree import Proposal, Tree, ancestors
from aerie.infer.decode.verify import accept_sibling, rule_of, verify
from aerie.infer.measure.cycles import acceptance, asked

P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.2, 0.6, 0.1, 0.1])


def sampler(temperature: float = 1.0, seed: int = 0) -> Sampler:
    decoding = Decoding(temperature > 0, temperature, 0, 1.0, 0.0, 8)
    return Sampler(decoding, torch.Generator().manual_seed(seed))


def bush(tokens: list[int], proposal: Any = None) -> Tree:
    """A root with these children."""
    count = len(tokens) + 1
    parents = torch.zeros(count, dtype=torch.long)
    depth = torch.tensor([0] + [1] * len(tokens))
    zero = torch.zeros(count)
    return Tree(torch.tensor([0, *tokens]), parents, depth, ancestors(parents, 1), zero, zero, 1, 1, proposal)


def judged(tree: Tree, chooser: Sampler, p: Tensor = P) -> Cycle:
    logits = p.log().expand(len(tree), -1)
    step = TargetStep(logits, logits, None)
    return Cycle(tree, step, verify(tree, logits, chooser), chooser, rule_of(tree.proposal, chooser))


def test_greedy_nodes_are_accepted_or_not() -> None:
    found = acceptance(judged(bush([0, 1]), sampler(0.0)))
    assert found[1:].tolist() == [1.0, 0.0]


def test_a_node_that_the_target_chooses_counts_with_its_probability_tried_or_not() -> None:
    found = acceptance(judged(bush([0, 1]), sampler()))
    assert found[1:].tolist() == pytest.approx([0.5, 0.3])


def rows(law: Tensor, count: int) -> Tensor:
    return law.expand(count, -1).contiguous()


def test_drawn_siblings_count_with_what_those_before_them_left() -> None:
    # drawn 1 then 0. First: 0.3 / 0.6. Refused: p - q = (.3, 0, .1, 0) -> (.75, 0, .25, 0).
    # R3 strikes 1 out of q: (.5, 0, .25, .25), so token 0 is certain; R4 keeps q: .75 / .2, certain too
    tree = bush([1, 0], Proposal("R3", rows(Q, 3)))
    assert acceptance(judged(tree, sampler()))[1:].tolist() == pytest.approx([0.5, 0.5])
    # drawn 1 then 2. R3: .25 / .25 is certain. Drawn 2 then 1: .2 / .1 is certain, and nothing is left to the second
    tree = bush([1, 2], Proposal("R3", rows(Q, 3)))
    assert acceptance(judged(tree, sampler()))[1:].tolist() == pytest.approx([0.5, 0.5])
    tree = bush([2, 1], Proposal("R3", rows(Q, 3)))
    assert acceptance(judged(tree, sampler()))[1:].tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(("rule", "tokens"), [("R1", [1]), ("R3", [1, 0, 2]), ("R4", [1, 0, 0])])
def test_the_chances_are_how_often_verification_accepts(rule: Any, tokens: list[int]) -> None:
    trials, p, q = 100_000, torch.tensor([0.5, 0.1, 0.2, 0.2]), torch.tensor([0.45, 0.45, 0.05, 0.05])
    uniform = torch.rand(trials, len(tokens), generator=torch.Generator().manual_seed(0))
    siblings = [torch.full((trials,), token) for token in tokens]
    chosen, _ = accept_sibling(rows(p, trials), rows(q, trials), siblings, uniform, replaced=rule == "R4")
    shares = [float((chosen == rank).double().mean()) for rank in range(len(tokens))]
    tree = bush(tokens, Proposal(rule, rows(q, len(tokens) + 1)))
    assert acceptance(judged(tree, sampler(), p))[1:].tolist() == pytest.approx(shares, abs=0.01)


def test_only_children_of_accepted_nodes_are_asked_and_no_passenger() -> None:
    parents = torch.tensor([0, 0, 0, 1, 2])
    zero, depth = torch.zeros(5), torch.tensor([0, 1, 1, 2, 2])
    mask = ancestors(parents, 2)
    tree = Tree(torch.arange(5), parents, depth, mask, zero, zero, 2, 2)
    assert asked(tree, [0, 2]).tolist() == [False, True, True, False, True]
    riding = torch.tensor([False, True, False, False, False])
    tree = Tree(torch.arange(5), parents, depth, mask, zero, zero, 2, 2, None, riding)
    assert asked(tree, [0, 2]).tolist() == [False, False, True, False, True]
