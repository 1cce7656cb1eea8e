"""Heads in every layout: recognised, read whole, written back bit for bit, or refused in one sentence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.model.checkpoint import head_facts, load_head, save_head
from aerie.model.export import TargetFacts, export
from aerie.model.formats import layouts
from aerie.model.formats.content import Export, HeadContent, read_taps
from aerie.model.formats.layouts import read_content
from aerie.model.formats.sglang import CHECKED, sglang_numbers
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.inspection import inspect_head, screen
from aerie.model.target import fingerprint
from aerie.model.weights import read_tensors
from tests import tiny
from tests.model.formats import published
from tests.model.formats.published import EAGLE1, EAGLE3, TAPS, safeailab_eagle3, specforge, target_facts, tensors

NUMBERED = "eagle_aux_hidden_state_layer_ids"
SERVERS = ("safeailab", "sglang", "speculators")


def same(one: Any, two: Any) -> None:
    assert one.config == two.config and one.state_dict().keys() == two.state_dict().keys()
    for name, value in one.state_dict().items():
        assert value.dtype == two.state_dict()[name].dtype and torch.equal(value, two.state_dict()[name]), name


def early_speculators(directory: Path) -> Path:
    """An EAGLE-1 head of speculators 0.1 to 0.4, whose embedding is the target's."""
    layer = {**published.EAGLE1_CONFIG, "num_key_value_heads": 4}
    values = {"speculators_model_type": "eagle", "transformer_layer_config": layer, "fusion_bias": True}
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    state = {
        theirs + name.removeprefix(ours): value
        for name, value in tensors(EAGLE1).items()
        for ours, theirs in names.items()
        if name.startswith(ours)
    }
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
def test_a_published_head_is_recognised_and_read_with_every_tensor(
    tmp_path: Path, make: Any, layout: str, kind: str, facts: dict[str, Any]
) -> None:
    place = make(tmp_path / "head")
    found, files, content = read_content(place, TAPS)
    assert (found.name, content.kind) == (layout, kind)
    assert {name: getattr(content.config, name) for name in facts} == facts
    state, expected = load_head(place, vocab=tiny.vocab(), after_blocks=TAPS).state_dict(), files.tensors
    if layout != "speculators":  # their names are ours
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert sum(value.numel() for name, value in expected.items() if name != "embed_tokens.weight") == sum(
        value.numel() for name, value in state.items() if name != "embed_tokens.weight"
    )
    if "embed_tokens.weight" not in expected:
        assert torch.equal(state["embed_tokens.weight"], tiny.vocab().embedding.to(state["fc.weight"].dtype))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_published_medusa_head_is_the_very_head(tmp_path: Path, layers: int, capsys: Any) -> None:
    head, place = published.medusa(tmp_path / "head", layers, medusa_num_heads=2)
    loaded: Any = load_head(place, vocab=tiny.vocab())
    features = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(features), head(features))
    assert "medusa_num_heads is 2, the weights have 4" in capsys.readouterr().err  # a config.json that lags
    assert inspect_head(place)["layout"] == "medusa" and f"num_heads 4, num_layers {layers}" in screen(
        inspect_head(place)
    )


def test_a_published_hydra_head_is_the_very_head(tmp_path: Path) -> None:
    head, place = published.hydra(tmp_path / "head")
    loaded: Any = load_head(place, vocab=tiny.vocab())
    assert loaded.state_dict().keys() == head.state_dict().keys()
    features = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    state, embeddings = loaded.prefix(features, (0, 5))[0], torch.randn(5, 64)
    assert torch.equal(state, head.prefix(features, (0, 5))[0])
    assert torch.equal(loaded.step(1, state, embeddings), head.step(1, state, embeddings))


