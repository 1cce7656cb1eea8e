"""Rejection sampling gives the target's law whatever the draft's: exactly, in 100,000 draws, and not when broken."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aerie.infer.decode import verify as rejection
from aerie.infer.decode.sampling import draw
from aerie.infer.decode.tree import Proposal, Tree, ancestors
from aerie.infer.decode.verify import accept_chain, accept_sibling, reject, rule_of, verify
from tests.infer.laws import DRAWS, SETTINGS, VOCAB, World, p_value, sampler, world

Law = Callable[[World, Tensor], Tensor]
FEWER = 20_000  # draws that show a broken rule
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
def test_a_chain_has_the_targets_law_exactly(temperature: float, top_p: float) -> None:
    """R1 by enumeration of both drafted tokens, of what is accepted, and of the bonus token."""
    laws = world(temperature, top_p)
    (p0, p1, p2), (q0, q1, _) = ([law.double() for law in side] for side in (laws.target, laws.draft))
    drafts = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    first, second = drafts.T
    p = torch.stack([p0.expand(len(drafts), -1), p1[first], p2[first, second]], dim=1)
    q = torch.stack([q0.expand(len(drafts), -1), q1[first]], dim=1)
    certain = torch.zeros(len(drafts), dtype=torch.double)

    def accepted(u1: Tensor, u2: Tensor) -> Tensor:
        return accept_chain(p, q, drafts, torch.stack([u1, u2], dim=1))[0]

    t1 = threshold(lambda u: accepted(u, certain + JUST_BELOW_ONE) >= 1, len(drafts))
    t2 = threshold(lambda u: accepted(certain, u) >= 2, len(drafts)) * (t1 > 0)
    reject_at = certain + JUST_BELOW_ONE
    written = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.double)
    for row, (x, y) in enumerate(drafts.tolist()):
        chance = q0[x] * q1[x, y]
        refused = accept_chain(p[row], q[row], drafts[row], reject_at[:2])[1]
        once = accept_chain(p[row], q[row], drafts[row], torch.stack([certain[0], reject_at[0]]))[1]
        twice = accept_chain(p[row], q[row], drafts[row], certain[:2])[1]
        written += chance * (1 - t1[row]) * refused[:, None, None] * p1[:, :, None] * p2
        written[x] += chance * t1[row] * (1 - t2[row]) * once[:, None] * p2[x]
        written[x, y] += chance * t1[row] * t2[row] * twice
    torch.testing.assert_close(written, p0[:, None, None] * p1[:, :, None] * p2, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_siblings_have_the_targets_law_exactly(count: int, replaced: bool, temperature: float, top_p: float) -> None:
    """R3 and R4 by enumeration of every way to draw the siblings, of the one accepted, and of the bonus token."""
    laws = world(temperature, top_p)
    p0, q0 = laws.target[0].double(), laws.draft[0].double()
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
            chosen, _ = accept_sibling(
                p, q, siblings, torch.cat([refuse[:, :rank], u[:, None], refuse[:, rank + 1 :]], 1), replaced
            )
            return chosen == rank

        share = threshold(accepts, len(rows))
        written.index_add_(0, siblings[rank], alive * share)
        alive = alive * (1 - share)
    written += alive @ accept_sibling(p, q, siblings, refuse, replaced)[1]
    torch.testing.assert_close(written, p0, atol=1e-6, rtol=0)


def chain(laws: World, count: int, p: Law = World.p, bonus: Law = World.p, drops: bool = False) -> Tensor:
    """count times three tokens [B, 3] of a chain of two (R1). drops: forgets drawn tokens that are not q's argmax."""
    drafts = torch.zeros(count, 0, dtype=torch.long)
    q, kept = [], torch.ones(count, dtype=torch.bool)
    length = torch.zeros(count, dtype=torch.long)
    for _ in range(2):
        q.append(laws.q(drafts))
        drafts = torch.cat([drafts, draw(q[-1], laws.generator)[:, None]], dim=1)
        kept &= (q[-1].argmax(1) == drafts[:, -1]) | (not drops)
        length += kept
    asked = torch.stack([*(p(laws, drafts[:, :place]) for place in range(2)), bonus(laws, drafts)], dim=1)
    accepted, law = accept_chain(asked, torch.stack(q, dim=1), drafts, torch.rand(count, 2, generator=laws.generator))
    cut = (accepted >= length) & (length < 2)
    accepted = torch.where(cut, length, accepted)
    law = torch.where(cut[:, None], asked[torch.arange(count), accepted], law)
    tokens = torch.cat([drafts, drafts[:, :1]], dim=1)
    tokens = tokens.scatter(1, accepted[:, None], draw(law, laws.generator)[:, None])
    return laws.completed(tokens, accepted + 1)


