"""How often a head's r-th guess is the target's token, by depth: what a static tree is rebuilt from."""

import torch

from infer.proposer import Cycle


class RankCollector:
    """Called after each cycle of a tree of best children; `accuracy` is what `choices.best_choices` takes.

    A child counts once its parent is on the accepted path: only then was it asked. It is accepted or not at T = 0, and
    with the target's probability of its token at T > 0 (R2). The tree should hold every rank that is to be ranked, at
    every depth: siblings without a gap, such as EAGLE-1's tree or Medusa's.
    """

    def __init__(self, levels: int, k: int) -> None:
        self._asked = torch.zeros(levels, k, dtype=torch.double)
        self._accepted = torch.zeros(levels, k, dtype=torch.double)

    def __call__(self, cycle: Cycle) -> None:
        tree = cycle.tree
        assert tree.proposal is None, "a child that was drawn has no rank"
        on_path = set(cycle.verdict.path)
        parents = tree.parents.tolist()
        depth = tree.depth.tolist()
        if cycle.sampler.decoding.do_sample:
            law = cycle.sampler.law(cycle.step.logits)
            chance = law[tree.parents, tree.tokens].tolist()
        else:
            chance = [float(node in on_path) for node in range(len(tree))]
        siblings: dict[int, int] = {}
        for node in range(1, len(tree)):
            parent = parents[node]
            rank = siblings.get(parent, 0)
            siblings[parent] = rank + 1
            if parent in on_path and depth[node] <= self._asked.shape[0] and rank < self._asked.shape[1]:
                self._asked[depth[node] - 1, rank] += 1
                self._accepted[depth[node] - 1, rank] += chance[node]

    def accuracy(self) -> list[list[float]]:
        """The shares [levels][k], 0 for a rank that was never asked."""
        shares: list[list[float]] = (self._accepted / self._asked.clamp(min=1)).tolist()
        return shares
