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
