"""A decoder that remembers writes what it writes without, and asks its models nothing twice."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.schema.decode import Method, MethodConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import Drafters, make_decoder
from aerie.infer.decode.proposer import Drafting
from aerie.infer.decode.tree import Tree
from aerie.infer.measure.lossless import write_miniature
from aerie.infer.measure.tune import remember
from aerie.model.target import Target

IDS = torch.tensor([[1, 5, 3, 4, 1, 6, 3, 2, 7, 0, 5, 4, 2, 6, 1, 7, 3, 0, 4]])


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Drafters, Path]:
    directory = tmp_path_factory.mktemp("miniature")
    return Drafters(Target.load(write_miniature(directory))), directory / "heads"


def answers(decoder: SpeculativeDecoder, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    settings = {"max_new_tokens": 5, "temperature": 0.8, "top_k": 0}
    return [decoder.generate(IDS, generator=generator, **settings).new_ids for _ in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "kind"),
    [("sps", "draft_lm"), ("eagle", "eagle1"), ("eagle3", "eagle3"), ("hydra", "hydra"), ("lookahead", None)],
)
def test_it_writes_the_same_tokens(miniature: tuple[Drafters, Path], method: Method, kind: str | None) -> None:
    drafters, heads = miniature
    head = None if kind is None else str(heads / kind)
    plain, remembering = (make_decoder(drafters, MethodConfig(method), head) for _ in range(2))
    assert answers(remember(remembering), 12) == answers(plain, 12)


def test_a_second_answer_with_the_same_draws_runs_no_model(miniature: tuple[Drafters, Path]) -> None:
    drafters, heads = miniature
    decoder = remember(make_decoder(drafters, MethodConfig("sps"), str(heads / "draft_lm")))
    calls: list[int] = []
    hook = drafters.target.decoder.register_forward_hook(lambda *_: calls.append(1))
    try:
        first = answers(decoder, 3)
        forwards = len(calls)
        assert answers(decoder, 3) == first and len(calls) == forwards > 3
    finally:
        hook.remove()


@pytest.mark.parametrize(("method", "kind", "anew"), [("eagle2", "eagle1", False), ("sps", "draft_lm", True)])
def test_a_tree_grows_anew_only_where_it_is_drawn(
    miniature: tuple[Drafters, Path], method: Method, kind: str, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters, heads = miniature
    plain = make_decoder(drafters, MethodConfig(method), str(heads / kind))
    assert isinstance(plain.proposer, Drafting)
    grown: list[int] = []
    grow = plain.proposer.shape.grow

    def counted(*given: Any) -> Tree:
        grown.append(1)
        return grow(*given)

    monkeypatch.setattr(plain.proposer.shape, "grow", counted)
    decoder = remember(plain)
    first = answers(decoder, 3)
    trees = len(grown)
    assert answers(decoder, 3) == first and trees > 0
    assert len(grown) == (2 * trees if anew else trees)
