"""Static trees: the published ones as published, mistakes named, and the tree rebuilt from accuracies the best one."""

import itertools
from pathlib import Path

import pytest
import yaml

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import Choice, TreeConfig, best_choices, inline, ordered, sized


def static(choices: str | tuple[Choice, ...], **changes: object) -> TreeConfig:
    return TreeConfig(shape="static", choices=choices, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "levels", "widest", "k"), [("eagle1", [4, 8, 8, 3, 2], 4, 4), ("medusa63", [10, 28, 23, 2], 10, 10)]
)
def test_the_published_trees(name: str, levels: list[int], widest: int, k: int) -> None:
    choices = inline(static(name))
    assert [len(list(group)) for _, group in itertools.groupby(choices, key=len)] == levels
    assert choices == tuple(sorted(choices, key=lambda choice: (len(choice), choice)))
    size = sized(static(name))
    assert (size.levels, size.k, size.nodes) == (len(levels), k, sum(levels) + 1)


def test_a_file_and_a_list_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"choices": [[0, 0], [1], [0]]}), encoding="utf-8")
    assert inline(static(str(path))) == inline(static(((1,), (0,), (0, 0)))) == ((0,), (1,), (0, 0))


def test_other_shapes_keep_their_size() -> None:
    assert sized(TreeConfig(levels=3)) == TreeConfig(levels=3)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "at least one path"),
        ([(0,), (0,)], r"\[0\] stands there twice"),
        ([(0,), (1, 0)], r"\[1, 0\] is listed without its parent \[1\]"),
        ([(0,), (-1,)], "negative rank"),
        ([(0,), (2,)], r"\[2\] is listed without \[1\].*would bias"),
    ],
)
def test_what_is_no_tree_is_named(choices: list[Choice], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ordered(choices, "tree.choices", sampled=True)


def test_best_children_may_skip_a_rank() -> None:
    assert inline(static(((0,), (2,)), children="best")) == ((0,), (2,))


def test_an_unknown_tree_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="eagle1, medusa63"):
        inline(static("eagle7"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("choices: [[0], [zero]]\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"broken.yaml:1.*integer.*'zero'"):
        inline(static(str(broken)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"children": "sampled"}, "dynamic tree with children: sampled would bias"),
        ({"children": "replaced"}, "dynamic tree with children: replaced would bias"),
        ({"shape": "chain", "children": "replaced"}, "no siblings"),
        ({"shape": "static"}, "set both or neither"),
        ({"choices": "eagle1"}, "set both or neither"),
    ],
)
def test_trees_that_cannot_be_are_refused_with_a_sentence(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(values, TreeConfig, "recipe.yaml", {})


def expected(choices: tuple[Choice, ...], accuracy: list[list[float]]) -> float:
    total = 0.0
    for choice in choices:
        chance = 1.0
        for depth, rank in enumerate(choice):
            chance *= accuracy[depth][rank]
        total += chance
    return total


def test_the_rebuilt_tree_is_the_best_of_all_trees() -> None:
    """Against every connected set of the same size, with ranks that are not even in order."""
    accuracy = [[0.5, 0.2, 0.25], [0.6, 0.1], [0.3, 0.2]]
    every = [
        choice for length in (1, 2, 3) for choice in itertools.product(*(range(len(row)) for row in accuracy[:length]))
    ]
    for size in (1, 2, 3, 4):
        found = best_choices(accuracy, size)
        connected = [
            nodes
            for nodes in itertools.combinations(every, size)
            if all(len(node) == 1 or node[:-1] in nodes for node in nodes)
        ]
        assert expected(found, accuracy) == pytest.approx(max(expected(nodes, accuracy) for nodes in connected))
        assert ordered(found, "test", sampled=False) == found
    assert best_choices(accuracy, 4) == ((0,), (1,), (2,), (0, 0))


def test_certain_ranks_stay_connected_and_hopeless_ones_are_left_out() -> None:
    assert best_choices([[1.0, 0.0], [1.0], [1.0]], 10) == ((0,), (0, 0), (0, 0, 0))
