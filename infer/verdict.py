"""What became of a draft tree: the path that was accepted, and the target's own token after it."""

from dataclasses import dataclass

import torch
from torch import Tensor

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


def reached(tree: Tree, refused: Tensor) -> Tensor:
    """Which nodes [N] stand on a path without a refused node; refused [N] is boolean, the root's entry is not read."""
    refused = refused.clone()
    refused[0] = False
    if tree.passengers is not None:
        refused |= tree.passengers
    return ~(tree.mask & refused).any(dim=1)


def deepest(tree: Tree, refused: Tensor) -> Tensor:
    """The index [] of the deepest node that is reached, the first of several."""
    return torch.where(reached(tree, refused), tree.depth, -1).argmax()


def ending_at(tree: Tree, last: Tensor, bonus: Tensor) -> Verdict:
    """The verdict of the path down to node last [] and the bonus token [] after it: the one device synchronisation."""
    row = torch.cat([tree.mask[last].to(tree.tokens.dtype), tree.tokens, bonus.reshape(1)]).tolist()
    count = len(tree)
    path = [node for node in range(count) if row[node]]
    return Verdict(path, [row[count + node] for node in path[1:]], row[-1])
