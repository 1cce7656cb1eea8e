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
from aerie.model.target import fingerprint
from tests import tiny
from tests.model.formats import published

NUMBERED = "eagle_aux_hidden_state_layer_ids"
SERVERS = ("safeailab", "sglang", "speculators")
EMBEDDING = "embed_tokens.weight"
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
        export(place, layout, tmp_path / "out", published.target_facts())
        published.same_tensors(read_tensors(tmp_path / "out")[1], theirs)


def test_published_multi_token(tmp_path: Path, capsys: Any) -> None:
    """A published Medusa or Hydra head is the very head."""
    for layers in (1, 2):
        medusa, place = published.medusa(tmp_path / f"medusa{layers}", layers, medusa_num_heads=2)
        published.same_tensors(
            load_head(place, vocab=tiny.vocab()).state_dict(), medusa.state_dict()
        )
        assert (
            "medusa_num_heads is 2, the weights have 4" in capsys.readouterr().err
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
        'has no "bias", which means true',
        load_head,
        published.write(tmp_path / "silent", config, own),
    )


def owner() -> Any:  # its embedding is not its target's
    head = published.eagle3()
    head.embed_tokens.weight.data.mul_(2.0)
    head.saves_embedding = True
    return head


@pytest.mark.parametrize(
    ("make", "layouts"),
    [
        (lambda: published.eagle3().to(torch.bfloat16), SERVERS),
        (lambda: published.eagle3(ids=torch.arange(320)), SERVERS),
        (
            lambda: published.eagle3(fc_norm=True, norm_output=True, after_blocks=(1, 3)),
            SERVERS[1:],
        ),
        (lambda: published.eagle3(norm_before_residual=True, norm_before_fc=True), SERVERS[2:]),
        (lambda: published.eagle3(qk_norm=True, num_hidden_layers=3), SERVERS[2:]),
        (lambda: published.eagle3(hidden_size=16), SERVERS),  # its target has 32
        (owner, SERVERS),
        (lambda: tiny.head(tiny.vocab().embedding, bias=True), SERVERS[:2]),
        (lambda: tiny.head(tiny.vocab().embedding, num_hidden_layers=2), SERVERS[:2]),
    ],
)
def test_every_layout(tmp_path: Path, make: Any, layouts: tuple[str, ...]) -> None:
    """A head of this project comes back from every layout bit for bit."""
    head = make()
    save_head(head, tmp_path / "head", step=4)
    (tmp_path / "head" / "recipe.yaml").write_text("run: r\n")
    (tmp_path / "head" / "conversations.jsonl").write_text("private\n")
    for to in layouts:
        export(tmp_path / "head", to, tmp_path / to, published.target_facts())
        published.same(load_head(tmp_path / to), head)
        assert load_head(tmp_path / to, vocab=tiny.vocab()).saves_embedding == head.saves_embedding
        again = tmp_path / f"{to}-again"  # and from there to another
        export(tmp_path / to, layouts[0], again, published.target_facts())
        published.same(load_head(again), head)
        facts = head_facts(again)
        assert (
            facts["step"] == 4
            and facts["exported_from"]["layout"] == to
            and (again / "recipe.yaml").is_file()
        )
        assert not (again / "conversations.jsonl").exists()
    if head.kind == "eagle1" and not head.config.bias:  # SGLang needs a bias: we write zeros
        assert torch.equal(read_tensors(tmp_path / "sglang")[1]["fc.bias"], torch.zeros(32))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tiny.head(tiny.vocab().embedding), ("eagle", 5)),
        (published.eagle3, ("eagle3", 5)),
        (lambda: tiny.multi_token_head("medusa", tiny.vocab(), num_heads=3), ("medusa", 3)),
        (
            lambda: tiny.multi_token_head("block", tiny.vocab(), block_size=6, markov_rank=0),
            ("dflash", 5),
        ),
        (
            lambda: tiny.multi_token_head(
                "block", tiny.vocab(), block_size=6, sample_from_anchor=True
            ),
            ("dspark", 6),
        ),
    ],
)
def test_commands(tmp_path: Path, make: Any, words: tuple[str, int]) -> None:
    """A printed command has vLLM's method, the head's own number of drafts and a wide target's
    dtype."""
    head, out, target = make(), tmp_path / "out", published.target_facts()
    save_head(head, tmp_path / "head", template_arguments={"enable_thinking": False})
    export(tmp_path / "head", "vllm", out, target)
    speculative = {"model": str(out), "method": words[0], "num_speculative_tokens": words[1]}
    command = f"vllm serve {target.path} --speculative-config '{json.dumps(speculative)}'"
    assert f"{command} --dtype float32" in screen(inspect_head(out, target))
    recorded = inspect_head(out)  # an export knows its target's dtype
    assert recorded["target"]["dtype"] == "float32" and "--dtype float32" in screen(recorded)
    narrow = replace(target, vocab=replace(target.vocab, lm_head=target.vocab.lm_head.bfloat16()))
    as_trained = "--default-chat-template-kwargs '{\"enable_thinking\": false}'"
    assert f"{command} {as_trained}" in screen(inspect_head(out, narrow))
    assert "--dtype" not in screen(inspect_head(out, narrow))


