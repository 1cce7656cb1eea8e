"""Decoding with sampled chains and static trees is lossless: greedy identity, and the target's law on a real model."""

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import ChainConfig, StaticConfig, TypicalConfig
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Cycle, Drafting, make_shape
from aerie.infer.decode.verify import rule_of
from aerie.model.target import Target
from tests import tiny
from tests.infer.draws import tiny_vocabulary
from tests.infer.laws import SETTINGS
from tests.infer.test_engine import make_target, prompts

ROWS = {
    "chain": ChainConfig(levels=4),
    "chain of the best": ChainConfig(levels=4, children="best"),
    "eagle1": StaticConfig(choices="eagle1"),
    "eagle1 replaced": StaticConfig(choices="eagle1", children="replaced"),
    "eagle1 best": StaticConfig(choices="eagle1", children="best"),
    "medusa63": StaticConfig(choices="medusa63", children="best"),
}
RULES = {"chain": "R1", "eagle1": "R3", "eagle1 replaced": "R4"}
LENGTH, DRAWS = 4, 5000


def decoder(target: Target, row: str, typical: TypicalConfig | None = None) -> SpeculativeDecoder:
    """A decoder with a random head."""
    head = tiny.head(target.vocab.embedding.float(), scale=3.0)
    return SpeculativeDecoder(target, Drafting(EagleDrafter(head.eval(), target), make_shape(ROWS[row])), typical)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("temperature", "top_p"), [*SETTINGS, (0.0, 1.0)])
def test_every_cycle_is_verified_by_the_rule_of_its_row(row: str, temperature: float, top_p: float) -> None:
    rules, widths = set(), []

    def watch(cycle: Cycle) -> None:
        if len(cycle.tree) > 1:
            rules.add(rule_of(cycle.tree.proposal, cycle.sampler))
            widths.append(len(cycle.tree))

    out = decoder(make_target(), row).generate(
        prompts(2)[-1], temperature=temperature, top_p=top_p, top_k=0, max_new_tokens=16, on_cycle=watch
    )
    assert rules == {RULES.get(row, "R2") if temperature else "R0"}
    assert max(widths) <= make_shape(ROWS[row]).max_nodes
    assert out.statistics.new_tokens == 16


class Mirror:
    """A drafter whose laws are the target's own."""

    max_positions = 10_000
    after_blocks = ()

    def __init__(self, target: Target) -> None:
        self.target, self.text, self.paths = target, [], [[]]  # type: ignore[var-annotated]

    def reset(self, prompt: Tensor, capacity: int) -> None:
        self.text = prompt[:1].tolist()

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        self.text += tokens.tolist()

    def target_ids(self, columns: Tensor) -> Tensor:
        return columns

    def start(self) -> Tensor:
        self.paths = [[]]
        return self._laws()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self.paths
        self.paths = [[*above[row], token] for row, token in zip(parents.tolist(), tokens.tolist(), strict=True)]
        return self._laws()

    def _laws(self) -> Tensor:
        batch = torch.tensor([[*self.text, *path] for path in self.paths])
        return self.target.model(batch).logits[:, -1].log_softmax(-1)


@pytest.mark.parametrize("row", RULES)
def test_a_draft_of_the_targets_own_laws_is_always_accepted(row: str) -> None:
    target, accepted = tiny_vocabulary(), []

    def watch(cycle: Cycle) -> None:
        accepted.append(cycle.verdict.accepted)
        assert cycle.verdict.accepted == cycle.tree.levels

    drafting = Drafting(Mirror(target), make_shape(ROWS[row]))
    SpeculativeDecoder(target, drafting).generate(
        torch.tensor([[1, 5, 3]]), temperature=0.9, top_p=0.9, top_k=0, max_new_tokens=30, on_cycle=watch
    )
    assert max(accepted) == make_shape(ROWS[row]).levels  # type: ignore[attr-defined]
