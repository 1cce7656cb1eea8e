"""The lossless choice: which drafted path the target would have written itself, and the token after it.

Candidates that were picked deterministically leave one rule for greedy decoding and sampling alike. Let the target
choose one token at every node, x_i from p(. | path to i) (its argmax at T = 0). Walk from the root: when the choice at
a node is one of its children, go there; else the choice is the bonus token. Every token of the walk is the target's own
choice, so the output has the target's law whatever was drafted.

At T > 0 that is the rule of EAGLE-2 and SpecInfer for point-mass candidates (accept child x with probability p(x), else
strike it out, renormalise, try its sibling, at last draw from what remains): drawing first and looking the draw up
among the children accepts x with probability p(x), and a draw that is no child has the law of the remainder.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.sampling import Sampler
from infer.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes from the root down, their tokens without the root's, and the bonus token."""

    path: list[int]
    tokens: list[int]
    bonus: int

    @property
    def accepted(self) -> int:
        return len(self.tokens)


def verify(tree: Tree, logits: Tensor, sampler: Sampler) -> Verdict:
    """The verdict for the target's logits [N, V] at every node, by the rule that the tree's children ask for."""
    return walk(tree, sampler.choose(logits))


def walk(tree: Tree, choice: Tensor) -> Verdict:
    """The verdict for the target's choice [N] at every node. Siblings must differ.

    One device synchronisation, no loop over nodes: a node is reached when it and all its ancestors are what the target
    chose at their parents.
    """
    refused = tree.tokens != choice[tree.parents]  # [N]
    refused[0] = False
    if tree.passengers is not None:
        refused |= tree.passengers
    reached = ~(tree.mask & refused).any(dim=1)  # [N]
    last = torch.where(reached, tree.depth, -1).argmax()
    row = torch.cat([tree.mask[last].to(tree.tokens.dtype), tree.tokens, choice[last][None]]).tolist()
    count = len(tree)
    path = [node for node in range(count) if row[node]]
    return Verdict(path, [row[count + node] for node in path[1:]], row[-1])
