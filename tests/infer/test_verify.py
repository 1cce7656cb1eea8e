"""Verification: exact laws by enumeration, the walk, typical acceptance."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import TypicalConfig
from aerie.infer.decode import verify as rejection
from aerie.infer.decode.sampling import draw, entropy
from aerie.infer.decode.tree import Proposal, Tree, ancestors
from aerie.infer.decode.verify import NOT_LOSSLESS, Verdict, accept_sibling, accept_typical, rule_of, verify, walk
from tests.infer.laws import SETTINGS, sampler

VOCAB = 5
RAGGED = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1))


def tree(tokens: list[int], parents: list[int], depth: list[int]) -> Tree:
    above, zero = torch.tensor(parents), torch.zeros(len(tokens))
    mask, levels = ancestors(above, max(*depth, 1)), max(depth)
    return Tree(torch.tensor(tokens), above, torch.tensor(depth), mask, zero, zero, levels, levels)


@pytest.mark.parametrize("riding", [False, True])
def test_the_walk_is_that_of_a_naive_descent(riding: bool) -> None:
    """Random trees, with and without passengers, which look like children and are none."""
    lengths = set()
    for seed in range(300):
        dice = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, 24, (1,), generator=dice))
        parents, depth = [0], [0]
        for node in range(1, count):
            parents.append(int(torch.randint(0, node, (1,), generator=dice)))
            depth.append(depth[parents[node]] + 1)
        rank = [sum(parents[other] == parents[node] for other in range(1, node)) for node in range(count)]
        rides = [riding and node > 0 and node % 3 == 0 for node in range(count)]
        tokens = [max(0, each - 1) if ride else each for each, ride in zip(rank, rides, strict=True)]
        choice = torch.randint(0, 3, (count,), generator=dice)
        grown = replace(tree(tokens, parents, depth), passengers=torch.tensor(rides) if riding else None)
        path, known = [0], True
        while known:
            wanted = int(choice[path[-1]])
            below = [n for n in range(1, count) if parents[n] == path[-1] and tokens[n] == wanted and not rides[n]]
            known = bool(below)
            path += below[:1]
        assert walk(grown, choice) == Verdict(path, [tokens[node] for node in path[1:]], int(choice[path[-1]]))
        lengths.add(len(path))
    assert {1, 2, 3, 4} <= lengths


JUST_BELOW_ONE = 1.0 - 2.0**-53


def threshold(accepts: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """The largest uniform [count] that is still accepted, by bisection: the exact chance of acceptance."""
    low, high = torch.zeros(count, dtype=torch.double), torch.ones(count, dtype=torch.double)
    for _ in range(60):
        middle = (low + high) / 2
        taken = accepts(middle)
        low, high = torch.where(taken, middle, low), torch.where(taken, high, middle)
    return torch.where(accepts(torch.full_like(low, JUST_BELOW_ONE)), torch.ones_like(low), low)


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_siblings_have_the_targets_law_exactly(count: int, replaced: bool, temperature: float, top_p: float) -> None:
    """By enumeration of every way to draw the siblings, of the one accepted, and of the bonus token. One child: R1."""
    # target and draft differ by about as much as they agree
    logits, change = 0.8 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5))
    p0, q0 = sampler(temperature, top_p).law(torch.stack([logits, logits + change])).double()
    count = count if replaced else min(count, int((q0 > 0).sum()))  # fewer survivors: fewer are drafted
    rows, chances = [], []
    for tokens in itertools.product(range(VOCAB), repeat=count):
        chance, left = 1.0, q0.clone()
        for token in tokens:
            chance *= float(left[token] / left.sum()) if left.sum() > 0 else 0.0
            if not replaced:
                left[token] = 0.0
        if chance > 0:
            rows.append(tokens)
            chances.append(chance)
    siblings = [torch.tensor(column) for column in zip(*rows, strict=True)]
    p, q = p0.expand(len(rows), -1), q0.expand(len(rows), -1)
    refuse = torch.full((len(rows), count), JUST_BELOW_ONE, dtype=torch.double)
    alive, written = torch.tensor(chances, dtype=torch.double), torch.zeros(VOCAB, dtype=torch.double)
    for rank in range(count):

        def accepts(u: Tensor, rank: int = rank) -> Tensor:
            uniform = torch.cat([refuse[:, :rank], u[:, None], refuse[:, rank + 1 :]], 1)
            return accept_sibling(p, q, siblings, uniform, replaced)[0] == rank

        share = threshold(accepts, len(rows))
        written.index_add_(0, siblings[rank], alive * share)
        alive = alive * (1 - share)
    written += alive @ accept_sibling(p, q, siblings, refuse, replaced)[1]
    torch.testing.assert_close(written, p0, atol=1e-6, rtol=0)


def random_tree(dice: torch.Generator, rule: Any) -> tuple[Tree, Tensor]:
    """A tree of sampled children, ragged, siblings apart from one another, and the target's logits; R1: a chain."""
    q, parents, depth, tokens = [], [0], [0], [0]
    for node in itertools.count():
        if node == len(parents) or len(parents) > 14:
            break
        q.append((1.5 * torch.randn(VOCAB, generator=dice)).softmax(-1))
        most = 1 if rule == "R1" else int(torch.randint(0 if node else 1, 4, (1,), generator=dice))
        if depth[node] < 3 and most:
            tokens += q[-1].multinomial(most, replacement=rule == "R4", generator=dice).tolist()
            parents += [node] * most
            depth += [depth[node] + 1] * most
    laws = torch.cat([torch.stack(q), torch.zeros(len(parents) - len(q), VOCAB)])
    grown = replace(tree(tokens, parents, depth), proposal=Proposal(rule, laws))
    return grown, torch.randn(len(parents), VOCAB, generator=dice)


