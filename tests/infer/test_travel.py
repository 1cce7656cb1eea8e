"""Decoding with heads that travelled: published ones are lossless, exported ones have the very same tau."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import DynamicConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.model.checkpoint import save_head
from aerie.model.export import export
from aerie.model.formats.content import TargetFacts
from aerie.model.storage import Manifest, find_weights
from aerie.model.target import Target
from tests import tiny
from tests.model.formats import published

TREE = DynamicConfig(levels=4, k=3, nodes=10)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("target"), num_blocks=8, eos_token_id=None)


@pytest.fixture(scope="module")
def target(path: Path) -> Target:
    return Target.load(TargetConfig(path=str(path), dtype="float32"))


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 320, (1, length), generator=generator) for length in (4, 6, 9)]


def decoded(target: Target, head: Path | str) -> tuple[list[list[int]], float, list[list[int]]]:
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


def own_eagle1(directory: Path) -> Path:
    save_head(tiny.head(tiny.vocab().embedding, scale=6.0), directory)
    return directory


def own_eagle3(directory: Path) -> Path:
    save_head(published.eagle3(), directory)
    return directory


@pytest.mark.parametrize(
    ("make", "layouts"),
    [
        (own_eagle1, ("safeailab", "sglang")),
        (own_eagle3, ("safeailab", "sglang", "speculators")),
        (published.safeailab_eagle1, ("sglang",)),
        (published.safeailab_eagle3, ()),
        (published.specforge, ("speculators",)),
        (published.angelslim, ("safeailab",)),
        (published.speculators, ()),
        (published.medusa, ()),
        (published.hydra, ()),
    ],
)
def test_a_head_decodes_what_the_target_writes_and_drafts_the_very_same_trees_after_it_was_converted(
    tmp_path: Path, path: Path, target: Target, make: Any, layouts: tuple[str, ...]
) -> None:
    made, vanilla = make(tmp_path / "head"), SpeculativeDecoder(target)
    head = made[1] if isinstance(made, tuple) else made  # a multi-token head comes with its state
    Manifest.of(head).write(head)
    answers, tau, trees = decoded(target, head)
    for ids, answer in zip(prompts(), answers, strict=True):
        assert answer == vanilla.generate(ids, do_sample=False, max_new_tokens=10).sequences[0].tolist()
    assert len(trees[0]) == TREE.nodes  # it did draft
    for layout in layouts:
        export(head, layout, tmp_path / layout, TargetFacts.load(str(path)))
        assert decoded(target, tmp_path / layout) == (answers, tau, trees)
        weights = find_weights(tmp_path / layout)
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        with pytest.raises(UserError, match=f"{weights}: is not what was written"):
            decoded(target, tmp_path / layout)
