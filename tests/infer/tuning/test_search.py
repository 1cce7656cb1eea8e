"""A tree is priced by hand-made costs, and a machine on which nodes cost more gets a smaller tree."""

from dataclasses import replace

import numpy as np
import pytest

from aerie.configs.schema.decode import METHODS, ChainConfig, DynamicConfig, EntropyConfig, MethodConfig
from aerie.infer.measure.tune import (
    GRID,
    Costs,
    Cycles,
    Recording,
    accepted,
    by_calibrated_confidence,
    candidates,
    cycles,
    method_of,
    path_ranks,
    predict,
    predictions,
    price,
    rows,
)

COSTS = Costs(draft={1: (1.0, 0.5), 3: (2.0, 1.0)}, verify={1: 10.0, 11: 20.0}, rest=1.0, plain=10.5)


def recording() -> Recording:
    """One answer of 7 tokens, 5 6 7 8 5 6 7, with a draft at each place: always the next token first, then token 9.

    Two levels, two children, each with probability 0.8 or 0.2.
    """
    text = [5, 6, 7, 8, 5, 6, 7]
    places = len(text) - 1
    tokens = np.full((places, 2, 2, 2), -1)
    survival = np.full((places, 2, 2, 2), -np.inf, dtype=np.float32)
    ahead = np.full((places, 2), -1)
    for place in range(places):
        following = [*text[place + 1 :], -7, -7][:2]  # -7: a token that the text has not
        ahead[place] = [token if token > 0 else -1 for token in following]
        tokens[place, 0, 0] = [following[0], 9]
        survival[place, 0, 0] = np.log([0.8, 0.2])
        tokens[place, 1] = [[following[1], 9], [following[1], 9]]
        survival[place, 1] = np.log([[0.64, 0.16], [0.16, 0.04]])
    return Recording(
        tokens=tokens,
        survival=survival,
        frontier=np.tile([0, 1], (places, 1, 1)),
        text=ahead,
        answer=np.zeros(places, dtype=np.int64),
        left=np.arange(places, 0, -1),
        allowed=np.full(places, 50),
    )


def test_ranks_are_places_among_all_candidates_of_the_tree() -> None:
    """0.8 first, 0.64 second; the last place has no second token to find."""
    ranks = path_ranks(recording(), 2, 2)
    assert ranks[:-1].tolist() == [[0, 1]] * 5 and ranks[-1].tolist() == [0, 8]


def test_cycles_begin_where_the_last_one_ended() -> None:
    """Six tokens: 2 drafted + 1 of the target's, twice; a tree of two nodes takes one drafted token a cycle."""
    found = recording()
    ranks = path_ranks(found, 2, 2)
    assert cycles(found, accepted(ranks, 3), 2) == Cycles(6, 2, 2, 4, 4)
    assert cycles(found, accepted(ranks, 2), 2) == Cycles(6, 3, 3, 6, 3)


def test_no_draft_is_deeper_than_what_may_still_be_written() -> None:
    found = replace(recording(), allowed=np.arange(6, 0, -1))
    ranks = path_ranks(found, 2, 2)
    assert accepted(ranks, 8).tolist() == [2, 2, 2, 2, 1, 0]
    assert cycles(found, accepted(ranks, 8), 2) == Cycles(6, 2, 2, 4, 4)


def test_a_price_is_drafting_verifying_and_the_rest() -> None:
    """Two drafting cycles of three levels in sum with k 2 (1.5 and 0.75 between the measured widths), one without."""
    counted = Cycles(tokens=6, target_forwards=3, draft_trees=2, draft_levels=3, accepted=3)
    assert price(counted, 2, 6, COSTS) == pytest.approx((2 * 1.5 + 1 * 0.75) + 2 * 15.0 + 10.0 + 3 * 1.0)


def test_a_prediction_is_the_price_of_its_cycles() -> None:
    found = predict(DynamicConfig(levels=2, k=2, nodes=3), recording(), COSTS)
    each = (2 * 1.5 + 2 * 0.75 + 2 * 12.0 + 2 * 1.0) / 6
    assert found.tau == 3.0 and found.ms_per_token == pytest.approx(each)
    assert found.speedup == pytest.approx(10.5 / each)


def test_where_nodes_cost_more_the_tree_is_smaller() -> None:
    free = Costs(COSTS.draft, {1: 10.0, 60: 10.0}, 1.0, 10.5)
    dear = Costs(COSTS.draft, {1: 10.0, 60: 900.0}, 1.0, 10.5)
    found = recording()
    assert predictions(found, free)[0].tree.nodes >= 3 > predictions(found, dear)[0].tree.nodes


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "draft_lm"])
def test_every_candidate_and_every_row_of_the_grid_is_a_method_of_its_kind(kind: str) -> None:
    named = rows(kind, method_of(kind, ChainConfig(levels=4)), grid=True)
    shapes = [ChainConfig(levels=4)]
    shapes += [] if kind == "draft_lm" else [DynamicConfig(levels=4, k=2, nodes=9)]
    for tree in shapes:
        for one in candidates(kind, tree, 8):
            named.append(MethodConfig.of(one.method, levels=8, stop=one.tree.stop))
    assert len(rows("eagle1", named[1], grid=True)) == 3 + len(GRID)
    for row in named:
        assert row.method == "vanilla" or (kind in METHODS[row.method].heads and row.tree is not None)


def test_a_chain_given_room_has_room_for_all_its_levels() -> None:
    grown = candidates("eagle1", ChainConfig(levels=3), 9)
    assert {(one.tree.levels, one.tree.nodes) for one in grown} == {(9, 10)}
    assert any(isinstance(one.tree.stop, EntropyConfig) for one in grown)


def test_a_chain_has_one_child_a_node_whatever_its_k() -> None:
    """TreeConfig's k and nodes say nothing of a chain; as a tree of k 2 it would be credited with siblings."""
    narrow = predict(ChainConfig(levels=2), recording(), COSTS)
    assert predict(ChainConfig(levels=2), recording(), COSTS) == narrow
    assert narrow.tau == 3.0


def test_calibrated_confidence_is_tried_with_every_rule_and_with_deeper_trees() -> None:
    tree = DynamicConfig(levels=5, k=2, nodes=12)
    rules = candidates("eagle1", tree, 10)
    found = by_calibrated_confidence("eagle1", tree, rules, 8)
    assert [one.method for one in found[: len(rules)]] == [one.method for one in rules]
    assert all(one.tree.calibrated == "isotonic" for one in found)
    assert [(one.method, one.tree.levels) for one in found[len(rules) :]] == [("eagle2", 5), ("eagle2", 7)]
    chain = ChainConfig(levels=5)
    assert len(by_calibrated_confidence("eagle1", chain, candidates("eagle1", chain, 10), 10)) == len(
        candidates("eagle1", chain, 10)
    )
