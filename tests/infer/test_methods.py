"""Methods by name: their published trees, what a recipe may change of them, and the heads that they draft with."""

import math
from pathlib import Path
from typing import Any, get_args

import pytest

from aerie.configs.errors import UserError
from aerie.configs.read import from_overrides, validate
from aerie.configs.schema.decode import (
    METHODS,
    USUAL,
    EntropyConfig,
    HeuristicConfig,
    LookaheadConfig,
    Method,
    MethodConfig,
    ProbabilitySumConfig,
    PromptLookupConfig,
    TreeChanges,
    TreeConfig,
    TypicalConfig,
    VoteConfig,
    check_kind,
    tree_of,
    usual_method,
)
from aerie.configs.schema.measure import SamplingConfig
from aerie.infer.decode.methods import find_head, kind_at
from aerie.infer.decode.shape import make_shape
from aerie.model.checkpoint import save_head
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
    chain = tree_of(MethodConfig("eagle-chain", TreeChanges(shape="chain", levels=4)), "x")
    assert chain == TreeConfig(shape="chain", levels=4)
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
        (
            "eagle2",
            {"shape": "chain"},
            "x: tree.shape: eagle2 drafts a dynamic tree, not a chain; leave it out, or",
        ),
        ("pld", {"levels": 3}, "x: tree.levels: pld grows no tree; leave it out (its settings are in lookup)"),
        ("vanilla", {"k": 3, "levels": 2}, "x: tree.levels, tree.k: vanilla grows no tree; leave them out"),
        ("eagle2", {"nodes": 1}, "x: tree: a tree needs levels >= 1, k >= 1 and nodes >= 2"),
        ("eagle2", {"children": "sampled"}, "x: tree: a dynamic tree with children: sampled would bias the output"),
        ("sps-heuristic", {"levels": 3}, "x: tree: stop.start 5 is deeper than the cap of 3 levels; lower stop.start"),
        ("medusa", {"stop": HeuristicConfig()}, "x: tree: stop.start 5 is deeper than the cap of 4 levels"),
        ("ddd", {"levels": 5}, "x: tree: stop.checks [5, 7, 9] are never reached"),
        ("sps", {"shape": "static"}, "x: tree.choices: a static tree needs its nodes; name a file of them, or eagle1"),
        ("eagle", {"choices": "mine.yaml"}, "x: tree.choices: mine.yaml: no such file"),
    ],
)
def test_changes_that_make_another_method_of_it_are_refused(
    method: Method, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        tree_of(MethodConfig(method, TreeChanges(**changes)), "x")
    assert str(error.value).startswith(message)


UNREAD = [
    *((method, key) for method in ("medusa", "hydra", "eagle") for key in ("levels", "k", "nodes", "rank", "rerank")),
    *((method, key) for method in ("sps", "sps-svip", "eagle-chain") for key in ("k", "nodes", "rank", "choices")),
    *((method, "choices") for method in ("eagle2", "eagle3", "deagle", "opt-tree")),
]
VALUES: dict[str, Any] = {"levels": 3, "k": 3, "nodes": 8, "rank": "confidence", "rerank": False, "choices": "eagle1"}


@pytest.mark.parametrize(("method", "key"), UNREAD)
def test_a_key_that_the_methods_tree_does_not_read_is_refused_by_its_name(method: Method, key: str) -> None:
    with pytest.raises(UserError, match=f"^x: tree.{key}: {method} drafts a [a-z ]*, which has none; leave it out"):
        tree_of(MethodConfig(method, TreeChanges(**{key: VALUES[key]})), "x")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            MethodConfig("pld", lookahead=LookaheadConfig()),
            "x: lookahead: pld does not read it; .* method lookahead",
        ),
        (MethodConfig("eagle2", lookup=PromptLookupConfig()), "x: lookup: eagle2 does not read it; .* use method pld"),
        (
            MethodConfig("vanilla", typical=TypicalConfig()),
            "x: typical: judges drafted tokens, and vanilla drafts",
        ),
    ],
)
def test_settings_of_another_method_are_refused(asked: MethodConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tree_of(asked, "x")


def test_a_draft_lm_drafts_in_any_shape_and_eagle_heads_in_chains_and_static_trees() -> None:
    dynamic = tree_of(MethodConfig("sps", TreeChanges(shape="dynamic", k=4, nodes=20, stop=VoteConfig())), "x")
    assert dynamic == TreeConfig(k=4, nodes=20, stop=VoteConfig())
    static = tree_of(MethodConfig("sps", TreeChanges(shape="static", choices="eagle1", children="replaced")), "x")
    assert static == TreeConfig(shape="static", choices="eagle1", children="replaced")
    for method in ("eagle", "eagle-chain"):
        assert METHODS[method].heads == ("eagle1", "eagle3")


def test_every_remedy_that_a_refusal_names_works() -> None:
    """Dynamic trees with sampled children, another shape, another rule, a cap that is too low, a missing form."""
    assert tree_of(MethodConfig("eagle", TreeChanges(children="sampled")), "x")
    assert tree_of(MethodConfig("sps", TreeChanges(shape="static", choices="eagle1", children="sampled")), "x")
    assert tree_of(MethodConfig("eagle-chain", TreeChanges(shape="chain")), "x")
    assert tree_of(MethodConfig("deagle", TreeChanges(stop=VoteConfig())), "x")
    assert tree_of(MethodConfig("sps-heuristic", TreeChanges(levels=3, stop=HeuristicConfig(start=3))), "x")
    assert tree_of(MethodConfig("ddd", TreeChanges(levels=5, stop=ProbabilitySumConfig(checks=(3,)))), "x")
    assert tree_of(MethodConfig("eagle2", TreeChanges(rerank=False, nodes=61)), "x")


def overridden(*words: str) -> MethodConfig:
    return from_overrides(MethodConfig, [*words], "command line")


def test_a_key_of_a_methods_own_stop_rule_needs_no_rule_beside_it() -> None:
    assert overridden("method=deagle", "tree.stop.bonus=0.5").tree.stop == VoteConfig(bonus=0.5)
    assert overridden("method=sps-svip", "tree.stop.h=0.5").tree.stop == EntropyConfig(h=0.5)
    assert overridden("method=eagle2", "tree.stop.rule=heuristic").tree.stop == HeuristicConfig()
    with pytest.raises(UserError, match=r"^--tree.stop.c: unknown key"):
        overridden("method=deagle", "tree.stop.c=1")
    with pytest.raises(UserError, match=r"needs a rule: constant, heuristic, entropy"):  # eagle2's own has no keys
        overridden("method=eagle2", "tree.stop.c=1")


@pytest.mark.parametrize(
    "wrong",
    [
        "tree.stop.c=0", "tree.stop.c=nan", "tree.stop.h=-0.1", "tree.stop.h=inf",
        "vote probability_threshold=1.5", "vote probability_threshold=-0.1", "vote momentum_threshold=nan",
        "vote momentum_threshold=2", "vote bonus=-1", "probability_sum threshold=1.1", "probability_sum threshold=nan",
        "probability_sum checks=[0]", "confidence threshold=1.01", "confidence threshold=-1",
        "marginal_gain threshold=1", "marginal_gain threshold=-0.5", "heuristic start=0", "heuristic fewer=0",
    ],
)  # fmt: skip
def test_a_threshold_that_makes_no_sense_is_refused_in_one_line(wrong: str) -> None:
    rule, _, change = wrong.rpartition(" ")
    words = [f"tree.stop.rule={rule}", f"tree.stop.{change}"] if rule else [wrong]
    with pytest.raises(UserError) as error:
        overridden(f"method={'eagle-chain' if rule else 'svip'}", *words)
    assert "\n" not in str(error.value) and "tree.stop" in str(error.value)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}])
def test_sampling_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))}"):
        validate(dict(wrong), SamplingConfig, "recipe.yaml", {})


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
