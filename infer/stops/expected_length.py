"""How many drafted tokens the tree drafted so far can be expected to yield."""

import torch
from torch import Tensor


class ExpectedLength:
    """The sum of the `nodes` largest survivals of all levels: those nodes are what reranking would keep.

    Source: E(A) of a tree, OPT-Tree (arXiv 2406.17276); the survival of a node stands for its chance to be accepted.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._best: Tensor | None = None

    def clear(self) -> None:
        """A new tree."""
        self._best = None

    def add(self, log_survival: Tensor) -> Tensor:
        """The sum, a scalar, once the nodes [n] of one more level are known."""
        survival = log_survival.exp()
        every = survival if self._best is None else torch.cat([self._best, survival])
        self._best = every.topk(min(self.nodes, every.shape[0])).values
        return self._best.sum()
