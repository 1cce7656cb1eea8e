"""Methods by name: their published trees, what a recipe may change of them, and the heads that they draft with."""

from pathlib import Path
from typing import Any, get_args

import pytest

from infer.config import Method, MethodConfig, TreeChanges, TreeConfig
from infer.heads import find_head, kind_at
from infer.methods import METHODS, USUAL, check_kind, tree_of, usual_method
from infer.shape import make_shape
from infer.stops.config import EntropyConfig, HeuristicConfig, VoteConfig
from model.checkpoint import save_head
from model.errors import UserError
from tests import tiny


def test_every_method_has_an_entry_and_a_tree_that_can_be_grown() -> None:
    assert set(METHODS) == set(get_args(Method))
    for method, published in METHODS.items():
        assert (published.tree is None) == (not published.heads)
        if published.tree is not None:
            assert make_shape(published.tree).max_nodes >= 2
            assert tree_of(MethodConfig(method), "x") == published.tree
    assert all(kind in METHODS[method].heads for kind, method in USUAL.items())


def test_the_published_trees() -> None:
    assert METHODS["eagle2"].tree == TreeConfig(levels=6, k=10, nodes=60)
    assert METHODS["eagle3"].tree == TreeConfig(levels=8, k=10, nodes=60)
    assert make_shape(METHODS["eagle"].tree).max_nodes == 26  # type: ignore[arg-type]
    assert make_shape(METHODS["medusa"].tree).max_nodes == 64  # type: ignore[arg-type]
    assert METHODS["sps"].tree == TreeConfig(shape="chain", levels=5)


def test_a_recipe_changes_what_it_names_and_nothing_else() -> None:
    tree = tree_of(MethodConfig("deagle", TreeChanges(levels=12)), "x")
    assert tree == TreeConfig(levels=12, stop=VoteConfig())
    chain = tree_of(MethodConfig("eagle-chain", TreeChanges(levels=4, k=2, nodes=12)), "x")
    assert chain == TreeConfig(shape="chain", levels=4)  # a chain has no k
    entropy = TreeChanges(stop=EntropyConfig(h=0.5))
    assert tree_of(MethodConfig("svip", entropy), "x") == TreeConfig(levels=8, stop=EntropyConfig(h=0.5))
    assert tree_of(MethodConfig("eagle-chain", entropy), "x") == TreeConfig(
        shape="chain", levels=5, stop=EntropyConfig(h=0.5)
    )
    bare = tree_of(MethodConfig("eagle2", TreeChanges(rerank=False, levels=3, k=4)), "x")
    assert bare is not None and bare.nodes == 13
    narrow = tree_of(MethodConfig("opt-tree", TreeChanges(nodes=20)), "x")
    assert narrow is not None and (narrow.nodes, narrow.k) == (20, 19)


def test_a_stop_rule_without_a_method_of_its_own_keeps_the_name_of_the_tree() -> None:
    stop = HeuristicConfig()
    assert tree_of(MethodConfig("eagle2", TreeChanges(stop=stop)), "x") == TreeConfig(levels=6, stop=stop)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("eagle2", {"stop": VoteConfig()}, "x: eagle2 with the stop rule vote: that is method deagle"),
        ("eagle3", {"stop": EntropyConfig()}, "x: eagle3 with the stop rule entropy: that is method svip"),
        ("sps", {"stop": EntropyConfig()}, "x: sps with the stop rule entropy: that is method sps-svip"),
        ("deagle", {"stop": HeuristicConfig()}, "x: deagle with the stop rule heuristic: leave tree.stop.rule vote"),
        ("eagle2", {"shape": "chain"}, "x: eagle2 drafts a dynamic tree, not a chain one"),
        ("pld", {"levels": 3}, "x: pld grows no tree; leave levels out"),
        ("eagle2", {"nodes": 1}, "x: a tree needs levels >= 1, k >= 1 and nodes >= 2"),
        ("eagle2", {"children": "sampled"}, "x: a dynamic tree with children: sampled would bias the output"),
    ],
)
def test_changes_that_make_another_method_of_it_are_refused(
    method: Method, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        tree_of(MethodConfig(method, TreeChanges(**changes)), "x")
    assert str(error.value).startswith(message)


def test_a_method_of_another_head_is_refused() -> None:
    for kind in METHODS["deagle"].heads:
        check_kind("deagle", kind, "x")
    with pytest.raises(UserError, match="x: eagle2 drafts with eagle1, and this is an eagle3 head"):
        check_kind("eagle2", "eagle3", "x")
    with pytest.raises(UserError, match="x: pld needs no head"):
        check_kind("pld", "eagle1", "x")
    with pytest.raises(UserError, match="does not draft"):
        usual_method("classifier")


def test_heads_are_found_by_their_kind(tmp_path: Path) -> None:
    embedding = tiny.ends().embedding
    save_head(tiny.head(embedding), tmp_path / "heads" / "eagle1")
    save_head(tiny.eagle3_head(embedding), tmp_path / "heads" / "eagle3")
    tiny.target(tmp_path / "lm")
    heads = tmp_path / "heads"
    assert [kind_at(heads / "eagle1"), kind_at(heads / "eagle3"), kind_at(tmp_path / "lm")] == [
        "eagle1",
        "eagle3",
        "draft_lm",
    ]
    assert find_head(MethodConfig("vanilla"), heads, "eagle1", None, "x") is None
    assert find_head(MethodConfig("deagle"), heads, "eagle1", None, "x") == str(heads / "eagle1")
    assert find_head(MethodConfig("deagle"), heads, "eagle3", None, "x") == str(heads / "eagle3")
    assert find_head(MethodConfig("eagle3"), heads, "eagle1", heads / "eagle1", "x") == str(heads / "eagle3")
    assert find_head(MethodConfig("sps", head=str(tmp_path / "lm")), heads, "eagle1", None, "x") == str(tmp_path / "lm")
    with pytest.raises(UserError, match=r"x: sps drafts with a head of kind draft_lm, and .*draft_lm holds none"):
        find_head(MethodConfig("sps"), heads, "eagle1", None, "x")
    with pytest.raises(UserError, match="sps drafts with draft_lm, and this is an eagle1 head"):
        find_head(MethodConfig("sps"), tmp_path, "eagle1", heads / "eagle1", "x")
    with pytest.raises(UserError, match="no such file"):
        kind_at(tmp_path / "nowhere")
