"""Watching a tree grow: the laws that its drafter proposed and the rule that ended it, for whoever records them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from infer.engine import SpeculativeDecoder
from infer.proposer import CachedDrafter, Drafting
from infer.shape import DynamicTree, Shape
from infer.stop import Level, Stop

Path = tuple[int, ...]  # the target's tokens below the root


class WatchedDrafter:
    """A drafter that keeps the laws of the tree being grown, and which nodes they are of."""

    def __init__(self, drafter: CachedDrafter) -> None:
        self.drafter = drafter
        self.laws: list[Tensor] = []  # log q [rows, Vd] of each call
        self.steps: list[tuple[Tensor, Tensor]] = []  # (tokens, parents) of each `step`

    @property
    def max_positions(self) -> int:
        return self.drafter.max_positions

    @property
    def after_blocks(self) -> tuple[int, ...]:
        return self.drafter.after_blocks

    def target_ids(self, columns: Tensor) -> Tensor:
        return self.drafter.target_ids(columns)

    def reset(self, prompt: Tensor, capacity: int) -> None:
        self.drafter.reset(prompt, capacity)

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        self.drafter.commit(tokens, features)

    def start(self) -> Tensor:
        self.laws, self.steps = [self.drafter.start()], []
        return self.laws[0]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.laws.append(self.drafter.step(tokens, parents))
        self.steps.append((tokens, parents))
        return self.laws[-1]


class WatchedStop(Stop):
    """A stop rule that says afterwards whether it was the rule that ended the tree."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.ended = False

    @property
    def name(self) -> str:
        """The rule as recipes call it: classes are named after their rule."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self.stop).__name__).lower()

    def reset(self) -> None:
        self.stop.reset()

    def begin(self) -> None:
        self.ended = False
        self.stop.begin()

    def ends(self, level: Level) -> bool:
        self.ended = self.stop.ends(level)
        return self.ended

    def expands(self, level: Level) -> Tensor | None:
        mask = self.stop.expands(level)
        self.ended = mask is not None and not bool(mask.any())
        return mask

    def declines(self, log_q: Tensor, above: Tensor) -> bool:
        self.ended = self.stop.declines(log_q, above)
        return self.ended

    def learn(self, accepted: int, levels: int) -> None:
        self.stop.learn(accepted, levels)


class Growth:
    """What a watched proposer knows of the tree that it grew last."""

    def __init__(self, drafter: WatchedDrafter, stop: WatchedStop, shape: Shape) -> None:
        self.drafter, self.stop, self.shape = drafter, stop, shape

    def target_ids(self) -> Tensor:
        """The target's ids [Vd] of the laws' columns."""
        law = self.drafter.laws[0]
        return self.drafter.target_ids(torch.arange(law.shape[-1], device=law.device))

    def laws(self) -> dict[Path, Tensor]:
        """log q [Vd] of the children of each node that was expanded, by the node's path."""
        paths: list[Path] = [()]
        found: dict[Path, Tensor] = {(): self.drafter.laws[0][0]}
        for (tokens, parents), laws in zip(self.drafter.steps, self.drafter.laws[1:], strict=True):
            paths = _paths_below(paths, tokens, parents)
            found.update(zip(paths, laws, strict=True))
        return found

    def frontiers(self, levels: int) -> list[tuple[list[Path], Tensor]] | None:
        """Of each level of the tree the frontier before reranking: the paths of its nodes, and their log survival [k].

        As the shape itself chose them. Null for other shapes than a dynamic tree, whose nodes are all in the tree.
        """
        shape = self.shape
        if not isinstance(shape, DynamicTree):
            return None
        paths: list[Path] = [()]
        above = torch.zeros(1, device=self.drafter.laws[0].device)
        found = []
        for depth, log_q in enumerate(self.drafter.laws[:levels]):
            k = min(shape.k, log_q.shape[-1])
            chances, columns = log_q.topk(k, dim=-1)
            chances = shape.calibrate(chances)
            tokens = self.drafter.target_ids(columns).flatten()  # [rows * k]
            survival = (above[:, None] + chances).flatten()
            best = (survival if shape.by_survival else chances.flatten()).topk(k).indices
            chosen = zip((best // k).tolist(), tokens[best].tolist(), strict=True)
            found.append(([(*paths[row], token) for row, token in chosen], survival[best]))
            if depth < len(self.drafter.steps):
                places = {path: place for place, path in enumerate(found[-1][0])}
                paths = _paths_below(paths, *self.drafter.steps[depth])
                above = found[-1][1][[places[path] for path in paths]]
        return found

    def frontier_masses(self, levels: int) -> list[float] | None:
        """S_d of the tree's levels: the summed survival of the frontier of a dynamic tree, pruned nodes included.

        Null for other shapes, whose nodes are all in the tree.
        """
        found = self.frontiers(levels)
        return None if found is None else [float(survival.exp().sum()) for _, survival in found]


def _paths_below(paths: list[Path], tokens: Tensor, parents: Tensor) -> list[Path]:
    """The paths of nodes with tokens [n] below the nodes that parents [n] index."""
    return [(*paths[parent], token) for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True)]


@contextmanager
def watched(decoder: SpeculativeDecoder) -> Iterator[Growth | None]:
    """Watches the trees of a decoder while the block runs; null where nothing is drafted from laws.

    Outside of it nothing is kept and nothing is asked: a decoder that is not watched does not know that it could be.
    """
    proposer = decoder.proposer
    if not isinstance(proposer, Drafting):
        yield None
        return
    drafter, stop = WatchedDrafter(proposer.drafter), WatchedStop(proposer.shape.stop)
    proposer.drafter, proposer.shape.stop = drafter, stop
    try:
        yield Growth(drafter, stop, proposer.shape)
    finally:
        proposer.drafter, proposer.shape.stop = drafter.drafter, stop.stop
