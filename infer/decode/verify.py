"""A lossless choice among drafted nodes by p and q, the target's and the draft's laws, and typical acceptance."""

from dataclasses import dataclass
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
    rides = [False] * len(tree) if tree.passengers is None else tree.passengers.tolist()
    # one synchronisation: so few numbers are walked faster on the host than a device starts kernels for them
    tokens, parents, chosen = torch.stack([tree.tokens, tree.parents, choice]).tolist()
    path = [0]
    for node in range(1, len(tree)):  # a parent stands before its children
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]] and not rides[node]:
            path.append(node)
    return Verdict(path, [tokens[node] for node in path[1:]], chosen[path[-1]])


def reject(tree: Tree, p: Tensor, generator: torch.Generator) -> Verdict:
    """R1, R3 and R4, speculative sampling: the verdict for children drawn from q, and p [N, V]."""
    assert tree.proposal is not None and tree.passengers is None, "only drawn children are verified by rejection"
    q = tree.proposal.over(p.shape[-1])
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        families.setdefault(parent, []).append(node)
    parents = sorted(families, key=lambda parent: -len(families[parent]))  # the largest families first
    inner = torch.tensor(parents, device=p.device)  # [M]
    ranks = zip_longest(*(families[parent] for parent in parents))  # of each rank, the nodes [m] below the first m
    children = [torch.tensor([node for node in nodes if node], device=p.device) for nodes in ranks]
    uniform = torch.rand(len(parents), len(children), generator=generator, device=p.device)
    siblings = [tree.tokens[nodes] for nodes in children]
    chosen, left = accept_sibling(p[inner], q[inner], siblings, uniform, tree.proposal.rule == "R4")
    # a node is refused unless its parent chose its rank
    refused = torch.ones(len(tree), dtype=torch.bool, device=p.device)
    for rank, nodes in enumerate(children):
        refused[nodes] = chosen[: nodes.shape[0]] != rank
    last = torch.where(_reached(tree, refused), tree.depth, -1).argmax()  # the deepest
    # [V]: a leaf has refused nothing
    law = p.index_copy(0, inner, left)[last]
    return _ending_at(tree, last, draw(law[None], generator))


def accept_sibling(
    p: Tensor, q: Tensor, siblings: list[Tensor], uniform: Tensor, replaced: bool
) -> tuple[Tensor, Tensor]:
    """The rank [M] of the child that each of M nodes accepts (-1: none), and what is left of p [M, V]."""
    # siblings[rank] [m] are the tokens drawn below the first m nodes; uniform [M, K] is in [0, 1); replaced: R4
    # x_i is accepted where r_i < p(x_i) / q(x_i): Leviathan et al. (arXiv 2211.17192, algorithm 1) for R1, SpecInfer
    # (arXiv 2305.09781) for R4, EAGLE-1's released code for R3. A refused x_i leaves norm(max(0, p - q)) of p, and
    # without replacement norm(q without x_i) of q. Where no child is accepted, the bonus token is drawn from that p.
    p, q = p.clone(), q.clone()
    chosen = torch.full(p.shape[:1], -1, device=p.device)
    for rank, tokens in enumerate(siblings):
        count = tokens.shape[0]
        p_i, q_i = p[:count], q[:count]  # views
        taken = uniform[:count, rank] * _of(q_i, tokens) < _of(p_i, tokens)
        chosen[:count] = torch.where((chosen[:count] < 0) & taken, rank, chosen[:count])
        p[:count] = residual(p_i, q_i)
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
    accepted = _reached(tree, p_node <= threshold[tree.parents])
    depth = torch.where(accepted, tree.depth, -1)
    log_p = torch.where(accepted, p_node.log(), 0.0)
    log_p[0] = 0.0
    score = tree.mask.to(log_p.dtype) @ log_p  # [N] log p of the path
    last = torch.where(depth == depth.max(), score, float("-inf")).argmax()
    return _ending_at(tree, last, p[last].argmax(-1))


def _reached(tree: Tree, refused: Tensor) -> Tensor:
    """Which nodes [N] are on a path without a refused node."""
    refused = refused.clone()
    refused[0] = False
    if tree.passengers is not None:
        refused |= tree.passengers
    return ~(tree.mask & refused).any(dim=1)


def _ending_at(tree: Tree, last: Tensor, bonus: Tensor) -> Verdict:
    # the one device synchronisation
    row = torch.cat([tree.mask[last].to(tree.tokens.dtype), tree.tokens, bonus.reshape(1)]).tolist()
    path = [node for node in range(len(tree)) if row[node]]
    return Verdict(path, [row[len(tree) + node] for node in path[1:]], row[-1])


def _of(law: Tensor, tokens: Tensor) -> Tensor:
    return law.gather(-1, tokens[..., None]).squeeze(-1)
