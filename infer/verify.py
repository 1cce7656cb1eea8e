"""The lossless choice: which drafted path the target would have written itself, and the token after it.

R0, greedy: the longest path of the target's argmax.

R2, children that were picked deterministically: let the target choose one token at every node, x_i from
p(. | path to i). Walk from the root: when the choice at a node is one of its children, go there; else the choice is the
bonus token. Every token of the walk is the target's own choice, so the output has the target's law whatever was
drafted. That is the rule of EAGLE-2 and SpecInfer for point-mass candidates (accept child x with probability p(x), else
strike it out, renormalise, try its sibling, at last draw from what remains): drawing first and looking the draw up
among the children accepts x with probability p(x), and a draw that is no child has the law of the remainder.

R1, R3, R4, children that were drawn at random: `infer/rejection.py`.
"""

from typing import Literal

import torch
from torch import Tensor

from infer.config import TypicalConfig
from infer.rejection import reject
from infer.sampling import Sampler
from infer.tree import Proposal, Tree
from infer.typical import accept_typical
from infer.verdict import Verdict

__all__ = ["NOT_LOSSLESS", "Verdict", "rule_of", "verify", "walk"]

Verification = Literal["R0", "R1", "R2", "R3", "R4", "typical (not lossless)"]
NOT_LOSSLESS: Verification = "typical (not lossless)"


def verify(tree: Tree, logits: Tensor, sampler: Sampler, typical: TypicalConfig | None = None) -> Verdict:
    """The verdict for the target's logits [N, V] at every node, by the rule that the tree's children ask for.

    typical, which is not lossless, replaces that rule where tokens are sampled.
    """
    rule = rule_of(tree.proposal, sampler, typical)
    if rule in ("R0", "R2"):
        return walk(tree, sampler.choose(logits))
    if rule == NOT_LOSSLESS:
        assert typical is not None
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
    """The verdict for the target's choice [N] at every node. Siblings must differ.

    One device synchronisation. A node is reached when it and all its ancestors are what the target chose at their
    parents; so many numbers are walked faster on the host than a device starts the kernels for them.
    """
    count = len(tree)
    columns = [tree.tokens, tree.parents, choice]
    if tree.passengers is not None:
        columns.append(tree.passengers.to(choice.dtype))
    row = torch.cat(columns).tolist()
    chosen = row[2 * count : 3 * count]
    rides = row[3 * count :] or [0] * count
    path = [0]
    for node in range(1, count):  # in level order, so that a parent is walked before its children
        if row[count + node] == path[-1] and row[node] == chosen[path[-1]] and not rides[node]:
            path.append(node)
    return Verdict(path, [row[node] for node in path[1:]], chosen[path[-1]])