def test_a_bias_is_there_where_config_json_is_silent_and_not_where_it_says_so(tmp_path: Path) -> None:
    state = {name: value for name, value in tensors(EAGLE1).items() if name != "fc.bias"}
    for number, values in enumerate(({"bias": False}, {"bias": None})):  # LLaMA-3's
        place = published.write(tmp_path / str(number), {**published.EAGLE1_CONFIG, **values}, state)
        assert "fc.bias" not in load_head(place).state_dict()
    with pytest.raises(UserError, match='has no "bias", which means true'):
        load_head(published.write(tmp_path / "silent", published.EAGLE1_CONFIG, state))
    biases = {f"layers.0.self_attn.{name}_proj.bias": (32,) for name in "qkv"}  # Qwen2's; old pickles hold frequencies
    state = {**tensors({**EAGLE1, **biases}), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    head = load_head(published.write(tmp_path / "q", {**published.EAGLE1_CONFIG, "qkv_bias": True}, state))
    assert all(torch.equal(head.state_dict()[name], state[name]) for name in biases)


# --------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("to", SERVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eagle3_head_comes_back_from_every_layout_bit_for_bit(tmp_path: Path, to: str, dtype: torch.dtype) -> None:
    one = published.eagle3().to(dtype)
    save_head(one, tmp_path / "head", step=4)
    (tmp_path / "head" / "recipe.yaml").write_text("run: r\n")
    (tmp_path / "head" / "conversations.jsonl").write_text("private\n")
    done = export(tmp_path / "head", to, tmp_path / to, target_facts())
    assert done.source_layout == "aerie" and not any("left out" in note for note in done.notes)
    same(one, load_head(tmp_path / to, vocab=tiny.vocab()))
    assert "conversations.jsonl" not in {path.name for path in (tmp_path / to).iterdir()}
    export(tmp_path / to, "speculators", tmp_path / "again", target_facts())  # and from there to another
    same(one, load_head(tmp_path / "again"))
    facts = head_facts(tmp_path / "again")
    assert facts["step"] == 4 and facts["exported_from"]["layout"] == to and (tmp_path / "again/recipe.yaml").is_file()


@pytest.mark.parametrize("to", ["safeailab", "sglang"])
@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"num_hidden_layers": 2}])
def test_an_eagle1_head_comes_back_bit_for_bit(tmp_path: Path, to: str, changes: dict[str, Any]) -> None:
    one = tiny.head(tiny.vocab().embedding, **changes)
    save_head(one, tmp_path / "head")
    export(tmp_path / "head", to, tmp_path / to, target_facts())
    same(one, load_head(tmp_path / to))


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"qk_norm": True},
        {"num_hidden_layers": 3},
        {"after_blocks": (1, 3)},
        {"ids": torch.arange(320)},
    ],
)
def test_every_flavour_comes_back_from_vllms_layout_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    one = published.eagle3(**changes)
    save_head(one, tmp_path / "head")
    export(tmp_path / "head", "speculators", tmp_path / "out", target_facts())
    assert not any(name.startswith("midlayer.") for name in read_tensors(tmp_path / "out")[1])
    same(one, load_head(tmp_path / "out"))


@pytest.mark.parametrize(
    ("make", "to", "shapes", "dtype"),
    [
        (published.safeailab_eagle1, "safeailab", EAGLE1, torch.float16),
        (safeailab_eagle3, "safeailab", EAGLE3, torch.float16),
        (specforge, "sglang", EAGLE3, torch.bfloat16),
        (published.angelslim, "sglang", EAGLE3, torch.bfloat16),
    ],
)
def test_written_back_every_published_tensor_is_the_same_bit_for_bit(
    tmp_path: Path, make: Any, to: str, shapes: Any, dtype: torch.dtype
) -> None:
    export(make(tmp_path / "head"), to, tmp_path / "out", target_facts())
    found = read_tensors(tmp_path / "out")[1]
    assert found.keys() == {*shapes, "embed_tokens.weight"}  # not every reader takes it from the target
    for name, value in tensors(shapes, dtype).items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_an_eagle1_head_without_a_bias_gets_zeros_for_sglang_and_comes_back_without(tmp_path: Path) -> None:
    save_head(tiny.head(tiny.vocab().embedding), tmp_path / "head")
    notes = export(tmp_path / "head", "sglang", tmp_path / "out", target_facts()).notes
    assert any("fc.bias of zeros" in note for note in notes)
    assert torch.equal(read_tensors(tmp_path / "out")[1]["fc.bias"], torch.zeros(32))
    assert "fc.bias" not in load_head(tmp_path / "out").state_dict()
    save_head(tiny.head(tiny.vocab().embedding, bias=True), tmp_path / "biased")
    export(tmp_path / "biased", "sglang", tmp_path / "out2", target_facts())
    assert "fc.bias" in load_head(tmp_path / "out2").state_dict()  # zeros too, but the head's own


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


