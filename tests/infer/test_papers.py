"""The papers' comparisons: claims and lengths worked out by hand, grids of sweeps, published figures beside."""

from dataclasses import replace
from typing import Any

import pytest

from aerie.configs.schema.decode import EntropyConfig, Method, MethodConfig, VoteConfig
from aerie.infer.measure.record import Asked, AskedCell, AskedPoint, Record, SummaryRow, TreeShape, tree_shape
from aerie.infer.measure.statistics import group, summary_row
from aerie.infer.report import claims, papers
from tests.infer.made_up import drafted, milliseconds, record

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
PROMPTS = (("sums", "a"), ("sums", "b"))
# trees: a level costs 1 ms, verifying 2 ms for one node and 4 for 60, the rest 0.5 a cycle, a plain cycle 3
TREE_COSTS = {"draft": {"1": [1.0, 1.0], "10": [1.0, 1.0]}, "verify": {"1": 2.0, "60": 4.0}, "rest": 0.5, "plain": 3.0}
# chains: a drafted token costs 1 ms, v(n) is 2 + n ms
CHAIN_COSTS = {"draft": {"1": [1.0, 1.0]}, "verify": {"1": 3.0, "41": 43.0}, "rest": 0.5, "plain": 3.0}
TUNING: dict[str, Any] = {
    "heads": [{"kind": "eagle1", "costs_ms": TREE_COSTS}, {"kind": "draft_lm", "costs_ms": CHAIN_COSTS}]
}


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
    (claim,) = claims.claims(*voting(), TUNING)
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
    assert [(wall["rule"], wall["depth"]) for wall in claim["wall"]] == [("fixed", 4), ("vote", 2)]
    assert [wall["speed"] for wall in claim["wall"]] == [pytest.approx(10 / 16), pytest.approx(20 / 16)]
    assert claim["wall"][1]["speed_ci95"] == [pytest.approx(1.25), pytest.approx(1.25)]


def test_a_claim_needs_both_rules_at_two_depths_on_the_same_prompts_and_names_its_confidence() -> None:
    records, asked = voting()
    assert claims.claims(records, None, TUNING) == []
    assert claims.claims(records, replace(asked, points=asked.points[:3]), TUNING) == []
    other = replace(asked.points[3], prompts=PROMPTS[:1])
    assert claims.claims(records, replace(asked, points=(*asked.points[:3], other)), TUNING) == []
    failed = [replace(one, status="error", message="x", ms=None) if one.row == 4 else one for one in records]
    assert claims.claims(failed, asked, TUNING) == []
    moved = []
    for one in records:
        if one.tree is not None:
            shape = replace(one.tree, settings={**one.tree.settings, "calibrated": "isotonic"})
            moved.append(replace(one, tree=shape, row=one.row + 4))
    points = (*asked.points, *(replace(point, row=point.row + 4) for point in asked.points))
    own, calibrated = claims.claims([*records, *moved], replace(asked, points=points), TUNING)
    assert (own["calibrated"], calibrated["calibrated"]) == (None, "isotonic") and own["tau"] == calibrated["tau"]
    idle = [replace(one, draft_forwards_wasted=0) if one.row == 3 else one for one in records]
    (claim,) = claims.claims(idle, asked, None)  # no costs, no waste: no ratios
    names = ("modelled", "modelled_holds", "modelled_best_depth", "waste", "waste_holds")
    assert all(claim[name] is None for name in names)


def chains() -> tuple[list[Record], Asked]:
    """Constants of 1, 2 and 4 and SVIP with 3 drafted tokens in a cycle on average; cycles: (drafted, accepted)."""
    asked: list[tuple[Method, int | None, dict[str, list[tuple[int, int]]]]] = [
        ("sps-svip", None, {"a": [(5, 5), (1, 0)], "b": [(5, 4), (1, 1)]}),
        ("sps", 1, {"a": [(1, 1)] * 3, "b": [(1, 1)] * 3}),
        ("sps", 2, {"a": [(2, 2), (2, 1)], "b": [(2, 1), (2, 2)]}),
        ("sps", 4, {"a": [(4, 3), (4, 1)], "b": [(4, 2), (4, 2)]}),
    ]
    records = [record(prompt_id=name, output_ids=(1, 2, 3, 4, 5, 6)) for _, name in PROMPTS]
    for row, (method, levels, answers) in enumerate(asked, start=1):
        shape = tree(method, **({} if levels is None else {"levels": levels}))
        for name, cycles in answers.items():
            nodes = tuple(count for count, _ in cycles)
            spent = {"draft_forwards": sum(nodes), "draft_nodes": sum(nodes), "cycle_nodes": nodes}
            values = {"row": row, "method": method, "tree": shape, "head": "draft_lm", "prompt_id": name, **spent}
            values |= {"output_ids": (1, 2, 3, 4, 1, 2, 3, 4), "ms": milliseconds(10.0, 30.0)}
            records.append(drafted(tuple(kept + 1 for _, kept in cycles), **values))
    points = tuple(
        AskedPoint(row, **GREEDY, sweep="c", key="tree.levels", value=gamma, prompts=PROMPTS)
        for row, gamma in ((2, 1), (3, 2), (4, 4))
    )
    return records, Asked((AskedCell(0, **GREEDY), AskedCell(1, **GREEDY)), points)


