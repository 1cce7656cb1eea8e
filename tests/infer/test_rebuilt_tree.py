"""A static tree rebuilt from a head's ranks can expect no less than the one that it replaces, and is taken as it is."""

from pathlib import Path

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import DynamicConfig, MethodConfig, StaticConfig, digests, ordered
from aerie.configs.schema.measure import CalibrateConfig, PromptsConfig
from aerie.infer.decode.methods import Drafters, make_decoder
from aerie.infer.measure.lossless import VOCABULARY, write_miniature
from aerie.infer.measure.rebuilt_tree import CHOICES, expected_tau, probe, rebuild, rebuilt
from aerie.model.target import Target
from tests.infer.test_engine import greedy

SECTION = CalibrateConfig(PromptsConfig("none", max_new_tokens=24), ranks=6)
UNORDERED = [[0.5, 0.1, 0.3], [0.4, 0.3]]  # the third guess is better than the second


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_what_is_drafted_to_find_out_has_the_tree_and_every_rank_at_every_depth(method: str) -> None:
    tree = MethodConfig(method).tree
    assert isinstance(tree, StaticConfig)
    wide = probe(tree, ranks=12)
    assert set(tree.paths) <= set(wide)
    for depth in range(tree.levels):
        assert {(*[0] * depth, rank) for rank in range(12)} <= set(wide)
    assert ordered(wide, "test", sampled=True) == wide


def test_a_rank_is_left_out_only_where_children_are_not_drawn() -> None:
    best = StaticConfig(choices=((0,), (1,), (2,)), children="best")
    drawn = StaticConfig(choices=((0,), (1,), (2,)))
    assert rebuilt(best, UNORDERED, nodes=4) == ((0,), (2,), (0, 0))
    found = rebuilt(drawn, UNORDERED, nodes=6)
    assert len(found) == 5 and ordered(found, "test", sampled=True) == found
    with pytest.raises(UserError, match="would bias"):
        ordered(rebuilt(best, UNORDERED, nodes=4), "test", sampled=True)


def test_expected_tau_is_one_and_the_sum_of_the_chances_of_all_paths() -> None:
    assert expected_tau(((0,), (2,), (0, 0), (2, 1)), UNORDERED) == pytest.approx(1 + 0.5 + 0.3 + 0.2 + 0.09)
    assert expected_tau(((9,),), UNORDERED) == 1.0  # never tried


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    directory = tmp_path_factory.mktemp("miniature")
    return directory / "heads", Target.load(write_miniature(directory))


def prompts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (1, 4 + n), generator=generator) for n in range(count)]


@pytest.mark.parametrize("method", ["hydra", "eagle"])
def test_the_file_beside_the_head_is_a_tree_of_the_same_size_that_decodes_losslessly(
    method: str, miniature: tuple[Path, Target], tmp_path: Path
) -> None:
    heads, target = miniature
    head = str(heads / ("hydra" if method == "hydra" else "eagle3"))
    asked = MethodConfig(method)  # type: ignore[arg-type]
    line = rebuild(target, asked, head, prompts(4), SECTION, tmp_path)
    assert line is not None and f"--tree.choices {head}/{CHOICES}" in line
    mine, _, replaced = line.partition("expected tau ")[2].partition(" (")
    if method == "hydra":  # where siblings are drawn, no rank may be left out before a better one
        assert float(mine) >= float(replaced.split(" for")[0])
    assert (Path(head) / CHOICES).read_bytes() == (tmp_path / CHOICES).read_bytes()
    changed = MethodConfig.of(asked.method, choices=str(Path(head) / CHOICES))
    assert changed.tree is not None and asked.tree is not None and changed.tree.nodes <= asked.tree.nodes
    ids = prompts(5)[-1]
    written = make_decoder(Drafters(target), changed, head).generate(ids, do_sample=False, max_new_tokens=20)
    assert written.sequences.tolist() == greedy(target, ids, 20)


def test_the_size_is_what_was_asked_for_and_no_other_shape_has_a_tree_to_rebuild(
    miniature: tuple[Path, Target], tmp_path: Path
) -> None:
    heads, target = miniature
    section = CalibrateConfig(SECTION.prompts, ranks=6, nodes=9)
    assert rebuild(target, MethodConfig("medusa"), str(heads / "medusa"), prompts(2), section, tmp_path)
    assert len(StaticConfig(choices=str(tmp_path / CHOICES), children="best").paths) == 8
    assert rebuild(target, MethodConfig("eagle2"), str(heads / "eagle1"), prompts(1), SECTION, tmp_path / "no") is None
    assert not (tmp_path / "no").exists()


def test_a_measurement_depends_on_what_the_file_of_its_tree_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("choices:\n  - [0]\n", encoding="utf-8")
    tree = StaticConfig(choices=str(path))
    first = digests([None, tree, DynamicConfig()])
    path.write_text("choices:\n  - [0]\n  - [1]\n", encoding="utf-8")
    assert list(first["choices"]) == [str(path)] and digests([tree]) != first
    assert digests([None, DynamicConfig(), StaticConfig(choices="eagle1")]) == {}
