"""Accepts drafted nodes, losslessly, by the target's distributions p and the head's q.

How the children of a tree were made decides how they are judged (docs/lossless.md has the proofs):

    R0  temperature 0, any children    a child is kept if it is the target's argmax at its parent
    R2  q's most probable tokens       a child is kept if the target draws it from p at its parent
    R1  a chain, each drawn from q     a child is kept with chance min(1, p/q): speculative sampling
    R3  siblings, drawn from q         R1 for each sibling in turn, with what earlier refusals left
        without replacement            of p

`judge` judges all nodes at once. The sizes of its tensors depend on the tree's form alone, so a
CUDA graph can hold the whole verification. Only `read` waits for the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from aerie.infer.decode.sampling import Sampler, draw
from aerie.infer.decode.tree import DraftLaws, Tree


@dataclass(frozen=True)
class Verdict:
    path: list[int]  # the accepted nodes, the root first
    tokens: list[int]  # the tokens of the path, without the root's
    bonus: int  # the target's own token after the path
    drafted: int = field(default=0, compare=False)  # nodes that could have been accepted
    # On the device: the path, and the token that is written after each of its nodes (the bonus
    # token last). Refused nodes follow.
    nodes: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)
    new: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)

    @property
    def accepted(self) -> int:
        return len(self.tokens)


def judge(tree: Tree, logits: Tensor, sampler: Sampler) -> Tensor:
    """The matrix [3 or 4, L] that `read` turns into a verdict; logits [N, V] are the target's.

    Each column is a node, and the accepted path comes first. Take a root (token 5) with the
    children 1 (token 8) and 2 (token 3), node 3 (token 4) below 1, and node 4 (token 6) below 2.
    The target writes 3 after the root, 7 after node 1 and 9 after node 2. So node 2 is accepted,
    and 1, 3 and 4 are refused. A path of two levels has at most L = 3 nodes:

        refused nodes on the way, itself included   0 0 1
        node                                        0 2 1
        token that is written after it              3 9 7

    The zeros of the first row mark the path 0, 2, after which the target writes 3, and then 9, the
    bonus token. Nodes 1, 3 and 4 have 1, 2 and 1 refused nodes on the way; of equals the lower
    number comes first. If the tree has passengers, a fourth row holds their number.
    """
    if rule_of(tree.draft_laws, sampler) in ("R0", "R2"):
        return walk(tree, sampler.choose(logits))
    return reject(tree, sampler.law(logits), sampler.generator)


def rule_of(proposal: DraftLaws | None, sampler: Sampler) -> str:
    """The rule, R0 to R3, for children that these laws gave (None: picked by rank)."""
    if not sampler.decoding.do_sample:
        return "R0"
    return "R2" if proposal is None else proposal.rule


def read(judged: Tensor, count: int) -> Verdict:
    """The verdict on a tree of count nodes; `judged` is `judge`'s matrix."""
    refused, nodes, written, *passengers = judged.tolist()  # the only wait for the device
    length = refused.count(0)
    num_passengers = passengers[0][0] if passengers else 0
    return Verdict(
        path=nodes[:length],
        tokens=written[: length - 1],
        bonus=written[length - 1],
        drafted=count - 1 - num_passengers,
        nodes=judged[1],
        new=judged[2],
    )


class PathFirst(NamedTuple):
    """The levels + 1 nodes with the fewest refused nodes on the way to them, fewest first.

    At most one child of each node is accepted, so the nodes with count 0 form a path.
    """

    refused: Tensor  # [L] these counts; the root, never refused, comes first
    nodes: Tensor  # [L]


def path_first(tree: Tree, refused: Tensor) -> PathFirst:
    """refused [N]: whether each node is refused if its parent is accepted."""
    if tree.passengers is not None:
        refused = refused | tree.passengers
    counts = (tree.mask[:, 1:] & refused[1:]).sum(dim=1)  # [N]
    counts, nodes = counts.sort(stable=True)
    return PathFirst(counts[: tree.levels + 1], nodes[: tree.levels + 1])


def _judged(tree: Tree, order: PathFirst, written: Tensor) -> Tensor:
    rows = [*order, written]
    if tree.passengers is not None:
        rows.append(tree.passengers.sum().expand_as(written))
    return torch.stack(rows)


# --- R0 and R2: the target chooses a token at every node


def walk(tree: Tree, choice: Tensor) -> Tensor:
    """`judge` by the target's choice [N] at every node: its argmax, or a draw from p."""
    if len(tree) == 1:
        root = torch.zeros_like(choice)
        return _judged(tree, PathFirst(root, root), choice)
    refused = tree.tokens != choice.index_select(0, tree.parents)  # [N]
    order = path_first(tree, refused)
    return _judged(tree, order, choice.index_select(0, order.nodes))


