"""Every node that one dynamic tree drafted, and the tree of those that are kept."""

import torch
from torch import Tensor

from infer.tree import Tree, ancestors


class Candidates:
    """The drafted nodes of one tree, shallow-first; the root is candidate 0. A node's score never exceeds its parent's.

    So the best by score are connected once ties go to the shallower node, which a stable sort sees to.
    """

    def __init__(self, root: Tensor) -> None:
        self._tokens, self._depths, self._size = [root], [0], 1
        self._parents: list[Tensor] = []  # of each level, the indices of its expanded nodes
        zero = torch.zeros(1, device=root.device)
        self._confidence, self._survival, self._score = [zero], [zero], [zero]
        self._frontiers = [zero.long()]

    @property
    def levels(self) -> int:
        return len(self._parents)

    def add(self, tokens: Tensor, parents: Tensor, confidence: Tensor, survival: Tensor, score: Tensor) -> int:
        """Adds one level: [rows, k] nodes under candidates [rows]; the index of the first of them."""
        first = self._size
        self._tokens.append(tokens.flatten())
        self._parents.append(parents)
        self._confidence.append(confidence.flatten())
        self._survival.append(survival.flatten())
        self._score.append(score.flatten())
        self._size += tokens.numel()
        self._depths += [len(self._parents)] * tokens.numel()
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
        return torch.cat(self._frontiers).sort().values

    def tree(self, kept: Tensor, k: int, draft_forwards: int) -> Tree:
        """The tree of the candidates kept [N], in level order, parents among them. Every level had k a row."""
        count = kept.shape[0]
        place = kept.new_full((self._size,), -1)
        place[kept] = torch.arange(count, device=kept.device)
        above = torch.cat([kept.new_zeros(1), torch.cat(self._parents).repeat_interleave(k)])  # [candidates]
        parents = place[above[kept]]
        if parents.device.type == "cpu":  # elsewhere it would be a synchronisation
            assert int(parents.min()) >= 0, "a kept node's parent was cut"
        return Tree(
            tokens=torch.cat(self._tokens)[kept],
            parents=parents,
            depth=torch.tensor(self._depths, device=kept.device)[kept],
            mask=ancestors(parents, self.levels),
            confidence=torch.cat(self._confidence)[kept],
            survival=torch.cat(self._survival)[kept],
            levels=self.levels,
            draft_forwards=draft_forwards,
        )
