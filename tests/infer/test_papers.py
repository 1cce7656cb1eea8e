"""The papers' comparisons: DEAGLE's claim worked out by hand, grids of sweeps, published figures beside."""

from dataclasses import replace
from typing import Any

import pytest

from aerie.configs.schema.decode import EntropyConfig, Method, MethodConfig, VoteConfig
from aerie.infer.measure.record import Asked, AskedCell, AskedPoint, Record, SummaryRow, TreeShape, tree_shape
from aerie.infer.measure.statistics import group, summary_row
from aerie.infer.report import papers
from tests.infer.made_up import drafted, milliseconds, record

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
PROMPTS = (("sums", "a"), ("sums", "b"))
# trees: a level costs 1 ms, verifying 2 ms for one node and 4 for 60, the rest 0.5 a cycle, a plain cycle 3
TREE_COSTS = {"draft": {"1": [1.0, 1.0], "10": [1.0, 1.0]}, "verify": {"1": 2.0, "60": 4.0}, "rest": 0.5, "plain": 3.0}
TUNING: dict[str, Any] = {"heads": [{"kind": "eagle1", "costs_ms": TREE_COSTS}]}


def tree(method: Method, **changes: Any) -> TreeShape:
    """What a record says of a method's tree with these changes."""
    shape = tree_shape(MethodConfig.of(method, **changes))
    assert shape is not None
    return shape


def point(key: str, value: Any, method: Method, changes: dict[str, Any] | None = None, **answer: Any) -> SummaryRow:
    """A point of sweep "s": one greedy answer of 4 tokens in 2 cycles and 20 ms, where vanilla took 40; tau 2."""
    tokens = answer.pop("tokens", (3, 1))
    values = {"head": "eagle1", "ms": milliseconds(10.0, 30.0), "row": 1, **answer}
    vanilla = record(temperature=values.get("temperature", 0.0))
    members = group([vanilla, drafted(tokens, method=method, tree=tree(method, **(changes or {})), **values)])[1]
    return replace(summary_row(members), sweep="s", key=key, value=value)


def voting() -> tuple[list[Record], Asked]:
    """Fixed and voting trees of 2 and of 4 levels on two prompts."""
    spent: list[tuple[Method, int, tuple[int, ...], int, int, float]] = [  # ..., forwards, of them wasted, decode ms
        ("eagle2", 2, (3, 1), 4, 2, 20.0), ("deagle", 2, (3, 1), 3, 1, 20.0),
        ("eagle2", 4, (4,), 4, 4, 10.0), ("deagle", 4, (3, 1), 3, 2, 16.0),
    ]  # fmt: skip
    records = [record(prompt_id=name) for _, name in PROMPTS]  # 4 tokens after the prefill's in 40 ms
    points = []
    for row, (method, levels, tokens, forwards, wasted, ms) in enumerate(spent, start=1):
        points.append(AskedPoint(row, **GREEDY, sweep="d", key="tree.levels", value=levels, prompts=PROMPTS))
        for _, name in PROMPTS:
            drafts = {"draft_forwards": forwards, "draft_forwards_wasted": wasted, "draft_nodes": 59 * len(tokens)}
            times = {"cycle_nodes": (59,) * len(tokens), "ms": milliseconds(10.0, 10.0 + ms)}
            shape = tree(method, levels=levels)
            records.append(
                drafted(tokens, row=row, method=method, tree=shape, head="eagle1", prompt_id=name, **drafts, **times)
            )
    return records, Asked((AskedCell(0, **GREEDY),), tuple(points))


def test_deagles_ratios_are_of_the_vote_and_held_to_their_limits() -> None:
    (claim,) = papers.claims(*voting(), TUNING)
    assert (claim["head"], claim["largest"], claim["prompts"]) == ("eagle1", 4, 2)
    assert (claim["waste"], claim["waste_holds"]) == (4 / 8, True)
    assert (claim["tau"], claim["tau_best_depth"], claim["tau_holds"]) == (2 / 4, 4, False)
    assert [one["tau"] for one in claim["fixed"]] == [2.0, 4.0]
    assert [one["speedup"] for one in claim["vote"]] == [pytest.approx(2.0), pytest.approx(2.5)]
    # 8 tokens in 4 cycles: drafting 4 + 4, verifying 16, the rest 2; the vote drafts two levels fewer
    # 8 tokens in 2 cycles: drafting 2 + 6, verifying 8, the rest 1
    assert [one["modelled"] for one in claim["fixed"]] == [pytest.approx(24 / 26), pytest.approx(24 / 17)]
    assert [one["modelled"] for one in claim["vote"]] == [pytest.approx(1.0), pytest.approx(1.0)]
    assert (claim["modelled"], claim["modelled_best_depth"], claim["modelled_holds"]) == (pytest.approx(1.0), 2, True)


def test_a_claim_needs_both_rules_at_two_depths_on_the_same_prompts() -> None:
    records, asked = voting()
    assert papers.claims(records, None, TUNING) == []
    assert papers.claims(records, replace(asked, points=asked.points[:3]), TUNING) == []
    other = replace(asked.points[3], prompts=PROMPTS[:1])
    assert papers.claims(records, replace(asked, points=(*asked.points[:3], other)), TUNING) == []
    failed = [replace(one, status="error", message="x", ms=None) if one.row == 4 else one for one in records]
    assert papers.claims(failed, asked, TUNING) == []
    idle = [replace(one, draft_forwards_wasted=0) if one.row == 3 else one for one in records]
    (claim,) = papers.claims(idle, asked, None)  # no costs, no waste: no ratios
    names = ("modelled", "modelled_holds", "modelled_best_depth", "waste", "waste_holds")
    assert all(claim[name] is None for name in names)


