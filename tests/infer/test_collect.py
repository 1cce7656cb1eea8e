"""What calibration takes for a node's acceptance is how often the tree's own rule takes it, whatever the rule."""

import numpy as np
import pytest
import torch

from aerie.configs.schema.decode import ChainConfig, StaticConfig, TreeConfig, TypicalConfig
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposer import Cycle, Drafting
from aerie.infer.decode.shape import make_shape
from aerie.infer.decode.verify import acceptance, reject, walk
from aerie.infer.measure.cycles import NodeCollector
from tests import tiny
from tests.infer.draws import tiny_vocabulary

FORM = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1))
TREES = {
    "R1": ChainConfig(levels=3),
    "R2": StaticConfig(choices=FORM, children="best"),
    "R3": StaticConfig(choices=FORM, children="sampled"),
    "R4": StaticConfig(choices=FORM, children="replaced"),
}
DRAWS = 1200


def cycles(tree: TreeConfig, typical: TypicalConfig | None = None) -> list[Cycle]:
    """The cycles of one sampled answer of a tiny model."""
    target = tiny_vocabulary()
    head = tiny.head(target.ends.embedding.float(), scale=3.0).eval()
    speculative = SpeculativeDecoder(target, Drafting(EagleDrafter(head, target), make_shape(tree)), typical)
    found: list[Cycle] = []
    speculative.generate(
        torch.tensor([[1, 5, 3]]),
        temperature=1.3,
        top_k=0,
        top_p=0.95,
        max_new_tokens=12,
        generator=torch.Generator().manual_seed(4),
        on_cycle=found.append,
    )
    return [cycle for cycle in found if cycle.tree.levels > 1]


def undecided(found: list[Cycle]) -> Cycle:
    """The cycle whose root's children are least sure to be accepted or refused."""

    def spread(cycle: Cycle) -> float:
        law = cycle.sampler.law(cycle.step.logits)
        chances = acceptance(cycle.tree, law) if cycle.tree.proposal else law[cycle.tree.parents, cycle.tree.tokens]
        return float((chances * (1 - chances))[cycle.tree.depth == 1].max())

    return max(found, key=spread)


@pytest.mark.parametrize("rule", TREES)
def test_a_nodes_acceptance_is_its_share_among_many_verdicts_over_the_very_same_draft(rule: str) -> None:
    cycle = undecided(cycles(TREES[rule]))
    assert cycle.rule == rule
    tree, law, generator = cycle.tree, cycle.sampler.law(cycle.step.logits), torch.Generator().manual_seed(9)
    reached, taken = np.zeros(len(tree)), np.zeros(len(tree))
    parents = tree.parents.numpy()
    for _ in range(DRAWS):
        if rule == "R2":
            verdict = walk(tree, law.multinomial(1, generator=generator)[:, 0])
        else:
            verdict = reject(tree, law, generator)
        on_path = np.isin(np.arange(len(tree)), verdict.path)
        reached += on_path[parents]
        taken += on_path
    collector = NodeCollector()
    collector.prompt = 0
    everything = [0, *range(1, len(tree))]  # as if every parent had been accepted
    verdict = type(cycle.verdict)(everything, cycle.verdict.tokens, cycle.verdict.bonus)
    collector(Cycle(**{**vars(cycle), "verdict": verdict}))
    chances = collector.arrays().acceptance
    often = reached[1:] >= 100
    assert ((chances > 0.05) & (chances < 0.95) & often).any()
    sigma = np.sqrt(np.maximum(chances * (1 - chances), 1e-4) / np.maximum(reached[1:], 1))
    assert (np.abs(taken[1:] / np.maximum(reached[1:], 1) - chances) < 4.5 * sigma)[often].all()


def test_p_alone_would_be_wrong_where_children_were_sampled() -> None:
    for rule in ("R1", "R3", "R4"):
        cycle = undecided(cycles(TREES[rule]))
        law = cycle.sampler.law(cycle.step.logits)
        plain = law[cycle.tree.parents, cycle.tree.tokens]
        assert float((acceptance(cycle.tree, law) - plain)[1:].abs().max()) > 0.05


def test_typical_acceptance_counts_what_happened() -> None:
    cycle = cycles(TREES["R2"], TypicalConfig())[0]
    collector = NodeCollector()
    collector(cycle)
    assert set(collector.arrays().acceptance) <= {0.0, 1.0}