# --- R1 and R3: speculative sampling


@dataclass(frozen=True)
class Families:
    """M parents, those with the most children first, and up to K children of each."""

    inner: Tensor  # [M] the parents' nodes
    # [M, K] the children's nodes, by rank; a missing child repeats the first (0 if there is none)
    children: Tensor
    is_there: Tensor  # [M, K] whether the parent has a child of that rank
    most: tuple[int, ...]  # [K] how many of the M parents, at most, have a child of that rank


class Chances(NamedTuple):
    """The chances of the children of M parents, each judged as if its parent were accepted."""

    q: Tensor  # [N, V] row i is the distribution that node i's children were drawn from
    families: Families
    accept: Tensor  # [M, K] the chance of each child, once the children before it were refused
    weight: Tensor  # [M, 1] `left_of`'s weight of q, once all of them were refused


def reject(tree: Tree, p: Tensor, generator: torch.Generator) -> Tensor:
    """`judge` for children that were drawn from q; p [N, V]."""
    q, families, accept, weight = _chances(tree, p)
    # --- every parent takes the first child whose uniform number is below its chance
    uniform = torch.rand(accept.shape, generator=generator, device=p.device)
    # max gives the first of equals: the accepted sibling that comes first
    takes_one, rank = (uniform < accept).byte().max(-1)  # [M]
    # A parent that takes no child takes node 0 instead, the root, which is never refused.
    taken = families.children.gather(1, rank[:, None])[:, 0] * takes_one
    refused = torch.ones_like(tree.tokens, dtype=torch.bool).scatter_(0, taken, 0)  # [N]
    order = path_first(tree, refused)
    # --- the bonus token comes from what the refused children left of p at the path's last node
    end = (order.refused[1:] == 0).sum(0, keepdim=True)  # [1] the last node's column
    last = order.nodes.index_select(0, end)
    is_parent, row = (families.inner == last).byte().max(0, keepdim=True)
    weight = weight.index_select(0, row) * is_parent  # a leaf refused no child: 0
    left = left_of(p.index_select(0, last), q.index_select(0, last), weight)  # [1, V]
    # every node is followed by the token of the next one, and the last by the bonus token
    written = tree.tokens.index_select(0, order.nodes).roll(-1)
    written = written.index_copy_(0, end, draw(left, generator))
    return _judged(tree, order, written)


def acceptance(tree: Tree, p: Tensor) -> Tensor:
    """The chance [N] that `reject` accepts each drawn node once its parent is; 0 for the root."""
    _, families, accept, _ = _chances(tree, p)
    refused = (1.0 - accept).cumprod(-1)  # [M, K] the chance that it and all before it are refused
    reached = accept * F.pad(refused[:, :-1], (1, 0), value=1.0)
    # A missing child has its first sibling's node, and adds a chance of 0 there.
    nodes = families.children.flatten()
    return torch.zeros_like(tree.confidence).index_add_(0, nodes, reached.flatten())


def _chances(tree: Tree, p: Tensor) -> Chances:
    proposal = tree.draft_laws
    assert proposal is not None, "only drawn children are verified by rejection"
    assert tree.passengers is None
    if proposal.ranks is not None:
        families = _families_on_device(tree, proposal.ranks, proposal.width)
    elif proposal.parents is not None:
        families = _cached_families(proposal.parents, p.device)
    else:  # a tree with missing tokens: too many forms to cache
        families = families_of(tree.parents.tolist(), p.device)
    q = proposal.over(p.shape[-1])  # [N, V]
    tokens = tree.tokens.take(families.children)  # [M, K]
    return Chances(q, families, *sibling_chances(p, q, tokens, families))


