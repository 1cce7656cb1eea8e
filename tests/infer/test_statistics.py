"""Laws of tau, speedup, contexts and the rows of summary.json; numbers worked out by hand.

Laws of a bench's files, and of the names by which its rows are told apart.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.schema.decode import (
    METHODS,
    EntropyConfig,
    LookaheadConfig,
    MethodConfig,
    PromptLookupConfig,
    VoteConfig,
)
from aerie.infer.measure.bench_files import Record, line_of, read_records
from aerie.infer.measure.bootstrap import tau_difference
from aerie.infer.measure.statistics import (
    Pair,
    context_rows,
    group,
    identity,
    speedups,
    summary_row,
    tau_interval,
    told_apart,
)
from aerie.infer.measure.tree_shape import tree_shape
from aerie.infer.report.tables import (
    console_table,
    csv_table,
    label,
    markdown_table,
    row_labels,
    tree_text,
)
from tests.infer.made_up import FAILED, drafted, milliseconds, record
from tests.tiny import refused


def two_prompts() -> list[Record]:
    """Vanilla: 4 tokens in 40 ms, 8 in 80 ms; eagle2: in 10 ms (2 cycles) and 40 ms (4)."""
    return [
        record(prompt_id="a"),
        record(8, prompt_id="b", ms=milliseconds(prefill=10.0, wall=90.0)),
        drafted((3, 1), prompt_id="a", ms=milliseconds(prefill=10.0, wall=20.0, draft=4.0)),
        drafted(
            (4, 1, 2, 1),
            prompt_id="b",
            ms=milliseconds(prefill=20.0, wall=60.0, draft=8.0),
            peak_memory_gib=1.5,
        ),
    ]


def rows_of(records: list[Record]) -> list[dict[str, Any]]:
    return [summary_row(members).as_dict() for members in group(records)]


def test_figures() -> None:
    """Figures count the bonus but not the prefill's token; speedup is of decode seconds."""
    records = two_prompts()
    vanilla, eagle = rows_of([*records[:3], replace(records[3], identical=False)])
    assert (vanilla["tau"], vanilla["speedup"], vanilla["speedup_ci95"]) == (1.0, 1.0, [1.0, 1.0])
    assert eagle["tau"] == (5 + 9 - 2) / 6 and eagle["tau_macro"] == (4 / 2 + 8 / 4) / 2
    # 12 decoded tokens each; vanilla 120 ms, eagle2 10 + 40 ms
    assert eagle["speedup"] == pytest.approx(120 / 50) and eagle["tokens_per_s"] == pytest.approx(
        12 / 0.050
    )
    assert eagle["speedup_mean_per_prompt"] == pytest.approx((40 / 10 + 80 / 40) / 2)
    assert eagle["speedup_with_prefill"] == pytest.approx(
        140 / 80
    )  # all 14 new tokens; walls of 140 and 80 ms
    assert (eagle["prompts"], eagle["peak_memory_gib"], eagle["draft_nodes"]) == (2, 1.5, 90)
    assert eagle["accept_rate"] == (2 + 0 + 3 + 0 + 1 + 0) / 90
    assert (eagle["identical"], eagle["mismatch"], eagle["ms"]["draft"]) == (1, 1, 12.0)
    assert (vanilla["accepted_histogram"], eagle["accepted_histogram"]) == (
        [12],
        [3, 1, 1, 1, 0, 0, 0],
    )
    (pooled,) = rows_of([drafted((5,), prompt_id="a"), drafted((1, 1, 1), prompt_id="b")])
    assert (pooled["tau"], pooled["tau_macro"]) == (8 / 4, (5 + 1) / 2)


def test_failures() -> None:
    """Speedup is of prompts that are ok in both; a failed row has no figure."""
    records = two_prompts()
    vanilla, eagle = rows_of([records[0], record(prompt_id="b", **FAILED), *records[2:]])
    assert (
        vanilla["status"] == "error"
        and eagle["speedup"] == pytest.approx(40 / 10)
        and eagle["speedup_ci95"] is None
    )
    _, eagle = rows_of([*records[:3], replace(records[3], **FAILED)])
    assert eagle["message"] == "1 of 2 prompts failed; first 'b': no memory"
    assert not {"tokens_per_s", "speedup", "speedup_ci95", "ms", "tau"} & eagle.keys()
    (alone,) = rows_of(records[2:])
    assert alone["speedup"] is None and alone["tau"] == 2.0


