"""Every node that one dynamic tree drafted, and the tree of those that are kept."""

import torch
from torch import Tensor

from infer.tree import Tree, ancestors


class Candidates:
    """The drafted nodes of one tree, shallow-first; the root is candidate 0. A node's score never exceeds its parent's.

    So the best by score are connected once ties go to the shallower node, which a stable sort sees to.
    """

    def __init__(self, root: Tensor) -> None:
        self._tokens, self._size = [root], 1
        self._firsts: list[int] = []  # of each level, the index of its first candidate
        self._parents: list[Tensor] = []  # of each level, the indices of its expanded nodes
        zero = torch.zeros(1, device=root.device)
        self._confidence, self._survival, self._score = [zero], [zero], [zero]
        self._frontiers: list[Tensor] = []

    @property
    def levels(self) -> int:
        return len(self._parents)

    def add(self, tokens: Tensor, parents: Tensor, confidence: Tensor, survival: Tensor, score: Tensor) -> int:
        """Adds one level: nodes [rows * k], k under each of the candidates [rows]; the index of the first of them."""
        first = self._size
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._confidence.append(confidence)
        self._survival.append(survival)
        self._score.append(score)
        self._firsts.append(first)
        self._size += tokens.shape[0]
        return first

    def pick(self, frontier: Tensor) -> None:
        """Notes the candidates [k] that a level was ranked down to."""
        self._frontiers.append(frontier)

    def best(self, nodes: int) -> Tensor:
        """The best `nodes` candidates by score, the root among them, in level order."""
        order = torch.cat(self._score).sort(descending=True, stable=True).indices[:nodes]
        return order.sort().values

    def picked(self) -> Tensor:
        """The root and every candidate that was picked, in level order."""
        root = self._frontiers[0].new_zeros(1)
        return torch.cat([root, *self._frontiers]).sort().values

    def tree(self, kept: Tensor, k: int, draft_forwards: int) -> Tree:
        """The tree of the candidates kept [N], in level order, parents among them. Every level had k a row."""
        expanded = torch.cat(self._parents)  # the root first, k candidates for each
        above = expanded.index_select(0, (kept - 1).clamp_(min=0).floor_divide_(k))  # the root is its own parent
        parents = torch.searchsorted(kept, above)
        if kept.device.type == "cpu":  # elsewhere it would be a synchronisation
            assert torch.equal(kept[parents], above), "a kept node's parent was cut"
        return Tree(
            tokens=torch.cat(self._tokens).index_select(0, kept),
            parents=parents,
            depth=torch.bucketize(kept, torch.tensor(self._firsts, device=kept.device), right=True),
            mask=ancestors(parents, self.levels),
            confidence=torch.cat(self._confidence).index_select(0, kept),
            survival=torch.cat(self._survival).index_select(0, kept),
            levels=self.levels,
            draft_forwards=draft_forwards,
        )