def sibling_chances(
    p: Tensor, q: Tensor, tokens: Tensor, families: Families
) -> tuple[Tensor, Tensor]:
    """The chance [M, K] that each child is accepted once the children before it were refused.

    Also `left_of`'s weight [M, 1] of q once all of them were refused. p and q [N, V] are the
    distributions after each node; tokens [M, K] are the children's.
    """
    # Child x_i is accepted with p_i(x_i) / q_i(x_i), at most 1: Leviathan et al. (arXiv 2211.17192,
    # algorithm 1) for one child, EAGLE-1's released code for siblings. A refused x_i leaves
    #   p_i+1 = norm(max(0, p_i - q_i)), which is 0 at x_i, and
    #   q_i+1 = norm(q_i without x_i), as the draws are without replacement.
    # So for every x that was not refused
    #   q_i(x) = q(x) / c_i    and    p_i(x) = max(0, p(x) - s_i q(x)) / t_i
    # with s_0 = 0, t_0 = c_0 = 1, and s_i+1 = s_i + t_i / c_i. c_i and t_i make q_i and p_i sum to
    # 1, and cost two sums over the vocabulary for each rank.
    cells = families.inner[:, None] * p.shape[1] + tokens  # [M, K]
    p_x = p.take(cells)
    q_x = q.take(cells)
    tiny = torch.finfo(p.dtype).tiny
    is_there = families.is_there
    ones = torch.ones_like(p_x[:, 0])  # [M]
    if len(families.most) == 1:  # no child has siblings
        accept = (p_x / q_x.clamp(min=tiny)).clamp_(max=1.0)  # p(x) / q(x)
        return accept * is_there, ones[:, None] * is_there
    s, t, c = torch.zeros_like(ones), ones, ones
    by_rank = [(s, t, c)]
    for rank, count in enumerate(families.most[1:]):
        # only the first `count` parents can have a child of the next rank
        s = s[:count].addcdiv(t[:count], c[:count])
        if rank == 0:
            parents = families.inner[:count]
            p = p.index_select(0, parents)  # copies: refused tokens are deleted from them
            q = q.index_select(0, parents)
        refused = tokens[:count, rank, None]
        p = p[:count].scatter_(1, refused, 0.0)
        q = q[:count].scatter_(1, refused, 0.0)
        c = q.sum(-1).clamp_(min=tiny)
        t = torch.addcmul(p, s[:, None], q, value=-1).clamp_(min=0.0).sum(-1)
        by_rank.append((s, t, c))
    # [M, K, 3]: one padded stack, because each rank has at most as many parents as the one before
    stack = pad_sequence([*chain.from_iterable(by_rank)], padding_value=1.0)
    s, t, c = stack.view(-1, len(by_rank), 3).unbind(-1)  # [M, K]
    accept = (p_x - s * q_x).clamp_(min=0.0) * c / (q_x * t).clamp_(min=tiny)  # p_i(x) / q_i(x)
    # For a missing child s, t and c mean nothing, and may be infinite.
    accept = torch.where(is_there, accept.clamp_(max=1.0), 0.0)
    # s never falls with the rank, so the largest s belongs to the last child.
    weight = torch.where(is_there, s.addcdiv(t, c), 0.0).amax(1, keepdim=True)
    return accept, weight


def left_of(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """What refused children leave of p [.., V]: max(0, p - weight q), not normalised.

    Where rounding leaves nothing, p itself.
    """
    left = torch.addcmul(p, weight, q, value=-1).clamp_(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def families_of(parents: Iterable[int], device: torch.device) -> Families:
    """The families of a tree whose parents [N] the host knows."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if node > 0:
            children.setdefault(parent, []).append(node)
    inner = sorted(children, key=lambda parent: -len(children[parent]))
    width = len(children[inner[0]])
    nodes = []
    is_there = []
    for parent in inner:
        siblings = children[parent]
        num_missing = width - len(siblings)
        nodes.append(siblings + siblings[:1] * num_missing)
        is_there.append([True] * len(siblings) + [False] * num_missing)
    most = tuple(sum(column) for column in zip(*is_there, strict=True))
    return Families(
        torch.tensor(inner, device=device),
        torch.tensor(nodes, device=device),
        torch.tensor(is_there, device=device),
        most,
    )


_cached_families = cache(families_of)  # CUDA graphs read its tensors as long as they live


def _families_on_device(tree: Tree, ranks: Tensor, width: int) -> Families:
    """The families of a tree whose parents only the device knows; ranks [N] are below width."""
    count = len(tree)
    node = torch.arange(1, count, device=ranks.device)
    node = node * (tree.survival[1:] > float("-inf"))  # 0: no token was left to draw
    table = node.new_zeros(count, width)  # the children's nodes, by parent and rank
    table.view(-1).scatter_(0, tree.parents[1:] * width + ranks[1:], node)
    # N nodes have at most N - 1 parents and N - 1 children
    inner = (table > 0).sum(-1).argsort(descending=True, stable=True)[: count - 1]
    children = table.index_select(0, inner)[:, : count - 1]
    is_there = children > 0
    # no more than (N - 1) / n nodes have n children
    most = tuple((count - 1) // (rank + 1) for rank in range(children.shape[1]))
    return Families(inner, torch.where(is_there, children, children[:, :1]), is_there, most)
