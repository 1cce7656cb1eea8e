"""Made-up answers of fixed and voting trees, and what tuning measured, for report and claims."""

from typing import Any

from aerie.configs.schema.decode import Method, MethodConfig
from aerie.infer.measure.bench_files import Cell, Record, SuiteFile, SweepPoint
from aerie.infer.measure.tree_shape import TreeShape, tree_shape
from tests.infer.made_up import GREEDY, drafted, milliseconds, record

PROMPTS = (("sums", "a"), ("sums", "b"))
# A level costs 1 ms, verifying 2 ms for one node and 4 for 60, the rest 0.5 a cycle; a cycle
# without a draft costs 3 ms.
COSTS = {
    "draft": {"1": [1.0, 1.0], "10": [1.0, 1.0]},
    "verify": {"1": 2.0, "60": 4.0},
    "rest": 0.5,
    "plain": 3.0,
}
TREE_NAME = "eagle2, 6 levels, k 10, 60 nodes"
PREDICTED = {"name": TREE_NAME, "tau": 3.0, "ms_per_token": 2.0, "speedup": 1.5}
PREDICTIONS = {"choice": PREDICTED, "published": PREDICTED, "trees": [PREDICTED], "rules": []}
TUNING: dict[str, Any] = {
    "chosen": "eagle1",
    "heads": [{"kind": "eagle1", "costs_ms": COSTS, **PREDICTIONS}],
}


def tree_of(method: Method, **changes: Any) -> TreeShape:
    """A record's entry for a method's tree with these changes."""
    shape = tree_shape(MethodConfig.of(method, **changes))
    assert shape is not None
    return shape


def voting_answers() -> list[Record]:
    """Vanilla (row 0), then a fixed and a voting tree of 2 levels, then both of 4, on two prompts.

    Each tree also answers prompt c.
    """
    spent: list[tuple[Method, int, tuple[int, ...], int, int, float]] = [
        # method, levels, tokens of the cycles, draft forwards, wasted ones, decode ms
        ("eagle2", 2, (3, 1), 4, 2, 20.0),
        ("deagle", 2, (3, 1), 3, 1, 20.0),
        ("eagle2", 4, (4,), 4, 4, 10.0),
        ("deagle", 4, (3, 1), 3, 2, 16.0),
    ]
    records = [record(prompt_id=name) for _, name in PROMPTS]  # 4 decoded tokens in 40 ms
    for row, (method, levels, tokens, forwards, wasted, ms) in enumerate(spent, start=1):
        about: dict[str, Any] = {
            "row": row,
            "method": method,
            "tree": tree_of(method, levels=levels),
            "head": "eagle1",
        }
        drafts: dict[str, Any] = {
            "draft_forwards": forwards,
            "draft_forwards_wasted": wasted,
            "draft_nodes": 59 * len(tokens),
            "cycle_nodes": (59,) * len(tokens),
            "ms": milliseconds(10.0, 10.0 + ms),
        }
        records += [drafted(tokens, prompt_id=name, **about, **drafts) for _, name in PROMPTS]
        records.append(drafted((9, 9), prompt_id="c", **about))
    return records


def voting_suite() -> SuiteFile:
    """A sweep over the levels of `voting_answers` without prompt c; trees of 2 are also rows."""
    points = []
    for row, levels in enumerate((2, 2, 4, 4), start=1):
        sweep: dict[str, Any] = {"sweep": "d", "key": "tree.levels", "value": levels}
        points.append(SweepPoint(row, **GREEDY, prompts=PROMPTS, **sweep))
    return SuiteFile(tuple(Cell(row, **GREEDY) for row in (0, 1, 2)), tuple(points))
