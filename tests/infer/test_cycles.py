"""A recorder describes the cycles of an answer, and changes no token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aerie.configs.schema import decode as schema
from aerie.configs.schema.decode import DynamicConfig, StaticConfig, TreeConfig
from aerie.infer.decode.sampling import entropy
from aerie.infer.decode.shape import Cycle
from aerie.infer.decode.verify import read, reject, walk
from aerie.infer.measure.cycles import Recorder, acceptance, asked, places, tables_of
from tests.infer.draws import decoder_of, make_target

WIDE = DynamicConfig(levels=5, k=6, nodes=24)
CHAIN = schema.ChainConfig(levels=4)
STATIC = StaticConfig(choices="eagle1")
FORM = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1))
RULES = {"R1": schema.ChainConfig(levels=3)} | {
    rule: StaticConfig(choices=FORM, children=children)
    for rule, children in (("R2", "best"), ("R3", "sampled"))  # type: ignore[arg-type]
}


def recorded(
    tree: TreeConfig, temperature: float = 0.0, kind: str = "eagle1"
) -> tuple[list[Cycle], list[dict[str, Any]], list[int]]:
    """The cycles of one answer, their records, and the text."""
    decoder, prompt = decoder_of(make_target(), tree, kind), torch.tensor([[7, 9, 11, 23, 5]])
    settings = {
        "temperature": temperature,
        "do_sample": temperature > 0,
        "top_k": 0,
        "max_new_tokens": 12,
    }
    plain = decoder.generate(prompt, generator=torch.Generator().manual_seed(3), **settings).new_ids
    decoder.proposer.keep = True  # type: ignore[union-attr]
    recorder, cycles = Recorder(), list[Cycle]()

    def watch(cycle: Cycle) -> None:
        recorder(cycle)
        cycles.append(cycle)

    done = decoder.generate(
        prompt, generator=torch.Generator().manual_seed(3), on_cycle=watch, **settings
    )
    assert done.new_ids == plain  # recording changes no token
    return cycles, recorder.records, done.sequences[0].tolist()


@pytest.mark.parametrize("rule", RULES)
def test_a_nodes_acceptance_is_its_share_among_many_verdicts_over_the_very_same_draft(
    rule: str,
) -> None:
    target, draws = (
        make_target(vocab_size=12, hidden_size=16, num_blocks=2, pad_token_id=None),
        1200,
    )
    cycles: list[Cycle] = []
    decoder_of(target, RULES[rule], scale=3.0).generate(
        torch.tensor([[1, 5, 3]]), temperature=1.3, top_k=0, top_p=0.95, max_new_tokens=40,
        generator=torch.Generator().manual_seed(4), on_cycle=cycles.append,
    )  # fmt: skip
    # the cycle with the least certain verdict on a child of the root
    cycle = max(
        (cycle for cycle in cycles if cycle.tree.levels > 1),
        key=lambda cycle: float(
            (acceptance(cycle) * (1 - acceptance(cycle)))[cycle.tree.depth == 1].max()
        ),
    )
    assert cycle.rule == rule
    tree, law, generator = (
        cycle.tree,
        cycle.sampler.law(cycle.step.logits),
        torch.Generator().manual_seed(9),
    )
    reached, taken, parents = np.zeros(len(tree)), np.zeros(len(tree)), tree.parents.numpy()
    for _ in range(draws):
        chosen = law.multinomial(1, generator=generator)[:, 0]
        verdict = read(
            walk(tree, chosen) if rule == "R2" else reject(tree, law, generator), len(tree)
        )
        on_path = np.isin(np.arange(len(tree)), verdict.path)
        reached += on_path[parents]
        taken += on_path
    chances, often = acceptance(cycle).numpy()[1:], reached[1:] >= 100
    assert ((chances > 0.05) & (chances < 0.95) & often).any()
    sigma = np.sqrt(np.maximum(chances * (1 - chances), 1e-4) / np.maximum(reached[1:], 1))
    assert (np.abs(taken[1:] / np.maximum(reached[1:], 1) - chances) < 4.5 * sigma)[often].all()


def test_only_children_of_accepted_nodes_are_asked_and_no_passenger() -> None:
    tree = recorded(replace(STATIC, choices=((0,), (1,), (0, 0), (1, 0))))[0][0].tree
    assert asked(tree, [0, 2]).tolist() == [False, True, True, False, True]
    riding = torch.tensor([False, True, False, False, False])
    assert asked(replace(tree, passengers=riding), [0, 2]).tolist() == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert places([0, 0, 0, 2, 2, 1]) == ["", "0", "1", "1.0", "1.1", "0.0"]


@pytest.mark.parametrize(
    ("tree", "kind", "temperature"),
    [(WIDE, "eagle1", 0.0), (WIDE, "eagle3", 1.0), (CHAIN, "eagle1", 0.7), (STATIC, "eagle1", 0.7)],
)
def test_nodes_and_laws_are_those_that_were_drafted_and_verified(
    tree: TreeConfig, kind: str, temperature: float
) -> None:
    cycles, records, text = recorded(tree, temperature, kind)
    num_laws = 0
    for cycle, record in zip(cycles, records, strict=True):
        if cycle.tree.pool is None:
            continue
        drafted, node, law = cycle.tree, record["node"], record["law"]
        raw, p = drafted.pool.log_laws(), cycle.sampler.law(cycle.step.logits).double()
        q_of = torch.zeros_like(p)
        for parent, own in raw.items():
            seen = own if drafted.proposal is None else cycle.sampler.log_law(own[None])[0]
            q_of[parent, drafted.pool.ids] = seen.double().exp()
        for place in range(1, len(drafted)):
            parent, token = node["parent"][place], node["token"][place]
            assert node["q"][place] == pytest.approx(float(q_of[parent, token]), rel=1e-4)
            assert node["entropy"][place] == pytest.approx(
                float(entropy(raw[parent].exp())), rel=1e-5
            )
            assert node["p"][place] == pytest.approx(float(p[parent, token]), abs=1e-6)
        for number, at in enumerate(law["node"] if law else ()):
            children = [child for child in range(1, len(drafted)) if node["parent"][child] == at]
            q = q_of[at]
            assert at in cycle.verdict.path and law["token"][number] == node["token"][children[0]]
            assert law["tvd"][number] == pytest.approx(
                0.5 * float((p[at] - q).abs().sum()), abs=1e-5
            )
            kl = torch.special.xlogy(q, q / p[at]).nansum()
            assert law["kl_qp"][number] == pytest.approx(float(kl), abs=1e-4)
            assert law["agrees"][number] == (int(q.argmax()) == int(p[at].argmax()))
            assert law["followed"][number] == any(child in cycle.verdict.path for child in children)
            # a draft vocabulary that lacks tokens makes KL(p||q) infinite
            assert np.isinf(law["kl_pq"][number]) == (kind == "eagle3")
            num_laws += 1
    tables = tables_of(0, records, text)
    assert len(tables["laws"]) == num_laws > 0 and len(tables["cycles"]) == len(cycles)
    nodes = [
        (cycle, n) for cycle in cycles for n in asked(cycle.tree, cycle.verdict.path).nonzero()
    ]
    assert tables["nodes"].acceptance.tolist() == pytest.approx(
        [float(acceptance(cycle)[n]) for cycle, n in nodes]
    )


def test_frontiers_hold_what_reranking_dropped_and_levels_beyond_the_text_are_left_out() -> None:
    _, records, text = recorded(replace(WIDE, k=4, nodes=8, levels=3))
    frontier = tables_of(0, records, text)["frontier"]
    assert (
        frontier.groupby(["cycle", "depth"]).size() == 4
    ).all()  # although a tree keeps only 7 nodes
    for record in records:
        masses = record["level"]["survival"]
        assert len(masses) == record["depth"] and record["level"]["expected"] == pytest.approx(
            np.cumsum(masses)
        )
        first = [survival for branch, survival in record["frontier"] if len(branch) == 1]
        assert not masses or sum(first) == pytest.approx(masses[0], rel=1e-5)
    assert 0 < len(tables_of(0, records, text[:-4])["frontier"]) < len(frontier)
    for temperature in (0.0, 1.0):  # chain nodes are in the text exactly when accepted
        _, records, text = recorded(CHAIN, temperature)
        tables = tables_of(0, records, text)
        depth_of = tables["frontier"].merge(
            tables["cycles"], on=["prompt", "cycle"], suffixes=("", "_length")
        )
        assert (depth_of.accepted == (depth_of.depth <= depth_of.accepted_length)).all()


def test_the_rule_that_ends_a_tree_is_its_stop_reason() -> None:
    unsure = replace(WIDE, stop=schema.EntropyConfig(c=1.0, h=0.01))
    for tree, reason, depth in ((unsure, "entropy", 1), (WIDE, "levels", 5)):
        records = recorded(tree)[1]
        assert (records[0]["stop_reason"], records[0]["depth"]) == (reason, depth)
        assert {record["stop_reason"] for record in records} <= {reason, "budget", "levels", None}