def test_intervals() -> None:
    """Intervals are paired, seeded, and as wide as the spread between prompts."""
    pairs = []
    for prompt in range(30):
        wall = 50.0 * (1 + prompt)  # times differ 30-fold between prompts, speedups hardly
        base = record(prompt_id=str(prompt), ms=milliseconds(prefill=0.0, wall=wall))
        quick = milliseconds(prefill=0.0, wall=wall / (2.0 + 0.1 * (prompt % 3)))
        pairs.append(Pair(drafted((3, 1), prompt_id=str(prompt), ms=quick), base))
    measured = speedups(pairs, seed=3)
    low, high = measured["speedup_ci95"]
    assert 2.0 < low < measured["speedup"] < high < 2.2
    assert high - low < 0.1  # unpaired resampling of such prompts spreads over more than 1
    assert speedups(pairs, seed=3) == measured != speedups(pairs, seed=4)
    alike = [drafted((3, 1), prompt_id=str(prompt)) for prompt in range(8)]
    assert tau_interval(alike) == [2.0, 2.0] and tau_interval(alike[:1]) is None


def test_turns() -> None:
    """The turns of a prompt are one prompt, and are compared turn by turn."""
    turns = [
        replace(each, prompt_id="a", turn=number % 2) for number, each in enumerate(two_prompts())
    ]
    _, eagle = rows_of(turns)
    assert (eagle["prompts"], eagle["identical"], eagle["new_tokens"], eagle["speedup_ci95"]) == (
        1,
        2,
        14,
        None,
    )
    assert eagle["speedup"] == eagle["speedup_mean_per_prompt"] == pytest.approx(120 / 50)
    assert eagle["tau"] == eagle["tau_macro"] == 12 / 6 and tau_interval(turns[2:]) is None


def answer(number: int, prompt: str, tokens: int, cycles: int) -> Record:
    return drafted((tokens,) * cycles, row=number, prompt_id=prompt)


def test_tau_difference() -> None:
    """Compared rows are pooled, and paired by prompt."""
    records = [
        answer(1, "a", 4, 3),
        answer(1, "b", 2, 1),
        answer(2, "a", 2, 2),
        answer(2, "b", 2, 2),
    ]
    assert tau_difference(records, [1], [2]).startswith("tau 3.500 against 2.000: +1.500 [")
    assert tau_difference(records, [1, 2], [2]).startswith("tau 2.750 against")
    mixed = [
        answer(number, str(n), tokens, 5)
        for n in range(8)
        for number, tokens in ((1, 2 + n % 4), (2, 3))
    ]
    low, high = (
        float(bound) for bound in re.findall(r"[+-]\d\.\d+", tau_difference(mixed, [1], [2]))[1:]
    )
    assert low < 0.5 < high and f"[{-high:+.3f}, {-low:+.3f}]" in tau_difference(mixed, [2], [1])
    refused("lacks answers", tau_difference, [*records[:2], answer(2, "c", 2, 1)], [1], [2])
    assert "+2.000 [-inf, +inf] (95 %, paired bootstrap; prompts: 1)" in tau_difference(
        records[::2], [1], [2]
    )
    refused(
        "tau cannot be compared",
        tau_difference,
        [answer(row, "a", 0, 0) for row in (1, 2)],
        [1],
        [2],
    )


def slow(prompt: str = "0") -> Record:
    """Vanilla on a prompt of 100 tokens: 40 more tokens of 10 ms each."""
    spent = {"prompt_tokens": 100, "cycle_ms": (10.0,) * 40, "cycle_nodes": (0,) * 40}
    return record(40, prompt_id=prompt, ms=milliseconds(5.0, 405.0), **spent)


def fast(cycles: int = 10, **changes: Any) -> Record:
    """Cycles of 4 tokens: 16 ms each up to context 121, 8 ms each after it."""
    times = ((16.0,) * 5 + (8.0,) * 5)[:cycles]
    spent = {"prompt_tokens": 100, "cycle_ms": times, "cycle_nodes": (6,) * cycles}
    return drafted((4,) * cycles, ms=milliseconds(5.0, 5.0 + sum(times)), **spent, **changes)


def test_contexts() -> None:
    """Points by context length: the way to each, and the way from the one before."""
    loop = (*range(21), *range(20))  # 4-grams that end at tokens 25 to 41 are repeats
    _, members = group([slow(), fast(output_ids=loop)])
    measured = {
        (one.value, one.span): one for one in context_rows(members, (103, 111, 131, 141), None)
    }
    # the prefill's token is at 101; ten tokens, to 111, take vanilla 100 ms, and eagle2 2.5
    # cycles of 16 ms
    assert measured[111, "cumulative"].speedup == pytest.approx(100 / 40)
    assert measured[131, "bucket"].speedup == pytest.approx(
        200 / (40 + 20)
    )  # ten more at 4 ms a token, ten at 2
    assert measured[131, "cumulative"].speedup == pytest.approx(300 / 100)
    last = measured[141, "bucket"]
    assert (last.tau, last.new_tokens, last.accept_rate) == (
        pytest.approx(4.0),
        10,
        pytest.approx(3 / 6),
    )
    repeated = {key: one.repeated for key, one in measured.items()}
    assert (
        repeated[103, "cumulative"] is None and repeated[111, "cumulative"] == 0.0
    )  # no 4-gram ends at 103 yet
    assert repeated[141, "cumulative"] == pytest.approx(17 / 38) and repeated[
        131, "bucket"
    ] == pytest.approx(7 / 20)
    # left out: lengths that no pair reaches, or that are beyond the target's context
    _, members = group([slow(), slow("1"), fast(), fast(2, prompt_id="1")])
    reached = [
        (one.value, one.prompts)
        for one in context_rows(members, (105, 120, 200), 150)
        if one.span == "bucket"
    ]
    assert reached == [(105, 2), (120, 1)]
    assert context_rows(members, (100, 142), None) == []  # before the answers begin, after they end


