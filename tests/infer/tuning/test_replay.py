"""A replay counts what the real decoder does, for every tree narrower than the recording."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import ChainConfig, DynamicConfig, TreeConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import Drafters, drafting
from aerie.infer.measure.lossless import VOCABULARY, write_miniature
from aerie.infer.measure.tune import Recording, accepted, cycles, path_ranks, record
from aerie.model.target import Target

LEVELS, K, NEW = 5, 6, 28
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("miniature")


@pytest.fixture(scope="module")
def target(miniature: Path) -> Target:
    return Target.load(write_miniature(miniature), "cpu")


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCABULARY, (1, 3 + number), generator=generator) for number in range(4)]


def decoder(target: Target, miniature: Path, kind: str, tree: TreeConfig) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, drafting(Drafters(target).of(str(miniature / "heads" / kind)), tree))


@pytest.fixture(scope="module", params=["eagle1", "eagle3", "draft_lm"])
def recorded(
    request: pytest.FixtureRequest, target: Target, miniature: Path, prompts: list[Tensor]
) -> tuple[str, Recording]:
    made = decoder(target, miniature, request.param, DynamicConfig())
    return request.param, record(made, prompts, LEVELS, K, NEW)


def replayed(recording: Recording, tree: TreeConfig) -> tuple[int, int, int, int]:
    found = cycles(recording, accepted(path_ranks(recording, tree.levels, tree.k), tree.nodes), tree.levels)
    return found.tokens, found.target_forwards, found.draft_levels, found.accepted


def decoded(made: SpeculativeDecoder, prompts: list[Tensor]) -> tuple[int, int, int, int]:
    counted = [made.generate(ids, max_new_tokens=NEW, do_sample=False).statistics for ids in prompts]
    return (
        sum(one.new_tokens - 1 for one in counted),
        sum(one.target_forwards for one in counted),
        sum(one.draft_forwards for one in counted),
        sum(sum(one.accepted) for one in counted),
    )


@pytest.mark.parametrize(
    "tree",
    [
        DynamicConfig(levels=1, k=K, nodes=4),
        DynamicConfig(levels=3, k=K, nodes=8),
        DynamicConfig(levels=5, k=K, nodes=20),
        DynamicConfig(levels=4, k=K, nodes=60),
        DynamicConfig(levels=5, k=K, nodes=3),
        ChainConfig(levels=4),
    ],
)
def test_a_chain_and_a_tree_as_wide_as_the_recording_are_replayed_exactly(
    target: Target, miniature: Path, prompts: list[Tensor], recorded: tuple[str, Recording], tree: TreeConfig
) -> None:
    kind, recording = recorded
    assert replayed(recording, tree) == decoded(decoder(target, miniature, kind, tree), prompts)


@pytest.mark.parametrize(("k", "nodes"), [(2, 10), (3, 10)])
def test_a_narrower_tree_is_replayed_to_a_cycle_an_answer_and_never_overrated(
    target: Target, miniature: Path, prompts: list[Tensor], recorded: tuple[str, Recording], k: int, nodes: int
) -> None:
    kind, recording = recorded
    tree = DynamicConfig(levels=5, k=k, nodes=nodes)
    tokens, ours, _, _ = replayed(recording, tree)
    same_tokens, real, _, _ = decoded(decoder(target, miniature, kind, tree), prompts)
    assert tokens == same_tokens and 0 <= ours - real <= len(prompts)