def test_a_head_of_another_width_and_one_with_its_own_embedding_take_it_along(tmp_path: Path) -> None:
    wide = tiny.eagle3_head(tiny.vocab(hidden_size=48).embedding, hidden_size=32, head_dim=8, after_blocks=TAPS)
    save_head(wide, tmp_path / "wide")
    owner = published.eagle3()
    owner.embed_tokens.weight.data.mul_(2.0)
    owner.saves_embedding = True
    save_head(owner, tmp_path / "owner")
    for to in SERVERS:
        export(tmp_path / "wide", to, tmp_path / to, target_facts(hidden_size=48))
        same(wide, load_head(tmp_path / to))
    export(tmp_path / "owner", "sglang", tmp_path / "out", target_facts())
    assert torch.equal(read_tensors(tmp_path / "out")[1]["embed_tokens.weight"], 2.0 * tiny.vocab().embedding)


# ------------------------------------------------------------------------------------------------------------ taps


@pytest.mark.parametrize(
    ("values", "fallback", "taps"),
    [
        ({NUMBERED: [1, 3, 4]}, (2, 4, 5), (2, 4, 5)),  # outputs of blocks, as SpecForge counts
        ({NUMBERED: [2, 4, 5]}, (2, 4, 5), (2, 4, 5)),  # entries of hidden_states
        ({"eagle_config": {NUMBERED: [1, 7, 9]}}, (2, 4, 5), (2, 8, 10)),  # SGLang: a list that begins with 1
        ({NUMBERED: [3, 7, 9]}, (2, 4, 5), (3, 7, 9)),
        ({NUMBERED: [1, 4, 5]}, (1, 4, 5), (1, 4, 5)),  # whoever knows the target's taps is believed
        ({NUMBERED: [3, 7, 9], "architectures": ["LlamaForCausalLMEagle3"]}, (2, 4, 5), (4, 8, 10)),
        ({NUMBERED: [3, 7, 9], "architectures": ["Eagle3LlamaForCausalLM"]}, (2, 4, 5), (3, 7, 9)),  # vLLM's
        ({"after_blocks": [3, 4, 5], "tap_convention": "hidden_states", NUMBERED: [1, 3, 4]}, (2, 4, 5), (3, 4, 5)),
        ({}, (2, 4, 5), (2, 4, 5)),
        ({}, None, "does not say which of the target's states"),
        ({"after_blocks": [3, 4, 5], "tap_convention": "outputs"}, None, "tap_convention is 'outputs'"),
        ({NUMBERED: [4, 2, 5]}, None, "must ascend"),
        ({NUMBERED: [True, 4, 5]}, None, "must be a list of block numbers"),
    ],
)
def test_the_two_numberings_of_taps_are_told_apart(values: dict[str, Any], fallback: Any, taps: Any) -> None:
    if isinstance(taps, str):
        with pytest.raises(UserError, match=taps):
            read_taps(values, fallback, Path("config.json"))
        return
    found, guess = read_taps(values, fallback, Path("config.json"))
    assert (
        found == taps
        and (guess is None) == ("after_blocks" in values)
        and str(list(taps)) in (guess or str(list(found)))
    )
    assert read_taps({NUMBERED: [1, 7, 9]}, (2, 4, 5), Path("c"), is_speculators=True) == ((1, 7, 9), None)


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
        found = sglang_numbers(taps, (2, 16, 29), (architecture,))
        assert (found.values, found.versions) == numbers


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        *(("safeailab", {name: True}, name) for name in ("qk_norm", "fc_norm", "norm_output", "norm_before_residual")),
        ("safeailab", {"num_hidden_layers": 2}, "2 layers"),
        ("safeailab", {"after_blocks": (1, 4, 5)}, r"the taps \[1, 4, 5\]: SafeAILab's code reads always \[2, 4, 5\]"),
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


