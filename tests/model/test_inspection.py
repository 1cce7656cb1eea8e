"""What inspect says of a head: its layout and sizes, what is missing, and whether it fits a target."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.configs.errors import UserError
from aerie.model.checkpoint import load_head, save_head
from aerie.model.export import TargetFacts
from aerie.model.inspection import inspect_head, screen
from aerie.model.target import fingerprint
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
    assert len(lines) <= 24 and any(
        line.startswith("taps") and "not determined without its target" in line for line in lines
    )


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
    assert found["target"]["fits"] is False and "fingerprint 0123" in found["problems"][0]
    own = fingerprint(target.text_config, target.ends, torch.bfloat16)
    save_head(published.eagle3(), tmp_path / "bf16", target=own, **facts)
    assert inspect_head(tmp_path / "bf16", target)["target"]["fits"] is True  # digits are no other weights


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
        ("nan", "fc.weight holds 1 of 3,072 values that are NaN or infinite"),
        ("infinite", "lm_head.weight holds 2 of 3,424 values that are NaN or infinite"),
        ("fp8", "fc.weight holds float8_e4m3fn: quantised heads are not read"),
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
    elif kind == "nan":
        state["fc.weight"][3, 4] = torch.nan
    elif kind == "infinite":
        state["lm_head.weight"][0, :2] = torch.inf
    elif kind == "fp8":
        state["fc.weight"] = state["fc.weight"].to(torch.float8_e4m3fn)
    save_file(state, place)
    other = {"target": ends_facts(vocab_size=400), "depth": ends_facts(num_blocks=5), "ends": target}.get(kind)
    found = inspect_head(tmp_path / "head", other)
    assert any(message in text for text in found["problems"]), found["problems"]
    assert "PROBLEM" in screen(found) and len(found["problems"]) == len(set(found["problems"]))
    if other is None:  # what inspect finds, loading refuses
        with pytest.raises(UserError, match=re.escape(message)):
            load_head(tmp_path / "head", ends=tiny.ends())


def test_equal_vocabularies_with_one_table_do_not_load_and_inspect_says_so(tmp_path: Path, target: TargetFacts) -> None:
    save_head(published.eagle3(ids=torch.arange(320)), tmp_path / "head")
    state = load_file(tmp_path / "head" / "model.safetensors")
    save_file({name: value for name, value in state.items() if name != "t2d"}, tmp_path / "head" / "model.safetensors")
    for given in (None, target):
        found = inspect_head(tmp_path / "head", given)
        assert "has one of d2t and t2d" in found["problems"][0] and found["target"].get("fits") in (None, False)


def test_keys_that_change_drafting_and_are_not_followed_are_said(tmp_path: Path) -> None:
    odd = {"sliding_window": 16, "layer_types": ["sliding_attention"], "eagle_config": {"parallel_drafting": True}}
    text = screen(inspect_head(safeailab_eagle3(tmp_path / "head", odd)))
    for said in ("layer_types names sliding_attention", "sliding_window is 16", "parallel_drafting is true"):
        assert f"remark      {said}" in text
    nested = {
        "transformer_layer_config": {**published.SPECULATORS_CONFIG["transformer_layer_config"], "sliding_window": 8}
    }
    assert "sliding_window is 8" in screen(inspect_head(speculators(tmp_path / "nested", nested)))
    for number, unused in enumerate(
        ({"sliding_window": 16, "use_sliding_window": False}, {"sliding_window": 16, "layer_types": ["full_attention"]})
    ):
        assert inspect_head(safeailab_eagle3(tmp_path / str(number), unused))["remarks"] == []


def test_taps_that_only_the_target_tells_are_not_determined_without_it(tmp_path: Path, target: TargetFacts) -> None:
    numbered = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}}
    place = published.specforge(tmp_path / "head", numbered)
    alone = inspect_head(place)
    assert alone["taps"] is None and alone["taps_open"] == "ambiguous"
    assert "not determined without its target" in screen(alone) and "give it with --target" in alone["guesses"][0]
    known = inspect_head(place, target)
    assert known["taps"] == [4, 5, 7] and known["taps_open"] is None
    assert inspect_head(place, None, (4, 5, 7))["taps"] == [4, 5, 7]
    with pytest.raises(UserError, match=r"--after-blocks 2,4,6: .*config.json says that the head reads"):
        inspect_head(place, None, (2, 4, 6))
    numbered["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 4, 6]  # one is added by every rule
    assert inspect_head(published.specforge(tmp_path / "one", numbered))["taps"] == [2, 5, 7]
    assert inspect_head(safeailab_eagle3(tmp_path / "plain"), None, (1, 3, 6))["taps"] == [1, 3, 6]


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such head directory"):
        inspect_head(tmp_path / "none")
    place = safeailab_eagle1(tmp_path / "head")
    (place / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="cannot read the weights"):
        inspect_head(place)
