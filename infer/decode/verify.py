"""A lossless choice among the drafted nodes (rules R0 to R4), and Medusa's typical acceptance, which is NOT lossless.

R0: the target's argmax. R2: its own draw at every node, whatever was drafted. R1, R3, R4: speculative sampling of
children that were drawn from q. p are the target's laws, q the draft's, both after the processors.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from aerie.configs.schema.decode import TypicalConfig
from aerie.infer.decode.sampling import Sampler, draw, entropy
from aerie.infer.decode.tree import Proposal, Tree

Verification = Literal["R0", "R1", "R2", "R3", "R4", "typical (not lossless)"]
NOT_LOSSLESS: Verification = "typical (not lossless)"


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes from the root down, their tokens without the root's, and the bonus token."""

    path: list[int]
    tokens: list[int]
    bonus: int

    @property
    def accepted(self) -> int:
        return len(self.tokens)


def verify(tree: Tree, logits: Tensor, sampler: Sampler, typical: TypicalConfig | None = None) -> Verdict:
    """The verdict for the target's logits [N, V] by the tree's rule; typical replaces it where tokens are sampled."""
    rule = rule_of(tree.proposal, sampler, typical)
    if rule in ("R0", "R2"):
        return walk(tree, sampler.choose(logits))
    if typical is not None:
        return accept_typical(tree, sampler.law(logits), typical)
    return reject(tree, sampler.law(logits), sampler.generator)


def rule_of(proposal: Proposal | None, sampler: Sampler, typical: TypicalConfig | None = None) -> Verification:
    """The rule that verifies a tree of this proposal under these settings."""
    if not sampler.decoding.do_sample:
        return "R0"
    if typical is not None:
        return NOT_LOSSLESS
    return "R2" if proposal is None else proposal.rule


def walk(tree: Tree, choice: Tensor) -> Verdict:
    """R0 and R2: the verdict for the target's choice [N] at every node. Siblings must differ."""
    # a node is reached when it and all its ancestors are what the target chose at their parents
    rides = [False] * len(tree) if tree.passengers is None else tree.passengers.tolist()
    # one synchronisation; so few numbers are walked faster on the host than a device starts the kernels for them
    tokens, parents, chosen = torch.stack([tree.tokens, tree.parents, choice]).tolist()
    path = [0]
    for node in range(1, len(tree)):  # a parent stands before its children
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]] and not rides[node]:
            path.append(node)
    return Verdict(path, [tokens[node] for node in path[1:]], chosen[path[-1]])


def reject(tree: Tree, p: Tensor, generator: torch.Generator) -> Verdict:
    """R1, R3 and R4: the verdict for a tree of sampled children and the target's laws p [N, V]."""
    assert tree.proposal is not None and tree.passengers is None, "only drawn children are verified by rejection"
    q = tree.proposal.over(p.shape[-1])
    # every inner node is tried at once, and the path is read off afterwards: two synchronisations in all
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
    # a node is refused unless its parent chose its rank; parents that nothing reaches do no harm
    refused = torch.ones(len(tree), dtype=torch.bool, device=p.device)
    for rank, nodes in enumerate(children):
        refused[nodes] = chosen[: nodes.shape[0]] != rank
    last = torch.where(_reached(tree, refused), tree.depth, -1).argmax()  # the deepest
    law = p.index_copy(0, inner, left)[last]  # [V]: a leaf has refused nothing
    return _ending_at(tree, last, draw(law[None], generator))


def accept_sibling(
    p: Tensor, q: Tensor, siblings: list[Tensor], uniform: Tensor, replaced: bool
) -> tuple[Tensor, Tensor]:
    """R1, R3 and R4: the rank [M] of the child that each of M nodes accepts (-1: none); what is left of p [M, V].

    p, q [M, V]; siblings[rank] [m] are the tokens drawn at that rank below the first m nodes, where m may fall from
    rank to rank; uniform [M, K] in [0, 1). replaced: siblings were drawn with replacement (R4), else without (R3).
    """
    # x_i is accepted where r_i < p(x_i) / q(x_i): Leviathan et al. (arXiv 2211.17192, algorithm 1) for R1, SpecInfer
    # (arXiv 2305.09781) for R4, EAGLE-1's released code for R3. A refused x_i leaves norm(max(0, p - q)) of p, and
    # without replacement norm(q without x_i) of q. Where no child is accepted, what is left of p is the law of the
    # token that follows; elsewhere it has no meaning.
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
    """norm(max(0, p - q)) [.., V], what a refused draw from q leaves of p."""
    # where rounding leaves nothing (p = q, which refuses nothing but by a float's error) it is p
    left = (p - q).clamp_(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def without(q: Tensor, tokens: Tensor) -> Tensor:
    """q [M, V] with one token [M] struck out, renormalised; all zero where nothing else had a chance."""
    left = q.scatter(-1, tokens[..., None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)


def acceptance(tree: Tree, p: Tensor) -> Tensor:
    """The chance [N] that `reject` goes on to each drawn node once at its parent; 0 for the root. p [N, V]."""
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
    """NOT lossless: the longest path of tokens that the target's laws p [N, V] find typical (Medusa, section 2.3.1)."""
    # Token x is typical where p(x) > min(epsilon, delta exp(-H(p))), however it was drafted: nothing pays back for the
    # tokens that are kept too often. Of equally long paths the most probable is taken. The bonus token is the target's
    # argmax, as in the paper, where every cycle's first token is the greedy one and accepted unseen.
    p_node = p[tree.parents, tree.tokens]  # [N] p of each node under its parent
    threshold = (config.delta * (-entropy(p)).exp()).clamp_(max=config.epsilon)
    alive = _reached(tree, p_node <= threshold[tree.parents])
    depth = torch.where(alive, tree.depth, -1)
    log_p = torch.where(alive, p_node.log(), 0.0)
    log_p[0] = 0.0
    score = tree.mask.to(log_p.dtype) @ log_p  # [N] log p of the path
    last = torch.where(depth == depth.max(), score, float("-inf")).argmax()
    return _ending_at(tree, last, p[last].argmax(-1))


def _reached(tree: Tree, refused: Tensor) -> Tensor:
    """Which nodes [N] stand on a path without a refused node; refused [N] is boolean, the root's entry is not read."""
    refused = refused.clone()
    refused[0] = False
    if tree.passengers is not None:
        refused |= tree.passengers
    return ~(tree.mask & refused).any(dim=1)


def _ending_at(tree: Tree, last: Tensor, bonus: Tensor) -> Verdict:
    """The verdict of the path down to node last [] and the bonus token [] after it: the one device synchronisation."""
    row = torch.cat([tree.mask[last].to(tree.tokens.dtype), tree.tokens, bonus.reshape(1)]).tolist()
    count = len(tree)
    path = [node for node in range(count) if row[node]]
    return Verdict(path, [row[count + node] for node in path[1:]], row[-1])


def _of(law: Tensor, tokens: Tensor) -> Tensor:
    """The entries [..] of laws [.., V] at tokens [..]."""
    return law.gather(-1, tokens[..., None]).squeeze(-1)