@pytest.mark.parametrize("make", [safeailab_eagle3, specforge, published.speculators, "own"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", "32", "hidden_size is '32'; it must be a positive whole number"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1,000,000,000; no head has more than 1,024"),
        ("max_position_embeddings", 0, "max_position_embeddings is 0; it must be a positive whole number"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5'; it must be a positive number"),
        ("norm_output", "false", "norm_output is 'false'; it must be true or false, without quotes"),
        ("rope_scaling", "linear", "rope_scaling is 'linear'; it must be a table of keys or null"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "of type 'llama3': lacks low_freq_factor"),
        ("rope_scaling", {"type": "linear", "factor": "4"}, "rope_scaling of type 'linear': factor is '4', no number"),
    ],
)
def test_a_malformed_value_is_one_clear_line(tmp_path: Path, make: Any, name: str, value: Any, message: str) -> None:
    place = tmp_path / "head"
    if make == "own":
        save_head(published.eagle3(), place)
    else:
        make(place)
    values = json.loads((place / "config.json").read_text())
    nested = values.get("transformer_layer_config", {})
    (nested if name in nested else values)[name] = value
    (place / "config.json").write_text(json.dumps(values))
    for look in (
        lambda: inspect_head(place, target_facts()),
        lambda: load_head(place, vocab=tiny.vocab(), after_blocks=TAPS),
        lambda: export(place, "speculators", tmp_path / "out", target_facts()),
    ):
        with pytest.raises(UserError) as caught:
            look()
        assert message in str(caught.value) and str(place) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def damaged(directory: Path, damage: str) -> Path:
    """A published EAGLE-3 head with one thing wrong."""
    state, values = tensors(EAGLE3), dict(published.EAGLE3_CONFIG)
    changes: dict[str, Any] = {
        "unexpected": {"midlayer.extra.weight": torch.zeros(2)},
        "shape": {"fc.weight": torch.zeros(32, 64)},
        "index table": {"d2t": state["d2t"] + torch.arange(107)},
        "column": {"d2t": state["d2t"][:, None]},
        "fractions": {"d2t": state["d2t"].float() + 0.5},
        "threes": {"t2d": 3 * state["t2d"].int()},
        "quantised": {"fc.weight": state["fc.weight"].to(torch.int8)},
        "two layers": {"layers.0.hidden_norm.weight": state["midlayer.hidden_norm.weight"]},
    }
    state |= changes.get(damage, {})
    for name in {"missing": ["fc.weight"], "one table": ["t2d"]}.get(damage, []):
        del state[name]
    if damage == "prefix":
        state = {f"draft_model.{name}": value for name, value in state.items()}
    elif damage in ("whole model", "nothing known"):
        name = "model.layers.0.mlp.up_proj.weight" if damage == "whole model" else "weight"
        state, values = {name: torch.zeros(2, 2)}, {"model_type": "llama"}
    elif damage == "another kind":
        values["aerie_kind"] = "dflash"
    elif damage == "no taps":
        values["eagle_config"] = {"use_aux_hidden_state": False}
    return published.write(directory, values, state, pickled=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("prefix", 'Missing key.* "d2t".* Unexpected key.* "draft_model.d2t"'),
        ("missing", 'pytorch_model.bin: .*Missing key.*: "fc.weight"'),
        ("unexpected", 'Unexpected key.*: "midlayer.extra.weight"'),
        ("shape", r"size mismatch for fc.weight: .*\[32, 64\].*\[32, 96\]"),
        ("index table", "d2t holds offsets"),
        ("one table", 'Missing key.*: "t2d"'),
        ("column", r"size mismatch for d2t: .*\[107, 1\]"),
        ("fractions", "d2t must be a list of whole token offsets"),
        ("threes", "t2d a list of marks"),
        ("quantised", "fc.weight holds torch.int8: quantised heads are not read"),
        ("two layers", "two names of the head's first layer"),
        ("no taps", "reads no taps"),
        ("whole model", "a whole language model and no draft head: a target, or a draft_lm"),
        ("nothing known", "nor one in a layout that it reads"),
        ("another kind", "aerie_kind is 'dflash'"),
    ],
)
def test_a_damaged_head_is_one_sentence_and_no_model(tmp_path: Path, damage: str, message: str) -> None:
    place = damaged(tmp_path / "head", damage)
    with pytest.raises(UserError, match=message) as caught:
        load_head(place, vocab=tiny.vocab(), after_blocks=TAPS)
    assert "\n" not in str(caught.value) and str(place) in str(caught.value)


