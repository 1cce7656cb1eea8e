"""A recorder describes the cycles of an answer, and changes no token."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aerie.configs.schema import decode as schema
from aerie.configs.schema.decode import DynamicConfig, StaticConfig, TreeConfig
from aerie.infer.decode.roles import Cycle
from aerie.infer.decode.sampling import entropy
from aerie.infer.decode.verify import read, reject, walk
from aerie.infer.measure.recorder import (
    Recorder,
    judged_nodes,
    node_acceptance,
    sibling_ranks,
    tables_of,
)
from tests.infer.draws import decoder_of, make_target

WIDE = DynamicConfig(levels=5, k=6, nodes=24)
CHAIN = schema.ChainConfig(levels=4)
STATIC = StaticConfig(choices="eagle1")
FORM = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1))
RULES = {
    "R1": schema.ChainConfig(levels=3),
    "R2": StaticConfig(choices=FORM, children="best"),
    "R3": StaticConfig(choices=FORM, children="sampled"),
}


class Recorded(NamedTuple):
    """One answer."""

    cycles: list[Cycle]
    records: list[dict[str, Any]]
    text: list[int]  # prompt and answer


def record(tree: TreeConfig, temperature: float = 0.0, kind: str = "eagle1") -> Recorded:
    decoder = decoder_of(make_target(), tree, kind)
    prompt = torch.tensor([[7, 9, 11, 23, 5]])
    settings: dict[str, Any] = {"temperature": temperature, "top_k": 0, "max_new_tokens": 12}
    plain = decoder.generate(prompt, generator=torch.Generator().manual_seed(3), **settings)
    decoder.proposer.shape.keeps_pool = True  # type: ignore[union-attr]
    recorder = Recorder()
    cycles: list[Cycle] = []

    def watch(cycle: Cycle) -> None:
        recorder(cycle)
        cycles.append(cycle)

    generator = torch.Generator().manual_seed(3)
    watched = decoder.generate(prompt, generator=generator, on_cycle=watch, **settings)
    assert watched.new_ids == plain.new_ids
    return Recorded(cycles, recorder.records, watched.sequences[0].tolist())


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_is_the_share_among_many_verdicts(rule: str) -> None:
    """A node's acceptance is how often it is accepted over the same draft, given its parent."""
    target = make_target(vocab_size=12, hidden_size=16, num_blocks=2, pad_token_id=None)
    cycles: list[Cycle] = []
    decoder_of(target, RULES[rule], scale=3.0).generate(
        torch.tensor([[1, 5, 3]]), temperature=1.3, top_k=0, top_p=0.95, max_new_tokens=40,
        generator=torch.Generator().manual_seed(4), on_cycle=cycles.append,
    )  # fmt: skip

    def uncertainty(cycle: Cycle) -> float:  # of the verdict on a child of the root
        chances = node_acceptance(cycle)
        return float((chances * (1 - chances))[cycle.tree.depth == 1].max())

    cycle = max((cycle for cycle in cycles if cycle.tree.levels > 1), key=uncertainty)
    assert cycle.rule == rule
    tree, law = cycle.tree, cycle.sampler.law(cycle.step.logits)
    generator = torch.Generator().manual_seed(9)
    reached, taken = np.zeros(len(tree)), np.zeros(len(tree))
    for _ in range(1200):
        if rule == "R2":
            judged = walk(tree, law.multinomial(1, generator=generator)[:, 0])
        else:
            judged = reject(tree, law, generator)
        on_path = np.isin(np.arange(len(tree)), read(judged, len(tree)).path)
        reached += on_path[tree.parents.numpy()]
        taken += on_path
    chances, often = node_acceptance(cycle).numpy()[1:], reached[1:] >= 100
    assert ((chances > 0.05) & (chances < 0.95) & often).any()
    sigma = np.sqrt(np.maximum(chances * (1 - chances), 1e-4) / np.maximum(reached[1:], 1))
    shares = taken[1:] / np.maximum(reached[1:], 1)
    assert (np.abs(shares - chances) < 4.5 * sigma)[often].all()


def test_children_of_accepted_nodes_are_judged_but_no_passenger() -> None:
    tree = record(replace(STATIC, choices=((0,), (1,), (0, 0), (1, 0)))).cycles[0].tree
    assert judged_nodes(tree, [0, 2]).nonzero()[:, 0].tolist() == [1, 2, 4]
    riding = torch.tensor([False, True, False, False, False])
    assert judged_nodes(replace(tree, passengers=riding), [0, 2]).nonzero()[:, 0].tolist() == [2, 4]
    assert sibling_ranks([0, 0, 0, 2, 2, 1]) == ["", "0", "1", "1.0", "1.1", "0.0"]


