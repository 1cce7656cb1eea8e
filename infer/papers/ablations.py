"""EAGLE-2's ablations (arXiv 2406.16858, table 3): a tree without value or without reranking."""

import torch
from torch import Tensor

from aerie.configs.schema.decode import DynamicConfig
from aerie.infer.decode.dynamic_tree import BestChildren, DynamicTree
from aerie.infer.decode.roles import Calibrate, Drafter
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.stop import Stop
from aerie.infer.decode.tree import Level, first_numbers, zeros


class AblatedTree(DynamicTree):
    """A dynamic tree with `rank: confidence`, `rerank: false`, or both.

    rank: confidence ranks nodes by their own q. rerank: false keeps each level's k best nodes.
    """

    def __init__(self, stop: Stop, config: DynamicConfig, calibrate: Calibrate) -> None:
        super().__init__(stop, config, calibrate)
        self.by_survival = config.rank == "survival"
        self.reranks = config.rerank

    def _expansion(
        self, drafter: Drafter, vocab_size: int, sampler: Sampler | None
    ) -> BestChildren:
        if self.by_survival and sampler is not None:
            return super()._expansion(drafter, vocab_size, sampler)
        kind = BestChildren if self.by_survival else SurestChildren
        return kind(drafter, min(self.k, vocab_size), self.calibrate)

    def _kept(self, levels: tuple[Level, ...], survival: Tensor) -> Tensor:
        if not self.reranks:
            return self._frontiers(levels)
        if self.by_survival:
            return super()._kept(levels, survival)
        # A node's score is the least confidence on its path, so the best nodes are connected.
        certain = zeros(1, survival.device)
        above = certain  # the scores of the level above
        scores = [certain]
        for level in levels:
            parents = level.expanded.index_select(0, level.rows)
            above = torch.minimum(above.index_select(0, parents), level.confidence)
            scores.append(above)
        return super()._kept(levels, torch.cat(scores))

    def _frontiers(self, levels: tuple[Level, ...]) -> Tensor:
        """The numbers of the root and of each level's k best candidates, ascending."""
        numbers = [levels[0].expanded]  # the root, 0
        for first, level in zip(first_numbers(levels), levels, strict=True):
            best = level.survival if self.by_survival else level.confidence
            numbers.append(first + best.topk(min(self.k, len(best))).indices)
        return torch.cat(numbers).sort().values


class SurestChildren(BestChildren):
    """Expands the candidates with the highest q next, however unsure their parents are."""

    def with_frontier(self, level: Level) -> Level:
        frontier = level.confidence.topk(self.k).indices
        survival = level.survival.index_select(0, frontier)
        return level._replace(frontier=frontier, frontier_survival=survival)
