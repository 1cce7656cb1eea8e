"""A draft tree as flat tensors: node 0 is the root, and nodes stand in level order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Rule = Literal["R1", "R3"]
Path = tuple[int, ...]  # the target's ids below the root


@dataclass(frozen=True)
class DraftLaws:
    """The distributions q that a tree's children were drawn from."""

    # R1: a chain, each token drawn from q. R3: siblings drawn without replacement, in node order
    rule: Rule
    # [N, Vd] row i is q of node i's children, after the processors; nobody reads a leaf's row
    laws: Tensor
    ids: Tensor | None = None  # [Vd] the target's id of each column; None: the column is the id
    parents: tuple[int, ...] | None = None  # `Tree.parents`, if the host knows them
    # Of a dynamic tree: [N] which of its parent's draws each node is, and the most draws of a node.
    ranks: Tensor | None = None
    width: int = 0

    def over(self, vocab_size: int) -> Tensor:
        """q [N, V] over the target's vocabulary."""
        count, columns = self.laws.shape
        # A draft vocabulary: tokens outside it are never drafted, so their q is 0.
        if self.ids is not None:
            return self.laws.new_zeros(count, vocab_size).index_copy_(1, self.ids, self.laws)
        # The head's LM head may lack the target's padding columns.
        if columns == vocab_size:
            return self.laws
        return F.pad(self.laws, (0, vocab_size - columns))


class Level(NamedTuple):
    """One level before reranking: n candidates below the r nodes that were expanded above it.

    Confidence and survival are natural logarithms.
    """

    depth: int  # 1 for the root's children
    log_q: Tensor  # [r, Vd] the head's distributions under the expanded nodes, before any processor
    expanded: Tensor  # [r] the expanded nodes, as places among the candidates of the level above
    rows: Tensor  # [n] which of the r expanded nodes each candidate stands below
    tokens: Tensor  # [n] target ids
    confidence: Tensor  # [n] log q, calibrated if the tree is
    survival: Tensor  # [n] the sum of confidence down the path: EAGLE-2's value
    # [f] which of the n may be expanded next, the best first; empty if nobody needs it. A static
    # tree's frontier has only nodes with children, so it may lack the level's best.
    frontier: Tensor = torch.empty(0, dtype=torch.long)
    frontier_survival: Tensor = torch.empty(0)  # [f]
    drawn_from: Tensor | None = None  # [r, Vd] q of drawn candidates; None: picked by rank


def first_numbers(levels: Sequence[Level]) -> list[int]:
    """The number of each level's first candidate.

    Candidates are numbered level after level, from the root's 0. For levels of 2 and 4 candidates,
    0 | 1 2 | 3 4 5 6, the result is [1, 3].
    """
    return list(accumulate((len(level.tokens) for level in levels[:-1]), initial=1))


def expanded_numbers(levels: Sequence[Level]) -> Tensor:
    """The candidate numbers [E] of all expanded nodes; `Level.expanded` has places in one level."""
    above = [0, *first_numbers(levels)[:-1]]  # the first number of the level above each level
    sizes = tuple(len(level.expanded) for level in levels)
    places = torch.cat([level.expanded for level in levels])
    return places + _repeated(tuple(above), sizes, places.device)


@cache
def _repeated(values: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values).repeat_interleave(torch.tensor(counts)).to(device)


