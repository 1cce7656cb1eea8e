"""Heads in every layout: recognised, read whole, written back bit for bit, or refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import Eagle3Section
from aerie.model import export as exporting
from aerie.model.checkpoint import head_facts, load_head, new_head, save_head
from aerie.model.export import export, inspect_head, screen
from aerie.model.formats.content import read_taps
from aerie.model.formats.eagle import CHECKED, sglang_numbers
from aerie.model.formats.layouts import read_content, read_tensors
from aerie.model.target import fingerprint
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import EAGLE1, EAGLE3, TAPS, safeailab_eagle3, same, specforge, target_facts, tensors

NUMBERED = "eagle_aux_hidden_state_layer_ids"
SERVERS = ("safeailab", "sglang", "speculators")
EMBEDDING = "embed_tokens.weight"


def early_speculators(directory: Path) -> Path:
    layer = {**published.EAGLE1_CONFIG, "num_key_value_heads": 4}
    values = {"speculators_model_type": "eagle", "transformer_layer_config": layer, "fusion_bias": True}
    state = {name: value for name, value in tensors(EAGLE1).items() if name != EMBEDDING}
    state = {name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): state[name] for name in state}
    return published.write(directory, values, state)


@pytest.mark.parametrize(
    ("make", "layout", "kind", "facts"),
    [
        (published.safeailab_eagle1, "safeailab", "eagle1", {"bias": True, "rope_theta": 1e4, "head_dim": 8}),
        (safeailab_eagle3, "safeailab", "eagle3", {"after_blocks": TAPS, "rope_theta": 1e4}),
        (specforge, "sglang", "eagle3", {"after_blocks": TAPS, "rope_theta": 1e6}),
        (published.angelslim, "sglang", "eagle3", {"rope_theta": 1e6}),
        (published.speculators, "speculators", "eagle3", {"norm_before_residual": True, "rope_theta": 5e5}),
        (early_speculators, "speculators", "eagle1", {"bias": True}),
    ],
)
def test_a_published_head_is_recognised_read_whole_and_written_back_bit_for_bit(
    tmp_path: Path, make: Any, layout: str, kind: str, facts: dict[str, Any]
) -> None:
    place = make(tmp_path / "head")
    found, files, content = read_content(place, TAPS)
    assert (found, content.kind) == (layout, kind)
    assert {name: getattr(content.config, name) for name in facts} == facts
    state, theirs = load_head(place, vocab=tiny.vocab(), after_blocks=TAPS).state_dict(), dict(files.tensors)
    theirs.setdefault(EMBEDDING, tiny.vocab().embedding.to(state["fc.weight"].dtype))
    assert sum(value.numel() for value in theirs.values()) == sum(value.numel() for value in state.values())
    if layout != "speculators":  # their names are ours
        assert all(torch.equal(state[name], value) for name, value in theirs.items())
    if make is not early_speculators:
        export(place, layout, tmp_path / "out", target_facts())
        written = read_tensors(tmp_path / "out")[1]  # not every reader takes the embedding from the target
        assert written.keys() == theirs.keys()
        for name, value in theirs.items():
            assert written[name].dtype == value.dtype and torch.equal(written[name], value), name


def test_a_published_medusa_or_hydra_head_is_the_very_head(tmp_path: Path, capsys: Any) -> None:
    features = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    for layers in (1, 2):
        medusa, place = published.medusa(tmp_path / f"medusa{layers}", layers, medusa_num_heads=2)
        loaded: Any = load_head(place, vocab=tiny.vocab())
        assert torch.equal(loaded(features), medusa(features))
        assert "medusa_num_heads is 2, the weights have 4" in capsys.readouterr().err  # a config.json that lags
        assert f"num_heads 4, num_layers {layers}" in screen(inspect_head(place))
    hydra, place = published.hydra(tmp_path / "hydra")
    loaded = load_head(place, vocab=tiny.vocab())
    state, embeddings = loaded.prefix(features, (0, 5))[0], torch.randn(5, 64)
    assert torch.equal(state, hydra.prefix(features, (0, 5))[0])
    assert torch.equal(loaded.step(1, state, embeddings), hydra.step(1, state, embeddings))


def test_a_bias_is_there_where_config_json_is_silent_and_not_where_it_says_so(tmp_path: Path) -> None:
    biases = {f"layers.0.self_attn.{name}_proj.bias": (32,) for name in "qkv"}  # Qwen2's; old pickles hold frequencies
    state = {**tensors({**EAGLE1, **biases}), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    head = load_head(published.write(tmp_path / "q", {**published.EAGLE1_CONFIG, "qkv_bias": True}, state))
    assert all(torch.equal(head.state_dict()[name], state[name]) for name in biases)
    state = {name: value for name, value in tensors(EAGLE1).items() if name != "fc.bias"}
    load_head(published.write(tmp_path / "llama", {**published.EAGLE1_CONFIG, "bias": False}, state))
    with pytest.raises(UserError, match='has no "bias", which means true'):
        load_head(published.write(tmp_path / "silent", published.EAGLE1_CONFIG, state))


def narrow() -> Any:  # its target has 48
    embedding = tiny.vocab(hidden_size=48).embedding
    return tiny.eagle3_head(embedding, hidden_size=32, head_dim=8, after_blocks=TAPS)


def owner() -> Any:  # its embedding is not its target's
    head = published.eagle3()
    head.embed_tokens.weight.data.mul_(2.0)
    head.saves_embedding = True
    return head


@pytest.mark.parametrize(
    ("make", "layouts"),
    [
        *((lambda dtype=dtype: published.eagle3().to(dtype), SERVERS) for dtype in (torch.float32, torch.bfloat16)),
        (lambda: published.eagle3(ids=torch.arange(320)), SERVERS),
        (lambda: published.eagle3(fc_norm=True, norm_output=True), ("speculators", "sglang")),
        (lambda: published.eagle3(after_blocks=(1, 3)), ("speculators", "sglang")),
        (lambda: published.eagle3(norm_before_residual=True, norm_before_fc=True), ("speculators",)),
        (lambda: published.eagle3(qk_norm=True, num_hidden_layers=3), ("speculators",)),
        (narrow, SERVERS),
        (owner, SERVERS),
        *((lambda bias=bias: tiny.head(tiny.vocab().embedding, bias=bias), SERVERS[:2]) for bias in (False, True)),
        (lambda: tiny.head(tiny.vocab().embedding, num_hidden_layers=2), SERVERS[:2]),
    ],
)
def test_a_head_of_this_project_comes_back_from_every_layout_bit_for_bit(
    tmp_path: Path, make: Any, layouts: tuple[str, ...]
) -> None:
    head = make()
    target = target_facts(hidden_size=getattr(head.config, "target_hidden_size", 32))
    save_head(head, tmp_path / "head", step=4)
    (tmp_path / "head" / "recipe.yaml").write_text("run: r\n")
    (tmp_path / "head" / "conversations.jsonl").write_text("private\n")
    for to in layouts:
        export(tmp_path / "head", to, tmp_path / to, target)
        same(head, load_head(tmp_path / to))
        if (head.kind, to) == ("eagle1", "sglang"):  # which needs a bias: zeros that are no part of the head
            assert torch.equal(read_tensors(tmp_path / to)[1]["fc.bias"], torch.zeros(32))
        again = tmp_path / f"{to}-again"  # and from there to another
        export(tmp_path / to, layouts[0], again, target)
        same(head, load_head(again))
        facts = head_facts(again)
        assert facts["step"] == 4 and facts["exported_from"]["layout"] == to and (again / "recipe.yaml").is_file()
        assert not (again / "conversations.jsonl").exists()


def test_every_key_on_which_vllm_and_speculators_disagree_is_written(tmp_path: Path) -> None:
    save_head(published.eagle3(), tmp_path / "head")
    export(tmp_path / "head", "speculators", tmp_path / "out", target_facts(max_positions=4096))
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = values["transformer_layer_config"]
    assert values["norm_before_residual"] is False and values[NUMBERED] == [2, 4, 5]
    assert values["draft_vocab_size"] == 107 and layer["vocab_size"] == 320 and layer["model_type"] == "llama"
    assert layer["max_position_embeddings"] == 4096  # the target's: vLLM cannot draft beyond it
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0
    assert values["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert not any(name.startswith("midlayer.") for name in read_tensors(tmp_path / "out")[1])


@pytest.mark.parametrize(
    ("values", "fallback", "taps"),
    [
        ({NUMBERED: [1, 3, 4]}, (2, 4, 5), (2, 4, 5)),  # outputs of blocks, as SpecForge counts
        ({NUMBERED: [2, 4, 5]}, (2, 4, 5), (2, 4, 5)),  # entries of hidden_states
        ({"eagle_config": {NUMBERED: [1, 7, 9]}}, (2, 4, 5), (2, 8, 10)),  # SGLang: a list that begins with 1
        ({NUMBERED: [3, 7, 9]}, (2, 4, 5), (3, 7, 9)),
        ({NUMBERED: [1, 4, 5]}, (1, 4, 5), (1, 4, 5)),  # the target's own taps are believed
        ({NUMBERED: [3, 7, 9], "architectures": ["LlamaForCausalLMEagle3"]}, (2, 4, 5), (4, 8, 10)),
        ({"after_blocks": [3, 4, 5], "tap_convention": "hidden_states", NUMBERED: [1, 3, 4]}, (2, 4, 5), (3, 4, 5)),
        ({}, (2, 4, 5), (2, 4, 5)),
    ],
)
def test_the_two_numberings_of_taps_are_told_apart(values: dict[str, Any], fallback: Any, taps: Any) -> None:
    found, guess = read_taps(values, fallback, Path("config.json"))
    assert found == taps and (guess is None) == ("after_blocks" in values)
    assert read_taps({NUMBERED: [1, 7, 9]}, (2, 4, 5), Path("c"), is_speculators=True) == ((1, 7, 9), None)
    with pytest.raises(UserError, match="names no taps; load it with its target"):
        read_taps({}, None, Path("config.json"))


@pytest.mark.parametrize(
    ("architecture", "taps", "numbers"),
    [
        ("LlamaForCausalLM", (2, 16, 29), (None, CHECKED)),
        ("UnheardOfForCausalLM", (2, 10, 20), ([1, 9, 19], CHECKED)),  # one is added by every rule
        ("Qwen3ForCausalLM", (8, 16, 24), ([7, 15, 23], CHECKED)),
        ("DeepseekV3ForCausalLM", (8, 16, 24), ([8, 16, 24], "0.5.13 to 0.5.23")),  # earlier ones add one
        ("UnheardOfForCausalLM", (8, 16, 24), "no rule known for UnheardOfForCausalLM; serve it with vLLM"),
        ("DeepseekV3ForCausalLM", (1, 16, 24), "one is added to what begins with 1; serve it with vLLM"),
        ("LlamaForCausalLM", (0, 16, 24), "SGLang has no number for the embedding; serve it with vLLM"),
    ],
)
def test_sglangs_numbers_depend_on_the_targets_architecture(architecture: str, taps: Any, numbers: Any) -> None:
    if isinstance(numbers, str):
        with pytest.raises(UserError, match=numbers):
            sglang_numbers(taps, (2, 16, 29), (architecture,))
    else:
        assert sglang_numbers(taps, (2, 16, 29), (architecture,)) == numbers


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        *(("safeailab", {name: True}, name) for name in ("qk_norm", "fc_norm", "norm_output", "norm_before_residual")),
        ("safeailab", {"num_hidden_layers": 2}, "2 layers"),
        ("safeailab", {"after_blocks": (1, 4, 5)}, r"the taps \[1, 4, 5\]: SafeAILab's code reads \(2, 4, 5\)"),
        *(("sglang", {name: True}, name) for name in ("qk_norm", "norm_before_residual", "norm_before_fc")),
        ("sglang", {"num_hidden_layers": 2}, "2 layers"),
        ("sglang", {"after_blocks": (0, 4, 5)}, "SGLang has no number for the embedding"),
        ("speculators", "eagle1", "an EAGLE-1 head; vLLM serves it from --to safeailab"),
        *((to, "medusa", "") for to in SERVERS),
    ],
)
def test_what_a_server_would_misread_in_silence_is_refused(tmp_path: Path, to: str, changes: Any, message: str) -> None:
    heads = {"eagle1": lambda: tiny.head(tiny.vocab().embedding), "medusa": lambda: published.medusa(tmp_path / "m")[0]}
    save_head(heads[changes]() if isinstance(changes, str) else published.eagle3(**changes), tmp_path / "head")
    expected = "this is a medusa head" if changes == "medusa" else rf"--to {to}: cannot carry .*{message}"
    with pytest.raises(UserError, match=expected):
        export(tmp_path / "head", to, tmp_path / "out", target_facts())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "state", "message"),
    [
        ({"num_hidden_layers": 10**9}, {}, "num_hidden_layers is 1,000,000,000; it must be above 0 and below 1,024"),
        ({"rope_scaling": {"rope_type": "llama3"}}, {}, "Missing required keys in `rope_parameters`"),
        ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'; heads have 'silu'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, {}, "keep the one of its training"),
        ({"aerie_kind": "dflash"}, {}, "aerie_kind is 'dflash'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "heads that read no taps"),
        ({}, {"midlayer.extra.weight": torch.zeros(2)}, 'Unexpected key.*: "midlayer.extra.weight"'),
        ({}, {"fc.weight": torch.zeros(32, 64)}, r"size mismatch for fc.weight: .*\[32, 64\].*\[32, 96\]"),
        ({}, {"fc.weight": None}, 'pytorch_model.bin: .*Missing key.*: "fc.weight"'),
        ({}, {"fc.weight": torch.full((32, 96), torch.nan)}, "3,072 of 3,072 values that are NaN"),
        ({}, {"fc.weight": torch.zeros(32, 96).to(torch.int8)}, "holds torch.int8: quantised heads are not read"),
        ({}, {"d2t": torch.arange(107) * 3}, "d2t holds offsets"),
        ({}, {"t2d": None}, 'Missing key.*: "t2d"'),
        ({}, {"d2t": torch.zeros(107) + 0.5}, "d2t must be a list of whole token offsets"),
        ({}, {"layers.0.hidden_norm.weight": torch.ones(32)}, "is a second 'midlayer.hidden_norm.weight' of the head"),
    ],
)
def test_a_damaged_head_is_one_sentence_and_no_model(
    tmp_path: Path, values: dict[str, Any], state: dict[str, Any], message: str
) -> None:
    state = {name: value for name, value in {**tensors(EAGLE3), **state}.items() if value is not None}
    place = published.write(tmp_path / "head", {**published.EAGLE3_CONFIG, **values}, state, pickled=True)
    for look in (
        lambda: load_head(place, vocab=tiny.vocab(), after_blocks=TAPS),
        lambda: export(place, "speculators", tmp_path / "out", target_facts()),
    ):
        with pytest.raises(UserError, match=message) as caught:
            look()
        assert str(place) in str(caught.value) and "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_what_is_no_head_and_hydra_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    lone = published.write(tmp_path / "lone", {"model_type": "llama"}, {"weight": torch.zeros(2, 2)})
    cases = {"not a head in a layout that is known here": lone}
    for changes, message in (
        ({"num_attention_heads": None}, 'add "num_attention_heads" of the target'),
        ({"num_attention_heads": 1000}, "which does not fit the width 32"),
        ({"grounded_heads": False}, "or a hidden_state_offset are not supported"),
    ):
        cases[message] = published.hydra(tmp_path / message[:8], **changes)[1]
    for message, place in cases.items():
        with pytest.raises(UserError, match=message):
            load_head(place)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "its hidden size is 32, that of tiny is 48"),
        ({"vocab_size": 400}, "its vocabulary is 320, that of tiny is 400"),
        ({"num_blocks": 5}, "after blocks [2, 4, 5], and tiny has 5 blocks"),
        ({"seed": 5}, "trained on a target with other weights than tiny"),
    ],
)
def test_a_head_for_another_target_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    own, other, head = target_facts(), target_facts(**changes), tmp_path / "head"
    for dtype in (None, torch.float16):  # as it is, and rounded
        save_head(published.eagle3(), head, target=fingerprint(own.text_config, own.vocab, dtype))
        export(head, "speculators", tmp_path / "own", own)
        assert inspect_head(head, own)["problems"] == []
    with pytest.raises(UserError) as caught:
        export(head, "speculators", tmp_path / "out", other)
    assert message in str(caught.value) and not (tmp_path / "out").exists()
    assert any(message in problem for problem in inspect_head(head, other)["problems"])
    if "seed" in changes:
        assert message in export(head, "speculators", tmp_path / "out", other, any_target=True)[1][0]
    with pytest.raises(UserError, match=r"--after-blocks 2,3,6: .*json says that the head reads \[2, 4, 5\]"):
        export(head, "speculators", tmp_path / "out", own, after_blocks=(2, 3, 6))


def test_an_export_that_would_read_back_otherwise_is_never_left_behind(tmp_path: Path, monkeypatch: Any) -> None:
    save_head(published.eagle3(), tmp_path / "head")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("an earlier export")
    write = exporting.write_eagle

    def rounding(*arguments: Any) -> Any:
        made = write(*arguments)
        made.tensors["norm.weight"] = made.tensors["norm.weight"].half().float()
        return made

    monkeypatch.setattr(exporting, "write_eagle", rounding)
    with pytest.raises(AssertionError, match=r"was read back otherwise"):
        export(tmp_path / "head", "sglang", tmp_path / "out", target_facts())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]


def test_what_an_export_adds_leaves_out_or_guesses_is_said(tmp_path: Path) -> None:
    save_head(published.eagle3(ids=torch.arange(320)), tmp_path / "same")
    odd = published.safeailab_eagle1(tmp_path / "odd", {"sliding_window": 512, "mystery": 3})
    drafts = published.speculators(tmp_path / "drafts", {NUMBERED: [2, 4, 5], "norm_before_residual": False})
    for head, to, expected in (
        (specforge(tmp_path / "taps"), "speculators", "4,096 is written as 8,192"),
        (specforge(tmp_path / "taps"), "speculators", "embed_tokens.weight is added, the target's in bfloat16"),
        (tmp_path / "same", "sglang", "d2t and t2d left out"),
        (odd, "safeailab", "sliding_window is 512"),
        (odd, "safeailab", "config.json's mystery left out"),
        (drafts, "sglang", "its 3 drafts per cycle are left out"),
    ):
        assert expected in " | ".join(export(head, to, tmp_path / "out", target_facts(max_positions=8192))[1])


def test_a_published_head_is_shown_as_it_is_and_a_warm_start_keeps_its_rope(tmp_path: Path) -> None:
    head = inspect_head(safeailab_eagle3(tmp_path / "head"))
    assert head["kind"] == "eagle3" and head["taps"] is None
    assert head["left_out"] == [EMBEDDING] and head["problems"] == []
    assert head["vocabulary"] == {"draft": 107, "target": 320, "coverage": None}
    place = specforge(tmp_path / "one", {"eagle_config": {NUMBERED: [3, 4, 6]}})
    assert inspect_head(place)["taps_open"] == "ambiguous" and "give it with --target" in screen(inspect_head(place))
    assert inspect_head(place, target_facts())["taps"] == inspect_head(place, None, (4, 5, 7))["taps"] == [4, 5, 7]
    section = Eagle3Section(init_from=str(safeailab_eagle3(tmp_path / "head")))
    started: Any = new_head(section, tiny.llama().config, tiny.vocab(), 0, after_blocks=TAPS)
    assert started.config.rope_theta == 10000.0
