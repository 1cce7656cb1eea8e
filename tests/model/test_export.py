"""Heads written in other layouts: whole or absent, equal when read back, refused for another target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import head_facts, load_head, save_head
from model.errors import UserError
from model.export import TargetFacts, export
from model.formats import layouts
from model.formats.content import Export, HeadContent
from model.heads.eagle3 import Eagle3Head
from model.weights import read_tensors
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import TAPS, ends_facts, safeailab_eagle3, specforge


def same(one: Any, two: Any) -> None:
    assert one.config == two.config and one.state_dict().keys() == two.state_dict().keys()
    for name, value in one.state_dict().items():
        assert value.dtype == two.state_dict()[name].dtype and torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("to", ["safeailab", "sglang", "speculators"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eagle3_head_comes_back_from_every_layout_bit_for_bit(tmp_path: Path, to: str, dtype: torch.dtype) -> None:
    one = published.eagle3().to(dtype)
    save_head(one, tmp_path / "head", step=4)
    done = export(tmp_path / "head", to, tmp_path / to, ends_facts())
    assert done.source_layout == "aerie" and not done.notes
    same(one, load_head(tmp_path / to, ends=tiny.ends()))
    export(tmp_path / to, "speculators", tmp_path / "again", ends_facts())  # and from there to another
    same(one, load_head(tmp_path / "again"))
    assert head_facts(tmp_path / "again")["step"] == 4


@pytest.mark.parametrize("to", ["safeailab", "sglang"])
@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"num_hidden_layers": 2}])
def test_an_eagle1_head_comes_back_from_every_layout_bit_for_bit(
    tmp_path: Path, to: str, changes: dict[str, Any]
) -> None:
    one = tiny.head(tiny.ends().embedding, **changes)
    save_head(one, tmp_path / "head")
    export(tmp_path / "head", to, tmp_path / to, ends_facts())
    same(one, load_head(tmp_path / to))


def test_a_head_of_another_width_takes_its_own_embedding_along(tmp_path: Path) -> None:
    embedding = tiny.ends(hidden_size=48).embedding
    one = tiny.eagle3_head(embedding, hidden_size=32, head_dim=8, after_blocks=TAPS)
    save_head(one, tmp_path / "head")
    for to in ("safeailab", "sglang", "speculators"):
        export(tmp_path / "head", to, tmp_path / to, ends_facts(hidden_size=48))
        assert json.loads((tmp_path / to / "config.json").read_text())["target_hidden_size"] == 48
        same(one, load_head(tmp_path / to))


def test_an_embedding_of_its_own_is_exported_and_not_the_targets(tmp_path: Path) -> None:
    one = published.eagle3()
    one.embed_tokens.weight.data.mul_(2.0)
    one.saves_embedding = True
    save_head(one, tmp_path / "head")
    export(tmp_path / "head", "sglang", tmp_path / "out", ends_facts())
    assert torch.equal(read_tensors(tmp_path / "out")[1]["embed_tokens.weight"], 2.0 * tiny.ends().embedding)


def test_what_config_json_does_not_say_is_said_in_the_notes_and_in_the_export(tmp_path: Path) -> None:
    done = export(specforge(tmp_path / "head"), "speculators", tmp_path / "out", ends_facts(max_positions=8192))
    assert done.notes[0].startswith("names no taps; [2, 4, 5] are taken")
    assert "4,096 is written as 8,192" in done.notes[1]
    named = export(specforge(tmp_path / "head"), "speculators", tmp_path / "out", ends_facts(), after_blocks=(1, 2, 3))
    assert "[1, 2, 3] are taken" in named.notes[0]
    head = load_head(tmp_path / "out")
    assert isinstance(head, Eagle3Head) and head.config.after_blocks == (1, 2, 3)


def test_the_files_beside_the_head_go_along_and_the_source_is_recorded(tmp_path: Path) -> None:
    save_head(published.eagle3(), tmp_path / "head", step=3)
    (tmp_path / "head" / "recipe.yaml").write_text("run: r\n")
    (tmp_path / "head" / "conversations.jsonl").write_text("private\n")
    export(tmp_path / "head", "sglang", tmp_path / "out", ends_facts())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "recipe.yaml"}
    origin = head_facts(tmp_path / "out")["exported_from"]
    assert origin["layout"] == "aerie" and origin["files"].keys() == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (ends_facts(hidden_size=48), "its hidden size is 32, that of tiny is 48"),
        (ends_facts(vocab_size=400), "its vocabulary is 320, that of tiny is 400"),
        (ends_facts(num_blocks=5), r"after blocks \[2, 4, 5\], and tiny has 5 blocks"),
    ],
)
def test_a_head_for_another_target_is_refused_and_nothing_is_written(
    tmp_path: Path, target: TargetFacts, message: str
) -> None:
    save_head(published.eagle3(), tmp_path / "head")
    with pytest.raises(UserError, match=message):
        export(tmp_path / "head", "speculators", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_an_export_that_would_read_back_otherwise_is_never_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(published.eagle3(), tmp_path / "head")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("an earlier export")
    write = layouts.WRITABLE["sglang"]

    def rounding(content: HeadContent, destination: Any) -> Export:
        made = write(content, destination)
        return Export(made.values, {**made.tensors, "norm.weight": made.tensors["norm.weight"].half().float()})

    monkeypatch.setitem(layouts.WRITABLE, "sglang", rounding)
    with pytest.raises(AssertionError, match=r"norm.weight was read back otherwise"):
        export(tmp_path / "head", "sglang", tmp_path / "out", ends_facts())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]


def test_a_head_is_never_written_over_itself(tmp_path: Path) -> None:
    place = safeailab_eagle3(tmp_path / "head")
    with pytest.raises(UserError, match="is the head itself"):
        export(place, "sglang", place, ends_facts())


def test_a_real_targets_facts_are_read_without_its_trunk(tmp_path: Path) -> None:
    path = tiny.target(tmp_path / "target", num_blocks=8)
    facts = TargetFacts.load(str(path), name="someone/tiny", speculative_tokens=7)
    assert torch.equal(facts.ends.embedding, load_file(path / "model.safetensors")["model.embed_tokens.weight"])
    found = facts.destination
    assert (found.target, found.architectures) == ("someone/tiny", ("LlamaForCausalLM",))
    assert (found.num_blocks, found.max_position_embeddings, found.speculative_tokens) == (8, 256, 7)
    assert facts.default_taps == TAPS
