"""A rule's draft lengths against constant ones of the same mean and the best one, worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from aerie.configs.schema.decode import Method
from aerie.infer.measure.record import Asked, AskedCell, AskedPoint, Record
from aerie.infer.report.page import reading
from aerie.infer.report.papers import length_sentence, length_words, lengths, measured_constants
from tests.infer.figures.made_up import tree
from tests.infer.made_up import drafted, milliseconds, record

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
PROMPTS = (("sums", "a"), ("sums", "b"))
# a drafted token costs 1 ms, v(n) is 2 + n ms, the rest of a cycle 0.5; a plain cycle 3
COSTS = {"draft": {"1": [1.0, 1.0]}, "verify": {"1": 3.0, "41": 43.0}, "rest": 0.5, "plain": 3.0}
TUNING: dict[str, Any] = {"heads": [{"kind": "draft_lm", "costs_ms": COSTS}]}


def answers(
    row: int, method: Method, cycles: dict[str, list[tuple[int, int]]], levels: int | None = None
) -> list[Record]:
    """Answers of chains to each prompt; cycles: (drafted, accepted)."""
    found = []
    for name, spent in cycles.items():
        nodes = tuple(count for count, _ in spent)
        found.append(
            drafted(
                tuple(kept + 1 for _, kept in spent), row=row, method=method, head="draft_lm", prompt_id=name,
                tree=tree(method, **({} if levels is None else {"levels": levels})), draft_forwards=sum(nodes),
                draft_nodes=sum(nodes), cycle_nodes=nodes, output_ids=(1, 2, 3, 4, 1, 2, 3, 4),
                ms=milliseconds(10.0, 30.0),
            )
        )  # fmt: skip
    return found


def bench() -> tuple[list[Record], Asked]:
    """Constants of 1, 2 and 4 and SVIP with 3 drafted tokens in a cycle on average."""
    records = [record(prompt_id=name, output_ids=(1, 2, 3, 4, 5, 6)) for _, name in PROMPTS]
    records += answers(1, "sps-svip", {"a": [(5, 5), (1, 0)], "b": [(5, 4), (1, 1)]})
    records += answers(2, "sps", {"a": [(1, 1)] * 3, "b": [(1, 1)] * 3}, 1)
    records += answers(3, "sps", {"a": [(2, 2), (2, 1)], "b": [(2, 1), (2, 2)]}, 2)
    records += answers(4, "sps", {"a": [(4, 3), (4, 1)], "b": [(4, 2), (4, 2)]}, 4)
    main = (AskedCell(0, **GREEDY), AskedCell(1, **GREEDY))
    points = tuple(
        AskedPoint(row, **GREEDY, sweep="c", key="tree.levels", value=gamma, prompts=PROMPTS)
        for row, gamma in ((2, 1), (3, 2), (4, 4))
    )
    return records, Asked(main, points)


def test_a_constant_of_the_same_mean_is_read_between_its_neighbours() -> None:
    (found,) = lengths(*bench(), TUNING)
    assert (found["head"], found["temperature"], found["prompts"]) == ("draft_lm", 0.0, 2)
    (rule,) = found["rules"]
    # 12 drafted tokens in 4 cycles, 10 of them accepted
    assert (rule["length"], rule["accept_rate"], rule["tau"]) == (3.0, 10 / 12, 14 / 4)
    equal = rule["equal"]
    assert (equal["below"], equal["above"], equal["share"]) == (2, 4, 0.5)
    # of 2 drafted tokens 1.5 are accepted, of 4 of them 2: of 3, in turn the one and the other, 1.75
    assert (equal["length"], equal["tau"], equal["accept_rate"]) == (3.0, 2.75, pytest.approx(1.75 / 3))
    assert equal["tau_difference"] == pytest.approx(0.75)
    assert equal["accept_difference"] == pytest.approx(10 / 12 - 1.75 / 3)


def test_every_cycle_pays_for_its_own_length() -> None:
    (found,) = lengths(*bench(), TUNING)
    # a cycle of n drafted tokens takes n + (3 + n) + 0.5 = 3.5 + 2 n; SVIP's of 5 and of 1 take 9.5 on average
    assert [one["modelled"] for one in found["constants"]] == [
        pytest.approx(3 * 2 / 5.5), pytest.approx(3 * 2.5 / 7.5), pytest.approx(3 * 3 / 11.5),
    ]  # fmt: skip
    (rule,) = found["rules"]
    assert rule["modelled"] == pytest.approx(3 * 3.5 / 9.5)
    assert rule["equal"]["modelled"] == pytest.approx(3 * 2.75 / 9.5)
    assert rule["equal"]["speed"] == pytest.approx(3.5 / 2.75)
    assert found["best"] == 1 and rule["best"]["speed"] == pytest.approx((3.5 / 9.5) / (2 / 5.5))


def test_v_of_the_mean_length_is_not_the_mean_of_v() -> None:
    bent = {"heads": [{"kind": "draft_lm", "costs_ms": {**COSTS, "verify": {"1": 3.0, "4": 3.0, "8": 30.0}}}]}
    (found,) = lengths(*bench(), bent)
    # v(2) = 3 and v(6) = 16.5: 9.75 in the mean, where v(4) is 3
    assert found["rules"][0]["modelled"] == pytest.approx(3 * 3.5 / (3 + 9.75 + 0.5))


def test_answers_that_repeat_themselves_are_told() -> None:
    (found,) = lengths(*bench(), TUNING)
    assert found["repeated"] == 0.0 and found["rules"][0]["repeated"] == pytest.approx(1 / 5)


def test_without_costs_the_clock_names_the_best_and_no_speed_is_modelled() -> None:
    for tuning in (None, {"heads": [{"kind": "eagle1", "costs_ms": COSTS}]}):
        records, asked = bench()
        quick = [replace(one, ms=milliseconds(10.0, 20.0)) if one.row == 4 else one for one in records]
        (found,) = lengths(quick, asked, tuning)
        assert found["best"] == 4 and found["rules"][0]["modelled"] is found["rules"][0]["equal"]["speed"] is None
        assert "costs were not measured" in length_words(found)[0]
        assert "of the same mean: a larger tau (+0.75, 95 %" in length_sentence(found, found["rules"][0])


def test_a_length_that_no_constant_has_is_not_made_up() -> None:
    records, asked = bench()
    (found,) = lengths(records, replace(asked, points=asked.points[:2]), TUNING)
    assert found["rules"][0]["equal"] is None
    assert "No constant of the sweep is as short or as long." in length_words(found)[0]
    assert "of the same mean: it was not measured." in length_sentence(found, found["rules"][0])


def test_only_chains_with_good_answers_to_the_same_prompts_are_compared() -> None:
    records, asked = bench()
    assert lengths(records, None, TUNING) == []
    assert lengths(records, replace(asked, points=asked.points[:1]), TUNING) == []  # one constant is no sweep
    one_prompt = [one for one in records if one.row != 1 or one.prompt_id == "a"]
    assert lengths(one_prompt, asked, TUNING) == []
    failed = [replace(one, status="error", message="x", ms=None) if one.row == 1 else one for one in records]
    assert lengths(failed, asked, TUNING) == []
    other_head = [replace(one, head_path="runs/other") if one.row == 1 else one for one in records]
    assert lengths(other_head, asked, TUNING) == []
    twice = [*records, *(replace(one, row=7) for one in records if one.row == 1)]  # as a sweep's point
    assert len(lengths(twice, asked, TUNING)[0]["rules"]) == 1
    (old,) = lengths([replace(one, cycle_nodes=()) for one in records], asked, TUNING)
    assert old["rules"][0]["modelled"] is None  # records of an older version


def test_the_best_constant_is_one_of_those_that_were_measured() -> None:
    records, asked = bench()
    records += answers(5, "sps", {"a": [(3, 3), (3, 1)], "b": [(3, 2), (3, 2)]}, 3)
    third = replace(asked.points[0], row=5, value=3)
    for points, named in (
        (asked.points, "gamma 1, 2 and 4"),
        (asked.points[1:], "gamma 2 and 4"),
        ((*asked.points, third), "gamma 1 to 4"),
    ):
        (found,) = lengths(records, replace(asked, points=points), TUNING)
        best = found["best"]
        assert measured_constants(found) == named
        assert f"The best of {named} on these prompts, {best}: accept rate" in length_words(found)[1]
        assert f"Against the best of {named} on these prompts, {best}: " in length_sentence(found, found["rules"][0])


@pytest.mark.parametrize(
    ("kept", "said"), [((5, 5), "faster ("), ((0, 0), "slower ("), ((5, 0), "not told apart in speed (")]
)
def test_the_words_say_it_whichever_way_it_comes_out(kept: tuple[int, int], said: str) -> None:
    records, asked = bench()
    own = answers(1, "sps-svip", {"a": [(5, kept[0]), (1, 0)], "b": [(5, kept[1]), (1, 0)]})
    (found,) = lengths([one for one in records if one.row != 1] + own, asked, TUNING)
    (rule,) = found["rules"]
    sentence = length_sentence(found, rule)
    assert sentence.startswith("SVIP (entropy) on the draft_lm head, T 0, 2 prompts: drafts of 3.00 tokens on ")
    assert sentence.count(said) == 2
    rate = f"{sum(kept) / 12:.2f}"
    assert length_words(found)[0].startswith(f"SVIP (entropy) drafts 3.00 tokens in a cycle, accept rate {rate}")
    details = {"analysis": None, "tuning": None, "deagle": [], "lengths": [found]}
    assert reading({"rows": []}, details) == [sentence]
