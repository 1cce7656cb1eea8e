"""Each table of the suite's sections from made-up rows, and their pictures."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from aerie.configs.schema.decode import Method, VoteConfig
from aerie.infer.measure.record import Record
from aerie.infer.measure.statistics import group, row
from aerie.infer.report.page import PREFIX, sections, sweep_pictures, varied_tables
from aerie.infer.report.papers import (
    PUBLISHED_TASKS,
    TASKS,
    ablation,
    beside,
    context_tables,
    depth_tables,
    policy_tables,
    published,
    reasoning_tables,
)
from aerie.infer.report.papers import PUBLISHED_reasoning as PUBLISHED
from tests.infer.figures.made_up import point, tree
from tests.infer.made_up import drafted, milliseconds, record


def ablated() -> list[dict[str, Any]]:
    cells = [("survival", True, (4,)), ("survival", False, (3, 1)), ("confidence", True, (2, 2))]
    return [
        point("a", "tree.rank", rank, "eagle2", {"rank": rank, "rerank": rerank}, tokens=tokens)
        for rank, rerank, tokens in cells
    ]


def deepened() -> list[dict[str, Any]]:
    alone = VoteConfig(signals=("expectation",))
    found = [point("d", "tree.levels", n, m, {"levels": n}) for n in (6, 8) for m in ("eagle2", "deagle")]
    votes = [point("v", "tree.levels", n, "deagle", {"levels": n, "stop": alone}, tokens=(4,)) for n in (8, 6)]
    return [*found, *votes, point("v", "tree.levels", 6, "eagle2", {"levels": 6})]


def test_the_ablation_has_a_row_for_each_tree_with_the_published_figures_beside() -> None:
    table = ablation(ablated())
    assert table is not None and table.families == ("eagle2, eagle1, T 0",)
    assert [(r.name, r.measured[0] and r.measured[0]["tau"]) for r in table.rows] == [
        ("without value", 2.0), ("without reranking", 2.0), ("EAGLE-2", 4.0),
    ]  # fmt: skip
    assert table.rows[2].published == ((3.62, 4.98), (3.63, 4.97))
    assert ablation(deepened()) is None


def test_depths_of_several_sweeps_are_one_table_and_no_point_is_shown_twice() -> None:
    (table,) = depth_tables(deepened())
    assert table.title == "eagle1 head, T 0, 1 prompt of sums"
    assert [line.label for line in table.lines] == ["fixed (eagle2)", "vote (DEAGLE)", "expectation alone"]
    assert [[p["value"] for p in line.points] for line in table.lines] == [[6, 8]] * 3
    assert table.depths == [6, 8] and table.lines[2].points[0]["tau"] == 4.0
    chains = [point("c", "tree.levels", n, "sps", {"levels": n}, head="draft_lm") for n in (2, 3)]
    assert depth_tables(chains) == [] and [one.name for one in varied_tables([*chains, *deepened()])] == ["c"]


def test_context_lengths_have_two_spans_with_the_same_rows() -> None:
    points = [
        {**point("context", "context", length, method), "span": span}
        for method in ("eagle2", "deagle")
        for length in (64, 128)
        for span in ("cumulative", "bucket")
    ]
    table = context_tables(points[:-1])  # deagle's bucket ends early
    assert table is not None and table.lengths == (64, 128)
    assert [len(line.points) for line in (*table.cumulative, *table.bucket)] == [2, 2, 2, 1]
    assert table.bucket[0].label == table.cumulative[0].label == "eagle2, 6 levels, k 10, 60 nodes"
    assert context_tables([{**points[0], "tree": None}]) is None
    heads = context_tables([*points, *({**each, "head_path": "runs/other"} for each in points)])
    assert heads is not None and len(heads.cumulative) == 4 and heads.cumulative[2].label.endswith("head runs/other")


def summary_rows(methods: tuple[Method, ...]) -> list[dict[str, Any]]:
    answers: list[Record] = [record()]
    for number, name in enumerate(methods, start=1):
        head = "draft_lm" if name.startswith("sps") else "eagle1"
        spent = {"draft_forwards": 2 * number, "draft_nodes": 4, "ms": milliseconds(10.0, 30.0)}
        answers.append(drafted((3, 1), row=number, method=name, tree=tree(name), head=head, **spent))
    return [row(members) for members in group(answers)]


def test_policies_are_compared_on_one_head_with_svips_figures_beside_chains() -> None:
    tables = policy_tables(summary_rows(("eagle2", "deagle", "sps", "sps-svip", "eagle-chain")))
    assert [(t.title, t.chain) for t in tables] == [
        ("draft_lm, chains, T 0", True),
        ("eagle1, trees, T 0", False),
    ]  # one rule alone (eagle-chain) is no comparison
    constant, svip = tables[0].rules
    assert (constant.name, constant.levels, constant.published) == ("constant", 3.0, 1.49)
    assert (svip.name, svip.levels, svip.published) == ("SVIP (entropy)", 4.0, 1.71)
    assert svip.row["accept_rate"] == 0.5
    assert [rule.published for rule in tables[1].rules] == [None, None]


def parts(rows: list[dict[str, Any]], tasks: tuple[str, ...], speedups: tuple[float, ...]) -> list[dict[str, Any]]:
    found = [
        {**one, "row": place, "task": task, "speedup": speedup + place}
        for place, one in enumerate(rows)
        for task, speedup in zip(tasks, speedups, strict=True)
    ]
    return [{**one, "new_tokens": 50, "prompts": 2} if one["method"] == "vanilla" else one for one in found]


def test_chains_stand_by_task_with_the_answers_lengths_and_the_published_figures() -> None:
    rows = summary_rows(("sps", "sps-svip", "eagle2"))
    speedups = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0)
    (table,) = reasoning_tables(rows, parts(rows, PUBLISHED_TASKS, speedups))
    assert table.title == "draft_lm, chains, T 0" and table.tasks == PUBLISHED_TASKS
    assert table.lengths == (25.0,) * 7 and table.published_lengths[5] == 3900
    constant, svip = table.rules
    assert constant.published == PUBLISHED["sps"] and svip.published[-1] == 1.71
    assert [part and part["speedup"] for part in svip.parts] == [each + 2 for each in speedups] and svip.mean == 5.0
    for figures in PUBLISHED.values():
        assert sum(figures[:7]) / 7 == pytest.approx(figures[7], abs=0.005)


def test_published_figures_stand_beside_the_papers_own_methods_alone() -> None:
    """A rule that another method shares, a variant and another temperature have none."""
    rows = summary_rows(("sps", "sps-svip"))
    shared = {**rows[1], "method": "eagle-chain"}
    variant = {**rows[1], "tree": {**rows[1]["tree"], "variant": "levels 8"}}
    assert rows[1]["tree"]["stop"]["rule"] == "constant"
    for first, other in ((shared, rows[2]), (variant, rows[2])):
        changed = [rows[0], first, other]
        (table,) = reasoning_tables(changed, parts(changed, PUBLISHED_TASKS, (1.0,) * 7))
        assert [rule.published[-1] for rule in table.rules] == [None, 1.71]
        assert [rule.published for rule in policy_tables(changed)[0].rules] == [None, 1.71]
    warm = [{**one, "temperature": 1.0} for one in rows]
    (table,) = reasoning_tables(warm, parts(warm, PUBLISHED_TASKS, (1.0,) * 7))
    assert {figure for rule in table.rules for figure in rule.published} == {None}


def test_other_tasks_have_no_published_figures_and_a_failed_part_no_mean() -> None:
    rows = summary_rows(("sps", "sps-heuristic"))
    found = parts(rows, ("sums", "aime"), (1.0, 2.0))
    found[2]["status"] = "error"  # of sps, sums
    (table,) = reasoning_tables(rows, found)
    assert table.rules[0].parts[0] is None and table.rules[0].mean is None and table.rules[1].mean == 3.5
    assert table.rules[1].published == (None, 1.34, None) and table.published_lengths == (None, 6200)
    assert reasoning_tables(rows, []) == []


def test_every_published_line_is_of_a_method_with_figures_of_its_own() -> None:
    lines = published()
    keys = [(line.method, line.model, line.temperature, line.source) for line in lines]
    assert len(set(keys)) == len(keys) > 40
    assert all(line.cells and set(line.cells) <= set(TASKS) for line in lines)
    found = {key[:3]: line.cells for key, line in zip(keys, lines, strict=True) if "EAGLE-2" in key[3]}
    assert found["eagle2", "Vicuna 13B", 0.0]["mean"].text() == "4.04× / 4.65"
    assert found["sps", "Vicuna 7B", 1.0]["natural_questions"].text() == "1.33× / 1.72"


def test_published_lines_stand_below_the_measured_row_and_are_labelled() -> None:
    rows = summary_rows(("hydra", "svip"))
    part = {**rows[1], "task": "gsm8k", "row": 1, "tau": 3.0, "speedup": None}
    lines = beside([rows[0], {**rows[1], "task": "all"}, rows[2]], [part])
    assert [(line.method, line.source is None) for line in lines] == [
        ("hydra", True),
        ("hydra", False),
        ("hydra", False),
    ]
    ours = dict(zip(TASKS, lines[0].cells, strict=True))
    assert ours == {**dict.fromkeys(TASKS, ""), "gsm8k": " / 3.00", "mean": "2.00× / 2.00"}
    assert lines[1].model == "Vicuna 13B" and lines[1].cells[:2] == ("2.69× / 3.40", "2.88× / 3.65")
    assert beside([{**rows[1], "temperature": 1.0}], []) == []  # nothing was published of it at T 1


def test_every_table_that_can_be_drawn_is_drawn_and_a_failed_point_is_left_out() -> None:
    broken = point("k", "tree.k", 4, "eagle2", {"k": 4}, status="error", message="no memory", ms=None)
    k = [*(point("k", "tree.k", n, "eagle2", {"k": n}) for n in (2, 8)), broken]
    methods = [point("m", "method", name, name) for name in ("deagle", "svip")]
    context = [{**point("context", "context", 64, "eagle2"), "span": span} for span in ("cumulative", "bucket")]
    made = sections(summary_rows(("eagle2", "deagle")), [], [*ablated(), *deepened(), *k, *methods, *context])
    drawn = sweep_pictures(made)
    assert sorted(drawn) == [f"{PREFIX}0-k", f"{PREFIX}contexts", f"{PREFIX}depths"]
    for text in drawn.values():
        ET.fromstring(text)  # noqa: S314 (our own picture)
    assert made.varied[0][1].values == (2, 4, 8) and made.varied[1][0] is None


@pytest.mark.parametrize("sweeps", [[], ablated()[:1]])
def test_nothing_measured_is_nothing_shown(sweeps: list[dict[str, Any]]) -> None:
    made = sections([], [], sweeps)
    assert (made.depths, made.contexts, made.varied, made.policies, made.beside) == ((), None, (), (), ())
    assert not sweep_pictures(made)