def tree(
    laws: World, count: int, replaced: bool, p: Law = World.p, bonus: Law = World.p, drops: bool = False
) -> Tensor:
    """count times three tokens [B, 3] of a tree, 3 siblings and then 2. drops: siblings whose first is not q's best."""
    tokens = torch.zeros(count, 3, dtype=torch.long)
    known, on_path = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.bool)
    for place, most in enumerate((3, 2)):
        prefix = tokens[:, :place]
        q, asked = laws.q(prefix), p(laws, prefix)
        columns = drawn(laws, q, most, replaced)
        uniform = torch.rand(count, most, generator=laws.generator)
        chosen, left = some_siblings(asked, q, columns, uniform, replaced)
        if drops:
            dropped = columns[:, 0] != q.argmax(1)
            chosen = chosen.masked_fill(dropped, -1)
            left = torch.where(dropped[:, None], asked, left)
        token = torch.where(
            chosen >= 0, columns.gather(1, chosen.clamp(min=0)[:, None])[:, 0], draw(left, laws.generator)
        )
        tokens[:, place] = torch.where(on_path, token, tokens[:, place])
        known += on_path
        on_path &= chosen >= 0
    tokens[:, 2] = draw(bonus(laws, tokens[:, :2]), laws.generator)
    return laws.completed(tokens, known + on_path)


def drawn(laws: World, q: Tensor, most: int, replaced: bool) -> Tensor:
    """Columns [B, most] drawn from q one after the other."""
    columns, left = [], q.clone()
    for _ in range(most):
        columns.append(draw(left, laws.generator)[:, None])
        if not replaced:
            left.scatter_(1, columns[-1], 0.0)
    return torch.cat(columns, dim=1)


def some_siblings(p: Tensor, q: Tensor, columns: Tensor, uniform: Tensor, replaced: bool) -> tuple[Tensor, Tensor]:
    """accept_sibling where a law of few tokens gave some nodes fewer siblings than others."""
    chances = q.gather(1, columns) > 0  # a column that was drawn when nothing was left comes after the others
    alive = torch.ones_like(chances)
    for rank in range(1, columns.shape[1]):
        repeated = (columns[:, :rank] == columns[:, rank : rank + 1]).any(1)
        alive[:, rank] = alive[:, rank - 1] & chances[:, rank] & (replaced | ~repeated)
    order = alive.sum(1).sort(descending=True, stable=True).indices
    counts = alive.sum(0).tolist()
    siblings = [columns[order[:count], rank] for rank, count in enumerate(counts)]
    chosen, left = accept_sibling(p[order], q[order], siblings, uniform[order], replaced)
    back = order.argsort()
    return chosen[back], left[back]


