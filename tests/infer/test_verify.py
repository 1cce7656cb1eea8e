"""Losslessness of the verifier: the walk along the target's own choices has the target's law, whatever was drafted.

The laws are those of rule R2 (EAGLE-2, SpecInfer with point-mass candidates): accept child x with probability p(x),
else strike it out and renormalise; the bonus comes from what remains.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.tree import Tree, ancestors
from aerie.infer.decode.verify import Verdict, walk

VOCAB = 6
PARENTS = [0, 0, 0, 1, 1, 2]  # root; children 1 and 2; 3 and 4 under 1; 5 under 2
TOKENS = [0, 3, 1, 2, 4, 0]
DRAWS = 100_000
Chooser = Callable[[Sampler, Tensor], Tensor]
decide = walk


def tree() -> Tree:
    parents = torch.tensor(PARENTS)
    depth = torch.tensor([0, 1, 1, 2, 2, 2])
    zero = torch.zeros(len(TOKENS))
    return Tree(torch.tensor(TOKENS), parents, depth, ancestors(parents, 2), zero, zero, 2, 2)


def sampler(temperature: float, top_p: float, seed: int) -> Sampler:
    decoding = Decoding(temperature > 0, temperature, 0, top_p, 0.0, 8)
    return Sampler(decoding, torch.Generator().manual_seed(seed))


def logits() -> Tensor:
    return 2.0 * torch.randn(len(TOKENS), VOCAB, generator=torch.Generator().manual_seed(5))


def outcomes(law: Tensor) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of path tokens and bonus with its exact probability under the target's law at each node."""
    children = {n: {TOKENS[c]: c for c in range(1, len(TOKENS)) if PARENTS[c] == n} for n in range(len(TOKENS))}

    def descend(node: int, prefix: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        for token in range(VOCAB):
            reached = chance * float(law[node, token])
            if token in children[node]:
                yield from descend(children[node][token], (*prefix, token), reached)
            else:
                yield (*prefix, token), reached

    yield from descend(0, (), 1.0)


def p_value(chooser: Chooser, temperature: float, top_p: float) -> float:
    """Chi-square of DRAWS verdicts against the exact law."""
    torch.set_num_threads(1)
    chosen, grown, scores = sampler(temperature, top_p, 11), tree(), logits()
    expected = dict(outcomes(chosen.law(scores).double()))
    rows = chooser(chosen, scores.repeat(DRAWS, 1)).view(DRAWS, len(TOKENS))
    keys, counts = np.unique(rows.numpy(), axis=0, return_counts=True)
    seen: dict[tuple[int, ...], int] = {}
    for key, count in zip(keys, counts, strict=True):
        verdict = decide(grown, torch.from_numpy(key))
        outcome = (*verdict.tokens, verdict.bonus)
        seen[outcome] = seen.get(outcome, 0) + int(count)
    if any(seen[outcome] and expected.get(outcome, 0.0) == 0.0 for outcome in seen):
        return 0.0  # something impossible came out
    possible = [outcome for outcome, chance in expected.items() if chance * len(rows) >= 5]
    rest = len(rows) - sum(seen.get(outcome, 0) for outcome in possible)
    observed = [seen.get(outcome, 0) for outcome in possible] + [rest]
    wanted = [expected[outcome] * len(rows) for outcome in possible]
    wanted.append(len(rows) - sum(wanted))
    if wanted[-1] < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.8)])
def test_the_outputs_have_the_targets_law(temperature: float, top_p: float) -> None:
    assert p_value(lambda s, x: s.choose(x), temperature, top_p) > 1e-3


def without_processors(s: Sampler, x: Tensor) -> Tensor:
    return Sampler(Decoding(True, 1.0, 0, 1.0, 0.0, 8), s.generator).choose(x)


def draft_law(s: Sampler, x: Tensor) -> Tensor:
    """q for p: the draws of a draft that is a little off."""
    return s.choose(x.roll(1, dims=-1) * 0.1 + x * 0.9)


def sibling_not_removed(s: Sampler, x: Tensor) -> Tensor:
    """After a refused child the bonus is drawn from the whole law again, refused children included."""
    law = s.law(x)
    first, second = s.choose(x), s.choose(x)
    nodes = torch.arange(len(x)) % len(TOKENS)
    child = torch.zeros(len(x), VOCAB, dtype=torch.bool)
    for node, (parent, token) in enumerate(zip(PARENTS, TOKENS, strict=True)):
        if node:
            child[nodes == parent, token] = True
    accepted = torch.rand(len(x), generator=s.generator) < (law * child).sum(-1)
    drawn_child = ((law * child + 1e-12) / torch.empty_like(law).exponential_(generator=s.generator)).argmax(-1)
    has_child = child.any(-1)
    return torch.where(accepted & has_child, drawn_child, torch.where(has_child, second, first))