@pytest.mark.parametrize("layout", ["medusa", "hydra"])
def test_two_tensors_that_would_be_one_are_refused(tmp_path: Path, layout: str) -> None:
    place = getattr(published, layout)(tmp_path / "head")[1]
    weights = place / f"{layout}_lm_head.pt"
    state = torch.load(weights, weights_only=True)
    torch.save({**state, "branches.0.blocks.0.linear.bias": torch.zeros(32)}, weights)
    with pytest.raises(UserError, match="are the same tensor of a head by two names"):
        load_head(place, vocab=tiny.vocab())


def test_hydra_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_attention_heads": None}, 'add "num_attention_heads" of the target'),
        ({"num_attention_heads": 1000}, "which does not fit the width 32"),
        ({"grounded_heads": False}, "such heads are not supported"),
    ]
    for number, (changes, message) in enumerate(cases):
        with pytest.raises(UserError, match=message):
            load_head(published.hydra(tmp_path / str(number), **changes)[1])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (target_facts(hidden_size=48), "its hidden size is 32, that of tiny is 48"),
        (target_facts(vocab_size=400), "its vocabulary is 320, that of tiny is 400"),
        (target_facts(num_blocks=5), r"after blocks \[2, 4, 5\], and tiny has 5 blocks"),
    ],
)
def test_a_head_for_another_target_is_refused(tmp_path: Path, target: TargetFacts, message: str) -> None:
    save_head(published.eagle3(), tmp_path / "head")
    with pytest.raises(UserError, match=message):
        export(tmp_path / "head", "speculators", tmp_path / "out", target)
    assert any(
        message.split(",")[0].replace("\\", "") in text for text in inspect_head(tmp_path / "head", target)["problems"]
    )
    assert not (tmp_path / "out").exists()


def test_a_target_of_other_weights_is_refused_unless_told(tmp_path: Path) -> None:
    target = target_facts()
    other = dataclasses.replace(target, vocab=tiny.vocab(seed=5))
    save_head(published.eagle3(), tmp_path / "head", target=fingerprint(target.text_config, target.vocab))
    with pytest.raises(UserError, match=r"trained on a target with other weights than tiny .*--any-target"):
        export(tmp_path / "head", "sglang", tmp_path / "out", other)
    assert "other weights" in inspect_head(tmp_path / "head", other)["problems"][0]
    assert "other weights" in export(tmp_path / "head", "sglang", tmp_path / "out", other, any_target=True).notes[0]
    assert inspect_head(tmp_path / "head", target)["problems"] == []
    half = fingerprint(target.text_config, target.vocab, torch.float16)
    save_head(published.eagle3(), tmp_path / "half", target=half)
    export(tmp_path / "half", "sglang", tmp_path / "half-out", target)  # trained on the rounded weights