RULES: dict[str, Callable[..., Tensor]] = {
    "R1": chain,
    "R3": lambda laws, count, **changes: tree(laws, count, False, **changes),
    "R4": lambda laws, count, **changes: tree(laws, count, True, **changes),
}


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_the_outputs_have_the_targets_law(rule: str, temperature: float, top_p: float) -> None:
    laws = world(temperature, top_p)
    assert p_value(laws, RULES[rule](laws, DRAWS)) > 1e-3


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_q_in_the_place_of_p_is_found(rule: str, temperature: float, top_p: float) -> None:
    laws = world(temperature, top_p)
    assert p_value(laws, RULES[rule](laws, FEWER, p=World.q)) < 1e-6


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_reversed_residual_is_found(
    rule: str, temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rejection.residual
    monkeypatch.setattr(rejection, "residual", lambda p, q: right(q, p))
    laws = world(temperature, top_p)
    assert p_value(laws, RULES[rule](laws, FEWER)) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_a_bonus_without_the_processors_is_found(rule: str) -> None:
    laws = world(0.6, 0.8)
    assert p_value(laws, RULES[rule](laws, FEWER, bonus=World.unprocessed)) < 1e-6


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_token_that_is_dropped_is_found(rule: str, temperature: float, top_p: float) -> None:
    laws = world(temperature, top_p)
    assert p_value(laws, RULES[rule](laws, FEWER, drops=True)) < 1e-6


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_a_sibling_that_stays_in_q_is_found(temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "without", lambda q, tokens: q)
    laws = world(temperature, top_p)
    assert p_value(laws, RULES["R3"](laws, FEWER)) < 1e-6


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_refused_draw_that_leaves_p_whole_is_found(
    rule: str, temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    laws = world(temperature, top_p)
    assert p_value(laws, RULES[rule](laws, FEWER)) < 1e-6


def random_tree(dice: torch.Generator, rule: str) -> tuple[Tree, Tensor]:
    """A tree of sampled children in level order, ragged, siblings apart from one another, and the target's logits."""
    q, parents, depth, tokens = [], [0], [0], [0]
    for node in itertools.count():
        if node == len(parents) or len(parents) > 14:
            break
        q.append((1.5 * torch.randn(VOCAB, generator=dice)).softmax(-1))
        most = int(torch.randint(0 if node else 1, 4, (1,), generator=dice))
        if depth[node] < 3 and most:
            tokens += q[-1].multinomial(most, replacement=rule == "R4", generator=dice).tolist()
            parents += [node] * most
            depth += [depth[node] + 1] * most
    count = len(parents)
    laws = torch.cat([torch.stack(q), torch.zeros(count - len(q), VOCAB)])
    zero, above = torch.zeros(count), torch.tensor(parents)
    proposal = Proposal(rule, laws)  # type: ignore[arg-type]
    grown = Tree(torch.tensor(tokens), above, torch.tensor(depth), ancestors(above, 3), zero, zero, 3, 3, proposal)
    return grown, torch.randn(count, VOCAB, generator=dice)


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


@pytest.mark.parametrize("rule", ["R3", "R4"])
def test_a_tree_is_decided_as_the_textbook_decides_it(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged trees, all nodes at once against one child after the other, with the same uniform numbers."""
    bonus: list[Tensor] = []

    def remembering(law: Tensor, generator: torch.Generator) -> Tensor:
        bonus.append(law[0])
        return draw(law, generator)

    monkeypatch.setattr(rejection, "draw", remembering)
    lengths = set()
    for seed in range(150):
        dice = torch.Generator().manual_seed(seed)
        grown, logits = random_tree(dice, rule)
        families: dict[int, int] = {}
        for parent in grown.parents.tolist()[1:]:
            families[parent] = families.get(parent, 0) + 1
        inner = sorted(families, key=lambda parent: -families[parent])
        table = torch.rand(len(inner), max(families.values()), generator=torch.Generator().manual_seed(seed))
        uniform = {parent: table[row].tolist() for row, parent in enumerate(inner)}
        path, law = textbook(grown, logits.softmax(-1), uniform)
        verdict = verify(grown, logits, sampler(1.0, 1.0, seed))
        assert verdict.path == path
        assert verdict.tokens == grown.tokens[path[1:]].tolist()
        torch.testing.assert_close(bonus[-1].double(), law, atol=1e-5, rtol=0)
        assert law[verdict.bonus] > 0
        lengths.add(len(path))
    assert lengths == {1, 2, 3, 4}


def test_a_draft_vocabulary_is_spread_over_the_targets() -> None:
    laws = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    spread = Proposal("R1", laws, torch.tensor([4, 1])).over(6)
    assert spread.tolist() == [[0, 0.75, 0, 0, 0.25, 0], [0, 0.5, 0, 0, 0.5, 0]]
    assert Proposal("R1", laws).over(3).tolist() == [[0.25, 0.75, 0], [0.5, 0.5, 0]]


def test_equal_laws_refuse_nothing() -> None:
    law = torch.randn(2000, 3, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = draw(law[:, :2].flatten(0, 1), torch.Generator().manual_seed(1)).view(2000, 2)
    accepted, bonus = accept_chain(law, law[:, :2], tokens, torch.full((2000, 2), 1.0 - 2**-24))
    assert bool((accepted == 2).all())
    torch.testing.assert_close(bonus, law[:, 2])


def test_the_rule_follows_the_proposal_and_the_temperature() -> None:
    sampled = Proposal("R3", torch.zeros(1, VOCAB))
    assert rule_of(sampled, sampler(1.0, 1.0)) == "R3"
    assert rule_of(None, sampler(1.0, 1.0)) == "R2"
    assert rule_of(sampled, sampler(0.0, 1.0)) == rule_of(None, sampler(0.0, 1.0)) == "R0"


def test_a_deterministic_tree_is_not_rejection_sampled() -> None:
    grown, logits = random_tree(torch.Generator().manual_seed(0), "R3")
    with pytest.raises(AssertionError, match="drawn children"):
        reject(Tree(**{**grown.__dict__, "proposal": None}), logits.softmax(-1), torch.Generator())