@pytest.mark.parametrize(
    ("mutation", "temperature", "top_p"),
    [(without_processors, 0.6, 0.8), (draft_law, 1.0, 1.0), (draft_law, 0.6, 0.8), (sibling_not_removed, 1.0, 1.0)],
)
def test_each_broken_rule_is_found(mutation: Chooser, temperature: float, top_p: float) -> None:
    assert p_value(mutation, temperature, top_p) < 1e-6


def test_a_bonus_taken_one_node_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(grown: Tree, choice: Tensor) -> Verdict:
        verdict = walk(grown, choice)
        if verdict.tokens:
            return Verdict(verdict.path[:-1], verdict.tokens[:-1], verdict.bonus)
        return verdict

    monkeypatch.setitem(globals(), "decide", early)
    assert p_value(lambda s, x: s.choose(x), 1.0, 1.0) < 1e-6


def test_r2_equals_drawing_first_and_looking_up() -> None:
    """The textbook loop (accept with p, strike out, renormalise) has exactly the law that `outcomes` enumerates."""
    law = logits()[0].double().softmax(-1)
    children = [TOKENS[node] for node in (1, 2)]
    left, chance, accepted = law.clone(), 1.0, {}
    for token in children:
        share = float(left[token] / left.sum())
        accepted[token] = chance * share
        chance *= 1.0 - share
        left[token] = 0.0
    bonus = {token: chance * float(left[token] / left.sum()) for token in range(VOCAB) if token not in children}
    for token, value in {**accepted, **bonus}.items():
        assert value == pytest.approx(float(law[token]), abs=1e-12)


def test_greedy_follows_the_argmax_to_the_deepest_node() -> None:
    verdict = walk(tree(), torch.tensor([3, 4, 0, 5, 2, 1]))
    assert (verdict.path, verdict.tokens, verdict.bonus) == ([0, 1, 4], [3, 4], 2)


def test_nothing_accepted_leaves_the_roots_choice() -> None:
    verdict = walk(tree(), torch.tensor([5, 2, 0, 0, 0, 0]))
    assert (verdict.path, verdict.tokens, verdict.bonus) == ([0], [], 5)


@pytest.mark.parametrize("riding", [False, True])
def test_the_walk_is_that_of_a_naive_descent(riding: bool) -> None:
    """Random trees, with and without passengers, which look like children and are none."""
    lengths = set()
    for seed in range(300):
        dice = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, 24, (1,), generator=dice))
        above = [0, *(int(torch.randint(0, node, (1,), generator=dice)) for node in range(1, count))]
        depth = [0] * count
        for node in range(1, count):
            depth[node] = depth[above[node]] + 1
        order = sorted(range(count), key=depth.__getitem__)
        parents = [order.index(above[node]) for node in order]
        rank = [sum(parents[other] == parents[node] for other in range(1, node)) for node in range(count)]
        rides = [riding and node > 0 and node % 3 == 0 for node in range(count)]
        tokens = [max(0, each - 1) if ride else each for each, ride in zip(rank, rides, strict=True)]
        choice = torch.randint(0, 3, (count,), generator=dice)
        passengers = torch.tensor(rides) if riding else None
        parent, zero = torch.tensor(parents), torch.zeros(count)
        levels = max(depth)
        grown = Tree(
            tokens=torch.tensor(tokens),
            parents=parent,
            depth=torch.tensor(sorted(depth)),
            mask=ancestors(parent, max(levels, 1)),
            confidence=zero,
            survival=zero,
            levels=levels,
            draft_forwards=levels,
            passengers=passengers,
        )
        path, known = [0], True
        while known:
            wanted = int(choice[path[-1]])
            below = [n for n in range(1, count) if parents[n] == path[-1] and tokens[n] == wanted and not rides[n]]
            known = bool(below)
            path += below
        assert walk(grown, choice) == Verdict(path, [tokens[node] for node in path[1:]], int(choice[path[-1]]))
        lengths.add(len(path))
    assert {1, 2, 3, 4} <= lengths
