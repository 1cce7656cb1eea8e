"""A lossless choice among drafted nodes by p and q, the target's and the draft's laws, and typical acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest

import torch
from torch import Tensor

from aerie.configs.schema.decode import TypicalConfig
from aerie.infer.decode.sampling import Sampler, draw, entropy
from aerie.infer.decode.tree import Proposal, Tree

NOT_LOSSLESS = "typical (not lossless)"


@dataclass(frozen=True)
class Verdict:
    path: list[int]  # the accepted nodes, the root first
    tokens: list[int]  # without the root's
    bonus: int
    drafted: int = field(default=0, compare=False)  # nodes that could have been accepted
    # the same on the device, with refused nodes behind: the path, and its tokens without the root's, then the bonus
    nodes: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)
    new: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)

    @property
    def accepted(self) -> int:
        return len(self.tokens)


def verify(tree: Tree, logits: Tensor, sampler: Sampler, typical: TypicalConfig | None = None) -> Verdict:
    """logits [N, V] are the target's; typical replaces the tree's rule where tokens are sampled."""
    if rule_of(tree.proposal, sampler, typical) in ("R0", "R2"):
        return walk(tree, sampler.choose(logits))
    if typical is not None:
        return accept_typical(tree, sampler.law(logits), typical)
    return reject(tree, sampler.law(logits), sampler.generator)


def rule_of(proposal: Proposal | None, sampler: Sampler, typical: TypicalConfig | None = None) -> str:
    if not sampler.decoding.do_sample:
        return "R0"
    if typical is not None:
        return NOT_LOSSLESS
    return "R2" if proposal is None else proposal.rule


def walk(tree: Tree, choice: Tensor) -> Verdict:
    """R0 and R2: the verdict for the target's choice [N], its argmax or draw at every node."""
    if len(tree) == 1:
        root = torch.zeros_like(choice)
        return _verdict(tree, root, root, choice)
    # a node is refused unless it is its parent's choice, which is what the parent's place of the path writes
    blocks, order = _path_first(tree, tree.tokens != choice.index_select(0, tree.parents))
    return _verdict(tree, blocks, order, choice.index_select(0, order))


def reject(tree: Tree, p: Tensor, generator: torch.Generator) -> Verdict:
    """R1, R3 and R4, speculative sampling: the verdict for children drawn from q, and p [N, V]."""
    assert tree.proposal is not None and tree.passengers is None, "only drawn children are verified by rejection"
    if tree.proposal.ranks is not None:
        inner, children, counts = _dynamic_families(tree, tree.proposal.ranks, tree.proposal.width)
    else:
        inner, children, counts = _families(tree.proposal.parents or tuple(tree.parents.tolist()), p.device)
    uniform = torch.rand(children.shape, generator=generator, device=p.device)
    q, tokens = tree.proposal.over(p.shape[-1]), tree.tokens[children]
    given = tokens, (children > 0).sum(-1), counts, uniform, tree.proposal.rule == "R4"
    chosen, times = accept_sibling(p.index_select(0, inner), q.index_select(0, inner), *given)
    # a node is refused unless its parent chose its rank; the root, which stands where there is no child, never is
    ranks = torch.arange(children.shape[1], device=p.device)
    refused = torch.ones(len(tree), dtype=torch.bool, device=p.device)
    refused.index_put_((children,), chosen[:, None] != ranks)
    blocks, order = _path_first(tree, refused)
    length = (blocks == 0).sum(0, keepdim=True)
    last = order.index_select(0, length - 1)  # [1]
    # a leaf, whose c is 0, has refused nothing
    c = p.new_zeros(len(tree)).index_copy_(0, inner, times).index_select(0, last)
    law = residual(p.index_select(0, last), c * q.index_select(0, last))
    return _ending_with(tree, blocks, order, length, draw(law, generator))