def test_taps_that_differ_from_those_in_the_file_are_refused(tmp_path: Path) -> None:
    save_head(published.eagle3(), tmp_path / "own")
    for head in (tmp_path / "own", specforge(tmp_path / "theirs", {"eagle_config": {NUMBERED: [1, 3, 4]}})):
        with pytest.raises(UserError, match=r"--after-blocks 2,3,6: .*json says that the head reads \[2, 4, 5\]"):
            export(head, "speculators", tmp_path / "out", target_facts(), after_blocks=(2, 3, 6))
        export(head, "speculators", tmp_path / f"{head.name}-out", target_facts(), after_blocks=TAPS)


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
        export(tmp_path / "head", "sglang", tmp_path / "out", target_facts())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]


# -------------------------------------------------------------------------------------------- what is said of a head


def test_what_an_export_adds_leaves_out_or_guesses_is_said(tmp_path: Path) -> None:
    def notes(head: Path, to: str, **facts: Any) -> str:
        return " | ".join(export(head, to, tmp_path / f"{head.name}-{to}", target_facts(**facts)).notes)

    said = notes(specforge(tmp_path / "a"), "speculators", max_positions=8192)
    assert "names no taps; [2, 4, 5] are taken" in said and "4,096 is written as 8,192" in said
    assert "embed_tokens.weight is added, the target's in bfloat16" in said and "local path" in said
    save_head(published.eagle3(ids=torch.arange(320)), tmp_path / "b")
    assert "d2t and t2d left out" in notes(tmp_path / "b", "sglang")
    state = {**tensors(EAGLE1), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    odd = published.write(tmp_path / "c", {**published.EAGLE1_CONFIG, "sliding_window": 512, "mystery": 3}, state)
    said = notes(odd, "safeailab")
    assert "inv_freq left out" in said and "sliding_window is 512" in said and "config.json's mystery left out" in said
    said = notes(published.speculators(tmp_path / "d", {NUMBERED: [2, 4, 5], "norm_before_residual": False}), "sglang")
    assert "its 3 drafts per cycle are left out" in said
    assert "left out" not in notes(published.safeailab_eagle1(tmp_path / "e"), "safeailab")


def test_a_published_head_is_shown_on_one_screen_and_as_json(tmp_path: Path) -> None:
    head = inspect_head(safeailab_eagle3(tmp_path / "head"))
    assert (head["layout"], head["kind"], head["weights"]) == ("safeailab", "eagle3", "pytorch_model.bin")
    assert head["taps"] is None and head["left_out"] == ["embed_tokens.weight"] and head["problems"] == []
    assert head["vocabulary"] == {"draft": 107, "target": 320, "coverage": None}
    expected = sum(torch.Size(shape).numel() for name, shape in EAGLE3.items() if name not in ("d2t", "t2d"))
    counts = head["parameters"]
    assert counts["own"] + counts["lm_head"] == expected and counts["lm_head"] == 107 * 32
    assert json.loads(json.dumps(head)) == head and len(screen(head).splitlines()) <= 24
    place = specforge(tmp_path / "one", {"eagle_config": {NUMBERED: [3, 4, 6]}})
    assert inspect_head(place)["taps_open"] == "ambiguous" and "give it with --target" in screen(inspect_head(place))
    assert inspect_head(place, target_facts())["taps"] == inspect_head(place, None, (4, 5, 7))["taps"] == [4, 5, 7]


def test_a_warm_start_keeps_the_published_heads_rope(tmp_path: Path) -> None:
    from aerie.configs.schema.target_and_head import Eagle3Section
    from aerie.model.checkpoint import new_head

    place = str(safeailab_eagle3(tmp_path / "head"))
    head = new_head(Eagle3Section(init_from=place), tiny.llama().config, tiny.vocab(), 0, after_blocks=TAPS)
    assert isinstance(head, Eagle3Head) and not isinstance(head, Eagle1Head) and head.config.rope_theta == 10000.0
