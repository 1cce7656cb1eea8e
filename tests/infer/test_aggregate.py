"""Laws of tau, speedup and the rows of summary.json; the expected numbers are worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from aerie.infer.measure.record import Record
from aerie.infer.measure.statistics import Group, accepted_histogram, group, row, speedups, tau, tau_interval, tau_macro
from aerie.infer.report.tables import tree_text
from tests.infer.made_up import drafted, milliseconds, record

TIMES = {"tokens_per_s", "speedup", "speedup_ci95", "speedup_mean_per_prompt", "speedup_with_prefill", "ms", "tau"}


def two_prompts() -> list[Record]:
    """Vanilla: 4 decoded tokens in 40 ms, 8 in 80 ms; eagle2: the same tokens in 10 ms (2 cycles) and 40 ms (4)."""
    return [
        record(prompt_id="a"),
        record(
            prompt_id="b",
            new_tokens=9,
            accepted=(0,) * 8,
            cycle_tokens=(1,) * 8,
            target_forwards=8,
            ms=milliseconds(prefill=10.0, wall=90.0),
        ),
        drafted((3, 1), prompt_id="a", ms=milliseconds(prefill=10.0, wall=20.0, draft=4.0)),
        drafted((4, 1, 2, 1), prompt_id="b", ms=milliseconds(prefill=20.0, wall=60.0, draft=8.0), peak_memory_gib=1.5),
    ]


def rows_of(records: list[Record]) -> list[dict[str, Any]]:
    return [row(members) for members in group(records)]


def test_tau_leaves_out_the_prefills_token_and_counts_the_bonus() -> None:
    vanilla, eagle = rows_of(two_prompts())
    assert vanilla["tau"] == 1.0
    assert eagle["tau"] == (5 + 9 - 2) / 6
    assert eagle["tau_macro"] == (4 / 2 + 8 / 4) / 2


def test_tau_pools_cycles_while_tau_macro_weighs_prompts_alike() -> None:
    records = [drafted((5,), prompt_id="a"), drafted((1, 1, 1), prompt_id="b")]
    assert tau(records) == 8 / 4
    assert tau_macro(records) == (5 + 1) / 2


def test_speedup_compares_decode_seconds_without_the_prefill() -> None:
    vanilla, eagle = rows_of(two_prompts())
    # 12 decoded tokens each; 120 ms of vanilla, 10 + 40 ms of eagle2
    assert vanilla["speedup"] == 1.0
    assert vanilla["speedup_ci95"] == [1.0, 1.0]
    assert eagle["speedup"] == pytest.approx(120 / 50)
    assert eagle["tokens_per_s"] == pytest.approx(12 / 0.050)
    assert eagle["speedup_mean_per_prompt"] == pytest.approx((40 / 10 + 80 / 40) / 2)
    # all 14 new tokens; walls of 140 and 80 ms
    assert eagle["speedup_with_prefill"] == pytest.approx(140 / 80)


def test_speedup_uses_only_prompts_that_are_ok_in_both() -> None:
    records = two_prompts()
    failed = record(prompt_id="b", status="error", message="out of memory", ms=None)
    vanilla, eagle = rows_of([records[0], failed, *records[2:]])
    assert vanilla["status"] == "error"
    assert eagle["status"] == "ok"
    assert eagle["speedup"] == pytest.approx(40 / 10)
    assert eagle["speedup_ci95"] is None


def test_a_row_with_a_failed_prompt_says_so_and_carries_no_figure() -> None:
    records = two_prompts()
    failed = replace(records[3], status="error", message="prompt too long", ms=None)
    _, eagle = rows_of([*records[:3], failed])
    assert eagle["status"] == "error"
    assert eagle["message"] == "1 of 2 prompts failed; first 'b': prompt too long"
    assert not TIMES & eagle.keys()


def test_without_a_vanilla_row_there_is_no_speedup() -> None:
    (eagle,) = rows_of(two_prompts()[2:])
    assert eagle["speedup"] is None
    assert eagle["tau"] == 2.0


def test_each_sampling_is_measured_against_its_own_vanilla_row() -> None:
    slow = [replace(item, temperature=1.0, verify="R2", identical=None) for item in two_prompts()]
    for place in (0, 1):
        slow[place] = replace(slow[place], ms=milliseconds(prefill=10.0, wall=10.0 + 400.0))
    _, greedy, _, sampled = rows_of([*two_prompts(), *slow])
    assert greedy["speedup"] == pytest.approx(120 / 50)
    assert sampled["speedup"] == pytest.approx(800 / 50)
    assert sampled["identical"] is None
    assert sampled["mismatch"] is None


def test_interval_is_paired_seeded_and_brackets_the_speedup() -> None:
    pairs = []
    for prompt in range(30):
        wall = 50.0 * (1 + prompt)  # prompts differ 30-fold in time, their speedups hardly
        gain = 2.0 + 0.1 * (prompt % 3)
        base = record(prompt_id=str(prompt), ms=milliseconds(prefill=0.0, wall=wall))
        pairs.append((drafted((3, 1), prompt_id=str(prompt), ms=milliseconds(prefill=0.0, wall=wall / gain)), base))
    found = speedups(pairs, seed=3)
    low, high = found["speedup_ci95"]
    assert 2.0 < low < found["speedup"] < high < 2.2
    assert high - low < 0.1  # unpaired resampling of such prompts spreads over more than 1
    assert speedups(pairs, seed=3) == found
    assert speedups(pairs, seed=4) != found


def test_interval_of_tau_has_the_width_of_the_spread_between_prompts() -> None:
    alike = [drafted((3, 1), prompt_id=str(prompt)) for prompt in range(8)]
    assert tau_interval(alike) == [2.0, 2.0]
    mixed = alike[:4] + [drafted((7, 7), prompt_id=str(prompt)) for prompt in range(4, 8)]
    interval = tau_interval(mixed)
    assert interval is not None
    assert interval[0] < 3.5 and interval[1] > 5.5
    assert tau_interval(alike[:1]) is None


def test_histogram_reaches_the_trees_depth_and_counts_every_cycle() -> None:
    assert accepted_histogram([drafted((3, 1)), drafted((4, 1, 1), prompt_id="1")]) == [3, 0, 1, 1, 0, 0, 0]
    assert accepted_histogram([record()]) == [4]


def test_a_row_sums_counts_and_times_and_takes_the_largest_memory() -> None:
    _, eagle = rows_of(two_prompts())
    assert eagle["prompts"] == 2
    assert eagle["new_tokens"] == 14
    assert (eagle["target_forwards"], eagle["draft_forwards"], eagle["draft_nodes"]) == (6, 36, 90)
    assert eagle["accept_rate"] == (2 + 0 + 3 + 0 + 1 + 0) / 90
    assert eagle["ms"]["wall"] == 80.0
    assert eagle["ms"]["draft"] == 12.0
    assert eagle["peak_memory_gib"] == 1.5
    assert eagle["tree"] == {"shape": "dynamic", "levels": 6, "k": 8, "nodes": 16}


def test_identical_and_mismatch_count_the_compared_answers() -> None:
    records = two_prompts()
    records[3] = replace(records[3], identical=False)
    _, eagle = rows_of(records)
    assert (eagle["identical"], eagle["mismatch"]) == (1, 1)


def test_an_answer_that_ends_at_the_prefills_token_changes_no_ratio() -> None:
    ended: dict[str, Any] = {"new_tokens": 1, "accepted": (), "cycle_tokens": (), "target_forwards": 0}
    ended["ms"] = milliseconds(prefill=10.0, wall=10.0)
    records = [*two_prompts(), record(prompt_id="c", **ended), replace(drafted(()), prompt_id="c", ms=ended["ms"])]
    _, eagle = rows_of(records)
    assert (eagle["tau"], eagle["tau_macro"]) == (2.0, 2.0)
    assert eagle["speedup"] == pytest.approx(120 / 50)


def test_several_tasks_make_one_row_and_one_part_per_task() -> None:
    records = two_prompts()
    records = [replace(item, task="units") if item.prompt_id == "b" else item for item in records]
    _, eagle = group(records)
    assert row(eagle)["task"] == "all"
    parts = {task: row(part) for task, part in eagle.by_task().items()}
    assert [(task, part["task"], part["prompts"]) for task, part in parts.items()] == [
        ("sums", "sums", 1),
        ("units", "units", 1),
    ]
    assert parts["units"]["speedup"] == pytest.approx(80 / 40)


def test_one_prompt_id_in_two_tasks_is_two_prompts() -> None:
    base = record(task="units", ms=milliseconds(prefill=0.0, wall=1000.0))
    (members,) = [found for found in group([record(), base, drafted((3, 1))]) if found.first.method == "eagle2"]
    assert isinstance(members, Group)
    assert [pair.ms.wall for _, pair in members.pairs if pair.ms is not None] == [50.0]


def test_a_row_says_that_it_is_not_lossless_as_soon_as_one_answer_does() -> None:
    lossy = "typical (not lossless)"
    records = [replace(item, temperature=1.0, verify="R2") for item in two_prompts()]
    records = [*records[:-1], replace(records[-1], verify=lossy)]
    rows = [row(members) for members in group(records)]
    assert rows[-1]["verify"] == lossy and "NOT lossless" in tree_text(rows[-1])


def test_the_turns_of_a_prompt_are_one_prompt_in_every_figure() -> None:
    turns = [replace(each, prompt_id="a", turn=number % 2) for number, each in enumerate(two_prompts())]
    vanilla, eagle = rows_of(turns)
    assert eagle["prompts"] == 1 and eagle["identical"] == 2 and eagle["new_tokens"] == 14
    assert eagle["speedup"] == eagle["speedup_mean_per_prompt"] == pytest.approx(120 / 50)
    assert eagle["speedup_ci95"] is None and tau_interval(turns[2:]) is None  # one prompt has no spread
    assert eagle["tau"] == eagle["tau_macro"] == 12 / 6
    assert vanilla["speedup"] == 1.0


def test_a_turn_is_compared_with_vanillas_answer_to_the_same_turn() -> None:
    mixed = two_prompts()
    turns = [replace(each, prompt_id="a", turn=turn) for each, turn in zip(mixed, (1, 0, 0, 1), strict=True)]
    _, eagle = rows_of(turns)
    pairs = {(mine.turn, mine.new_tokens): base.new_tokens for mine, base in group(turns)[1].pairs}
    assert pairs == {(0, 5): 9, (1, 9): 5} and eagle["speedup"] is not None