def textbook(grown: Tree, p: Tensor, uniform: dict[int, list[float]]) -> tuple[list[int], Tensor]:
    """The path and the law of the bonus token, one child after the other; uniform: a number per child of each node."""
    assert grown.proposal is not None
    path, node = [0], 0
    while True:
        left, q = p[node].double(), grown.proposal.laws[node].double()
        children = [n for n in range(1, len(grown)) if int(grown.parents[n]) == node]
        for child, u in zip(children, uniform.get(node, []), strict=False):
            token = int(grown.tokens[child])
            if u < left[token] / q[token]:
                node = child
                path.append(child)
                break
            left = (left - q).clamp(min=0)
            left = left / left.sum()
            if grown.proposal.rule == "R3":
                q[token] = 0.0
                q = q / q.sum()
        else:
            return path, left


@pytest.mark.parametrize("rule", ["R1", "R3", "R4"])
def test_a_tree_is_decided_as_the_textbook_decides_it(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged trees, all nodes at once against one child after the other, with the same uniform numbers."""
    bonus: list[Tensor] = []

    def remembering(law: Tensor, generator: torch.Generator) -> Tensor:
        bonus.append(law[0])
        return draw(law, generator)

    monkeypatch.setattr(rejection, "draw", remembering)
    lengths = set()
    for seed in range(150):
        grown, logits = random_tree(torch.Generator().manual_seed(seed), rule)
        families: dict[int, int] = {}
        for parent in grown.parents.tolist()[1:]:
            families[parent] = families.get(parent, 0) + 1
        inner = sorted(families, key=lambda parent: -families[parent])
        table = torch.rand(len(inner), max(families.values()), generator=torch.Generator().manual_seed(seed))
        path, law = textbook(grown, logits.softmax(-1), dict(zip(inner, table.tolist(), strict=True)))
        verdict = verify(grown, logits, sampler(1.0, 1.0, seed))
        assert verdict.path == path
        assert verdict.tokens == grown.tokens[path[1:]].tolist()
        torch.testing.assert_close(bonus[-1].double(), law, atol=1e-5, rtol=0)
        assert law[verdict.bonus] > 0
        lengths.add(len(path))
    assert lengths == {1, 2, 3, 4}


def test_equal_laws_refuse_nothing() -> None:
    law = torch.randn(2000, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = draw(law, torch.Generator().manual_seed(1))
    chosen, left = accept_sibling(law, law, [tokens], torch.full((2000, 1), 1.0 - 2**-24), replaced=False)
    assert bool((chosen == 0).all()) and left.isfinite().all()


PUBLISHED = TypicalConfig()


def test_a_sure_target_asks_for_epsilon_and_an_unsure_one_for_less() -> None:
    line = tree([0, 1], [0, 0], [0, 1])
    for chance, accepted in ((0.08, 0), (0.1, 1)):
        law = torch.tensor([0.0, chance, 0.62, 0.38 - chance])
        assert 0.3 * math.exp(-float(entropy(law))) > 0.1  # epsilon decides
        assert accept_typical(line, law.expand(2, -1), PUBLISHED).accepted == accepted
    flat = torch.full((2, 20), 0.05)  # delta exp(-H) = 0.3 / 20
    assert accept_typical(line, flat, PUBLISHED).accepted == 1
    assert accept_typical(line, flat, TypicalConfig(delta=1.1)).accepted == 0


def test_the_longest_typical_path_wins_and_then_the_most_probable() -> None:
    grown = tree([0, 1, 2, 1, 2, 3], [0, 0, 0, 1, 2, 2], [0, 1, 1, 2, 2, 2])
    root, never, often = [0.1, 0.5, 0.4, 0.0], [0.9, 0.0, 0.1, 0.0], [0.0, 0.0, 0.45, 0.55]
    verdict = accept_typical(grown, torch.tensor([root, never, often, root, never, often]), PUBLISHED)
    assert (verdict.path, verdict.tokens, verdict.bonus) == ([0, 2, 5], [2, 3], 3)  # longer beats the likelier sibling
    alone = accept_typical(tree([0, 1, 2], [0, 0, 0], [0, 1, 1]), torch.tensor([root, never, often]), PUBLISHED)
    assert alone.tokens == [1] and alone.bonus == 0


def test_it_is_named_not_lossless_and_its_output_has_another_law() -> None:
    hot, cold = sampler(1.0, 1.0), sampler(0.0, 1.0)
    assert rule_of(None, hot, PUBLISHED) == NOT_LOSSLESS and "not lossless" in NOT_LOSSLESS
    assert rule_of(None, cold, PUBLISHED) == "R0"
    law = torch.tensor([0.5, 0.3, 0.2]).expand(2, -1)
    first = {verify(tree([0, 1], [0, 0], [0, 1]), law.log(), hot, PUBLISHED).tokens[0] for _ in range(50)}
    assert first == {1}  # token 1 has probability 0.3, and always comes out