def test_a_line_is_one_row_along_its_values_and_is_called_by_what_tells_it_apart() -> None:
    alone = VoteConfig(signals=("momentum",))
    points = [
        point("tree.levels", levels, "deagle", {"levels": levels, **stop})
        for levels in (6, 4)
        for stop in ({}, {"stop": alone})
    ]
    lines = papers.sweep_lines(points)
    assert [line.label for line in lines] == ["deagle", "deagle, signals momentum"]
    assert [[p.value for p in line.points] for line in lines] == [[6, 4], [6, 4]] and papers.values_of(points) == (4, 6)
    assert lines[1].at(6) is points[1] and lines[1].at(7) is None
    varied = [
        [point("tree.levels", n, "eagle-chain", {"levels": n}) for n in (2, 3)],
        [point("tree.stop.h", h, "svip", {"stop": EntropyConfig(h=h)}) for h in (0.2, 0.4)],
        [point("temperature", t, "eagle2", temperature=t, identical=None) for t in (0.0, 1.0)],
        [point("method", name, name) for name in ("deagle", "svip")],
    ]
    assert [len(papers.sweep_lines(points)) for points in varied] == [1] * len(varied)
    apart = [
        point("tree.levels", 4, "eagle2", {"levels": 4, "nodes": 20}),
        point("tree.levels", 4, "eagle2", {"levels": 4}),
        point("tree.levels", 4, "eagle2", {"levels": 4}, head_path="runs/other"),
        point("tree.levels", 4, "eagle2", {"levels": 4}, temperature=1.0, identical=None),
    ]
    assert len(papers.sweep_lines(apart)) == 4 and len(papers.sweep_lines([apart[0], apart[0]])) == 2
    assert papers.sweep_lines(apart[:3])[2].label == "eagle2, runs/other head, 60 nodes"


def test_the_ablation_has_a_row_for_each_tree_with_the_published_figures_beside() -> None:
    cells: list[tuple[str, bool, tuple[int, ...]]]
    cells = [("survival", True, (4,)), ("survival", False, (3, 1)), ("confidence", True, (2, 2))]
    points = [
        point("tree.rank", rank, "eagle2", {"rank": rank, "rerank": rerank}, tokens=tokens)
        for rank, rerank, tokens in cells
    ]
    grid = papers.ablation(points)
    assert grid is not None and grid.values == ("without value", "without reranking", "EAGLE-2")
    measured, *paper = grid.lines
    assert measured.label == "eagle2, eagle1, T 0" and [line.published for line in grid.lines] == [False, True, True]
    assert [p and p.tau for p in map(measured.at, grid.values)] == [2.0, 2.0, 4.0]
    assert [(p and (p.speedup, p.tau)) for p in (line.at("EAGLE-2") for line in paper)] == [(3.62, 4.98), (3.63, 4.97)]
    assert papers.varied_grids(points) == []


def test_depths_of_several_sweeps_are_one_grid_and_no_point_is_shown_twice() -> None:
    alone = VoteConfig(signals=("expectation",))
    points = [point("tree.levels", n, m, {"levels": n}) for n in (6, 8) for m in ("eagle2", "deagle")]
    points += [point("tree.levels", n, "deagle", {"levels": n, "stop": alone}, tokens=(4,)) for n in (8, 6)]
    points += [point("tree.levels", 6, "eagle2", {"levels": 6})]
    (grid,) = papers.depth_grids(points)
    assert grid.title == "eagle1 head, T 0, 1 prompt of sums" and grid.values == (6, 8)
    assert [line.label for line in grid.lines] == ["fixed (eagle2)", "vote (DEAGLE)", "expectation alone"]
    assert [[p.value for p in line.points] for line in grid.lines] == [[6, 8]] * 3
    gammas = [point("tree.levels", n, "sps", {"levels": n}, head="draft_lm") for n in (2, 3)]
    assert papers.depth_grids(gammas) == [] and len(papers.varied_grids([*gammas, *points])) == 1


def summary_rows(methods: tuple[Method, ...]) -> list[SummaryRow]:
    answers: list[Record] = [record()]
    for number, name in enumerate(methods, start=1):
        head = "draft_lm" if name.startswith("sps") else "eagle1"
        spent = {"draft_forwards": 2 * number, "draft_nodes": 4, "ms": milliseconds(10.0, 30.0)}
        answers.append(drafted((3, 1), row=number, method=name, tree=tree(name), head=head, **spent))
    return [summary_row(members) for members in group(answers)]


def test_published_lines_stand_below_the_measured_row() -> None:
    lines = [(key, line) for key, members in papers.published_methods().items() for line in members]
    assert len({(*key, line.label, line.note) for key, line in lines}) == len(lines) > 40
    rows = summary_rows(("hydra", "svip"))
    part = replace(rows[1], task="gsm8k", tau=3.0, speedup=None)
    shown = papers.beside([rows[0], replace(rows[1], task="all"), rows[2]], [(1, part)])
    assert [(method, line.published) for method, _, line in shown] == [
        ("hydra", False),
        ("hydra", True),
        ("hydra", True),
    ]
    mean, own = shown[0][2].at("mean"), shown[0][2].at("gsm8k")
    assert mean and own and (mean.speedup, mean.tau, own.speedup, own.tau) == (2.0, 2.0, None, 3.0)
    paper = shown[1][2].at("mt_bench")
    assert shown[1][2].label == "Vicuna 13B" and paper and (paper.speedup, paper.tau) == (2.88, 3.65)
