"""A recorder describes the cycles of an answer, and changes no token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from aerie.configs.schema.decode import (
    ChainConfig,
    DynamicConfig,
    EntropyConfig,
    StaticConfig,
    TreeConfig,
)
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
CHAIN = ChainConfig(levels=4)
STATIC = StaticConfig(choices="eagle1")
FORM = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1))
RULES = {
    "R1": ChainConfig(levels=3),
    "R2": StaticConfig(choices=FORM, children="best"),
    "R3": StaticConfig(choices=FORM, children="sampled"),
}


def record(tree: TreeConfig, temperature: float = 0.0, kind: str = "eagle1") -> Any:
    """(cycles, their records, the ids of prompt and answer) of one answer."""
    decoder, prompt = decoder_of(make_target(), tree, kind), torch.tensor([[7, 9, 11, 23, 5]])
    recorder, cycles, texts = Recorder(), list[Cycle](), []
    for watch in (None, cycles.append):
        decoder.proposer.shape.keeps_pool = watch is not None  # type: ignore[union-attr]
        generation = decoder.generate(
            prompt, temperature=temperature, top_k=0, max_new_tokens=12, on_cycle=watch,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        texts.append(generation.sequences[0].tolist())
    assert texts[0] == texts[1]  # recording changes no token
    for cycle in cycles:
        recorder(cycle)
    return cycles, recorder.records, texts[0]


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_is_the_share_among_many_verdicts(rule: str) -> None:
    """A node's acceptance is how often it is accepted over the same draft, given its parent."""
    target = make_target(vocab_size=12, hidden_size=16, num_blocks=2, pad_token_id=None)
    cycles: list[Cycle] = []
    decoder_of(target, RULES[rule], scale=3.0).generate(
        torch.tensor([[1, 5, 3]]), temperature=1.3, top_k=0, top_p=0.95, max_new_tokens=40,
        generator=torch.Generator().manual_seed(4), on_cycle=cycles.append,
    )  # fmt: skip

    deep = [cycle for cycle in cycles if cycle.tree.levels > 1]
    # the most uncertain verdict on one of the root's first children
    cycle = min(deep, key=lambda cycle: float((node_acceptance(cycle)[1:3] - 0.5).abs().min()))
    tree, law = cycle.tree, cycle.sampler.law(cycle.step.logits)
    generator, taken = torch.Generator().manual_seed(9), np.zeros((1200, len(tree)), dtype=bool)
    for verdict in taken:
        drawn = law.multinomial(1, generator=generator)[:, 0] if rule == "R2" else None
        judged = reject(tree, law, generator) if drawn is None else walk(tree, drawn)
        verdict[read(judged, len(tree)).path] = True
    reached = taken[:, tree.parents.numpy()].sum(0)
    often = reached >= 100
    chances, shares = node_acceptance(cycle).numpy()[often], taken.sum(0)[often] / reached[often]
    sigma = np.sqrt(np.maximum(chances * (1 - chances), 1e-4) / reached[often])
    assert cycle.rule == rule and ((chances > 0.05) & (chances < 0.95)).any()
    assert (np.abs(shares - chances) < 4.5 * sigma)[1:].all()  # the root has no verdict


def test_children_of_accepted_nodes_are_judged_but_no_passenger() -> None:
    tree = record(replace(STATIC, choices=((0,), (1,), (0, 0), (1, 0))))[0][0].tree
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
    cycles, records, text = record(tree, temperature, kind)
    tables = tables_of(0, records, text)
    judged = [node_acceptance(c)[judged_nodes(c.tree, c.verdict.path)] for c in cycles]
    assert tables["nodes"].acceptance.tolist() == pytest.approx(torch.cat(judged).tolist())
    assert len(tables["cycles"]) == len(cycles) and len(tables["laws"]) > 0
    for cycle, row in zip(cycles, records, strict=True):
        if (law := row["law"]) is None:
            continue
        node, raw, ids = (
            pd.DataFrame(row["node"])[1:],
            cycle.tree.pool.log_laws(),
            cycle.tree.pool.ids,
        )
        entropies = [float(entropy(raw[parent].exp())) for parent in node.parent]
        p = cycle.sampler.law(cycle.step.logits).double()
        q = torch.zeros_like(p)  # [N, V]
        for parent, log_q in raw.items():
            is_drawn = cycle.tree.draft_laws is not None
            q[parent, ids] = (cycle.sampler.law(log_q) if is_drawn else log_q.exp()).double()
        cells = (node.parent.tolist(), node.token.tolist())
        p_after, q_after = p[law["node"]], q[law["node"]]  # [M, V]
        children = node.groupby("parent")
        for column, expected in (
            (node.q, q[cells]),
            (node.p, p[cells]),
            (node.entropy, entropies),
            (law["token"], children.token.first()[law["node"]]),
            (law["followed"], children.accepted.any()[law["node"]]),
            (law["agrees"], q_after.argmax(-1) == p_after.argmax(-1)),
            (law["tvd"], 0.5 * (p_after - q_after).abs().sum(-1)),
            (law["kl_qp"], torch.special.xlogy(q_after, q_after / p_after).nansum(-1)),
        ):
            np.testing.assert_allclose(list(column), list(expected), rtol=1e-4, atol=1e-5)
        # a draft vocabulary that lacks tokens makes KL(p||q) infinite
        assert np.isinf(law["kl_pq"]).all() == (kind == "eagle3")


def test_frontiers_hold_what_reranking_dropped() -> None:
    """Levels beyond the text are left out."""
    _, records, text = record(replace(WIDE, k=4, nodes=8, levels=3))
    frontier = tables_of(0, records, text)["frontier"]
    # although a tree keeps only 7 nodes
    assert (frontier.groupby(["cycle", "depth"]).size() == 4).all()
    assert 0 < len(tables_of(0, records, text[:-4])["frontier"]) < len(frontier)
    for row in records:
        masses = row["level"]["survival"]
        first = [survival for branch, survival in row["frontier"] if len(branch) == 1]
        assert len(masses) == row["depth"] and sum(first) == pytest.approx(sum(masses[:1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chains_branches_are_accepted_as_deep_as_its_tokens(temperature: float) -> None:
    _, records, text = record(CHAIN, temperature)
    tables = tables_of(0, records, text)
    cycle = ["prompt", "cycle"]
    rows = tables["frontier"].merge(tables["cycles"], on=cycle, suffixes=("", "_length"))
    assert (rows.accepted == (rows.depth <= rows.accepted_length)).all()


@pytest.mark.parametrize(
    ("tree", "reason", "depth"),
    [(replace(WIDE, stop=EntropyConfig(c=1.0, h=0.01)), "entropy", 1), (WIDE, "levels", 5)],
)
def test_the_rule_that_ends_a_tree_is_its_stop_reason(
    tree: TreeConfig, reason: str, depth: int
) -> None:
    first, *later = record(tree)[1]
    assert (first["stop_reason"], first["depth"]) == (reason, depth)
    assert {row["stop_reason"] for row in later} <= {reason, "budget", "levels", None}
