"""Accepts drafted nodes, losslessly, by the target's law p and the draft's laws q."""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from aerie.infer.decode.sampling import Sampler, draw
from aerie.infer.decode.tree import Proposal, Tree


@dataclass(frozen=True)
class Verdict:
    path: list[int]  # the accepted nodes, the root first
    tokens: list[int]  # without the root's
    bonus: int
    drafted: int = field(default=0, compare=False)  # nodes that could have been accepted
    # the same on the device, refused nodes last: the path; and its tokens without the root's, then the bonus token
    nodes: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)
    new: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)

    @property
    def accepted(self) -> int:
        return len(self.tokens)


def judge(tree: Tree, logits: Tensor, sampler: Sampler) -> Tensor:
    """The input [3 or 4, L] of `read`. A column is a node, those of the accepted path first. Its rows: the number of
    refused nodes on the way to it, the node, the token written after it, and the tree's passengers, if it has any.

    logits [N, V] are the target's.
    """
    if rule_of(tree.proposal, sampler) in ("R0", "R2"):
        return walk(tree, sampler.choose(logits))
    return reject(tree, sampler.law(logits), sampler.generator)


def rule_of(proposal: Proposal | None, sampler: Sampler) -> str:
    if not sampler.decoding.do_sample:
        return "R0"
    return "R2" if proposal is None else proposal.rule


def read(judged: Tensor, count: int) -> Verdict:
    """The verdict on a tree of count nodes; verification reads the device only here."""
    blocks, path, written, *rides = judged.tolist()
    length = blocks.count(0)
    new = written[:length]
    drafted = count - 1 - (rides[0][0] if rides else 0)
    return Verdict(path[:length], new[:-1], new[-1], drafted, judged[1], judged[2])


def walk(tree: Tree, choice: Tensor) -> Tensor:
    """R0 and R2: `judge` by the target's choice [N], its argmax or draw at every node."""
    if len(tree) == 1:
        root = torch.zeros_like(choice)
        return _judged(tree, root, root, choice)
    # a node is refused unless its token is the choice at its parent; that choice is written after the parent
    blocks, order = _path_first(tree, tree.tokens != choice.index_select(0, tree.parents))
    return _judged(tree, blocks, order, choice.index_select(0, order))


@dataclass(frozen=True)
class Families:
    """M nodes, those with the most children first, and up to K children of each."""

    inner: Tensor  # [M]
    children: Tensor  # [M, K] nodes, by rank; the first one stands for a missing one (0: there is none at all)
    is_there: Tensor  # [M, K]
    most: tuple[int, ...]  # by rank: how many of the M nodes, at most, have that child


def reject(tree: Tree, p: Tensor, generator: torch.Generator) -> Tensor:
    """R1 and R3, speculative sampling: `judge` by p [N, V], for children drawn from q."""
    q, families, chances, end = _chances(tree, p)
    uniform = torch.rand(chances.shape, generator=generator, device=p.device)
    is_taken, rank = (uniform < chances).byte().max(-1)
    # a node is refused unless its parent takes its rank; the root, never refused, stands for "no child taken"
    node = families.children.gather(1, rank[:, None])[:, 0] * is_taken
    blocks, order = _path_first(
        tree, torch.ones_like(tree.tokens, dtype=torch.bool).scatter_(0, node, 0)
    )
    at = (blocks[1:] == 0).sum(0, keepdim=True)  # the place of the path's last node
    last = order.index_select(0, at)
    is_inner, row = (families.inner == last).byte().max(0, keepdim=True)
    end = end.index_select(0, row) * is_inner  # a leaf has refused nothing
    law = left_of(p.index_select(0, last), q.index_select(0, last), end)
    return _ending_with(tree, blocks, order, at, draw(law, generator))


def acceptance(tree: Tree, p: Tensor) -> Tensor:
    """The chance [N] that `reject` accepts each drawn node once its parent is accepted; 0 for the root."""
    _, families, chances, _ = _chances(tree, p)
    refused = (1.0 - chances).cumprod(-1)
    reached = chances * F.pad(refused[:, :-1], (1, 0), value=1.0)
    # a missing child adds a chance of 0 to the first child
    return torch.zeros_like(tree.confidence).index_add_(
        0, families.children.flatten(), reached.flatten()
    )


def _chances(tree: Tree, p: Tensor) -> tuple[Tensor, Families, Tensor, Tensor]:
    """q [N, V], the families, and what `sibling_chances` returns for them."""
    proposal = tree.proposal
    assert proposal is not None and tree.passengers is None, (
        "only drawn children are verified by rejection"
    )
    if proposal.ranks is not None:
        families = _dynamic_families(tree, proposal.ranks, proposal.width)
    elif proposal.parents is not None:
        families = _families(proposal.parents, p.device)
    else:  # a tree with missing tokens: too many forms to cache
        families = _families.__wrapped__(tuple(tree.parents.tolist()), p.device)
    q, tokens = proposal.over(p.shape[-1]), tree.tokens.take(families.children)
    return q, families, *sibling_chances(p, q, tokens, families)


