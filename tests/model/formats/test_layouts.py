"""Heads in every layout are recognised, read whole and written back bit for bit, or refused in one
sentence."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.schema.heads import TargetConfig
from aerie.model.checkpoint import head_facts, load_head, save_head
from aerie.model.export import export
from aerie.model.formats.content import read_taps
from aerie.model.formats.eagle_layouts import CHECKED, VLLM_SINCE, sglang_numbers
from aerie.model.formats.layouts import read_content, read_tensors, tensor_names, write_tensors
from aerie.model.inspection import inspect_head, screen
from aerie.model.target_files import fingerprint
from tests import tiny
from tests.model.formats import published

NUMBERED = "eagle_aux_hidden_state_layer_ids"
SERVERS = ("safeailab", "sglang", "speculators")
EMBEDDING = "embed_tokens.weight"
FACTS = published.target_facts()
FLAGS = "qk_norm norm_before_residual norm_before_fc fc_norm norm_output".split()


def early_speculators(directory: Path) -> Path:
    values = {
        "speculators_model_type": "eagle",
        "transformer_layer_config": {**published.EAGLE1_CONFIG, "num_key_value_heads": 4},
        "fusion_bias": True,
    }
    state = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): value
        for name, value in published.tensors(published.EAGLE1).items()
        if name != EMBEDDING
    }
    return published.write(directory, values, state)


@pytest.mark.parametrize(
    ("make", "layout", "kind", "facts"),
    [
        (
            published.safeailab_eagle1,
            "safeailab",
            "eagle1",
            {"bias": True, "rope_theta": 1e4, "head_dim": 8},
        ),
        (
            published.safeailab_eagle3,
            "safeailab",
            "eagle3",
            {"after_blocks": published.TAPS, "rope_theta": 1e4},
        ),
        (
            published.specforge,
            "sglang",
            "eagle3",
            {"after_blocks": published.TAPS, "rope_theta": 1e6},
        ),
        (published.angelslim, "sglang", "eagle3", {"rope_theta": 1e6}),
        (
            published.speculators,
            "speculators",
            "eagle3",
            {"norm_before_residual": True, "rope_theta": 5e5},
        ),
        (early_speculators, "speculators", "eagle1", {"bias": True}),
    ],
)
def test_published(
    tmp_path: Path, make: Any, layout: str, kind: str, facts: dict[str, Any]
) -> None:
    """A published head is recognised read whole and written back bit for bit."""
    place = make(tmp_path / "head")
    found, files, content = read_content(place, published.TAPS)
    assert (found, content.kind) == (layout, kind)
    assert {name: getattr(content.config, name) for name in facts} == facts
    state, theirs = (
        load_head(place, vocab=tiny.vocab(), after_blocks=published.TAPS).state_dict(),
        dict(files.tensors),
    )
    theirs.setdefault(EMBEDDING, tiny.vocab().embedding.to(state["fc.weight"].dtype))
    assert sum(value.numel() for value in theirs.values()) == sum(
        value.numel() for value in state.values()
    )
    if layout != "speculators":  # its names are ours
        assert all(torch.equal(state[name], value) for name, value in theirs.items())
    if make is not early_speculators:
        export(place, layout, tmp_path / "out", FACTS)
        published.same_tensors(read_tensors(tmp_path / "out")[1], theirs)


def test_published_multi_token(tmp_path: Path, capsys: Any) -> None:
    """A published Medusa or Hydra head is the very head."""
    for layers in (1, 2):
        medusa, place = published.medusa(tmp_path / f"medusa{layers}", layers, medusa_num_heads=2)
        published.same_tensors(
            load_head(place, vocab=tiny.vocab()).state_dict(), medusa.state_dict()
        )
        assert (
            "medusa_num_heads is 2, but the weights have 4" in capsys.readouterr().err
        )  # an outdated config.json
    hydra, place = published.hydra(tmp_path / "hydra")
    loaded: Any = load_head(place, vocab=tiny.vocab())
    loaded.config = replace(
        loaded.config, max_position_embeddings=hydra.config.max_position_embeddings
    )
    published.same(loaded, hydra)


def test_biases(
    tmp_path: Path,
) -> None:
    """A bias is there where config.json is silent and not where it says so."""
    config, own = published.EAGLE1_CONFIG, published.tensors(published.EAGLE1)
    biases = {f"layers.0.self_attn.{name}_proj.bias": torch.ones(32) for name in "qkv"}  # Qwen2's
    state = {
        **own,
        **biases,
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }  # as in old pickles
    head = load_head(published.write(tmp_path / "q", {**config, "qkv_bias": True}, state))
    assert all(head.state_dict()[name].eq(1).all() for name in biases)
    del own["fc.bias"]
    load_head(published.write(tmp_path / "llama", {**config, "bias": False}, own))
    tiny.refused(
        'has no key "bias", which means true',
        load_head,
        published.write(tmp_path / "silent", config, own),
    )


EAGLE31 = {"fc_norm": True, "norm_output": True, "after_blocks": (1, 3)}


@pytest.mark.parametrize(
    ("kind", "changes", "layouts"),
    [
        ("eagle3", {"ids": torch.arange(320)}, SERVERS),
        ("eagle3", EAGLE31, SERVERS[1:]),
        ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}, SERVERS[2:]),
        ("eagle3", {"qk_norm": True, "num_hidden_layers": 3}, SERVERS[2:]),
        ("eagle3", {"hidden_size": 16}, SERVERS),  # its target has 32
        ("eagle1", {"bias": True}, SERVERS[:2]),
        ("eagle1", {"num_hidden_layers": 2}, SERVERS[:2]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout(
    tmp_path: Path, kind: str, changes: Any, layouts: tuple[str, ...], dtype: torch.dtype
) -> None:
    """A head of this project comes back from every layout bit for bit."""
    head = published.made(kind, **changes).to(dtype)
    if (kind, dtype) == ("eagle3", torch.bfloat16):  # its embedding is not its target's
        head.embed_tokens.weight.data.mul_(2.0)
        head.saves_embedding = True
    save_head(head, tmp_path / "head", step=4)
    (tmp_path / "head" / "recipe.yaml").write_text("run: r\n")
    (tmp_path / "head" / "conversations.jsonl").write_text("private\n")
    for to in layouts:
        again = tmp_path / f"{to}-again"  # and from there to another
        export(tmp_path / "head", to, tmp_path / to, FACTS)
        export(tmp_path / to, layouts[0], again, FACTS)
        for place in (tmp_path / to, again):
            published.same(load_head(place, vocab=tiny.vocab()), head)
            assert load_head(place, vocab=tiny.vocab()).saves_embedding == head.saves_embedding
        facts = head_facts(again)
        assert (facts["step"], facts["exported_from"]["layout"]) == (4, to)
        assert (again / "recipe.yaml").is_file() and not (again / "conversations.jsonl").exists()
    if changes == {"num_hidden_layers": 2}:  # SGLang needs a bias: we write zeros
        assert not read_tensors(tmp_path / "sglang")[1]["fc.bias"].any()


@pytest.mark.parametrize(
    ("kind", "changes", "method", "drafts"),
    [
        ("eagle1", {}, "eagle", 5),
        ("eagle3", {}, "eagle3", 5),
        ("medusa", {"num_heads": 3}, "medusa", 3),
        ("block", {"block_size": 6, "markov_rank": 0}, "dflash", 5),
        ("block", {"block_size": 6, "sample_from_anchor": True}, "dspark", 6),
    ],
)
def test_commands(tmp_path: Path, kind: str, changes: Any, method: str, drafts: int) -> None:
    """A printed command has vLLM's method, the head's own number of drafts and a wide target's
    dtype."""
    head, out, target = published.made(kind, **changes), tmp_path / "out", FACTS
    save_head(head, tmp_path / "head", template_arguments={"enable_thinking": False})
    export(tmp_path / "head", "vllm", out, target)
    speculative = {"model": str(out), "method": method, "num_speculative_tokens": drafts}
    command = f"vllm serve {target.path} --speculative-config '{json.dumps(speculative)}'"
    assert f"{command} --dtype float32" in screen(inspect_head(out, target))
    # An export knows its target's dtype.
    assert "--dtype float32" in screen(inspect_head(out))
    narrow = replace(target, vocab=replace(target.vocab, lm_head=target.vocab.lm_head.bfloat16()))
    as_trained = "--default-chat-template-kwargs '{\"enable_thinking\": false}'"
    assert f"{command} {as_trained}" in screen(inspect_head(out, narrow))
    assert "--dtype" not in screen(inspect_head(out, narrow))


@pytest.mark.parametrize(
    ("taps", "written"), [((2, 4, 5), None), ((1, 3), 2)]
)  # no number of taps, if it is three
def test_disputed_keys(tmp_path: Path, taps: tuple[int, ...], written: int | None) -> None:
    """Every key on which vLLM and speculators disagree is written."""
    head = published.eagle3(after_blocks=taps)
    out = published.shipped(head, "speculators", tmp_path, max_positions=4096)
    values = json.loads((out / "config.json").read_text())
    layer = values["transformer_layer_config"]
    wanted = {"norm_before_residual": False, NUMBERED: [*taps], "draft_vocab_size": 107}
    assert wanted.items() <= values.items()
    # the target's positions: vLLM cannot draft beyond them
    wanted = {"vocab_size": 320, "model_type": "llama", "max_position_embeddings": 4096}
    assert wanted.items() <= layer.items()
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0
    assert layer.get("num_aux_hidden_states") == written
    shown = screen(inspect_head(tmp_path / "head", FACTS))
    assert ("llama.cpp's converter" in shown) == (written is not None)


@pytest.mark.parametrize("flag", FLAGS)
def test_later_keys(tmp_path: Path, flag: str) -> None:
    """Keys that need a later vLLM are named."""
    save_head(published.eagle3(**{flag: True}), tmp_path / "head")
    _, notes = export(tmp_path / "head", "speculators", tmp_path / "out", FACTS)
    assert (flag in " ".join(notes)) == (flag in VLLM_SINCE)


def test_numberings() -> None:
    """The two numberings of taps are told apart."""
    place, default, sglang = (
        Path("config.json"),
        (2, 4, 5),
        {"architectures": ["LlamaForCausalLMEagle3"]},
    )
    for values, fallback, taps in (
        ({NUMBERED: [1, 3, 4]}, default, default),  # SpecForge counts blocks' outputs
        (
            {"eagle_config": {NUMBERED: [1, 7, 9]}},
            default,
            (2, 8, 10),
        ),  # SGLang: a list that begins with 1
        ({NUMBERED: [3, 7, 9]}, default, (3, 7, 9)),
        ({NUMBERED: [1, 4, 5]}, (1, 4, 5), (1, 4, 5)),  # they are the target's default taps
        ({NUMBERED: [3, 7, 9], **sglang}, default, (4, 8, 10)),
        ({}, default, default),
    ):
        found, guesses = read_taps(values, fallback, place)
        assert found == taps and guesses
    named = {"after_blocks": [3, 4, 5], "tap_convention": "hidden_states", NUMBERED: [1, 3, 4]}
    assert read_taps(named, default, place) == ((3, 4, 5), [])
    assert read_taps({NUMBERED: [1, 7, 9]}, default, place, is_speculators=True) == ((1, 7, 9), [])
    tiny.refused("names no taps; load the head with its target", read_taps, {}, None, place)


def test_sglang_numbers() -> None:
    """SGLang's numbers depend on the target's architecture."""
    for architecture, taps, expected in (
        ("LlamaForCausalLM", (2, 16, 29), (None, CHECKED)),
        ("UnheardOfForCausalLM", (2, 10, 20), ([1, 9, 19], CHECKED)),  # every rule adds one
        ("Qwen3ForCausalLM", (8, 16, 24), ([7, 15, 23], CHECKED)),
        (
            "DeepseekV3ForCausalLM",
            (8, 16, 24),
            ([8, 16, 24], "0.5.13 to 0.5.23"),
        ),  # earlier ones add one
    ):
        assert sglang_numbers(taps, (2, 16, 29), (architecture,)) == expected
    tiny.refused(
        "no rule known for UnheardOfForCausalLM; serve it with vLLM",
        sglang_numbers,
        (8, 16, 24),
        (2, 16, 29),
        ("UnheardOfForCausalLM",),
    )


VLLM, SGLANG = f"{'vLLM':<12}", f"{'SGLang':<12}"
GATED = f"{VLLM}vLLM stops at the tensor gate_proj"
LOADED = f"{VLLM}loads it as it is"
TO_CONVERT = f"{VLLM}loads it in the layout speculators"
CORRECTED = f"{SGLANG}--to sglang: cannot carry markov_rank"
TO_SGLANG = f"{SGLANG}loads it in the layout sglang"


@pytest.mark.parametrize(
    ("to", "layout", "named", "keys", "said"),
    [  # --to, layout, key that names the kind, head, what inspect shows of the servers
        (
            "speculators",
            "speculators",
            "dspark",
            {"markov_head": "gated", "sample_from_anchor": True},
            (GATED, CORRECTED),
        ),
        ("speculators", "speculators", "dspark", {"sample_from_anchor": True}, (LOADED, CORRECTED)),
        (
            "speculators",
            "speculators",
            "dflash",
            {"markov_rank": 0, "num_hidden_layers": 2},
            (LOADED, TO_SGLANG),
        ),
        ("sglang", "z-lab", "DFlashDraftModel", {"markov_rank": 0}, (TO_CONVERT, TO_SGLANG)),
    ],
)
def test_block_layouts(
    tmp_path: Path, to: str, layout: str, named: str, keys: dict[str, Any], said: tuple[str, ...]
) -> None:
    """A block head goes to its servers and back bit for bit."""
    head = published.made("block", noise=0.2, **keys)
    out = published.shipped(head, to, tmp_path)
    assert read_content(out)[0] == layout and named in (out / "config.json").read_text()
    published.same(load_head(out), head)
    facts = inspect_head(out, FACTS)
    assert (facts["kind"], facts["taps"], facts["problems"]) == ("block", [1, 2], [])
    assert facts["made_for"] == {"speculators": "vLLM", "z-lab": "SGLang"}[layout]
    assert all(line in screen(facts) for line in said)
    for server in re.findall(r"loads it in the layout (\w+)", " ".join(said)):
        _, notes = export(out, server, tmp_path / f"to-{server}", FACTS)
        assert "does not know its meaning" not in " ".join(notes)


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_for_vllm(tmp_path: Path, layers: int) -> None:
    """A Medusa head, ours or a published one, goes to vLLM and back bit for bit."""
    head, place = published.medusa(tmp_path / "published", layers, model_type="medusa")
    save_head(head, tmp_path / "head")
    for number, source in enumerate((tmp_path / "head", place)):
        out = tmp_path / f"out{number}"
        export(source, "vllm", out, FACTS)
        values = json.loads((out / "config.json").read_text())
        names = {"hidden_size": 32, "vocab_size": 320, "num_heads": 4, "medusa_fc_bias": True}
        names |= {"architectures": ["MedusaModel"], "model_type": "medusa"}
        assert {**values, **names, "num_hidden_layers": layers} == values
        assert f"blocks.3.layers.{layers - 1}.bias" in tensor_names(out)
        assert "lm_heads.3.weight" in tensor_names(out)
        published.same_tensors(load_head(out, vocab=tiny.vocab()).state_dict(), head.state_dict())
    facts = inspect_head(tmp_path / "out0", FACTS)
    assert (facts["layout"], facts["kind"], facts["problems"]) == ("vllm", "medusa", [])
    assert load_head(tmp_path / "out0").config == head.config


EAGLE1_ALONE = "an EAGLE-1 head; vLLM serves it from --to safeailab"
PLAIN_BLOCK = {"sample_from_anchor": True, "markov_rank": 0}
OWN = [{"in_block": "causal"}, {"anchor_feature": True}, {"markov_order": 2}]
MISREAD: list[tuple[str, dict[str, Any], str, str]] = [  # kind, changes, --to, what is said
    *(("eagle3", {name: True}, "safeailab", f"cannot carry .*{name}") for name in FLAGS),
    *(("eagle3", {name: True}, "sglang", f"cannot carry .*{name}") for name in FLAGS[:3]),
    ("eagle3", {"num_hidden_layers": 2}, "sglang", "cannot carry 2 layers"),
    ("eagle3", {"after_blocks": (1, 4, 5)}, "safeailab", r"SafeAILab's code reads \(2, 4, 5\)"),
    ("eagle1", {}, "speculators", EAGLE1_ALONE),
    *(("medusa", {}, to, "cannot carry a Medusa head") for to in SERVERS),
    *(("hydra", {}, to, "cannot carry a Hydra head") for to in (*SERVERS, "vllm")),
    *(("block", own, "safeailab", "cannot carry .*; decode it with") for own in OWN),
    *(("block", own, "sglang", "cannot carry .*; decode it with") for own in OWN),
    *(("block", own, "speculators", "cannot carry .*; decode it with") for own in OWN),
    ("block", {}, "sglang", "cannot carry markov_rank; serve it with vLLM"),
    ("block", PLAIN_BLOCK, "speculators", "sample_from_anchor without markov_rank; decode it"),
    ("medusa", {"lm_head": "target"}, "vllm", "cannot carry lm_head: target; decode it with aerie"),
]


@pytest.mark.parametrize(("kind", "changes", "to", "said"), MISREAD)
def test_misread(tmp_path: Path, kind: str, changes: Any, to: str, said: str) -> None:
    """What a server would misread in silence is refused."""
    tiny.refused(said, published.shipped, published.made(kind, **changes), to, tmp_path)
    assert not (tmp_path / "out").exists()
    shown = screen(inspect_head(tmp_path / "head"))
    own = "options .*(in_block: causal|anchor_feature)|sizes .*markov_order 2"
    assert changes not in OWN or re.search(own, shown)


@pytest.mark.parametrize(
    ("kind", "changes", "layout", "fault"),
    [
        ("eagle1", {"bias": True}, "safeailab", "vLLM drops fc.bias"),
        ("block", {"markov_head": "gated"}, "speculators", "vLLM stops at the tensor gate_proj"),
    ],
)
def test_misread_by_vllm(tmp_path: Path, kind: str, changes: Any, layout: str, fault: str) -> None:
    """What vLLM alone would misread is refused for vLLM; the layout has other readers."""
    head = published.made(kind, **changes)
    said = f"--to vllm: {fault}.*; decode it with aerie"
    tiny.refused(said, published.shipped, head, "vllm", tmp_path)
    _, notes = export(tmp_path / "head", layout, tmp_path / layout, FACTS)
    assert any(fault in note and "is not for vLLM" in note for note in notes)
    shown = screen(inspect_head(tmp_path / "head"))
    assert fault in shown and "serve it with vLLM" not in shown
    assert not inspect_head(tmp_path / layout, FACTS)["servers"]["vLLM"]["as_it_is"]


@pytest.mark.parametrize(
    ("values", "state", "message"),
    [  # changes to config.json, to the tensors, message
        (
            {"num_hidden_layers": 10**9},
            {},
            "num_hidden_layers is 1,000,000,000; it must be above 0 and below 1,024",
        ),
        ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'; heads have 'silu'"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            {},
            "keep the one of the head's training",
        ),
        (
            {},
            {"fc.weight": None},
            r"pytorch_model.bin: fc.weight: the file has none, but the head needs \[32, 96\]",
        ),
        (
            {},
            {"fc.weight": torch.zeros(3, 2)},
            r"pytorch_model.bin: fc.weight: the file has \[3, 2\], but the head needs \[32, 96\]",
        ),
        ({}, {"fc.weight": torch.full((32, 96), torch.nan)}, "3,072 of 3,072 values that are NaN"),
        (
            {},
            {"fc.weight": torch.zeros(32, 96).to(torch.int8)},
            "holds torch.int8: quantised heads are not read",
        ),
        ({}, {"d2t": torch.arange(107) * 3}, "d2t must hold offsets"),
        ({}, {"t2d": None}, "t2d: the file has none"),
        (
            {"draft_vocab_size": 320},
            {"lm_head.weight": torch.ones(320, 32), "d2t": None},
            "d2t: the file has none",
        ),
    ],
)
def test_damaged_head(tmp_path: Path, values: Any, state: Any, message: str) -> None:
    """A damaged head is one sentence and no model."""
    state = {
        name: value
        for name, value in {**published.tensors(published.EAGLE3), **state}.items()
        if value is not None
    }
    place = published.write(
        tmp_path / "head", {**published.EAGLE3_CONFIG, **values}, state, published.PICKLE
    )
    message = rf"{place}.*{message}|{message}.*{place}"
    tiny.refused(message, load_head, place, vocab=tiny.vocab(), after_blocks=published.TAPS)
    tiny.refused(message, export, place, "speculators", tmp_path / "out", FACTS)
    assert not (tmp_path / "out").exists()


def test_no_head(tmp_path: Path) -> None:
    """What is no head is refused, and a head that would be read wrongly."""
    lone = published.write(
        tmp_path / "lone", {"model_type": "llama"}, {"weight": torch.zeros(2, 2)}
    )
    narrow = published.hydra(tmp_path / "narrow", num_attention_heads=None)[1]
    offset = published.hydra(tmp_path / "offset", grounded_heads=False)[1]
    for path, message in (
        (lone, "not a head in a layout that is known here"),
        (narrow, 'add "num_attention_heads" of the target'),
        (offset, "or a hidden_state_offset are not supported"),
    ):
        tiny.refused(message, load_head, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "its hidden size is 32, and that of tiny is 48"),
        ({"vocab_size": 400}, "its vocabulary is 320, and that of tiny is 400"),
        ({"num_blocks": 5}, r"after blocks \[2, 4, 5\], but tiny has only 5 blocks"),
        ({"seed": 5}, "made for a target with other weight files than tiny"),
    ],
)
def test_other_target(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    """A head for another target is refused."""
    head, out = tmp_path / "head", tmp_path / "out"
    own = fingerprint(TargetConfig(FACTS.path), FACTS.text_config, FACTS.vocab)
    save_head(published.eagle3(), head, target=own)
    assert inspect_head(head, FACTS)["problems"] == []
    other = published.target_facts(**changes)
    tiny.refused(message, export, head, "speculators", out, other)
    assert re.search(message, " ".join(inspect_head(head, other)["problems"]))
    said = r"--after-blocks 2,3,6: .*json says that the head reads \[2, 4, 5\]"
    tiny.refused(said, export, head, "speculators", out, FACTS, after_blocks=(2, 3, 6))
    assert not out.exists()
    if "seed" in changes:
        _, notes = export(head, "speculators", out, other, any_target=True)
        assert "other weight files" in notes[0]


# Tensors on disk: whole or sharded, safetensors or pickles of tensors alone; anything else is
# refused.

STATE = {
    "a": torch.arange(600.0),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor([True, False]),
}


@pytest.mark.parametrize("pickled", [False, True])
def test_tensor_files(tmp_path: Path, pickled: bool) -> None:
    """Every form reads back bit for bit and a view without what it views."""
    view = write_tensors(tmp_path, {"part": torch.zeros(100_000)[:10]}, pickled)
    assert view.stat().st_size < 10_000 and view.stat().st_mode & 0o044  # readable by others
    for write in (write_tensors, published.sharded):
        expected = write(tmp_path, STATE, pickled)
        place, found = read_tensors(tmp_path)
        assert place == expected and tensor_names(tmp_path) == found.keys()
        published.same_tensors(found, STATE)
        expected.unlink()


class Planted:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def test_pickle_code(tmp_path: Path) -> None:
    """A pickle with code in it is refused and never run."""
    trace = tmp_path / "trace"
    for content, said in (
        ({"a": Planted(trace)}, "more than tensors"),
        ({"state": {}}, "is no table of tensors"),
    ):
        torch.save(content, tmp_path / "pytorch_model.bin")
        tiny.refused(said, read_tensors, tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("pickled", [False, True])
def test_truncated(tmp_path: Path, pickled: bool) -> None:
    """A truncated file is one sentence."""
    for kept in (0, 7, -200):
        place = write_tensors(tmp_path, STATE, pickled)
        place.write_bytes(place.read_bytes()[:kept])
        tiny.refused(rf"{place.name}: cannot read the weights: [^\n]*$", read_tensors, tmp_path)
