"""What inspect says of a head: its layout and sizes, what is missing, and whether it fits a target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import save_head
from model.errors import UserError
from model.export import TargetFacts
from model.inspection import inspect_head, screen
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import EAGLE3, TAPS, ends_facts, safeailab_eagle1, safeailab_eagle3, speculators


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return TargetFacts.load(str(tiny.target(tmp_path_factory.mktemp("target"), num_blocks=8)))


def test_a_published_head_is_told_on_one_screen_and_as_json(tmp_path: Path) -> None:
    found = inspect_head(safeailab_eagle3(tmp_path / "head"))
    assert (found["layout"], found["kind"], found["weights"]) == ("safeailab", "eagle3", "pytorch_model.bin")
    assert found["taps"] is None and found["left_out"] == ["embed_tokens.weight"]
    assert found["vocabulary"] == {"draft": 107, "target": 320, "coverage": None}
    assert found["rope"] == {"theta": 10000.0, "scaling": None, "max_position_embeddings": 2048}
    expected = sum(torch.Size(shape).numel() for name, shape in EAGLE3.items() if name not in ("d2t", "t2d"))
    counts = found["parameters"]
    assert counts["own"] + counts["lm_head"] == expected and counts["lm_head"] == 107 * 32
    assert found["problems"] == [] and "names no taps" in found["guesses"][0]
    assert json.loads(json.dumps(found)) == found
    lines = screen(found).splitlines()
    assert len(lines) <= 24 and any(line.startswith("taps") and "not named" in line for line in lines)


def test_with_a_target_the_taps_are_known_and_the_fit_is_told(tmp_path: Path, target: TargetFacts) -> None:
    found = inspect_head(safeailab_eagle3(tmp_path / "head"), target)
    assert found["taps"] == list(TAPS) and found["target"]["fits"] is True
    assert found["remarks"] == []
    other = inspect_head(
        safeailab_eagle3(tmp_path / "other", {"rope_theta": 5e5, "max_position_embeddings": 64}), target
    )
    assert other["remarks"] == [
        "base of RoPE 500,000, the target's is 10,000",
        "drafts up to position 64, the target goes to 256",
    ]
    assert screen(found).splitlines()[-1] == f"fits        {target.path}: yes"


def test_our_own_head_tells_its_target_coverage_and_score(tmp_path: Path, target: TargetFacts) -> None:
    facts: dict[str, Any] = {"draft_vocabulary": {"coverage": 0.975}, "target_path": "a/b", "predicted_tau": 3.25}
    save_head(published.eagle3(), tmp_path / "head", target="0123", **facts)
    found = inspect_head(tmp_path / "head", target)
    assert found["target"]["recorded"] == "a/b" and found["vocabulary"]["coverage"] == 0.975
    assert found["training"] == {"predicted_tau": 3.25} and found["taps"] == list(TAPS)
    assert "97.50% of the training answers" in screen(found)
    assert any("fingerprint 0123" in text for text in found["remarks"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"own": True}, "in the file, the target's own"), ({"own": False}, "in the file, NOT the target's")],
)
def test_an_embedding_in_the_file_is_compared_with_the_targets(
    tmp_path: Path, target: TargetFacts, changes: dict[str, bool], text: str
) -> None:
    place = speculators(tmp_path / "head", {"eagle_aux_hidden_state_layer_ids": list(TAPS)})
    state = load_file(place / "model.safetensors")
    if changes["own"]:
        state["embed_tokens.weight"] = target.ends.embedding.to(torch.bfloat16)
        save_file(state, place / "model.safetensors")
    assert inspect_head(place, target)["embedding"] == text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "missing 'fc.weight'"),
        ("offsets", "d2t holds offsets"),
        ("target", "belongs to another target: its vocabulary is 320, that of tiny is 400"),
        ("depth", "tiny has 5 blocks"),
        ("ends", "none of the target's end-of-turn tokens"),
    ],
)
def test_every_problem_is_listed(tmp_path: Path, target: TargetFacts, kind: str, message: str) -> None:
    save_head(published.eagle3(ids=torch.arange(10, 117)), tmp_path / "head")
    place = tmp_path / "head" / "model.safetensors"
    state = load_file(place)
    if kind == "missing":
        del state["fc.weight"]
    elif kind == "offsets":
        state["d2t"] = state["d2t"] + torch.arange(107)
    save_file(state, place)
    other = {"target": ends_facts(vocab_size=400), "depth": ends_facts(num_blocks=5), "ends": target}.get(kind)
    found = inspect_head(tmp_path / "head", other)
    assert any(message in text for text in found["problems"]), found["problems"]
    assert "PROBLEM" in screen(found)


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such head directory"):
        inspect_head(tmp_path / "none")
    place = safeailab_eagle1(tmp_path / "head")
    (place / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="cannot read the weights"):
        inspect_head(place)
