"""Draft lengths along one answer: which prompt, which rules, and what the picture draws."""

import xml.etree.ElementTree as ET
from dataclasses import asdict

from aerie.configs.schema.decode import Method
from aerie.infer.measure.record import Record
from aerie.infer.measure.statistics import group
from aerie.infer.report.papers import from_json, traced
from aerie.infer.report.plots import trace_picture
from tests.infer.figures.made_up import tree
from tests.infer.made_up import drafted, milliseconds, record

METHODS: tuple[Method, ...] = ("sps", "sps-svip")


def answers(method: Method, row: int, lengths: dict[str, tuple[int, ...]]) -> list[Record]:
    """One answer a prompt, whose cycles gave so many tokens and drafted one more than they had accepted."""
    return [
        drafted(
            tokens, method=method, row=row, prompt_id=name, tree=tree(method), head="draft_lm", cycle_nodes=tokens,
            ms=milliseconds(10.0, 30.0),
        )
        for name, tokens in lengths.items()
    ]  # fmt: skip


def test_the_prompt_is_the_one_whose_shortest_answer_is_the_longest() -> None:
    records = [record(), *answers("sps", 1, {"0": (9, 9), "1": (2, 3), "2": (4,)})]
    records += answers("sps-svip", 2, {"0": (1,), "1": (4, 1)})
    found = traced(group(records))
    assert [one.title for one in found] == ["draft_lm, T 0, prompt sums/1"]
    constant, svip = found[0].traces
    assert (constant.begins, constant.drafted, constant.accepted) == ((1, 3), (2, 3), (1, 2))
    assert (svip.begins, svip.drafted) == ((1, 5), (4, 1))
    ET.fromstring(trace_picture("trace", found[0]))  # noqa: S314 (our own picture)
    assert from_json(asdict(found[0])) == found[0]


def test_one_rule_alone_is_compared_with_nothing() -> None:
    assert traced(group([record(), *answers("sps", 1, {"0": (2,)})])) == []
    assert traced(group([record(), *answers("sps", 1, {"0": (2,)}), *answers("sps-svip", 2, {"1": (2,)})])) == []