@pytest.mark.parametrize(
    ("tree", "kind", "temperature"),
    [(WIDE, "eagle1", 0.0), (WIDE, "eagle3", 1.0), (CHAIN, "eagle1", 0.7), (STATIC, "eagle1", 0.7)],
)
def test_columns_are_of_the_laws_drafted_and_verified(
    tree: TreeConfig, kind: str, temperature: float
) -> None:
    recorded = record(tree, temperature, kind)
    num_laws = 0
    acceptances = []
    for cycle, row in zip(recorded.cycles, recorded.records, strict=True):
        drafted, node, law = cycle.tree, row["node"], row["law"]
        judged = judged_nodes(drafted, cycle.verdict.path)
        acceptances += node_acceptance(cycle)[judged].tolist()
        if drafted.pool is None:
            continue
        raw, p = drafted.pool.log_laws(), cycle.sampler.law(cycle.step.logits).double()
        q_of = torch.zeros_like(p)  # [N, V]
        for parent, log_q in raw.items():
            is_drawn = drafted.draft_laws is not None
            compared = cycle.sampler.log_law(log_q[None])[0] if is_drawn else log_q
            q_of[parent, drafted.pool.ids] = compared.double().exp()
        for child in range(1, len(drafted)):
            parent, token = node["parent"][child], node["token"][child]
            assert node["q"][child] == pytest.approx(float(q_of[parent, token]), rel=1e-4)
            expected = float(entropy(raw[parent].exp()))
            assert node["entropy"][child] == pytest.approx(expected, rel=1e-5)
            assert node["p"][child] == pytest.approx(float(p[parent, token]), abs=1e-6)
        for number, parent in enumerate(law["node"] if law else ()):
            children = [n for n in range(1, len(drafted)) if node["parent"][n] == parent]
            q = q_of[parent]
            assert parent in cycle.verdict.path
            assert law["token"][number] == node["token"][children[0]]
            tvd = 0.5 * float((p[parent] - q).abs().sum())
            assert law["tvd"][number] == pytest.approx(tvd, abs=1e-5)
            kl = float(torch.special.xlogy(q, q / p[parent]).nansum())
            assert law["kl_qp"][number] == pytest.approx(kl, abs=1e-4)
            assert law["agrees"][number] == (int(q.argmax()) == int(p[parent].argmax()))
            assert law["followed"][number] == any(c in cycle.verdict.path for c in children)
            # a draft vocabulary that lacks tokens makes KL(p||q) infinite
            assert np.isinf(law["kl_pq"][number]) == (kind == "eagle3")
            num_laws += 1
    tables = tables_of(0, recorded.records, recorded.text)
    assert len(tables["laws"]) == num_laws > 0
    assert len(tables["cycles"]) == len(recorded.cycles)
    assert tables["nodes"].acceptance.tolist() == pytest.approx(acceptances)


def test_frontiers_hold_what_reranking_dropped() -> None:
    """Levels beyond the text are left out."""
    _, records, text = record(replace(WIDE, k=4, nodes=8, levels=3))
    frontier = tables_of(0, records, text)["frontier"]
    # although a tree keeps only 7 nodes
    assert (frontier.groupby(["cycle", "depth"]).size() == 4).all()
    for row in records:
        masses = row["level"]["survival"]
        assert len(masses) == row["depth"]
        assert row["level"]["expected"] == pytest.approx(np.cumsum(masses))
        first = [survival for branch, survival in row["frontier"] if len(branch) == 1]
        assert not masses or sum(first) == pytest.approx(masses[0], rel=1e-5)
    assert 0 < len(tables_of(0, records, text[:-4])["frontier"]) < len(frontier)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chains_branches_are_accepted_as_deep_as_its_tokens(temperature: float) -> None:
    _, records, text = record(CHAIN, temperature)
    tables = tables_of(0, records, text)
    cycle = ["prompt", "cycle"]
    rows = tables["frontier"].merge(tables["cycles"], on=cycle, suffixes=("", "_length"))
    assert (rows.accepted == (rows.depth <= rows.accepted_length)).all()


def test_the_rule_that_ends_a_tree_is_its_stop_reason() -> None:
    unsure = replace(WIDE, stop=schema.EntropyConfig(c=1.0, h=0.01))
    for tree, reason, depth in ((unsure, "entropy", 1), (WIDE, "levels", 5)):
        records = record(tree).records
        assert (records[0]["stop_reason"], records[0]["depth"]) == (reason, depth)
        assert {row["stop_reason"] for row in records} <= {reason, "budget", "levels", None}
