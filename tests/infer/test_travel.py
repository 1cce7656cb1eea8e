"""Decoding with heads that travelled: published ones are lossless, exported ones have the very same tau."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import DynamicConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.infer import main as measuring
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.model import main as travelling
from aerie.model.checkpoint import save_head
from aerie.model.export import export
from aerie.model.formats.content import TargetFacts
from aerie.model.push import upload
from aerie.model.storage import Manifest, find_weights
from aerie.model.target import Target
from tests import tiny
from tests.infer.test_main import write_recipe
from tests.model.formats import published
from tests.model.hub_server import Hub
from tests.model.test_push import hub
from tests.tiny import call

__all__ = ["hub"]  # the fixture
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


def test_a_head_on_the_hub_decodes_by_its_name(hub: Hub, tmp_path: Path, target: Target) -> None:
    head = own_eagle1(tmp_path / "head")
    files: dict[str, Path | bytes] = {place.name: place for place in head.iterdir()}
    for name, revision in (("me/head", None), ("me/head@better", "better")):
        upload("me/head", {**files, "README.md": b"---\ntags: [aerie]\n---\n"}, revision)
        assert decoded(target, name) == decoded(target, head)


@pytest.mark.slow
def test_a_head_that_was_really_benched_is_pushed_with_its_figures_and_so_is_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # a dry run does without
    write_recipe(tmp_path)
    for command in ("calibrate", "bench", "report"):
        assert call(measuring, command, "--config", tmp_path / "recipe.yaml") == 0
    run, head = tmp_path / "run", tmp_path / "run" / "heads" / "eagle1"
    assert isinstance(json.loads((run / "bench" / "provenance.json").read_text())["inputs"]["head"], list)
    summary = json.loads((run / "report" / "summary.json").read_text())
    row = next(row for row in summary["rows"] if row["method"] == "eagle2" and row["temperature"] == 0)
    out, target = tmp_path / "exported", tmp_path / "target"
    convert = ("convert", head, "--to", "safeailab", "--target", target, "--out", out)
    assert call(travelling, *convert) == 0
    push = ("--repo", "me/head", "--uncommitted", "--dry-run", "--target-name", "someone/tiny")
    for command in (("push", head, *push), ("push", out, *push, "--run", run)):
        capsys.readouterr()
        assert call(travelling, *command) == 0
        said = capsys.readouterr().out
        shown = f"| gsm8k | 0 | {row['prompts']} | {row['tau']:.2f} |".replace("gsm8k", row["task"])
        assert shown in said and f"{row['identical']}/{row['prompts']}" in said and "ECE" in said
        assert {"calibration.json", "summary.json"} <= set(said.split()) and str(tmp_path) not in said.split(
            "README.md:"
        )[1]
    state = load_file(head / "model.safetensors")
    save_file({**state, "fc.weight": state["fc.weight"] + 1}, head / "model.safetensors")
    assert call(travelling, "push", head, *push) == 2
    assert "was measured with another head" in capsys.readouterr().err
