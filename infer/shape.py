"""Where to draft: which nodes a tree gets, given the laws that a drafter proposes.

Chains are in `infer/chain.py`, fixed trees in `infer/static_tree.py`.
"""

from typing import Protocol

import torch
from torch import Tensor

from infer.calibration.calibrator import Calibrate, unchanged
from infer.candidates import Candidates
from infer.chain import Chain
from infer.choices import inline, sized
from infer.config import TreeConfig
from infer.sampling import Sampler
from infer.static_tree import StaticTree
from infer.stop import Level, Stop
from infer.stops.choice import make_stop
from infer.tree import Tree


class Drafter(Protocol):
    """Proposes laws over its own vocabulary of Vd tokens, which `target_ids` maps to the target's.

    One tree is `start`, then any number of `step`s, each over children of the step before. `start` begins anew.
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

    stop: Stop

    @property
    def levels(self) -> int:
        """The deepest that it drafts."""
        ...

    @property
    def max_nodes(self) -> int: ...

    @property
    def draft_slots(self) -> int:
        """How many nodes are given to the drafter's `step` for one tree, at most."""
        ...

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        """The tree under root [1], at most max_levels deep; sampler holds the target's processors and the generator."""
        ...


def make_shape(config: TreeConfig, calibrate: Calibrate = unchanged) -> Shape:
    """The shape that a recipe names; calibrate maps the head's log q to the confidence that survival is made of."""
    config = sized(config)
    stop = make_stop(config)
    if config.shape == "chain":
        return Chain(stop, config.levels, config.children != "best", calibrate)
    if config.shape == "static":
        return StaticTree(stop, inline(config), config.children or "sampled", calibrate)
    return DynamicTree(stop, config, calibrate)


class DynamicTree:
    """EAGLE-2's tree: expand the k most probable paths of each level, then keep the best nodes of all levels.

    Survival never grows along a path, so the best `nodes` by survival are connected once ties go to the shallower node:
    candidates stand shallow-first and the sort is stable. Deterministic, so pruning it leaves the output's law alone.
    Ablations: `rank` by confidence expands the nodes with the largest confidence of their own, and keeps those with
    the largest smallest confidence on their path, which is the rule "by confidence, with all ancestors"; without
    `rerank` every level's frontier is kept.
    Source: EAGLE-2 (arXiv 2406.16858), sections 4.1 (expansion), 4.2 (reranking) and 5.2 (ablations).
    """

    def __init__(self, stop: Stop, config: TreeConfig, calibrate: Calibrate = unchanged) -> None:
        self.stop, self.calibrate = stop, calibrate
        self.levels, self.k, self.nodes = config.levels, config.k, config.nodes
        self.by_survival, self.rerank = config.rank == "survival", config.rerank
        self._rows = torch.empty(0, dtype=torch.long)  # of a level's candidates, in order: k times 0, k times 1, ...

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def draft_slots(self) -> int:
        return self.levels * self.k

    def grow(self, drafter: Drafter, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        pool = Candidates(root)
        self.stop.begin()
        levels = min(self.levels, max_levels)
        log_q, forwards = drafter.start(), 1  # [1, Vd]
        frontier = torch.zeros(1, dtype=torch.long, device=root.device)  # pool indices of the expanded nodes
        above = lowest = torch.zeros(1, device=root.device)  # their survival; their path's smallest confidence
        k = min(self.k, log_q.shape[-1])
        row_of = self._row_of(k, root.device)
        for depth in range(1, levels + 1):
            if depth > 1 and self.stop.declines(log_q, above):
                break
            chances, columns = log_q.topk(k, dim=-1)  # [rows, k]
            chances = self.calibrate(chances)
            grown = above[:, None] + chances
            confidence, survival, tokens = chances.flatten(), grown.flatten(), drafter.target_ids(columns).flatten()
            score = survival if self.by_survival else torch.minimum(lowest[:, None], chances).flatten()
            first = pool.add(tokens, frontier, confidence, survival, score)
            if depth == levels and self.rerank:
                break
            best = (survival if self.by_survival else confidence).topk(k).indices
            if not self.rerank:
                pool.pick(best + first)
            if depth == levels:
                break
            rows, alive = row_of.index_select(0, best), survival.index_select(0, best)
            level = Level(depth, confidence.index_select(0, best), alive, log_q, above, rows, survival)
            kept = self._expanded(level)
            if kept is not None:
                best, rows, alive = best[kept], rows[kept], alive[kept]
            if best.shape[0] == 0:
                break
            log_q = drafter.step(tokens.index_select(0, best), rows)
            forwards += 1
            frontier, above = best + first, alive
            lowest = above if self.by_survival else score.index_select(0, best)
        return pool.tree(pool.best(self.nodes) if self.rerank else pool.picked(), k, forwards)

    def _row_of(self, k: int, device: torch.device) -> Tensor:
        if self._rows.shape[0] != k * k or self._rows.device != device:
            self._rows = torch.arange(k, device=device).repeat_interleave(k)
        return self._rows

    def _expanded(self, level: Level) -> Tensor | None:
        """Which of the frontier's nodes [k] the stop rule lets grow, null: all; none of them: the tree ends."""
        if self.stop.ends(level):
            return torch.zeros_like(level.rows, dtype=torch.bool)
        return self.stop.expands(level)