def test_disputed_keys(tmp_path: Path) -> None:
    """Every key on which vLLM and speculators disagree is written."""
    save_head(published.eagle3(), tmp_path / "head")
    export(
        tmp_path / "head",
        "speculators",
        tmp_path / "out",
        published.target_facts(max_positions=4096),
    )
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = values["transformer_layer_config"]
    assert values["norm_before_residual"] is False and values[NUMBERED] == [2, 4, 5]
    assert (
        values["draft_vocab_size"] == 107
        and layer["vocab_size"] == 320
        and layer["model_type"] == "llama"
    )
    assert layer["max_position_embeddings"] == 4096  # the target's: vLLM cannot draft beyond it
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0
    assert "num_aux_hidden_states" not in layer  # but for another number of taps than three
    save_head(published.eagle3(after_blocks=(1, 3)), tmp_path / "two")
    export(tmp_path / "two", "speculators", tmp_path / "two-out", published.target_facts())
    layer = json.loads((tmp_path / "two-out/config.json").read_text())["transformer_layer_config"]
    assert layer["num_aux_hidden_states"] == 2
    assert "llama.cpp's converter" in screen(
        inspect_head(tmp_path / "two", published.target_facts())
    )
    assert "llama.cpp" not in screen(inspect_head(tmp_path / "head", published.target_facts()))
    for name in FLAGS:  # keys that need a later vLLM are named
        save_head(published.eagle3(**{name: True}), tmp_path / name)
        _, notes = export(
            tmp_path / name, "speculators", tmp_path / f"{name}-out", published.target_facts()
        )
        assert any(name in note for note in notes) == (name in VLLM_SINCE)


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
    tiny.refused("names no taps; load it with its target", read_taps, {}, None, place)


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


