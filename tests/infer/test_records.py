"""Laws of a bench's files, and of the names by which its rows are told apart."""

from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema import decode
from aerie.configs.schema.decode import (
    METHODS,
    EntropyConfig,
    MethodConfig,
    VoteConfig,
)
from aerie.infer.measure.bench_files import Record, line_of, read_records
from aerie.infer.measure.statistics import group, identity, summary_row, told_apart
from aerie.infer.measure.tree_shape import tree_shape
from aerie.infer.report.tables import (
    console_table,
    csv_table,
    label,
    markdown_table,
    row_labels,
    tree_text,
)
from tests.infer.made_up import drafted, record


def test_file(tmp_path: Path) -> None:
    """Records survive the file, and a last line that was cut is left out."""
    path = tmp_path / "records.jsonl"
    written = [record(), drafted((3, 1), text="two\nlines é", output_ids=(1, 2, 3, 4, 5))]
    path.write_text("".join(map(line_of, written)) + line_of(drafted((3, 1), row=2))[:80])
    assert read_records(path) == written
    path.write_text(line_of(record()) + "{\n")
    with pytest.raises(UserError, match=r"records\.jsonl:2: .*delete the line"):
        read_records(path)


LookupConfig = decode.PromptLookupConfig
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
ROWS = [
    [MethodConfig.of(method, **changes) for changes in every] for method, every in ALIKE.items()
] + [
    [MethodConfig("pld", lookup=lookup) for lookup in (None, LookupConfig(3))],
    [
        MethodConfig("lookahead", lookahead=each)
        for each in (None, decode.LookaheadConfig(pool_from_text=True))
    ],
]


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


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows[0].method)
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
