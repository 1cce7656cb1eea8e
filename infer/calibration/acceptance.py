"""The chance of a drafted node to be accepted once its parent was, under the rule that judges its tree."""

import torch
from torch import Tensor

from infer.proposer import Cycle
from infer.rejection import residual, without
from infer.tree import Tree
from infer.verify import NOT_LOSSLESS


def asked(tree: Tree, path: list[int]) -> Tensor:
    """Which nodes [N] stand below an accepted node: their own acceptance was asked. Not the root, nor passengers."""
    on_path = torch.zeros(len(tree), dtype=torch.bool, device=tree.tokens.device)
    on_path[path] = True
    below = on_path[tree.parents]
    below[0] = False
    return below if tree.passengers is None else below & ~tree.passengers


def acceptance(cycle: Cycle) -> Tensor:
    """Per node [N], in float64: 0 or 1 at temperature 0, else its chance; only nodes that were `asked` have a meaning.

    R2: p(x), tried or not. R1: min(1, p / q). R3 and R4: the same for the first sibling, and for a later one its chance
    that those before it are refused and it is taken, given which tokens were drawn.
    """
    tree = cycle.tree
    if cycle.rule in ("R0", NOT_LOSSLESS):
        found = torch.zeros(len(tree), dtype=torch.float64, device=tree.tokens.device)
        found[cycle.verdict.path] = 1.0
        return found
    p = cycle.sampler.law(cycle.step.logits).double()  # [N, V]
    if tree.proposal is None:
        return p[tree.parents, tree.tokens]
    return _of_drawn(cycle, p)


def _of_drawn(cycle: Cycle, p: Tensor) -> Tensor:
    tree, proposal = cycle.tree, cycle.tree.proposal
    assert proposal is not None
    q = proposal.over(p.shape[-1]).double()
    found = torch.zeros(len(tree), dtype=torch.float64, device=p.device)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for parent in cycle.verdict.path:
        p_left, q_left, untaken = p[parent], q[parent], 1.0
        for child in range(1, len(tree)):
            if parents[child] != parent:
                continue
            token = tokens[child]
            chance = min(1.0, float(p_left[token] / q_left[token]))  # q of a drawn token is positive
            found[child] = untaken * chance
            untaken *= 1.0 - chance
            p_left = residual(p_left, q_left)
            if proposal.rule == "R3":
                q_left = without(q_left, tree.tokens[child])
    return found