@pytest.mark.parametrize(
    ("to", "layout", "named", "keys"),
    [  # --to, layout, key that names the kind, head
        (
            "speculators",
            "speculators",
            "dspark",
            {"markov_head": "gated", "sample_from_anchor": True},
        ),
        ("speculators", "speculators", "dspark", {"sample_from_anchor": True}),
        ("speculators", "speculators", "dflash", {"markov_rank": 0, "num_hidden_layers": 2}),
        ("sglang", "z-lab", "DFlashDraftModel", {"markov_rank": 0}),
    ],
)
def test_block_layouts(
    tmp_path: Path, to: str, layout: str, named: str, keys: dict[str, Any]
) -> None:
    """A block head goes to its servers and back bit for bit."""
    head: Any = tiny.multi_token_head("block", tiny.vocab(), noise=0.2, **keys)
    save_head(head, tmp_path / "head")
    export(tmp_path / "head", to, tmp_path / "out", published.target_facts())
    assert (
        read_content(tmp_path / "out")[0] == layout
        and named in (tmp_path / "out/config.json").read_text()
    )
    published.same(load_head(tmp_path / "out"), head)
    facts = inspect_head(tmp_path / "out", published.target_facts())
    assert (facts["kind"], facts["taps"], facts["problems"]) == ("block", [1, 2], [])
    assert facts["made_for"] == {"speculators": "vLLM", "z-lab": "SGLang"}[layout]
    for server, other in (("vLLM", "speculators"), ("SGLang", "sglang")):
        if server == "vLLM" and "markov_head" in keys:
            assert f"{server:<12}vLLM stops at the tensor gate_proj" in screen(facts)
            continue
        if server == "SGLang" and named == "dspark":
            assert f"{server:<12}--to sglang: cannot carry markov_rank" in screen(facts)
            continue
        assert f"{server:<12}loads it in the layout {other}" in screen(facts)
        notes = export(tmp_path / "out", other, tmp_path / f"to-{other}", published.target_facts())[
            1
        ]
        assert not any("meaning is not known" in note for note in notes)


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_for_vllm(tmp_path: Path, layers: int) -> None:
    """A Medusa head, ours or a published one, goes to vLLM and back bit for bit."""
    head, place = published.medusa(tmp_path / "published", layers, model_type="medusa")
    save_head(head, tmp_path / "head")
    for number, source in enumerate((tmp_path / "head", place)):
        out = tmp_path / f"out{number}"
        export(source, "vllm", out, published.target_facts())
        values = json.loads((out / "config.json").read_text())
        names = {"hidden_size": 32, "vocab_size": 320, "num_heads": 4, "medusa_fc_bias": True}
        names |= {"architectures": ["MedusaModel"], "model_type": "medusa"}
        assert {**values, **names, "num_hidden_layers": layers} == values
        assert f"blocks.3.layers.{layers - 1}.bias" in tensor_names(out)
        assert "lm_heads.3.weight" in tensor_names(out)
        published.same_tensors(load_head(out, vocab=tiny.vocab()).state_dict(), head.state_dict())
    facts = inspect_head(tmp_path / "out0", published.target_facts())
    assert (facts["layout"], facts["kind"], facts["problems"]) == ("vllm", "medusa", [])
    assert load_head(tmp_path / "out0").config == head.config