def _dynamic_families(tree: Tree, ranks: Tensor, width: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """As `_families`, of families that the device alone knows: some nodes may have no child."""
    count, parents = len(tree), tree.parents[1:]
    node = torch.arange(1, count, device=ranks.device) * (tree.survival[1:] > float("-inf"))  # 0: no token was left
    table = node.new_zeros(count, width)  # by parent and rank
    table.view(-1).scatter_(0, parents * width + ranks[1:], node)
    inner = (table > 0).sum(-1).argsort(descending=True, stable=True)[: count - 1]
    # no more than (N - 1) / n nodes have n children
    counts = tuple((count - 1) // rank for rank in range(1, 1 + min(width, count - 1)))
    return inner, table.index_select(0, inner)[:, : len(counts)], counts


@lru_cache
def _families(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The nodes [M] with children, the largest families first, their children by rank [M, K] (0: there is none), and
    how many nodes have, of each rank, such a child."""
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        families.setdefault(parent, []).append(node)
    inner = sorted(families, key=lambda parent: -len(families[parent]))
    ranks = list(zip_longest(*(families[parent] for parent in inner), fillvalue=0))
    counts = tuple(sum(node > 0 for node in nodes) for nodes in ranks)
    return torch.tensor(inner, device=device), torch.tensor(ranks, device=device).T.contiguous(), counts


def accept_sibling(
    p: Tensor, q: Tensor, tokens: Tensor, sizes: Tensor, counts: Sequence[int], uniform: Tensor, replaced: bool
) -> tuple[Tensor, Tensor]:
    """The rank [M] of the child that each of M nodes accepts (-1: none), and c [M]: max(0, p - c q) is left of p.

    tokens [M, K] were drawn below each node, sizes [M] of them; no more than the first counts[rank] nodes have a child
    of this rank; uniform [M, K] is in [0, 1); replaced: R4.
    """
    # x_i is accepted where r_i < p(x_i) / q(x_i): Leviathan et al. (arXiv 2211.17192, algorithm 1) for R1, SpecInfer
    # (arXiv 2305.09781) for R4, EAGLE-1's released code for R3. A refused x_i leaves norm(max(0, p - q)) of p, and
    # without replacement norm(q without x_i) of q. Where no child is accepted, the bonus token is drawn from that p.
    # By induction what is left of p is max(0, p - c q) / total, and of q it is q / rest but for the tokens drawn, which
    # have nothing left of p: so c grows by total / rest with each refusal.
    is_there = torch.arange(tokens.shape[1], device=p.device) < sizes[:, None]
    tokens = torch.where(is_there, tokens, tokens[:, :1])
    p_x, q_x = p.gather(-1, tokens), q.gather(-1, tokens)
    c, total, rest = torch.zeros_like(q_x), torch.ones_like(q_x), torch.ones_like(q_x)
    if not replaced and len(counts) > 1:
        first = counts[1]
        later = (q_x * is_there)[:first].flip(1).cumsum(1).flip(1)  # what is drawn later is not struck out yet
        struck = q[:first].scatter(-1, tokens[:first], 0.0).sum(-1, keepdim=True)
        rest[:first, 1:] = (struck + later)[:, 1:]
    for rank, count in enumerate(counts[1:], start=1):
        before = slice(count), rank - 1
        c[:count, rank] = c[before] + total[before] / rest[before]
        left = torch.addcmul(p[:count], q[:count], c[:count, rank, None], value=-1.0)
        total[:count, rank] = left.clamp_(min=0.0).sum(-1)
    taken = (uniform * q_x * total < (p_x - c * q_x).clamp_(min=0.0) * rest) & is_there
    chosen = torch.where(taken.any(-1), taken.int().argmax(-1), -1)
    return chosen, (c + total / rest).gather(-1, (sizes - 1).clamp(min=0)[:, None])[:, 0] * (sizes > 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) [.., V], what a refused draw from q leaves of p; p where rounding leaves nothing."""
    left = (p - q).clamp_(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def without(q: Tensor, tokens: Tensor) -> Tensor:
    """q [M, V] with one token [M] struck out, renormalised; zero where nothing else had a chance."""
    left = q.scatter(-1, tokens[..., None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)


def acceptance(tree: Tree, p: Tensor) -> Tensor:
    """The chance [N] that `reject` goes on to each drawn node once at its parent; 0 for the root."""
    assert tree.proposal is not None, "children that were not sampled are accepted with p"
    q, tokens = tree.proposal.over(p.shape[-1]), tree.tokens
    chances = torch.zeros_like(tree.confidence)
    # by parent: the chance that its children so far are all refused, and what they left of p and q
    state = {0: (torch.ones_like(chances[0]), p[0], q[0])}
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        if tree.survival[node] == float("-inf"):
            continue  # the processors had left no token to be drawn
        refused, p_i, q_i = state.get(parent, (torch.ones_like(chances[0]), p[parent], q[parent]))
        token = tokens[node]
        accepted = (_of(p_i, token) / _of(q_i, token).clamp(min=torch.finfo(q.dtype).tiny)).clamp(max=1.0)
        chances[node] = refused * accepted
        struck = without(q_i, token) if tree.proposal.rule == "R3" else q_i
        state[parent] = refused * (1 - accepted), residual(p_i, q_i), struck
    return chances


def accept_typical(tree: Tree, p: Tensor, config: TypicalConfig) -> Verdict:
    """NOT lossless: the longest path of tokens with p(x) > min(epsilon, delta exp(-H(p))) (Medusa, section 2.3.1)."""
    # of equally long paths the most probable; the bonus token is the target's argmax
    p_node = p[tree.parents, tree.tokens]  # [N] p of each node under its parent
    threshold = (config.delta * (-entropy(p)).exp()).clamp_(max=config.epsilon)
    refused = p_node <= threshold[tree.parents]
    refused[0] = False
    if tree.passengers is not None:
        refused |= tree.passengers
    accepted = ~(tree.mask & refused).any(dim=1)
    depth = torch.where(accepted, tree.depth, -1)
    log_p = torch.where(accepted, p_node.log(), 0.0)
    log_p[0] = 0.0
    score = tree.mask.to(log_p.dtype) @ log_p  # [N] log p of the path
    last = torch.where(depth == depth.max(), score, float("-inf")).argmax()
    blocks, order = _path_first(tree, ~tree.mask[last])
    return _ending_with(tree, blocks, order, tree.depth[last][None] + 1, p[last].argmax(-1, keepdim=True))


def _path_first(tree: Tree, refused: Tensor) -> tuple[Tensor, Tensor]:
    """How many refused nodes [levels + 1] are on the way to each of these nodes [levels + 1], those without any first.

    As at most one child of each node is not refused, they are one path. The root is never refused.
    """
    refused = refused[1:] if tree.passengers is None else (refused | tree.passengers)[1:]
    blocks, order = (tree.mask[:, 1:] & refused).sum(dim=1).sort(stable=True)
    return blocks[: tree.levels + 1], order[: tree.levels + 1]


def _ending_with(tree: Tree, blocks: Tensor, order: Tensor, length: Tensor, bonus: Tensor) -> Verdict:
    written = tree.tokens.index_select(0, order).roll(-1)
    return _verdict(tree, blocks, order, written.index_copy_(0, length - 1, bonus))


def _verdict(tree: Tree, blocks: Tensor, order: Tensor, written: Tensor) -> Verdict:
    rides = [] if tree.passengers is None else [tree.passengers.sum().expand_as(blocks)]
    # the cycle's one read of the device
    columns = torch.stack([blocks, order, written, *rides]).tolist()
    length = columns[0].count(0)
    path, new = (column[:length] for column in columns[1:3])
    return Verdict(path, new[:-1], new[-1], len(tree) - 1 - (columns[3][0] if rides else 0), order, written)


def _of(law: Tensor, tokens: Tensor) -> Tensor:
    return law.gather(-1, tokens[..., None]).squeeze(-1)
