"""A lossless choice among drafted nodes by p and q, the target's and the draft's laws, and typical acceptance."""

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
    q = tree.proposal.over(p.shape[-1])
    if tree.proposal.ranks is not None:
        inner, children, sizes = _dynamic_families(tree, tree.proposal.ranks, tree.proposal.width)
    else:
        (inner, children), sizes = _families(tree.proposal.parents or tuple(tree.parents.tolist()), p.device), None
    uniform = torch.rand(len(inner), len(children), generator=generator, device=p.device)
    siblings = [tree.tokens[nodes] for nodes in children]
    chosen, left = accept_sibling(p[inner], q[inner], siblings, uniform, tree.proposal.rule == "R4", sizes)
    # a node is refused unless its parent chose its rank
    refused = torch.ones(len(tree), dtype=torch.bool, device=p.device)
    for rank, nodes in enumerate(children):
        refused[nodes] = chosen[: nodes.shape[0]] != rank
    blocks, order = _path_first(tree, refused)
    length = (blocks == 0).sum(0, keepdim=True)
    # [1, V]: a leaf has refused nothing
    law = p.index_copy(0, inner, left).index_select(0, order.index_select(0, length - 1))
    return _ending_with(tree, blocks, order, length, draw(law, generator))


def _dynamic_families(tree: Tree, ranks: Tensor, width: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """As `_families`, of families that the device alone knows, and their sizes [M]; 0 where there is no such child."""
    count, parents = len(tree), tree.parents[1:]
    node = torch.arange(1, count, device=ranks.device) * (tree.survival[1:] > float("-inf"))  # 0: no token was left
    table = node.new_zeros(count, width)  # by parent and rank
    table.view(-1).scatter_(0, parents * width + ranks[1:], node)
    sizes, inner = (table > 0).sum(-1).sort(descending=True, stable=True)
    # no more than (N - 1) / n nodes have n children
    table = table.index_select(0, inner)
    children = [table[: (count - 1) // (rank + 1), rank] for rank in range(min(width, count - 1))]
    return inner[: count - 1], children, sizes[: count - 1]


@lru_cache
def _families(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The nodes [M] with children, the largest families first, and of each rank the children [m] of the first m."""
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        families.setdefault(parent, []).append(node)
    inner = sorted(families, key=lambda parent: -len(families[parent]))
    ranks = zip_longest(*(families[parent] for parent in inner))
    children = [torch.tensor([node for node in nodes if node], device=device) for nodes in ranks]
    return torch.tensor(inner, device=device), children


def accept_sibling(
    p: Tensor, q: Tensor, siblings: list[Tensor], uniform: Tensor, replaced: bool, sizes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rank [M] of the child that each of M nodes accepts (-1: none), and what is left of p [M, V]."""
    # siblings[rank] [m] are the tokens drawn below the first m nodes; uniform [M, K] is in [0, 1); replaced: R4
    # sizes [M]: of the families, where siblings[rank] has some nodes without such a child too
    # x_i is accepted where r_i < p(x_i) / q(x_i): Leviathan et al. (arXiv 2211.17192, algorithm 1) for R1, SpecInfer
    # (arXiv 2305.09781) for R4, EAGLE-1's released code for R3. A refused x_i leaves norm(max(0, p - q)) of p, and
    # without replacement norm(q without x_i) of q. Where no child is accepted, the bonus token is drawn from that p.
    p, q = p.clone(), q.clone()
    chosen = torch.full(p.shape[:1], -1, device=p.device)
    for rank, tokens in enumerate(siblings):
        count = tokens.shape[0]
        p_i, q_i = p[:count], q[:count]  # views
        taken = uniform[:count, rank] * _of(q_i, tokens) < _of(p_i, tokens)
        left = residual(p_i, q_i)
        if sizes is not None:
            is_there = sizes[:count] > rank
            taken, left = taken & is_there, torch.where(is_there[:, None], left, p_i)
        chosen[:count] = torch.where((chosen[:count] < 0) & taken, rank, chosen[:count])
        p[:count] = left
        if not replaced and rank + 1 < len(siblings):
            q[:count] = without(q_i, tokens)
    return chosen, p


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