def test_misread(tmp_path: Path) -> None:
    """What a server would misread in silence is refused."""

    def cannot_ship(head: Any, to: str, said: str) -> None:
        save_head(head, tmp_path / "head")
        tiny.refused(
            said, export, tmp_path / "head", to, tmp_path / "out", published.target_facts()
        )
        assert not (tmp_path / "out").exists()

    for to, names in (("safeailab", FLAGS), ("sglang", FLAGS[:3])):
        for name in names:
            cannot_ship(published.eagle3(**{name: True}), to, f"--to {to}: cannot carry .*{name}")
    cannot_ship(published.eagle3(num_hidden_layers=2), "sglang", "cannot carry 2 layers")
    cannot_ship(
        published.eagle3(after_blocks=(1, 4, 5)), "safeailab", r"SafeAILab's code reads \(2, 4, 5\)"
    )
    cannot_ship(
        tiny.head(tiny.vocab().embedding),
        "speculators",
        "an EAGLE-1 head; vLLM serves it from --to safeailab",
    )
    for to in SERVERS:
        for kind in ("medusa", "hydra"):
            said = f"--to {to}: cannot carry a {kind.capitalize()} head"
            cannot_ship(tiny.multi_token_head(kind, tiny.vocab()), to, said)
        for own in ({"in_block": "causal"}, {"anchor_feature": True}, {"markov_order": 2}):
            cannot_ship(
                tiny.multi_token_head("block", tiny.vocab(), **own),
                to,
                "cannot carry .*; decode it with",
            )
            assert re.search(
                "options .*(in_block: causal|anchor_feature)|sizes .*markov_order 2",
                screen(inspect_head(tmp_path / "head")),
            )
    cannot_ship(
        tiny.multi_token_head("block", tiny.vocab()),
        "sglang",
        "cannot carry markov_rank; serve it with vLLM",
    )
    anchored = tiny.multi_token_head("block", tiny.vocab(), sample_from_anchor=True, markov_rank=0)
    cannot_ship(anchored, "speculators", "sample_from_anchor without markov_rank; decode it with")
    for faulty, layout, fault in (
        (tiny.head(tiny.vocab().embedding, bias=True), "safeailab", "vLLM drops fc.bias"),
        (
            tiny.multi_token_head("block", tiny.vocab(), markov_head="gated"),
            "speculators",
            "vLLM stops at the tensor gate_proj",
        ),
    ):
        cannot_ship(faulty, "vllm", f"--to vllm: {fault}.*; decode it with aerie")
        # the layout has other readers
        notes = export(tmp_path / "head", layout, tmp_path / layout, published.target_facts())[1]
        assert any(fault in note and "is not for vLLM" in note for note in notes)
        assert fault in screen(inspect_head(tmp_path / "head"))
        assert "serve it with vLLM" not in screen(inspect_head(tmp_path / "head"))
    borrowing = tiny.multi_token_head("medusa", tiny.vocab(), lm_head="target")
    cannot_ship(borrowing, "vllm", "cannot carry lm_head: target; decode it with aerie")
    cannot_ship(tiny.multi_token_head("hydra", tiny.vocab()), "vllm", "cannot carry a Hydra head")


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
            "keep the one of its training",
        ),
        ({}, {"fc.weight": None}, r"pytorch_model.bin: fc.weight: none there, \[32, 96\] expected"),
        (
            {},
            {"fc.weight": torch.zeros(3, 2)},
            r"pytorch_model.bin: fc.weight: \[3, 2\] there, \[32, 96\] expected",
        ),
        ({}, {"fc.weight": torch.full((32, 96), torch.nan)}, "3,072 of 3,072 values that are NaN"),
        (
            {},
            {"fc.weight": torch.zeros(32, 96).to(torch.int8)},
            "holds torch.int8: quantised heads are not read",
        ),
        ({}, {"d2t": torch.arange(107) * 3}, "d2t holds offsets"),
        ({}, {"t2d": None}, "t2d: none there"),
        (
            {"draft_vocab_size": 320},
            {"lm_head.weight": torch.ones(320, 32), "d2t": None},
            "d2t: none there",
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
    tiny.refused(message, export, place, "speculators", tmp_path / "out", published.target_facts())
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


def test_other_target(tmp_path: Path) -> None:
    """A head for another target is refused."""
    own, head, out = published.target_facts(), tmp_path / "head", tmp_path / "out"
    save_head(
        published.eagle3(),
        head,
        target=fingerprint(TargetConfig(own.path), own.text_config, own.vocab),
    )
    assert inspect_head(head, own)["problems"] == []
    others: list[tuple[dict[str, int], str]] = [
        ({"hidden_size": 48}, "its hidden size is 32, that of tiny is 48"),
        ({"vocab_size": 400}, "its vocabulary is 320, that of tiny is 400"),
        ({"num_blocks": 5}, r"after blocks \[2, 4, 5\], and tiny has 5 blocks"),
        ({"seed": 5}, "made for a target with other weight files than tiny"),
    ]
    for changes, message in others:
        tiny.refused(message, export, head, "speculators", out, published.target_facts(**changes))
        assert any(
            re.search(message, problem)
            for problem in inspect_head(head, published.target_facts(**changes))["problems"]
        )
    tiny.refused(
        r"--after-blocks 2,3,6: .*json says that the head reads \[2, 4, 5\]",
        export,
        head,
        "speculators",
        out,
        own,
        after_blocks=(2, 3, 6),
    )
    assert not out.exists()
    assert (
        "other weight files"
        in export(head, "speculators", out, published.target_facts(seed=5), any_target=True)[1][0]
    )


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
