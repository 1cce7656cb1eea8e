"""Decoding with heads that travelled: published ones are lossless, exported ones have the very same tau."""

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config import TreeConfig
from infer.decoders import load_head_for
from infer.engine import SpeculativeDecoder
from model.checkpoint import save_head
from model.config import TargetConfig
from model.errors import UserError
from model.export import TargetFacts, export
from model.target import Target
from tests import tiny
from tests.model.formats import published
from tests.model.formats import test_multi_token as multi_token

TREE = TreeConfig(levels=4, k=3, nodes=10)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("target"), num_blocks=8, eos_token_id=None)


@pytest.fixture(scope="module")
def target(path: Path) -> Target:
    return Target.load(TargetConfig(path=str(path), dtype="float32"))


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 320, (1, length), generator=generator) for length in (4, 6, 9)]


def decoded(target: Target, head: Path) -> tuple[list[list[int]], float, list[list[int]]]:
    """Greedy answers, tau over all of them, and every drafted tree: another weight anywhere shows in these."""
    decoder = SpeculativeDecoder.from_pretrained(target, str(head), tree=TREE)
    answers, taus, trees = [], [], []
    for ids in prompts():
        done = decoder.generate(
            ids, do_sample=False, max_new_tokens=10, on_cycle=lambda cycle: trees.append(cycle.tree.tokens.tolist())
        )
        answers.append(done.sequences[0].tolist())
        taus.append(done.statistics.tau)
    return answers, sum(taus), trees


@pytest.mark.parametrize(
    "make",
    [
        published.safeailab_eagle1,
        published.safeailab_eagle3,
        published.specforge,
        published.angelslim,
        published.speculators,
    ],
)
def test_a_head_that_somebody_published_decodes_what_the_target_writes(
    tmp_path: Path, target: Target, make: Any
) -> None:
    vanilla, (answers, _, trees) = SpeculativeDecoder(target), decoded(target, make(tmp_path / "head"))
    for ids, answer in zip(prompts(), answers, strict=True):
        assert answer == vanilla.generate(ids, do_sample=False, max_new_tokens=10).sequences[0].tolist()
    assert len(trees[0]) == TREE.nodes  # it did draft


@pytest.mark.parametrize("make", [multi_token.medusa, multi_token.hydra])
def test_published_medusa_and_hydra_heads_decode_what_the_target_writes(
    tmp_path: Path, target: Target, make: Any
) -> None:
    vanilla, tree = SpeculativeDecoder(target), TreeConfig(levels=4, k=2, nodes=10)
    decoder = SpeculativeDecoder.from_pretrained(target, str(make(tmp_path / "head")[1]), tree=tree)
    for ids in prompts():
        found = decoder.generate(ids, do_sample=False, max_new_tokens=10)
        assert torch.equal(found.sequences, vanilla.generate(ids, do_sample=False, max_new_tokens=10).sequences)
        assert found.statistics.draft_nodes > 0


@pytest.mark.parametrize(
    ("kind", "layouts"), [("eagle1", ("safeailab", "sglang")), ("eagle3", ("safeailab", "sglang", "speculators"))]
)
def test_an_exported_head_reads_back_and_decodes_with_the_same_tau_to_the_last_digit(
    tmp_path: Path, path: Path, target: Target, kind: str, layouts: tuple[str, ...]
) -> None:
    embedding = target.ends.embedding
    head: Any = tiny.head(embedding, scale=6.0) if kind == "eagle1" else published.eagle3()
    head.embed_tokens.weight.data.copy_(embedding)
    save_head(head, tmp_path / "head")
    expected = decoded(target, tmp_path / "head")
    facts = TargetFacts.load(str(path))
    for layout in layouts:
        export(tmp_path / "head", layout, tmp_path / layout, facts)
        assert decoded(target, tmp_path / layout) == expected
    head.fc.weight.data[:, :4] = 0
    save_head(head, tmp_path / "head")
    assert decoded(target, tmp_path / "head") != expected  # the comparison sees another head


def test_a_head_for_another_target_is_refused(tmp_path: Path, target: Target) -> None:
    save_head(tiny.head(tiny.ends(hidden_size=64).embedding), tmp_path / "head")
    with pytest.raises(UserError, match="belongs to another target: its hidden size is 64"):
        load_head_for(target, str(tmp_path / "head"))
