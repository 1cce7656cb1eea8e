"""Laws of a sweep's lines."""

from aerie.configs.schema.decode import EntropyConfig, VoteConfig
from aerie.infer.report.papers import lines_of, numeric, values_of
from tests.infer.figures.made_up import point


def test_a_line_is_one_row_along_its_values_and_is_called_by_what_tells_it_apart() -> None:
    alone = VoteConfig(signals=("momentum",))
    points = [
        point("s", "tree.levels", levels, "deagle", {"levels": levels, **stop})
        for levels in (4, 6)
        for stop in ({}, {"stop": alone})
    ]
    lines = lines_of(points)
    assert [line.label for line in lines] == ["deagle", "deagle, signals momentum"]
    assert [[p["value"] for p in line.points] for line in lines] == [[4, 6], [4, 6]]
    assert lines[1].at(6) is points[3] and lines[1].at(7) is None


def test_what_follows_from_the_varied_key_does_not_part_a_line() -> None:
    varied = [
        [point("s", "tree.levels", n, "eagle-chain", {"levels": n}) for n in (2, 3)],  # a chain's nodes are its levels
        [point("s", "tree.levels", n, "eagle2", {"levels": n, "rerank": False}) for n in (2, 3)],
        [point("s", "tree.nodes", n, "eagle2", {"nodes": n}) for n in (8, 16)],
        [point("s", "tree.stop.h", h, "svip", {"stop": EntropyConfig(h=h)}) for h in (0.2, 0.4)],
        [point("s", "temperature", t, "eagle2", temperature=t, identical=None) for t in (0.0, 1.0)],
        [point("s", "head", name, "deagle", head=name, head_path=f"runs/{name}") for name in ("eagle1", "eagle3")],
        [point("s", "method", name, name) for name in ("deagle", "svip")],
    ]
    assert [len(lines_of(points)) for points in varied] == [1] * len(varied)


def test_other_trees_heads_and_samplings_are_lines_of_their_own() -> None:
    points = [
        point("s", "tree.levels", 4, "eagle2", {"levels": 4, "nodes": 20}),
        point("s", "tree.levels", 4, "eagle2", {"levels": 4}),
        point("s", "tree.levels", 4, "eagle2", {"levels": 4}, head_path="runs/other"),
        point("s", "tree.levels", 4, "eagle2", {"levels": 4}, temperature=1.0, identical=None),
    ]
    assert len(lines_of(points)) == 4
    assert len(lines_of([points[0], points[0]])) == 2  # alike in all that a summary says
    assert lines_of(points[:3])[2].label == "eagle2, runs/other head"


def test_numbers_are_in_order_and_words_as_they_came() -> None:
    points = [point("s", "tree.k", k, "eagle2", {"k": k}) for k in (8, 2)]
    assert values_of(lines_of(points)) == [2, 8]
    words = [point("s", "method", name, name) for name in ("svip", "deagle")]
    assert values_of(lines_of(words)) == ["svip", "deagle"] and not numeric(["svip"]) and not numeric([True])
