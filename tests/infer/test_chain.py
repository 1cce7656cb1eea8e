"""A chain draws from q under the target's processors, keeps what it drew, and says so; greedy it is the argmax."""

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from aerie.configs.schema.decode import ChainConfig
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Chain, make_shape
from aerie.infer.decode.stop import Stop
from aerie.infer.decode.tree import Level, Tree
from tests.infer.laws import SETTINGS, sampler
from tests.infer.test_shape import VOCAB, TableDrafter, check_connected

ROOT = torch.tensor([7])


class Mapped(TableDrafter):
    """A drafter with a vocabulary of its own: its column c is the target's token 2c + 1."""

    def target_ids(self, columns: Tensor) -> Tensor:
        return 2 * columns + 1


class Remembers(Stop):
    """Stops at a depth, and remembers which levels it was shown."""

    def __init__(self, levels: int) -> None:
        super().__init__(levels=levels)
        self.seen: list[Level] = []

    def ends(self, level: Level) -> bool:
        self.seen.append(level)
        return level.depth >= self.levels


def chain(drafter: TableDrafter, chosen: Sampler, levels: int = 3, sampled: bool = True) -> Tree:
    return Chain(Stop(), levels, sampled).grow(drafter, ROOT, levels, chosen)


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_tokens_are_drawn_from_q_under_the_processors(temperature: float, top_p: float) -> None:
    drafter, chosen, draws = TableDrafter(3, sharpness=1.0), sampler(temperature, top_p), 2000
    counts = torch.zeros(VOCAB)
    for _ in range(draws):
        counts[chain(drafter, chosen, levels=1).tokens[1]] += 1
    law = chosen.law(drafter.law(())[None])[0]
    assert not counts[law == 0].any() and (law > 0).sum() > 2
    alive = law > 0
    assert chisquare(counts[alive].numpy(), (law[alive] / law.sum() * draws).numpy()).pvalue > 1e-3


def test_the_laws_of_the_draws_are_recorded() -> None:
    drafter, chosen = TableDrafter(4), sampler(0.6, 0.8)
    tree = chain(drafter, chosen)
    assert tree.proposal is not None and tree.proposal.rule == "R1" and tree.proposal.ids is None
    path: tuple[int, ...] = ()
    for node, token in enumerate(tree.tokens[1:].tolist()):
        law = chosen.law(drafter.law(path)[None])[0]
        torch.testing.assert_close(tree.proposal.laws[node], law)
        assert float(tree.confidence[node + 1]) == pytest.approx(float(law[token].log()), abs=1e-6)
        path = (*path, token)
    check_connected(tree)
    assert len(tree.proposal.laws) == len(tree) == 4


def test_a_draft_vocabulary_is_mapped_in_tokens_and_laws() -> None:
    drafter, chosen = Mapped(4), sampler(1.0, 1.0)
    tree = chain(drafter, chosen)
    assert tree.proposal is not None
    law = tree.proposal.over(2 * VOCAB + 2)[0]
    torch.testing.assert_close(law[1 : 2 * VOCAB : 2], chosen.law(drafter.law(())[None])[0])
    assert float(law[::2].sum()) == 0.0 and bool((tree.tokens[1:] % 2 == 1).all())


@pytest.mark.parametrize(("temperature", "sampled"), [(0.0, True), (0.0, False), (1.0, False)])
def test_greedy_or_with_best_children_it_is_the_argmax_path(temperature: float, sampled: bool) -> None:
    drafter = TableDrafter(3)
    tree = chain(drafter, sampler(temperature, 1.0), sampled=sampled)
    path: tuple[int, ...] = ()
    for token in tree.tokens[1:].tolist():
        assert token == int(drafter.law(path).argmax())
        path = (*path, token)
    assert tree.proposal is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_rule_is_shown_the_token_that_stays(temperature: float) -> None:
    """The token on which it ends growth is in the chain, and no forward is paid after it."""
    drafter, stop = TableDrafter(3), Remembers(2)
    tree = Chain(stop, 6).grow(drafter, ROOT, 6, sampler(temperature, 1.0))
    assert len(tree) == 3 and drafter.calls == 2 and tree.levels == tree.draft_forwards == 2
    assert [level.depth for level in stop.seen] == [1, 2]
    assert [float(level.confidence) for level in stop.seen] == tree.confidence[1:].tolist()
    torch.testing.assert_close(stop.seen[1].log_q[0], drafter.law((int(tree.tokens[1]),)))  # the law, unprocessed


def test_the_recipe_chooses_how_children_are_picked() -> None:
    for children, sampled in (("sampled", True), ("best", False)):
        shape = make_shape(ChainConfig(levels=3, children=children))  # type: ignore[arg-type]
        assert (shape.grow(TableDrafter(1), ROOT, 3, sampler(1.0, 1.0)).proposal is not None) == sampled


def test_the_same_seed_draws_the_same_chain() -> None:
    tokens = [chain(TableDrafter(1), sampler(1.0, 1.0, seed)).tokens.tolist() for seed in (1, 1, 2, 3)]
    assert tokens[0] == tokens[1] and len({tuple(line) for line in tokens}) > 1
