"""Where to draft: which nodes a tree gets, given the laws that a drafter proposes.

Chains are in `infer/chain.py`, fixed trees in `infer/static_tree.py`.
"""

from typing import Protocol

import torch
from torch import Tensor

from infer.chain import Chain
from infer.choices import inline, sized
from infer.config import TreeConfig
from infer.sampling import Sampler
from infer.static_tree import StaticTree
from infer.stop import Constant, Level, Stop
from infer.tree import Tree, ancestors


class Drafter(Protocol):
    """Proposes laws over its own vocabulary of Vd tokens, which `target_ids` maps to the target's.

    One cycle is `start`, then any number of `step`s, each over children of the step before.
    """

    def start(self) -> Tensor:
        """log q [1, Vd] of the root's children."""
        ...

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, Vd] of the children of n nodes with tokens [n]; parents [n] index the rows of the last call."""
        ...

    def target_ids(self, columns: Tensor) -> Tensor:
        """The target's token ids of columns of log q, of the same shape."""
        ...


class Shape(Protocol):
    """Grows one tree under a root token."""

    @property
    def stop(self) -> Stop: ...

    @property
    def max_nodes(self) -> int: ...

    @property
    def draft_slots(self) -> int:
        """How many nodes are given to the drafter's `step` for one tree, at most."""
        ...

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        """The tree under root [1], at most max_levels deep; sampler holds the target's processors and the generator."""
        ...


def make_shape(config: TreeConfig) -> Shape:
    """The shape that a recipe names."""
    config = sized(config)
    stop = Constant(config.levels)
    if config.shape == "chain":
        return Chain(stop, config.levels, config.children != "best")
    if config.shape == "static":
        return StaticTree(stop, inline(config), config.children or "sampled")
    return DynamicTree(stop, config.levels, config.k, config.nodes)


class DynamicTree:
    """EAGLE-2's tree: expand the k most probable paths of each level, then keep the best nodes of all levels.

    Survival never grows along a path, so the best `nodes` by survival are connected once ties go to the shallower node:
    candidates stand shallow-first and the sort is stable. Deterministic, so pruning it leaves the output's law alone.
    Source: EAGLE-2 (arXiv 2406.16858), sections 4.1 (expansion) and 4.2 (reranking).
    """

    def __init__(self, stop: Stop, levels: int, k: int, nodes: int) -> None:
        self.stop = stop
        self.levels, self.k, self.nodes = levels, k, nodes

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def draft_slots(self) -> int:
        return self.levels * self.k

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        pool = _Pool(root)
        self.stop.begin()
        levels = min(self.levels, max_levels)
        log_q = drafter.start()  # [1, Vd]
        frontier = torch.zeros(1, dtype=torch.long, device=root.device)  # pool indices of the expanded nodes
        above = torch.zeros(1, device=root.device)  # their survival
        k = min(self.k, log_q.shape[-1])
        for depth in range(1, levels + 1):
            confidence, columns = log_q.topk(k, dim=-1)  # [rows, k]
            tokens = drafter.target_ids(columns)
            survival = above[:, None] + confidence
            first = pool.add(tokens, frontier, confidence, survival)
            if depth == levels:
                break
            alive, best = survival.flatten().topk(k)
            rows = best // k
            if self.stop.ends(Level(depth, confidence.flatten()[best], alive, log_q, above, rows)):
                break
            log_q = drafter.step(tokens.flatten()[best], rows)
            frontier, above = best + first, alive
        return pool.rerank(self.nodes, k)


class _Pool:
    """Every candidate of one tree, shallow-first; the root is candidate 0."""

    def __init__(self, root: Tensor) -> None:
        self._tokens, self._depths, self._size = [root], [0], 1
        self._parents: list[Tensor] = []  # of each level, the pool indices of its expanded nodes
        zero = torch.zeros(1, device=root.device)
        self._confidence, self._survival = [zero], [zero]

    def add(self, tokens: Tensor, parents: Tensor, confidence: Tensor, survival: Tensor) -> int:
        """Adds one level: [rows, k] candidates under parents [rows]; returns the pool index of the first."""
        first = self._size
        self._tokens.append(tokens.flatten())
        self._parents.append(parents)
        self._confidence.append(confidence.flatten())
        self._survival.append(survival.flatten())
        self._size += tokens.numel()
        self._depths += [len(self._parents)] * tokens.numel()
        return first

    def rerank(self, nodes: int, k: int) -> Tree:
        """The best `nodes` candidates by survival, the root among them, in level order. Every level had k a row."""
        survival = torch.cat(self._survival)
        order = survival.sort(descending=True, stable=True).indices[:nodes]
        kept = order.sort().values  # [N] pool indices: level order, parents first
        count = kept.shape[0]
        place = kept.new_full((self._size,), -1)
        place[kept] = torch.arange(count, device=kept.device)
        above = torch.cat([kept.new_zeros(1), torch.cat(self._parents).repeat_interleave(k)])  # [pool]
        parents = place[above[kept]]
        if parents.device.type == "cpu":  # elsewhere it would be a synchronisation
            assert int(parents.min()) >= 0, "a kept node's parent was cut"
        levels = len(self._parents)
        return Tree(
            tokens=torch.cat(self._tokens)[kept],
            parents=parents,
            depth=torch.tensor(self._depths, device=kept.device)[kept],
            mask=ancestors(parents, levels),
            confidence=torch.cat(self._confidence)[kept],
            survival=survival[kept],
            levels=levels,
            draft_forwards=levels,
        )
