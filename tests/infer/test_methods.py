"""Methods by name: published trees, what a recipe may change of them, and their heads."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict, validate
from aerie.configs.schema.decode import (
    METHODS,
    USUAL,
    ChainConfig,
    DynamicConfig,
    EntropyConfig,
    MarginalGainConfig,
    MethodConfig,
    StaticConfig,
    VoteConfig,
)
from aerie.configs.schema.heads import KINDS
from aerie.infer.decode.find_head import find_head, kind_at
from aerie.infer.decode.roles import Drafter
from aerie.infer.decode.shape import make_shape
from aerie.model.checkpoint import save_head
from aerie.model.heads import DRAFT_MODELS
from aerie.model.storage import ROOT
from aerie.train.objectives import Objective
from tests import tiny


def overridden(*words: str) -> MethodConfig:
    return validate({}, MethodConfig, "command line", {}, words)


def test_methods_are_whole() -> None:
    for name, published in METHODS.items():
        tree = MethodConfig.of(name).tree
        assert (tree is None) == (published.tree is None) == (not published.heads)
        if tree is not None:
            assert make_shape(tree).max_nodes == tree.nodes >= 2
            assert validate(
                as_dict(MethodConfig.of(name)), MethodConfig, "again", {}
            ) == MethodConfig.of(name)
    assert {*USUAL} == {*DRAFT_MODELS} == {*KINDS}
    for kind in DRAFT_MODELS.values():
        assert issubclass(kind.objective, Objective) and issubclass(kind.drafter, Drafter)


def test_published_trees() -> None:
    assert MethodConfig.of("eagle2").tree == DynamicConfig(levels=6, k=10, nodes=60)
    assert MethodConfig.of("eagle3").tree == DynamicConfig(levels=8, k=10, nodes=60)
    assert MethodConfig.of("sps").tree == ChainConfig(levels=5)
    files = {"eagle1": ([4, 8, 8, 3, 2], 4), "medusa63": ([10, 28, 23, 2], 10)}
    assert {path.stem for path in (ROOT / "configs/trees").iterdir()} == {*files}
    for name, (levels, k) in files.items():
        tree = StaticConfig(choices=name)
        assert [len(list(group)) for _, group in itertools.groupby(tree.paths, key=len)] == levels
        assert tree.paths == tuple(sorted(tree.paths, key=lambda choice: (len(choice), choice)))
        assert (tree.levels, tree.k, tree.nodes) == (len(levels), k, sum(levels) + 1)


@pytest.mark.parametrize(
    ("words", "tree"),
    [
        ("method=deagle tree.levels=12", DynamicConfig(levels=12, stop=VoteConfig())),
        ("method=sps-svip tree.stop.h=0.5", ChainConfig(levels=40, stop=EntropyConfig(h=0.5))),
        ("method=eagle-chain tree.stop.rule=entropy", ChainConfig(levels=5, stop=EntropyConfig())),
        ("method=eagle2 tree.levels=null", DynamicConfig(levels=6)),
        ("method=eagle-chain tree.shape=chain tree.levels=4", ChainConfig(levels=4)),
        (
            "method=sps tree.shape=dynamic tree.k=4",
            DynamicConfig(k=4),
        ),  # another shape drops the method's settings
        # its frontier is as wide as its budget
        (
            "method=opt-tree tree.nodes=20",
            DynamicConfig(levels=9, k=19, nodes=20, stop=MarginalGainConfig()),
        ),
        (
            "method=medusa tree.shape=static tree.children=sampled",
            StaticConfig(choices="medusa63", children="sampled"),
        ),
        (
            "method=eagle2 tree.rerank=false tree.levels=3 tree.k=4",
            DynamicConfig(levels=3, k=4, nodes=13, rerank=False),
        ),
    ],
)
def test_changes(words: str, tree: Any) -> None:
    assert overridden(*words.split()).tree == tree


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("method=eagel2", "--method: unknown 'eagel2'; did you mean 'eagle2'?"),
        (
            "method=eagle tree.levels=5",
            "--tree.levels: unknown key; it belongs to another kind of tree than static",
        ),
        ("method=sps tree.shape=static", "tree.choices: required"),
        ("method=eagle2 tree.shape=square", "unknown 'square'; known here: 'chain', 'static'"),
        ("method=eagle-chain tree.children=worst", "--tree.children: unknown 'worst'; known here"),
        (
            "method=eagle2 tree.children=sampled tree.rank=confidence",
            "would bias the output; use rank: survival",
        ),
        ("method=pld tree.levels=3", "tree: pld grows no tree"),
        ("method=eagle2 lookup.length=3", "lookup: eagle2 does not read it"),
        ("method=deagle tree.stop.rule=entropi", "unknown 'entropi'; did you mean 'entropy'"),
        ("method=svip tree.stop.h=inf", "--tree.stop.h: "),
        ("method=deagle tree.stop.signals=[]", "should have at least 1 item"),
        ("method=deagle tree.stop.signals=[momentum,momentum]", "momentum stands there twice"),
        ("method=ddd tree.stop.checks=[7,5]", "must ascend"),
        ("method=ddd tree.levels=5", r"stop.checks \[5, 7, 9\] are never reached in 5 levels"),
        ("method=eagle tree.choices=[]", "at least one path"),
        ("method=eagle tree.choices=[[0],[0]]", "each once"),
        ("method=eagle tree.choices=[[0],[-1]]", "ranks that count from 0"),
        ("method=eagle tree.choices=[[0],[1,0]]", r"\[1, 0\] is listed without its parent \[1\]"),
        ("method=eagle tree.choices=[[0],[2]]", r"\[2\] is listed without \[1\].*would bias"),
    ],
)
def test_mistakes(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        overridden(*words.split())
    assert "\n" not in str(error.value)


def test_choices(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"choices": [[0, 0], [1], [0]]}), encoding="utf-8")
    listed = StaticConfig(choices=((1,), (0,), (0, 0)))
    assert StaticConfig(choices=str(path)).paths == listed.paths == ((0,), (1,), (0, 0))
    assert StaticConfig(choices=((0,), (2,)), children="best").paths == (
        (0,),
        (2,),
    )  # the best may skip a rank
    path.write_text("choices: [[0], [zero]]\n", encoding="utf-8")
    tiny.refused(r"mine.yaml:1.*integer.*'zero'", StaticConfig, choices=str(path))
    with pytest.raises(ValueError, match=r"eagle7: no such file.*eagle1, medusa63"):
        StaticConfig(choices="eagle7")


def test_find_head(tmp_path: Path) -> None:
    embedding, heads = tiny.vocab().embedding, tmp_path / "heads"
    save_head(tiny.head(embedding), heads / "eagle1")
    save_head(tiny.eagle3_head(embedding), heads / "eagle3")
    tiny.target(tmp_path / "lm")
    places = (heads / "eagle1", heads / "eagle3", tmp_path / "lm")
    assert [kind_at(place) for place in places] == ["eagle1", "eagle3", "draft_lm"]

    def find(method: str, preferred: str = "eagle1", given: Path | None = None) -> str | None:
        return find_head(MethodConfig.of(method), heads, preferred, given, "x")

    assert find("vanilla") is None
    assert find("deagle") == str(heads / "eagle1") and find("deagle", "eagle3") == str(
        heads / "eagle3"
    )
    assert find("eagle3", given=heads / "eagle1") == str(heads / "eagle3")
    named = MethodConfig.of("sps", head=str(tmp_path / "lm"))
    assert find_head(named, heads, "eagle1", None, "x") == str(tmp_path / "lm")
    tiny.refused(
        r"x: sps drafts with a head of kind draft_lm, and .*draft_lm holds none", find, "sps"
    )
    tiny.refused(
        "sps drafts with a head of kind draft_lm, not eagle1", find, "sps", given=heads / "eagle1"
    )
