"""The chance of a drafted node to be accepted once its parent was, under the rule that judges its tree."""

import torch
from torch import Tensor

from infer.proposer import Cycle
from infer.rejection import acceptance as of_drawn
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
    """Per node [N], in float64, given that its parent was accepted: 0 or 1 at temperature 0, else its chance.

    R2: p(x), tried or not. R1: min(1, p / q). R3 and R4: the same for the first sibling, and for a later one its chance
    that those before it are refused and it is taken, given which tokens were drawn. Typical acceptance, which has no
    chances, is 0 or 1 too. Where it is 0 or 1, only nodes that were `asked` have a meaning.
    """
    tree = cycle.tree
    if cycle.rule in ("R0", NOT_LOSSLESS):
        found = torch.zeros(len(tree), dtype=torch.float64, device=tree.tokens.device)
        found[cycle.verdict.path] = 1.0
        return found
    p = cycle.sampler.law(cycle.step.logits)  # [N, V]
    chances = p[tree.parents, tree.tokens] if tree.proposal is None else of_drawn(tree, p)
    return chances.double()
