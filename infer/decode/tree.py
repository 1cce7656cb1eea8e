"""A draft tree as flat tensors: node 0 is the root, nodes stand in level order, every parent before its children."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Rule = Literal["R1", "R3", "R4"]


@dataclass(frozen=True)
class Proposal:
    """How sampled children were drawn, which is what makes them verifiable without bias.

    R1: a chain, each token from q. R3: siblings without replacement, in node order. R4: with replacement.
    """

    rule: Rule
    laws: Tensor  # q [N, Vd] that each node's children were drawn from, processors applied; rows of leaves are not read
    ids: Tensor | None = None  # [Vd] the target's ids of the laws' columns; null: they are the target's own

    def over(self, vocab_size: int) -> Tensor:
        """q [N, V] over the target's vocabulary: zero where the draft has no word."""
        count, width = self.laws.shape
        if self.ids is not None:
            return self.laws.new_zeros(count, vocab_size).index_copy_(1, self.ids, self.laws)
        return self.laws if width == vocab_size else F.pad(self.laws, (0, vocab_size - width))


def draft_ids(target_ids: Callable[[Tensor], Tensor], laws: Tensor) -> Tensor | None:
    """The target's ids [Vd] of the columns of laws [.., Vd]; null where target_ids hands its columns back."""
    columns = torch.arange(laws.shape[-1], device=laws.device)
    ids = target_ids(columns)
    return None if ids is columns else ids


@dataclass(frozen=True)
class Tree:
    """N nodes with the root. The root is the last known token; its law comes from the target, not from a draft."""

    tokens: Tensor  # [N] target ids
    parents: Tensor  # [N] node indices; the root is its own parent
    depth: Tensor  # [N] 0 for the root
    mask: Tensor  # [N, N] boolean: row i is True at i and at its ancestors
    confidence: Tensor  # [N] log q of the node under its parent; 0 for the root
    survival: Tensor  # [N] sum of confidence along the path (EAGLE-2's log value)
    levels: int  # drafted depth, which a pruned tree need not reach
    draft_forwards: int
    proposal: Proposal | None = None  # null: children were picked deterministically (R0, R2)
    passengers: Tensor | None = (
        None  # [N] boolean: rows that ride along and are never accepted; siblings may then repeat
    )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_drafted(self) -> int:
        """Nodes that may be accepted: neither the root nor passengers."""
        riding = 0 if self.passengers is None else int(self.passengers.sum())
        return len(self) - 1 - riding


def root_only(token: Tensor) -> Tree:
    """The tree of plain decoding: the token [1] alone."""
    zero = torch.zeros(1, dtype=torch.long, device=token.device)
    one = torch.ones(1, 1, dtype=torch.bool, device=token.device)
    nothing = torch.zeros(1, device=token.device)
    return Tree(token, zero, zero, one, nothing, nothing, levels=0, draft_forwards=0)


def ancestors(parents: Tensor, levels: int) -> Tensor:
    """The boolean [N, N] matrix of ancestors-or-self of nodes with these parents, at most `levels` deep."""
    count = parents.shape[0]
    above = [torch.arange(count, device=parents.device), parents]  # each node's ancestor 0, 1, 2, ... levels up
    for _ in range(1, levels):
        above.append(parents.index_select(0, above[-1]))
    reach = torch.zeros(count, count, dtype=torch.bool, device=parents.device)
    return reach.scatter_(1, torch.stack(above, dim=1), True)


def check_connected(tree: Tree) -> None:
    """Raises AssertionError unless every node's parent is in the tree, one level above and before it."""
    index = torch.arange(1, len(tree), device=tree.parents.device)
    parents = tree.parents[1:]
    assert bool((parents >= 0).all()) and bool((parents < index).all()), "a node's parent is missing or comes after it"
    assert bool((tree.depth[1:] == tree.depth[parents] + 1).all()), "a node does not stand one level below its parent"


def describe(tree: Tree, names: list[str]) -> str:
    """The tree as indented text, one node a line with its token, confidence and survival (EAGLE-2, figure 7)."""
    parents, depth = tree.parents.tolist(), tree.depth.tolist()
    confidence, survival = tree.confidence.exp().tolist(), tree.survival.exp().tolist()
    children: dict[int, list[int]] = {}
    for node in range(1, len(tree)):
        children.setdefault(parents[node], []).append(node)
    lines, stack = [], [0]
    while stack:
        node = stack.pop()
        lines.append(f"{'  ' * depth[node]}{names[node]!r}  q {confidence[node]:.3f}  survival {survival[node]:.3f}")
        stack.extend(reversed(children.get(node, [])))
    return "\n".join(lines)


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes from the root down, their tokens without the root's, and the bonus token."""

    path: list[int]
    tokens: list[int]
    bonus: int

    @property
    def accepted(self) -> int:
        return len(self.tokens)


def reached(tree: Tree, refused: Tensor) -> Tensor:
    """Which nodes [N] stand on a path without a refused node; refused [N] is boolean, the root's entry is not read."""
    refused = refused.clone()
    refused[0] = False
    if tree.passengers is not None:
        refused |= tree.passengers
    return ~(tree.mask & refused).any(dim=1)


def deepest(tree: Tree, refused: Tensor) -> Tensor:
    """The index [] of the deepest node that is reached, the first of several."""
    return torch.where(reached(tree, refused), tree.depth, -1).argmax()


def ending_at(tree: Tree, last: Tensor, bonus: Tensor) -> Verdict:
    """The verdict of the path down to node last [] and the bonus token [] after it: the one device synchronisation."""
    row = torch.cat([tree.mask[last].to(tree.tokens.dtype), tree.tokens, bonus.reshape(1)]).tolist()
    count = len(tree)
    path = [node for node in range(count) if row[node]]
    return Verdict(path, [row[count + node] for node in path[1:]], row[-1])


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
