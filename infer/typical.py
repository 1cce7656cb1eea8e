"""Medusa's typical acceptance. NOT lossless: the output's law is not the target's.

A drafted token is kept when the target finds it likely enough for its own uncertainty, however it was drafted, so
nothing pays back for the tokens that are kept too often.
Source: Medusa (arXiv 2401.10774), section 2.3.1.
"""

from torch import Tensor

from infer.config import TypicalConfig
from infer.tree import Tree
from infer.verdict import Verdict, ending_at, reached


def accept_typical(tree: Tree, p: Tensor, config: TypicalConfig) -> Verdict:
    """The verdict for the target's laws p [N, V]: the longest path of typical tokens, of equal ones the most probable.

    Token x is typical where p(x) > min(epsilon, delta exp(-H(p))). The bonus token is the target's argmax, as in the
    paper, where every cycle's first token is the greedy one and accepted unseen.
    """
    own = p[tree.parents, tree.tokens]  # [N] p of each node under its parent
    threshold = (config.delta * (-entropy(p)).exp()).clamp_(max=config.epsilon)
    alive = reached(tree, own <= threshold[tree.parents])
    depth = tree.depth.where(alive, tree.depth.new_full((), -1))
    chance = own.log().where(alive, own.new_zeros(()))
    chance[0] = 0.0
    score = tree.mask.to(chance.dtype) @ chance  # [N] log p of the path
    last = score.where(depth == depth.max(), score.new_full((), float("-inf"))).argmax()
    return ending_at(tree, last, p[last].argmax(-1))


def entropy(p: Tensor) -> Tensor:
    """H(p) in nats [..] of laws [.., V]; tokens without a chance count nothing."""
    return -p.xlogy(p).sum(-1)
