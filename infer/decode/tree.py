"""A draft tree as flat tensors: node 0 is the root, and nodes stand in level order."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Rule = Literal["R1", "R3"]
Path = tuple[int, ...]  # the target's ids below the root


@dataclass(frozen=True)
class Proposal:
    """The laws q that a tree's children were drawn from."""

    # R1: a chain, each token from q. R3: siblings without replacement, in node order
    rule: Rule
    laws: Tensor  # q [N, Vd] that each node's children were drawn from, processors applied; rows of leaves are not read
    ids: Tensor | None = (
        None  # [Vd] the target's ids of the laws' columns; None: they are the target's own
    )
    parents: tuple[int, ...] | None = None  # the tree's, where the host knows them
    # of a dynamic tree: which of its parent's draws each node is [N], and the most that a node has
    ranks: Tensor | None = None
    width: int = 0

    def over(self, vocab_size: int) -> Tensor:
        """q [N, V] over the target's vocabulary."""
        count, width = self.laws.shape
        if self.ids is not None:
            return self.laws.new_zeros(count, vocab_size).index_copy_(1, self.ids, self.laws)
        return self.laws if width == vocab_size else F.pad(self.laws, (0, vocab_size - width))


@dataclass(frozen=True)
class Level:
    """A level before reranking: n candidates below r expanded nodes. Confidence and survival are logarithms."""

    depth: int  # 1 for the root's children
    log_q: Tensor  # [r, Vd] the laws that the candidates come from, before any processor
    parents: (
        Tensor  # [r] the expanded nodes, numbered through all candidates of the tree; the root is 0
    )
    rows: Tensor  # [n] which expanded node each candidate stands below
    tokens: Tensor  # [n] target ids
    confidence: Tensor  # [n] log q, calibrated where the tree is
    survival: Tensor  # [n]
    frontier: Tensor  # [f] which candidates may be expanded next, the best first
    frontier_survival: Tensor  # [f]


@dataclass(frozen=True)
class Pool:
    """All candidates of a tree, with those that reranking left out."""

    levels: list[Level]
    kept: Tensor  # [N] each node's number among the candidates, ascending; the root is 0
    ids: Tensor  # [Vd] the target's ids of the laws' columns
    reranked: (
        bool  # the tree's nodes were chosen by score: a frontier's node may be missing from it
    )
    stopped_by: str | None  # the stop rule; None: the last level was reached

    def log_laws(self) -> dict[int, Tensor]:
        """log q [Vd] of the children of each node that was expanded and is in the tree."""
        node_of = {candidate: node for node, candidate in enumerate(self.kept.tolist())}
        laws = [
            pair
            for level in self.levels
            for pair in zip(level.parents.tolist(), level.log_q, strict=True)
        ]
        return {
            node_of[candidate]: law
            for candidate, law in sorted(laws, key=lambda p: p[0])
            if candidate in node_of
        }

    def frontiers(self) -> list[tuple[list[Path], Tensor]]:
        """By level: the frontier's paths and log survivals [f], for DEAGLE's S_d; in a static tree of all its nodes."""
        paths: list[Path] = [()]  # the tokens down to each candidate, the root's own token left out
        frontiers = []
        for level in self.levels:
            above, first = level.parents[level.rows].tolist(), len(paths)
            paths += [
                (*paths[parent], token)
                for parent, token in zip(above, level.tokens.tolist(), strict=True)
            ]
            places = (
                level.frontier
                if self.reranked
                else torch.arange(len(above), device=level.tokens.device)
            )
            frontiers.append(
                ([paths[first + place] for place in places.tolist()], level.survival[places])
            )
        return frontiers


@dataclass(frozen=True)
class Tree:
    """Confidence and survival are natural logarithms."""

    tokens: Tensor  # [N] target ids; the root is the last known token
    parents: Tensor  # [N] node indices; the root is its own parent
    depth: Tensor  # [N] 0 for the root
    mask: Tensor  # [N, N] boolean: row i is True at i and at its ancestors
    # [N] log q of the node under its parent (of a drawn dynamic tree see sampling.draw_children); 0 for the root
    confidence: Tensor
    survival: Tensor  # [N] sum of confidence along the path, the logarithm of EAGLE-2's value
    levels: int  # drafted depth, which a pruned tree need not reach
    draft_forwards: int
    proposal: Proposal | None = None  # None: children were picked deterministically (R0, R2)
    passengers: Tensor | None = (
        None  # [N] boolean: never accepted (lookahead's window); siblings may then repeat
    )
    pool: Pool | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_drafted(self) -> int:
        return len(self) - 1 - (0 if self.passengers is None else int(self.passengers.sum()))


def root_only(token: Tensor) -> Tree:
    zero, certain = torch.zeros_like(token), zeros(1, token.device)
    return Tree(token, zero, zero, zero[None] == 0, certain, certain, levels=0, draft_forwards=0)


def ancestors(parents: Tensor, levels: int) -> Tensor:
    """The boolean [N, N] matrix of ancestors-or-self of nodes with parents [N], at most `levels` deep."""
    # a power's entry [i, j] counts the ways up from i to j in at most that many steps; the root is its own parent
    reach = _eye(len(parents), parents.device).scatter(1, parents[:, None], 1.0)
    for step in range((levels - 1).bit_length()):
        reach = reach @ reach
        if step > 4:  # before that, far below float32's largest number
            reach.clamp_(max=1.0)
    return reach > 0


@cache
def zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, device=device)


@cache
def _eye(count: int, device: torch.device) -> Tensor:
    return torch.eye(count, device=device)


def describe(tree: Tree, names: list[str]) -> str:
    # as in EAGLE-2, figure 7: a node stands behind its ancestors
    lines = []
    for node in sorted(range(len(tree)), key=lambda node: tree.mask[node].nonzero()[:, 0].tolist()):
        chances = f"q {float(tree.confidence[node].exp()):.3f}  survival {float(tree.survival[node].exp()):.3f}"
        lines.append(f"{'  ' * int(tree.depth[node])}{names[node]!r}  {chances}")
    return "\n".join(lines)