def test_a_constant_length_of_the_same_mean_is_read_between_its_neighbours() -> None:
    (found,) = claims.lengths(*chains(), TUNING)
    (rule,) = found["rules"]
    # 12 drafted tokens in 4 cycles, 10 of them accepted
    assert (rule["length"], rule["accept_rate"], rule["tau"]) == (3.0, 10 / 12, 14 / 4)
    equal = rule["equal"]
    assert (equal["below"], equal["above"], equal["share"]) == (2, 4, 0.5)
    # of 2 drafted tokens 1.5 are accepted, of 4 of them 2: of 3, in turn the one and the other, 1.75
    assert (equal["length"], equal["tau"], equal["accept_rate"]) == (3.0, 2.75, pytest.approx(1.75 / 3))
    assert equal["tau_difference"] == pytest.approx(0.75)
    assert equal["accept_difference"] == pytest.approx(10 / 12 - 1.75 / 3)
    assert found["repeated"] == 0.0 and rule["repeated"] == pytest.approx(1 / 5)
    records, asked = chains()
    (short,) = claims.lengths(records, replace(asked, points=asked.points[:2]), TUNING)
    assert short["rules"][0]["equal"] is None  # a length that no constant has is not made up


def test_every_cycle_pays_for_its_own_length() -> None:
    (found,) = claims.lengths(*chains(), TUNING)
    # a cycle of n drafted tokens takes n + (3 + n) + 0.5 = 3.5 + 2 n; SVIP's of 5 and of 1 take 9.5 on average
    modelled = [3 * 2 / 5.5, 3 * 2.5 / 7.5, 3 * 3 / 11.5]
    assert [one["modelled"] for one in found["constants"]] == [pytest.approx(value) for value in modelled]
    (rule,) = found["rules"]
    assert rule["modelled"] == pytest.approx(3 * 3.5 / 9.5)
    assert rule["equal"]["modelled"] == pytest.approx(3 * 2.75 / 9.5)
    assert rule["equal"]["speed"] == pytest.approx(3.5 / 2.75)
    assert found["best"] == 1 and rule["best"]["speed"] == pytest.approx((3.5 / 9.5) / (2 / 5.5))
    bent = {"heads": [{"kind": "draft_lm", "costs_ms": {**CHAIN_COSTS, "verify": {"1": 3.0, "4": 3.0, "8": 30.0}}}]}
    # v(2) = 3 and v(6) = 16.5: 9.75 in the mean, where v of the mean, v(4), is 3
    assert claims.lengths(*chains(), bent)[0]["rules"][0]["modelled"] == pytest.approx(3 * 3.5 / (3 + 9.75 + 0.5))


def test_only_chains_with_good_answers_to_the_same_prompts_are_compared() -> None:
    records, asked = chains()
    assert claims.lengths(records, None, TUNING) == []
    assert claims.lengths(records, replace(asked, points=asked.points[:1]), TUNING) == []  # one constant is no sweep
    for changes in ({"prompt_id": "c"}, {"status": "error", "message": "x", "ms": None}, {"head_path": "runs/other"}):
        changed = [replace(one, **changes) if one.row == 1 and one.prompt_id == "a" else one for one in records]
        assert claims.lengths(changed, asked, TUNING) == [], changes
    twice = [*records, *(replace(one, row=7) for one in records if one.row == 1)]  # as a sweep's point
    assert len(claims.lengths(twice, asked, TUNING)[0]["rules"]) == 1
    quick = [replace(one, ms=milliseconds(10.0, 20.0)) if one.row == 4 else one for one in records]
    (by_clock,) = claims.lengths(quick, asked, None)
    assert by_clock["best"] == 4 and by_clock["rules"][0]["modelled"] is None


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
        [point("tree.levels", n, "eagle-chain", {"levels": n}) for n in (2, 3)],  # a chain's nodes are its levels
        [point("tree.levels", n, "eagle2", {"levels": n, "rerank": False}) for n in (2, 3)],
        [point("tree.nodes", n, "eagle2", {"nodes": n}) for n in (8, 16)],
        [point("tree.stop.h", h, "svip", {"stop": EntropyConfig(h=h)}) for h in (0.2, 0.4)],
        [point("temperature", t, "eagle2", temperature=t, identical=None) for t in (0.0, 1.0)],
        [point("head", name, "deagle", head=name, head_path=f"runs/{name}") for name in ("eagle1", "eagle3")],
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
    assert papers.sweep_lines(apart[:3])[2].label == "eagle2, runs/other head"


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