@dataclass(frozen=True)
class Pool:
    """All candidates of a tree, also those that reranking left out."""

    levels: Sequence[Level]
    kept: Tensor  # [N] each node's number among the candidates, ascending; the root is 0
    ids: Tensor  # [Vd] the target's id of each column of log q
    # Reranking chose the tree's nodes, so nodes of a frontier may be missing from the tree.
    reranked: bool
    stopped_by: str | None  # the stop rule's name; None: the tree reached its last level

    def log_laws(self) -> dict[int, Tensor]:
        """By node of the tree that was expanded: log q [Vd] of its children."""
        node_of = {candidate: node for node, candidate in enumerate(self.kept.tolist())}
        candidates = expanded_numbers(self.levels).tolist()
        laws = torch.cat([level.log_q for level in self.levels])  # [E, Vd]
        pairs = sorted(zip(candidates, laws, strict=True), key=lambda pair: pair[0])
        return {node_of[candidate]: law for candidate, law in pairs if candidate in node_of}

    def frontiers(self) -> list[tuple[list[Path], Tensor]]:
        """By level: the frontier's paths and log survivals [f], of which DEAGLE's S_d is made.

        A static tree gives all nodes of the level.
        """
        above: list[Path] = [()]  # the paths, without the root, of the level above
        frontiers = []
        for level in self.levels:
            parents = level.expanded[level.rows].tolist()  # [n]
            tokens = level.tokens.tolist()
            paths = [(*above[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            places = level.frontier
            if not self.reranked:
                places = torch.arange(len(paths), device=places.device)
            frontiers.append(([paths[place] for place in places.tolist()], level.survival[places]))
            above = paths
        return frontiers


@dataclass(frozen=True)
class Tree:
    """What one forward of the target verifies. Confidence and survival are natural logarithms."""

    tokens: Tensor  # [N] target ids; the root is the last known token
    parents: Tensor  # [N] node indices; the root is its own parent
    depth: Tensor  # [N] 0 for the root
    mask: Tensor  # [N, N] boolean: row i is True at i and at its ancestors
    # [N] log q of the node under its parent; in a drawn dynamic tree, `draw_children`'s chance
    confidence: Tensor
    survival: Tensor  # [N] the sum of confidence along the path, the logarithm of EAGLE-2's value
    levels: int  # drafted depth, which a pruned tree need not reach
    draft_forwards: int
    draft_laws: DraftLaws | None = None  # None: children were picked deterministically (R0, R2)
    # [N] boolean: nodes that are never accepted (lookahead's window) and may repeat a sibling's
    # token
    passengers: Tensor | None = None
    pool: Pool | None = None  # if a watcher asked for it

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_drafted(self) -> int:
        num_passengers = 0 if self.passengers is None else int(self.passengers.sum())
        return len(self) - 1 - num_passengers


def root_only(token: Tensor) -> Tree:
    """The tree of plain decoding: the root [1] alone."""
    zero = torch.zeros_like(token)
    certain = zeros(1, token.device)
    return Tree(token, zero, zero, zero[None] == 0, certain, certain, levels=0, draft_forwards=0)


def ancestors(parents: Tensor, levels: int) -> Tensor:
    """The boolean matrix [N, N] of each node's ancestors and itself.

    parents [N]; no node is deeper than `levels`.
    """
    # The matrix has 1 at each node and at its parent. Entry [i, j] of its n-th power counts the
    # ways up from i to j in at most n steps. Squaring it log2(levels) times reaches `levels` steps.
    reach = _identity(len(parents), parents.device).scatter(1, parents[:, None], 1.0)
    for step in range((levels - 1).bit_length()):
        reach = reach @ reach
        if step > 4:  # before that, counts stay far below float32's largest number
            reach.clamp_(max=1.0)
    return reach > 0


@cache
def repeated_range(count: int, times: int, device: torch.device) -> Tensor:
    """0, 0, .., 1, 1, .. [count * times]: which node each of `times` children is below."""
    return torch.arange(count, device=device).repeat_interleave(times)


@cache
def zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, device=device)


@cache
def _identity(count: int, device: torch.device) -> Tensor:
    return torch.eye(count, device=device)


def describe(tree: Tree, names: list[str]) -> str:
    """The tree as indented lines, each node below its ancestors (as in EAGLE-2, figure 7)."""
    lines = []
    # Sorted by its list of ancestors, a node stands behind its parent and elder siblings' subtrees.
    for node in sorted(range(len(tree)), key=lambda node: tree.mask[node].nonzero()[:, 0].tolist()):
        q = float(tree.confidence[node].exp())
        survival = float(tree.survival[node].exp())
        indent = "  " * int(tree.depth[node])
        lines.append(f"{indent}{names[node]!r}  q {q:.3f}  survival {survival:.3f}")
    return "\n".join(lines)
