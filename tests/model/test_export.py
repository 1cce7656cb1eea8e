"""Heads written in other layouts: whole or absent, equal when read back, refused for another target."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aerie.configs.errors import UserError
from aerie.model.checkpoint import head_facts, load_head, save_head
from aerie.model.export import TargetFacts, export
from aerie.model.formats import layouts
from aerie.model.formats.content import Export, HeadContent
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.target import fingerprint
from aerie.model.weights import read_tensors
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import TAPS, ends_facts, safeailab_eagle3, specforge, speculators


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
    assert done.source_layout == "aerie" and not any("left out" in note for note in done.notes)
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
    assert any("4,096 is written as 8,192" in note for note in done.notes)
    named = export(specforge(tmp_path / "head"), "speculators", tmp_path / "out", ends_facts(), after_blocks=(1, 2, 3))
    assert "[1, 2, 3] are taken" in named.notes[0]
    head = load_head(tmp_path / "out")
    assert isinstance(head, Eagle3Head) and head.config.after_blocks == (1, 2, 3)


@pytest.mark.parametrize("to", ["safeailab", "sglang", "speculators"])
def test_the_targets_embedding_is_added_in_the_heads_precision_and_said(tmp_path: Path, to: str) -> None:
    target = ends_facts()
    assert target.ends.embedding.dtype == torch.float32
    done = export(specforge(tmp_path / "head"), to, tmp_path / to, target)
    found = read_tensors(tmp_path / to)[1]
    assert {value.dtype for value in found.values() if value.is_floating_point()} == {torch.bfloat16}
    assert torch.equal(found["embed_tokens.weight"], target.ends.embedding.to(torch.bfloat16))
    assert any("embed_tokens.weight is added, the target's in bfloat16" in note for note in done.notes)
    again = export(tmp_path / to, "speculators", tmp_path / "again", target)
    assert not any("is added" in note for note in again.notes)


def test_tables_between_equal_vocabularies_frequencies_and_unknown_keys_are_left_out_and_said(tmp_path: Path) -> None:
    save_head(published.eagle3(ids=torch.arange(320)), tmp_path / "head")
    for to in ("safeailab", "sglang", "speculators"):
        done = export(tmp_path / "head", to, tmp_path / to, ends_facts())
        assert any(note.startswith("d2t and t2d left out") for note in done.notes)
        assert not {"d2t", "t2d"} & read_tensors(tmp_path / to)[1].keys()
    state = {**published.tensors(published.EAGLE1), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    odd = {**published.EAGLE1_CONFIG, "sliding_window": 512}
    done = export(published.write(tmp_path / "odd", odd, state), "safeailab", tmp_path / "even", ends_facts())
    assert any("layers.0.self_attn.rotary_emb.inv_freq left out" in note for note in done.notes)
    assert any(note.startswith("left out: sliding_window is 512") for note in done.notes)
    plain = export(published.safeailab_eagle1(tmp_path / "plain"), "safeailab", tmp_path / "same", ends_facts())
    assert not any("left out" in note for note in plain.notes)


def test_a_base_of_rope_that_is_carried_is_not_said_to_be_left_out_and_widened_tables_are_said(tmp_path: Path) -> None:
    done = export(specforge(tmp_path / "head"), "speculators", tmp_path / "out", ends_facts())
    assert not any("rope" in note or "holds" in note for note in done.notes), done.notes
    layer = json.loads((tmp_path / "out" / "config.json").read_text())["transformer_layer_config"]
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000000.0}
    state = published.tensors(published.EAGLE3)
    narrow = {**state, "d2t": state["d2t"].int(), "t2d": state["t2d"].to(torch.uint8)}
    done = export(
        published.write(tmp_path / "n", published.EAGLE3_CONFIG, narrow), "sglang", tmp_path / "o", ends_facts()
    )
    assert any(note.startswith("d2t holds int32 and is written as int64") for note in done.notes)
    assert any(note.startswith("t2d holds uint8 and is written as bool") for note in done.notes)


def test_drafts_per_cycle_are_the_heads_own_unless_told(tmp_path: Path) -> None:
    head = speculators(tmp_path / "head", {"eagle_aux_hidden_state_layer_ids": list(TAPS)})
    target, found = ends_facts(), []
    told = dataclasses.replace(target, destination=dataclasses.replace(target.destination, speculative_tokens=7))
    for number, facts in enumerate((target, told)):
        export(head, "speculators", tmp_path / str(number), facts)
        values = json.loads((tmp_path / str(number) / "config.json").read_text())
        found.append(values["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    assert found == [3, 7]
    save_head(published.eagle3(), tmp_path / "own")
    done = export(tmp_path / "own", "speculators", tmp_path / "out", target)
    assert any("servers are told to load tiny, which is a local path; give its Hub id" in note for note in done.notes)
    taps = {"eagle_aux_hidden_state_layer_ids": list(TAPS)}
    plain = speculators(tmp_path / "plain", {"norm_before_residual": False, **taps})
    done = export(plain, "sglang", tmp_path / "sglang", target)
    assert any("its 3 drafts per cycle are left out" in note for note in done.notes)


def test_taps_that_differ_from_those_in_the_file_are_refused_whatever_the_layout(tmp_path: Path) -> None:
    numbered = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    save_head(published.eagle3(), tmp_path / "own")
    heads = [tmp_path / "own", specforge(tmp_path / "theirs", numbered)]
    heads.append(speculators(tmp_path / "vllm", {"eagle_aux_hidden_state_layer_ids": list(TAPS)}))
    for head in heads:
        with pytest.raises(UserError, match=r"--after-blocks 2,3,6: .*json says that the head reads \[2, 4, 5\]"):
            export(head, "speculators", tmp_path / "out", ends_facts(), after_blocks=(2, 3, 6))
        assert not (tmp_path / "out").exists()
        export(head, "speculators", tmp_path / f"{head.name}-out", ends_facts(), after_blocks=TAPS)
    save_head(tiny.head(tiny.ends().embedding), tmp_path / "one")
    with pytest.raises(UserError, match="reads no taps; leave the option out"):
        export(tmp_path / "one", "sglang", tmp_path / "out", ends_facts(), after_blocks=TAPS)


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


def test_a_target_of_other_weights_is_refused_unless_it_is_told_to_be_any(tmp_path: Path) -> None:
    target = ends_facts()
    own, text = target.ends, target.text_config
    other = dataclasses.replace(target, ends=tiny.ends(seed=5))
    save_head(published.eagle3(), tmp_path / "head", target=fingerprint(text, own))
    with pytest.raises(
        UserError, match=r"trained on a target with other weights than tiny .*own target, .*--any-target"
    ):
        export(tmp_path / "head", "sglang", tmp_path / "out", other)
    assert not (tmp_path / "out").exists()
    done = export(tmp_path / "head", "sglang", tmp_path / "out", other, any_target=True)
    assert "other weights than tiny" in done.notes[0]
    assert not any(
        "other weights" in note for note in export(tmp_path / "head", "sglang", tmp_path / "own", target).notes
    )
    save_head(published.eagle3(), tmp_path / "half", target=fingerprint(text, own, torch.float16))
    export(tmp_path / "half", "sglang", tmp_path / "half-out", target)  # trained on the rounded weights


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
    with pytest.raises(AssertionError, match=r"was read back otherwise"):
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