def test_context_lengths_have_two_spans_with_the_same_rows() -> None:
    points = [
        replace(point("context", length, method), sweep="context", span=span)
        for method in ("eagle2", "deagle")
        for length in (64, 128)
        for span in ("cumulative", "bucket")
    ]
    grids = papers.context_grids(points[:-1])  # deagle's bucket ends early
    lines = (*grids["cumulative"].lines, *grids["bucket"].lines)
    assert [len(line.points) for line in lines] == [2, 2, 2, 1] and grids["bucket"].values == (64, 128)
    assert lines[0].label == lines[2].label == "eagle2, 6 levels, k 10, 60 nodes"
    heads = papers.context_grids([*points, *(replace(each, head_path="runs/other") for each in points)])
    assert heads["cumulative"].lines[2].label.endswith("head runs/other")


def summary_rows(methods: tuple[Method, ...]) -> list[SummaryRow]:
    answers: list[Record] = [record()]
    for number, name in enumerate(methods, start=1):
        head = "draft_lm" if name.startswith("sps") else "eagle1"
        spent = {"draft_forwards": 2 * number, "draft_nodes": 4, "ms": milliseconds(10.0, 30.0)}
        answers.append(drafted((3, 1), row=number, method=name, tree=tree(name), head=head, **spent))
    return [summary_row(members) for members in group(answers)]


def test_policies_are_compared_on_one_head_with_svips_figures_beside_its_own_methods() -> None:
    rows = summary_rows(("eagle2", "deagle", "sps", "sps-svip", "eagle-chain"))
    tables = papers.policies(rows, [])
    assert [table["title"] for table in tables] == ["draft_lm, chains, T 0", "eagle1, trees, T 0"]  # chains first
    constant, svip = tables[0]["rules"]
    assert (constant["name"], constant["levels"], constant["paper"].at("mean").speedup) == ("constant", 3.0, 1.49)
    assert (svip["name"], svip["levels"], svip["paper"].at("mean").speedup) == ("SVIP (entropy)", 4.0, 1.71)
    assert [rule["paper"] for rule in tables[1]["rules"]] == [None, None]
    assert rows[3].tree is not None
    for changes in ({"method": "eagle-chain"}, {"tree": replace(rows[3].tree, variant="x")}, {"temperature": 1.0}):
        changed = [replace(rows[3], **changes), replace(rows[4], temperature=changes.get("temperature", 0.0))]
        assert papers.policies(changed, [])[0]["rules"][0]["paper"] is None, changes


def test_chains_stand_by_task_with_the_answers_lengths_and_the_published_figures() -> None:
    rows, tasks = summary_rows(("sps", "sps-svip")), papers.published("reasoning").values[:-1]
    parts = [
        (at, replace(row, task=task, speedup=float(at + number), new_tokens=50, prompts=2))
        for at, row in enumerate(rows)
        for number, task in enumerate(tasks)
    ]
    (table,) = papers.policies(rows, parts)
    assert set(table["tokens"].values()) == {25.0} and table["tasks"] == tasks
    svip = table["rules"][1]
    assert [svip["parts"].at(task).speedup for task in tasks] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert svip["mean"] == 5.0 and svip["paper"].at("aime").speedup == 1.77
    parts[7] = (1, replace(parts[7][1], status="error"))  # of sps, the first task
    (table,) = papers.policies(rows, parts)
    assert table["rules"][0]["parts"].at(tasks[0]) is None and table["rules"][0]["mean"] is None
    for line in papers.published("reasoning").lines:
        *each, mean = [p.speedup or 0.0 for p in line.points]
        assert sum(each) / 7 == pytest.approx(mean, abs=0.005)


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


def test_a_trace_is_of_the_prompt_whose_shortest_answer_is_the_longest() -> None:
    def answers(method: Method, row: int, cycles: dict[str, tuple[int, ...]]) -> list[Record]:
        values: dict[str, Any] = {"method": method, "row": row, "tree": tree(method), "head": "draft_lm"}
        return [drafted(tokens, prompt_id=name, cycle_nodes=tokens, **values) for name, tokens in cycles.items()]

    records = [record(), *answers("sps", 1, {"0": (9, 9), "1": (2, 3), "2": (4,)})]
    (trace,) = papers.traces(group([*records, *answers("sps-svip", 2, {"0": (1,), "1": (4, 1)})]))
    assert trace["title"] == "draft_lm, T 0, prompt sums/1"
    constant, svip = trace["traces"]
    assert (constant["begins"], constant["drafted"], constant["accepted"]) == ([1, 3], (2, 3), (1, 2))
    assert (svip["begins"], svip["drafted"]) == ([1, 5], (4, 1))
    assert papers.traces(group(records)) == []  # one rule alone is compared with nothing
