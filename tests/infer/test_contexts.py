"""Answers cut by context length: the figures are worked out by hand."""

from typing import Any

import pytest

from aerie.infer.measure.record import Record
from aerie.infer.measure.statistics import context_rows, group, reached
from tests.infer.made_up import drafted, milliseconds, record


def answer(**changes: Any) -> Record:
    """Vanilla on a prompt of 100 tokens: 40 more tokens of 10 ms each."""
    values: dict[str, Any] = {
        "prompt_tokens": 100,
        "new_tokens": 41,
        "accepted": (0,) * 40,
        "cycle_tokens": (1,) * 40,
        "cycle_ms": (10.0,) * 40,
        "cycle_nodes": (0,) * 40,
        "target_forwards": 40,
        "ms": milliseconds(prefill=5.0, wall=405.0),
    }
    return record(**{**values, **changes})


def fast(**changes: Any) -> Record:
    """Cycles of 4 tokens: 16 ms each up to context 121, 8 ms each behind it."""
    times = (16.0,) * 5 + (8.0,) * 5
    own: dict[str, Any] = {"prompt_tokens": 100, "cycle_ms": times, "cycle_nodes": (6,) * 10}
    return drafted((4,) * 10, ms=milliseconds(5.0, 5.0 + sum(times)), **{**own, **changes})


def test_the_way_to_a_length_and_the_way_from_the_one_before() -> None:
    _, members = group([answer(), fast()])
    rows = [one.as_dict() for one in context_rows(members, (111, 131, 141), None)]
    found = {(row["value"], row["span"]): row for row in rows}
    # the prefill's token stands at 101: ten tokens to 111 take vanilla 100 ms and the cycles of 16 ms 2.5 of them
    assert found[111, "cumulative"]["speedup"] == pytest.approx(100 / 40)
    assert found[111, "bucket"]["speedup"] == found[111, "cumulative"]["speedup"]
    # ten more at 4 ms a token, ten at 2
    assert found[131, "bucket"]["speedup"] == pytest.approx(200 / (40 + 20))
    assert found[131, "cumulative"]["speedup"] == pytest.approx(300 / 100)
    assert found[141, "bucket"]["tau"] == pytest.approx(4.0)
    assert found[141, "bucket"]["new_tokens"] == 10 and found[141, "bucket"]["accept_rate"] == pytest.approx(3 / 6)
    assert {row["sweep"] for row in rows} == {"context"} and rows[0]["method"] == "eagle2"


def test_what_an_answer_says_again_is_counted_where_it_says_it() -> None:
    loop = (*range(21), *range(20))  # the 4-grams that end at its 25th to 41st token have been before
    _, members = group([answer(), fast(output_ids=loop)])
    found = {(row.value, row.span): row.repeated for row in context_rows(members, (103, 111, 131, 141), None)}
    assert found[103, "cumulative"] is None  # no 4-gram ends there yet
    assert found[111, "cumulative"] == 0.0 and found[141, "cumulative"] == pytest.approx(17 / 38)
    assert found[131, "bucket"] == pytest.approx(7 / 20) and found[141, "bucket"] == 1.0


def test_a_length_that_no_pair_reaches_or_that_the_target_does_not_know_is_left_out() -> None:
    short = fast(prompt_id="1", new_tokens=9, cycle_tokens=(4, 4), accepted=(3, 3), target_forwards=2,
                 cycle_ms=(16.0, 16.0), cycle_nodes=(6, 6))  # fmt: skip
    _, members = group([answer(), answer(prompt_id="1"), fast(), short])
    rows = context_rows(members, (105, 120, 200), 150)
    assert [(row.value, row.prompts) for row in rows if row.span == "cumulative"] == [(105, 2), (120, 1)]
    assert [row["value"] for row in context_rows(members, (105, 120), 110)] == [105, 105]


def test_an_answer_that_begins_behind_a_length_has_nothing_there() -> None:
    assert reached(answer(), 0, 100) is None and reached(answer(), 0, 142) is None
    part = reached(answer(), 64, 128)
    assert part is not None and (part.tokens, part.ms) == (27, 270.0)


def test_failures_and_records_without_times_have_no_context_rows() -> None:
    _, old = group([answer(), fast(cycle_ms=(), cycle_nodes=())])
    assert context_rows(old, (111,), None) == []
    failed = fast(status="error", message="x", prompt_id="1")
    _, members = group([answer(), answer(prompt_id="1"), fast(), failed])
    assert context_rows(members, (111,), None) == []
