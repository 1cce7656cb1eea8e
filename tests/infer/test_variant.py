"""Rows of a bench whose settings differ look different, wherever a row is named."""

from dataclasses import replace
from typing import Any

import pytest

from aerie.configs.schema.decode import (
    METHODS,
    EntropyConfig,
    HeuristicConfig,
    LookaheadConfig,
    MethodConfig,
    ProbabilitySumConfig,
    PromptLookupConfig,
    TypicalConfig,
    VoteConfig,
)
from aerie.infer.measure.record import Record, SummaryRow, tree_shape
from aerie.infer.measure.statistics import group, identity, summary_row, told_apart
from aerie.infer.report.tables import console_table, csv_table, label, markdown_table, names, tree_text
from tests.infer.made_up import drafted, record

ALIKE = [  # one method each, whose trees have one size
    [MethodConfig("eagle-chain"), *(MethodConfig.of("eagle-chain", children=c) for c in ("best",))],
    [
        MethodConfig.of("eagle-chain", stop=stop)
        for stop in (None, EntropyConfig(), EntropyConfig(c=1.0), EntropyConfig(h=0.5), HeuristicConfig(), VoteConfig())
    ],
    [
        MethodConfig.of("eagle2", **changes)
        for changes in (
            {"k": 10, "nodes": 61},
            {"rank": "confidence", "nodes": 61},
            {"rerank": False},
            {"rank": "confidence", "rerank": False},
            {"nodes": 61, "stop": HeuristicConfig(start=2)},
        )
    ],
    [
        MethodConfig.of("eagle", **changes)
        for changes in (
            {},
            {"children": "best"},
            {"children": "replaced"},
            {"choices": tuple((0,) * depth for depth in range(1, 6)), "children": "best"},
            {"choices": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 1)), "children": "best"},
        )
    ],
    [
        MethodConfig.of("deagle", stop=VoteConfig(**changes))
        for changes in ({}, {"bonus": 0.5}, {"over": "selected"}, {"signals": ("momentum",)}, {"consecutive": True})
    ],
    [MethodConfig.of("eagle2", calibrated=fit) for fit in (None, "temperature", "isotonic")],
    [MethodConfig.of("ddd", stop=ProbabilitySumConfig(checks=checks)) for checks in ((5, 7, 9), (5, 6))],
    [MethodConfig("medusa", typical=typical) for typical in (None, TypicalConfig(), TypicalConfig(delta=0.2))],
    [
        MethodConfig("pld", lookup=lookup, typical=typical)
        for lookup, typical in (
            (None, None),
            (PromptLookupConfig(match="last"), None),
            (PromptLookupConfig(min_ngram=2), None),
            (PromptLookupConfig(ngram=3), None),
            (None, TypicalConfig()),
        )
    ],
    [
        MethodConfig("lookahead", lookahead=each)
        for each in (None, LookaheadConfig(pool_from_text=True), LookaheadConfig(seed=1))
    ],
]


def dicts(rows: list[SummaryRow]) -> list[SummaryRow]:
    return told_apart(rows)


def measured(rows: list[MethodConfig], **changes: Any) -> list[Record]:
    """A record of vanilla and of each row, every one with the same figures."""
    found = [record()]
    for number, asked in enumerate(rows, start=1):
        kinds = METHODS[asked.method].heads
        head = {"head": kinds[0] if kinds else None, "head_path": asked.head}
        found.append(drafted((3, 1), row=number, method=asked.method, tree=tree_shape(asked), **{**head, **changes}))
    return found


@pytest.mark.parametrize("rows", ALIKE, ids=lambda rows: rows[0].method)
def test_rows_that_differ_in_any_setting_have_different_labels(rows: list[MethodConfig]) -> None:
    summary = dicts([summary_row(members) for members in group(measured(rows))])
    labels = [label(each, summary) for each in summary]
    assert len(set(labels)) == len(labels)
    whole = summary
    for text in (console_table(whole), markdown_table(whole), csv_table(whole)):
        lines = text.splitlines()[-len(rows) :]
        assert len(set(lines)) == len(rows)
    apart = [names(measured(rows), [number]).partition(" (")[2] for number in range(1, len(rows) + 1)]
    assert len(set(apart)) == len(rows)


def test_what_is_as_published_is_not_said() -> None:
    for method in METHODS:
        shape = tree_shape(MethodConfig(method))
        assert shape is None or shape.variant == ""
    same = MethodConfig.of("eagle2", levels=6, rank="survival")
    assert tree_shape(same) == tree_shape(MethodConfig("eagle2"))
    sampled = MethodConfig.of("eagle-chain", children="sampled")
    assert tree_shape(sampled) == tree_shape(MethodConfig("eagle-chain"))


def test_heads_are_named_where_they_alone_differ() -> None:
    rows = [MethodConfig("eagle2", head=head) for head in (None, "runs/a/heads/eagle1", "runs/b/heads/eagle1")]
    texts = [tree_text(each) for each in dicts([identity(each) for each in group(measured(rows))])[1:]]
    assert [text.removeprefix("6 levels, k 10, 60 nodes, ") for text in texts] == [
        "head of the run",
        "head runs/a/heads/eagle1",
        "head runs/b/heads/eagle1",
    ]
    first, second = measured([MethodConfig("deagle"), MethodConfig("deagle")])[1:]
    kinds = dicts([identity(each) for each in group([first, replace(second, head="eagle3")])])
    assert [tree_text(each).rpartition(", ")[2] for each in kinds] == ["eagle1 head", "eagle3 head"]
    alone = dicts([identity(each) for each in group(measured([rows[1]]))])
    assert tree_text(alone[1]) == "6 levels, k 10, 60 nodes"