def _dynamic_families(tree: Tree, ranks: Tensor, width: int) -> Families:
    """The families of a tree that only the device knows."""
    count, parents = len(tree), tree.parents[1:]
    node = torch.arange(1, count, device=ranks.device) * (
        tree.survival[1:] > float("-inf")
    )  # 0: no token was left
    table = node.new_zeros(count, width)  # by parent and rank
    table.view(-1).scatter_(0, parents * width + ranks[1:], node)
    inner = (table > 0).sum(-1).argsort(descending=True, stable=True)[: count - 1]
    children = table.index_select(0, inner)[:, : count - 1]
    # no more than (N - 1) / n nodes have n children
    most = tuple((count - 1) // (rank + 1) for rank in range(children.shape[1]))
    return Families(inner, torch.where(children > 0, children, children[:, :1]), children > 0, most)


@cache  # CUDA graphs read these tensors as long as they live
def _families(parents: tuple[int, ...], device: torch.device) -> Families:
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        below.setdefault(parent, []).append(node)
    inner = sorted(below, key=lambda parent: -len(below[parent]))
    sizes = [len(below[parent]) for parent in inner]
    table = [
        below[parent] + below[parent][:1] * (sizes[0] - len(below[parent])) for parent in inner
    ]
    most = tuple(sum(size > rank for size in sizes) for rank in range(sizes[0]))
    is_there = [[rank < size for rank in range(sizes[0])] for size in sizes]
    nodes, children, there = (
        torch.tensor(each, device=device) for each in (inner, table, is_there)
    )
    return Families(nodes, children, there, most)


def sibling_chances(
    p: Tensor, q: Tensor, tokens: Tensor, families: Families
) -> tuple[Tensor, Tensor]:
    """The chance [M, K] that each child is accepted once those before it were refused, and `left_of`'s end [M, 1].

    p and q [N, V] are the laws after each node, tokens [M, K] the children's.
    """
    # x_i is accepted with p_i(x_i) / q_i(x_i), at most 1: Leviathan et al. (arXiv 2211.17192, algorithm 1) for R1,
    # EAGLE-1's released code for R3. A refused x_i leaves p_i+1 = norm(max(0, p_i - q_i)), which is 0 at x_i, and
    # q_i+1 = norm(q_i without x_i), as the draws are without replacement. So
    #   q_i(x) = q(x) / c_i and p_i(x) = max(0, p(x) - s_i q(x)) / t_i, with s_0 = 0 and s_i+1 = s_i + t_i / c_i,
    # for all x but those refused; c_i and t_i make both sum to 1 (c_0 = t_0 = 1).
    # They take two sums over the vocabulary per rank.
    is_there, places = families.is_there, families.inner[:, None] * p.shape[1] + tokens
    p_x, q_x, least = p.take(places), q.take(places), torch.finfo(p.dtype).tiny  # [M, K]
    one = torch.ones_like(p_x[:, 0])
    if len(families.most) == 1:
        return (p_x / q_x.clamp(min=least)).clamp_(max=1.0) * is_there, one[:, None] * is_there
    sums = [
        (torch.zeros_like(one), one, one)
    ]  # s, t and c by rank, for the families that may have that child
    for rank, count in enumerate(families.most[1:]):
        s, t, c = (part[:count] for part in sums[-1])
        s = s.addcdiv(t, c)
        if rank == 0:
            p, q = (law.index_select(0, families.inner[:count]) for law in (p, q))
        p, q = p[:count], q[:count]
        for law in (p, q):
            law.scatter_(1, tokens[:count, rank, None], 0.0)
        c = q.sum(-1).clamp_(min=least)
        sums.append((s, torch.addcmul(p, s[:, None], q, value=-1).clamp_(min=0.0).sum(-1), c))
    parts = pad_sequence([part for each in sums for part in each], padding_value=1.0)
    s, t, c = parts.view(-1, len(sums), 3).unbind(-1)  # [M, K]
    chances = ((p_x - s * q_x).clamp_(min=0.0) * c / (q_x * t).clamp_(min=least)).clamp_(max=1.0)
    # for a missing child s, t and c mean nothing and may be infinite; s never falls
    chances, after = (torch.where(is_there, part, 0.0) for part in (chances, s.addcdiv(t, c)))
    return chances, after.amax(1, keepdim=True)


def left_of(p: Tensor, q: Tensor, end: Tensor) -> Tensor:
    """max(0, p - end q) [.., V], what refused children leave of p, not normalised; p where rounding leaves nothing."""
    left = torch.addcmul(p, end, q, value=-1).clamp_(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _path_first(tree: Tree, refused: Tensor) -> tuple[Tensor, Tensor]:
    """The levels + 1 nodes with the fewest refused nodes on the way to them: these counts, ascending, and the nodes.

    At most one child of each node is not refused, so those of count 0 are a path. The root is never refused.
    """
    refused = refused[1:] if tree.passengers is None else (refused | tree.passengers)[1:]
    blocks, order = (tree.mask[:, 1:] & refused).sum(dim=1).sort(stable=True)
    return blocks[: tree.levels + 1], order[: tree.levels + 1]


def _ending_with(tree: Tree, blocks: Tensor, order: Tensor, at: Tensor, bonus: Tensor) -> Tensor:
    written = tree.tokens.index_select(0, order).roll(-1)
    return _judged(tree, blocks, order, written.index_copy_(0, at, bonus))


def _judged(tree: Tree, *rows: Tensor) -> Tensor:
    rides = [] if tree.passengers is None else [tree.passengers.sum().expand_as(rows[0])]
    return torch.stack([*rows, *rides])