def test_file(tmp_path: Path) -> None:
    """Records survive the file, and a last line that was cut is left out."""
    path = tmp_path / "records.jsonl"
    written = [record(), drafted((3, 1), text="two\nlines é", output_ids=(1, 2, 3, 4, 5))]
    path.write_text("".join(map(line_of, written)) + line_of(drafted((3, 1), row=2))[:80])
    assert read_records(path) == written
    path.write_text(line_of(record()) + "{\n")
    refused(r"records\.jsonl:2: .*delete the line", read_records, path)


STOPS = [EntropyConfig(), EntropyConfig(c=1.0), EntropyConfig(h=0.5), VoteConfig()]
VOTES: list[dict[str, Any]] = [
    {},
    {"bonus": 0.5},
    {"signals": ("momentum",)},
    {"declines": 1},
]
ALIKE: dict[str, list[dict[str, Any]]] = {  # changes of a method's tree that keep its size
    "eagle-chain": [{}, {"children": "best"}, *({"stop": stop} for stop in STOPS)],
    "eagle2": [{}, {"rank": "confidence"}, {"rerank": False}],
    "eagle": [{}, {"children": "best"}, {"calibrated": "isotonic"}],
    "deagle": [{"stop": VoteConfig(**changes)} for changes in VOTES],
}


def measured(rows: list[MethodConfig]) -> list[Record]:
    """A record of vanilla and of each row, with the same figures."""
    records = [record()]
    for number, asked in enumerate(rows, start=1):
        kinds = METHODS[asked.method].heads
        named = {
            "method": asked.method,
            "head": kinds[0] if kinds else None,
            "head_path": asked.head,
        }
        records.append(drafted((3, 1), row=number, tree=tree_shape(asked), **named))
    return records


@pytest.mark.parametrize(
    "rows",
    [[MethodConfig.of(method, **changes) for changes in every] for method, every in ALIKE.items()]
    + [
        [MethodConfig("pld", lookup=lookup) for lookup in (None, PromptLookupConfig(3))],
        [
            MethodConfig("lookahead", lookahead=each)
            for each in (None, LookaheadConfig(pool_from_text=True))
        ],
    ],
    ids=lambda rows: rows[0].method,
)
def test_labels(rows: list[MethodConfig]) -> None:
    """Rows that differ in any setting have different labels."""
    summary = told_apart([summary_row(members) for members in group(measured(rows))])
    assert len({label(each, summary) for each in summary}) == len(summary)
    for text in (console_table(summary), markdown_table(summary), csv_table(summary)):
        assert len(set(text.splitlines()[-len(rows) :])) == len(rows)
    apart = {
        row_labels(measured(rows), [number]).partition(" (")[2]
        for number in range(1, len(rows) + 1)
    }
    assert len(apart) == len(rows)


def test_settings() -> None:
    """The summary holds every setting; a label leaves out what is as published."""
    asked = MethodConfig.of("eagle", children="best", stop=EntropyConfig(c=1.0))
    tree = identity(group(measured([asked]))[1]).as_dict()["tree"]
    assert (tree["choices"], tree["children"], tree["stop"]["c"], tree["stop"]["h"]) == (
        "eagle1",
        "best",
        1.0,
        0.3,
    )
    for method in METHODS:
        shape = tree_shape(MethodConfig.of(method))
        assert shape is None or shape.variant == ""


def test_head_names() -> None:
    """Heads are named where they alone differ."""
    rows = [
        MethodConfig.of("eagle2", head=head)
        for head in (None, "runs/a/heads/eagle1", "runs/b/heads/eagle1")
    ]
    texts = [
        tree_text(each)
        for each in told_apart([identity(each) for each in group(measured(rows))])[1:]
    ]
    wanted = ["of the run", "runs/a/heads/eagle1", "runs/b/heads/eagle1"]
    assert texts == [f"6 levels, k 10, 60 nodes, head {head}" for head in wanted]
