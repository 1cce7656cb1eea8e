"""Drafting and verifying together, on synthetic laws: a chain and sampled trees write the target's law."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.shape import Chain, Shape, StaticTree
from aerie.infer.decode.stop import Stop
from aerie.infer.decode.tree import Tree
from aerie.infer.decode.verify import verify
from tests.infer.laws import LENGTH, SETTINGS, VOCAB, World, p_value, sampler, world

RAGGED = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1))
SHAPES: dict[str, Callable[[], Shape]] = {
    "R1": lambda: Chain(Stop(), 2),
    "R3": lambda: StaticTree(Stop(), RAGGED, "sampled"),
    "R4": lambda: StaticTree(Stop(), RAGGED, "replaced"),
}
DRAWS = 2500


class Table:
    """A drafter of fixed laws [V, .., V], one for each length of the path above a node."""

    def __init__(self, laws: list[Tensor]) -> None:
        self.laws = [law.view(-1, VOCAB).log() for law in laws]
        self.rows, self.depth = [0], 0

    def target_ids(self, columns: Tensor) -> Tensor:
        return columns

    def start(self) -> Tensor:
        self.rows, self.depth = [0], 0
        return self.laws[0]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.rows = [
            self.rows[row] * VOCAB + token for row, token in zip(parents.tolist(), tokens.tolist(), strict=True)
        ]
        self.depth += 1
        return self.laws[self.depth][self.rows]


def scores(target: list[Tensor], tree: Tree) -> Tensor:
    """The target's logits [N, V] at every node."""
    laws, rows = [law.view(-1, VOCAB).log() for law in target], [0]
    for parent, token in zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True):
        rows.append(rows[parent] * VOCAB + token)
    return torch.stack([laws[depth][row] for depth, row in zip(tree.depth.tolist(), rows, strict=True)])


def written(shape: Shape, plain: World, laws: World, chosen: Sampler) -> Tensor:
    """DRAWS times three tokens [B, 3]; plain holds the laws that draft and target have without the processors."""
    drafter, root = Table(plain.draft), torch.tensor([0])
    tokens, known = torch.zeros(DRAWS, LENGTH, dtype=torch.long), torch.zeros(DRAWS, dtype=torch.long)
    for number in range(DRAWS):
        tree = shape.grow(drafter, root, 2, chosen)
        verdict = verify(tree, scores(plain.target, tree), chosen)
        emitted = torch.tensor([*verdict.tokens, verdict.bonus])
        tokens[number, : len(emitted)] = emitted
        known[number] = len(emitted)
    return laws.completed(tokens, known)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("rule", SHAPES)
def test_what_is_drafted_and_verified_has_the_targets_law(rule: str, temperature: float, top_p: float) -> None:
    laws = world(temperature, top_p)
    tokens = written(SHAPES[rule](), world(1.0, 1.0), laws, sampler(temperature, top_p, seed=3))
    assert p_value(laws, tokens) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rule", SHAPES)
def test_a_drafter_that_misreports_its_laws_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are drawn from q, and the laws that go with them are those of another draft."""
    laws, plain, chosen = world(0.6, 0.8), world(1.0, 1.0), sampler(0.6, 0.8, seed=3)
    shape = SHAPES[rule]()
    grow = shape.grow

    def misreporting(drafter: Table, root: Tensor, max_levels: int, chosen: Sampler) -> Tree:
        tree = grow(drafter, root, max_levels, chosen)
        assert tree.proposal is not None
        flat = tree.proposal.laws.sqrt()
        proposal = type(tree.proposal)(tree.proposal.rule, flat / flat.sum(-1, keepdim=True).clamp(min=1e-9))
        return Tree(**{**tree.__dict__, "proposal": proposal})

    monkeypatch.setattr(shape, "grow", misreporting)
    assert p_value(laws, written(shape, plain, laws, chosen)) < 1e-6
