"""DEAGLE's claim in numbers, computed by hand."""

from dataclasses import replace
from typing import Any

import pytest

from aerie.configs.schema.decode import Method
from aerie.infer.measure.record import Asked, AskedCell, AskedPoint, Record
from aerie.infer.report.page import claim_words, claimed_on, reading
from aerie.infer.report.papers import claims
from tests.infer.figures.made_up import tree
from tests.infer.made_up import drafted, milliseconds, record

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
PROMPTS = (("sums", "a"), ("sums", "b"))
# a level costs 1 ms, verifying 2 ms for one node and 4 for 60, the rest 0.5 a cycle, a plain cycle 3
COSTS = {"draft": {"1": [1.0, 1.0], "10": [1.0, 1.0]}, "verify": {"1": 2.0, "60": 4.0}, "rest": 0.5, "plain": 3.0}
TUNING: dict[str, Any] = {"heads": [{"kind": "eagle1", "costs_ms": COSTS}]}


def answers(
    row: int, method: Method, levels: int, tokens: tuple[int, ...], spent: tuple[int, int, float]
) -> list[Record]:
    """Both prompts' answers; spent: draft forwards, how many of them wasted, decode milliseconds."""
    forwards, wasted, ms = spent
    return [
        drafted(
            tokens, row=row, method=method, tree=tree(method, levels=levels), head="eagle1", prompt_id=name,
            draft_forwards=forwards, draft_forwards_wasted=wasted, draft_nodes=59 * len(tokens),
            cycle_nodes=(59,) * len(tokens), ms=milliseconds(10.0, 10.0 + ms),
        )
        for _, name in PROMPTS
    ]  # fmt: skip


def bench() -> tuple[list[Record], Asked]:
    records = [record(prompt_id=name) for _, name in PROMPTS]  # 4 tokens after the prefill's in 40 ms
    records += answers(1, "eagle2", 2, (3, 1), (4, 2, 20.0))
    records += answers(2, "deagle", 2, (3, 1), (3, 1, 20.0))
    records += answers(3, "eagle2", 4, (4,), (4, 4, 10.0))
    records += answers(4, "deagle", 4, (3, 1), (3, 2, 16.0))
    points = [
        AskedPoint(row, **GREEDY, sweep="d", key="tree.levels", value=levels, prompts=PROMPTS)
        for row, levels in ((1, 2), (2, 2), (3, 4), (4, 4))
    ]
    return records, Asked((AskedCell(0, **GREEDY),), tuple(points))


def test_ratios_are_of_the_vote_and_held_to_their_limits() -> None:
    (claim,) = claims(*bench(), TUNING)
    assert (claim["head"], claim["largest"], claim["prompts"]) == ("eagle1", 4, 2)
    assert (claim["waste"], claim["waste_holds"]) == (4 / 8, True)
    assert (claim["tau"], claim["tau_best_depth"], claim["tau_holds"]) == (2 / 4, 4, False)
    assert [one["tau"] for one in claim["fixed"]] == [2.0, 4.0]
    assert [one["speedup"] for one in claim["vote"]] == [pytest.approx(2.0), pytest.approx(2.5)]


def test_modelled_speed_is_the_price_of_the_cycles() -> None:
    (claim,) = claims(*bench(), TUNING)
    # 8 tokens in 4 cycles: drafting 4 + 4, verifying 16, the rest 2; the vote drafts two levels fewer
    # 8 tokens in 2 cycles: drafting 2 + 6, verifying 8, the rest 1
    assert [one["modelled"] for one in claim["fixed"]] == [pytest.approx(24 / 26), pytest.approx(24 / 17)]
    assert [one["modelled"] for one in claim["vote"]] == [pytest.approx(1.0), pytest.approx(1.0)]
    assert (claim["modelled"], claim["modelled_best_depth"], claim["modelled_holds"]) == (pytest.approx(1.0), 2, True)


def test_the_clock_is_paired_with_each_other_tree_once() -> None:
    (claim,) = claims(*bench(), TUNING)
    assert [(wall["rule"], wall["depth"]) for wall in claim["wall"]] == [("fixed", 4), ("vote", 2)]
    assert [wall["speed"] for wall in claim["wall"]] == [pytest.approx(10 / 16), pytest.approx(20 / 16)]
    assert claim["wall"][1]["speed_ci95"] == [pytest.approx(1.25), pytest.approx(1.25)]


def test_the_words_say_it_whichever_way_it_comes_out() -> None:
    (claim,) = claims(*bench(), TUNING)
    words = claim_words(claim)
    assert words[0].startswith("With room for 4 levels the vote wastes 4 draft forwards, the fixed tree 8: 0.50 times")
    assert "holds here" in words[0] and "50.0 %" in words[1] and "does NOT hold here" in words[1]
    assert "0.62 times as fast as the fixed tree of at most 4 levels (95 % 0.62–0.62, all below 1)" in words[3]
    said = reading({"rows": []}, {"analysis": None, "tuning": None, "deagle": [claim], "lengths": []})
    assert said == [
        "DEAGLE’s claim, on the eagle1 head: with room for 4 levels it holds for wasted forwards and modelled speed; "
        "does not hold for tau (T 0, 2 prompts)."
    ]


def test_without_costs_nothing_is_modelled_and_without_waste_there_is_no_ratio() -> None:
    for tuning in (None, {"heads": [{"kind": "eagle3", "costs_ms": COSTS}]}):
        (claim,) = claims(*bench(), tuning)
        assert claim["modelled"] is claim["modelled_holds"] is claim["modelled_best_depth"] is None
        assert [(wall["rule"], wall["depth"]) for wall in claim["wall"]] == [("fixed", 4)]
        assert len(claim_words(claim)) == 3
    records, asked = bench()
    idle = [replace(one, draft_forwards_wasted=0) if one.row == 3 else one for one in records]
    (claim,) = claims(idle, asked, None)
    assert claim["waste"] is claim["waste_holds"] is None and "There is no ratio" in claim_words(claim)[0]


def test_a_claim_needs_both_rules_at_two_depths_on_the_same_prompts() -> None:
    records, asked = bench()
    assert claims(records, None, TUNING) == []
    assert claims(records, Asked(asked.main, asked.points[:3]), TUNING) == []
    other = replace(asked.points[3], prompts=PROMPTS[:1])
    assert claims(records, Asked(asked.main, (*asked.points[:3], other)), TUNING) == []
    failed = [replace(one, status="error", message="x", ms=None) if one.row == 4 else one for one in records]
    assert claims(failed, asked, TUNING) == []


def test_trees_by_calibrated_confidence_are_a_claim_of_their_own() -> None:
    """They are compared with fixed trees by the same confidence, and say which."""
    records, asked = bench()
    moved = []
    for one in records:
        settings = {} if one.tree is None else {**one.tree.settings, "calibrated": "isotonic"}
        shape = None if one.tree is None else replace(one.tree, settings=settings)
        moved.append(replace(one, tree=shape, row=one.row + 4) if shape is not None else one)
    points = (*asked.points, *(replace(point, row=point.row + 4) for point in asked.points))
    own, calibrated = claims([*records, *(one for one in moved if one.tree)], replace(asked, points=points), TUNING)
    assert (own["calibrated"], calibrated["calibrated"]) == (None, "isotonic")
    assert own["tau"] == calibrated["tau"] and calibrated["prompts"] == 2
    assert claimed_on(own) == "eagle1 head" and claimed_on(calibrated) == "eagle1 head with isotonic confidence"
