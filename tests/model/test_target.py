"""Any stock causal LM gives the model's own features and logits, without forked model files."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoConfig, GenerationConfig

from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.cached_lm import CachedLM
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.model.hub import weights_digest
from aerie.model.kv_cache import KeptRows
from aerie.model.miniature import small_model
from aerie.model.storage import CONFIG, WEIGHTS, write_json
from aerie.model.target import Target, final_norm, load_vocab
from aerie.model.target_files import (
    load_config,
    load_tokenizer,
    only_trains,
    other_weights,
    require_same_token_ids,
)
from tests import tiny
from tests.infer.laws import tree_of

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
}


def family(name: str) -> Target:
    return Target(
        small_model(AutoConfig.for_model(name, **FAMILIES[name])), TargetConfig(path=name)
    )


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_families(
    name: str,
) -> None:
    """Features and logits are the model's own and a tree forward is plain forwards along every
    path. Also with a sliding window of 16 for a prompt of 64, and after cache rows were gathered
    out of order."""
    target, ids, near = family(name), prompt(64), {"rtol": 1e-4, "atol": 1e-4}
    with torch.inference_mode():
        own, rows = target.model(ids[None], output_hidden_states=True), torch.tensor([5, 11, 96])
    output = target.features(ids[None], after_blocks=(0, 2))
    torch.testing.assert_close(
        output.taps, torch.cat([own.hidden_states[0], own.hidden_states[2]], dim=-1)
    )
    torch.testing.assert_close(target.logits(output.last_hidden), own.logits, **near)
    torch.testing.assert_close(
        target.logits(output.last_hidden, rows), own.logits[..., rows], **near
    )
    lm, tree = CachedLM(target), tree_of(prompt(7, seed=1).tolist(), [0, 0, 0, 1, 1, 2, 5])

    def check(known: torch.Tensor, nodes: range) -> None:
        step = lm.extend(tree.tokens, tree.depth, tree.mask)
        for node in nodes:
            path = tree.mask[node].nonzero().flatten().tolist()
            plain = target.model(torch.cat([known, tree.tokens[path]])[None]).logits[0, -1]
            torch.testing.assert_close(step.logits[node], plain, **near)

    with torch.inference_mode():
        lm.prefill(ids, kept := KeptRows(96, ids.device, torch.float32))
        kept.advance(64)
        check(ids, range(7))
        lm.cache.gather(torch.tensor([0, 2, 5]))
        kept.advance(3)
        check(torch.cat([ids, tree.tokens[[0, 2, 5]]]), range(6, 7))


@pytest.mark.parametrize("tied", [True, False])
def test_load_vocab(tmp_path: Path, tied: bool) -> None:
    """The ends alone are those of the whole target."""
    config = TargetConfig(
        path=str(tiny.target(tmp_path / "t", tie_word_embeddings=tied)), dtype="float32"
    )
    whole, (text, vocab) = Target.load(config), load_vocab(config)
    assert torch.equal(vocab.embedding, whole.vocab.embedding) and torch.equal(
        vocab.lm_head, whole.vocab.lm_head
    )
    recorded = whole.fingerprint()
    assert other_weights(recorded, config, text, vocab) is None
    change(
        tmp_path / "t", {WEIGHTS: {"model.layers.1.mlp.up_proj.weight": torch.ones(64, 32)}}
    )  # only this
    assert "with other weight files" in str(other_weights(recorded, config, text, vocab))


@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2", "gpt2", "cohere", "olmo"])
@torch.no_grad()
def test_final_norm(tmp_path: Path, name: str) -> None:
    """The final norm alone makes last hidden or is refused by name."""
    model, config, inputs = (
        small_model(AutoConfig.for_model(name)),
        TargetConfig(str(tmp_path)),
        list[torch.Tensor](),
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(tmp_path)
    if name in ("gpt2", "cohere", "olmo"):  # norms that subtract a mean
        tiny.refused(
            rf"ForCausalLM|LMHeadModel \({name}\) ends in no RMS norm; leave norm_init",
            final_norm,
            config,
        )
        return
    target = Target(model, config)
    for part in target.decoder.children():
        part.register_forward_hook(lambda _, given, __: inputs.extend(given[:1]))
    last_hidden, weight = target.features(prompt(9)[None]).last_hidden, final_norm(config)
    torch.testing.assert_close(
        torch.nn.functional.rms_norm(inputs[-1], weight.shape, weight, 1e-6), last_hidden
    )
    torch.save(load_file(tmp_path / WEIGHTS), tmp_path / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    assert weight.equal(final_norm(config))


def test_weights_digest(tmp_path: Path, monkeypatch: Any) -> None:
    """A file of weights is hashed once and a blob of the Hub's cache never."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("aerie.model.hub.KEPT_BYTES", 0)
    path, blob = tmp_path / WEIGHTS, tmp_path / "blobs" / ("0" * 64)
    path.write_bytes(b"weights")
    assert weights_digest(path) == hashlib.sha256(b"weights").hexdigest()
    next(tmp_path.glob("cache/aerie/digests/*")).write_text("1" * 64)
    assert weights_digest(path) == "1" * 64
    path.write_bytes(b"others!")
    os.utime(path, ns=(0, 0))
    assert weights_digest(path) == hashlib.sha256(b"others!").hexdigest()
    blob.parent.mkdir()
    path.rename(blob)
    path.symlink_to(blob)
    assert weights_digest(path) == "0" * 64


def change(target: Path, files: dict[str, Any]) -> None:
    """Changes a file: its tensors, keys, text, size or name, or removes it."""
    for name, value in files.items():
        path = target / name
        match value:
            case dict() if path.suffix == ".safetensors":
                tensors = {
                    key: tensor
                    for key, tensor in (load_file(path) | value).items()
                    if tensor is not None
                }
                save_file(tensors, path, {"format": "pt"})
            case dict():
                write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | value)
            case str():
                path.write_text(value)
            case int():
                os.truncate(path, value)
            case Path():
                path.rename(target / value)


INDEX, SETTINGS = f"{WEIGHTS}.index.json", "generation_config.json"
NO_FIT, ONE = "its weights do not fit its config.json", Path("1.safetensors")
SHARDED = {"metadata": {}, "weight_map": {"model.norm.weight": "1.safetensors"}}


@pytest.mark.parametrize(
    ("count", "said", "files"),
    [  # how many of the three notice it
        (
            1,
            f"{NO_FIT}: .*2.mlp.down_proj.weight is missing",
            {WEIGHTS: {"model.layers.2.mlp.down_proj.weight": None}},
        ),
        (
            1,
            f"{NO_FIT}: lm_head.weight is not tied as tie_word_embeddings says",
            {CONFIG: {"tie_word_embeddings": True}},
        ),
        (2, f"{NO_FIT}: lm_head.weight is .320, 32., not .400, 32.", {CONFIG: {"vocab_size": 400}}),
        (
            1,
            f"{NO_FIT}: .*q_proj.bias has no place",
            {WEIGHTS: {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}},
        ),
        (
            1,
            "its logits differ .*broken weights",
            {WEIGHTS: {"model.norm.weight": torch.full((32,), torch.nan)}},
        ),
        (
            1,
            f"{NO_FIT}: model.layers.4.* is missing.* and 15 more; fetch",
            {CONFIG: {"num_hidden_layers": 6}},
        ),
        (
            2,
            f"{NO_FIT}: lm_head",
            {WEIGHTS: ONE, "1.safetensors": {"lm_head.weight": None}, INDEX: SHARDED},
        ),
        (
            3,
            "read 2.safetensors: No such file",
            {WEIGHTS: ONE, INDEX: {"weight_map": {"a": "2.safetensors"}}},
        ),
        (
            3,
            "names .*, which is no file beside it",
            {WEIGHTS: ONE, INDEX: {"weight_map": {"a": f"../{ONE}"}}},
        ),
        (
            3,
            "quant_method 'mystery' is not known",
            {CONFIG: {"quantization_config": {"quant_method": "mystery"}}},
        ),
        (3, "hidden_size", {CONFIG: {"hidden_size": "wide"}}),
        (1, "cannot read generation_config.json: .*'end'", {SETTINGS: {"eos_token_id": "end"}}),
        (3, "cannot read model.safetensors: .*header", {WEIGHTS: 100_000}),
        (3, "holds no weights; fetch model.safetensors", {WEIGHTS: Path("weights.old")}),
        (3, "GGUF is not read", {WEIGHTS: Path("model-q4.gguf")}),
    ],
)
def test_broken_target(count: int, said: str, files: Any, tmp_path: Path) -> None:
    """What a target's files lack is one line. If names and headers of the files show it, the error
    comes before the weights are read."""
    config = TargetConfig(str(tiny.target(tmp_path / "t")))
    change(tmp_path / "t", files)
    for read in (Target.load, load_vocab, load_config)[:count]:
        tiny.refused(f"^{config.path}.*{said}", read, config)


def test_generation_config(tmp_path: Path, capsys: Any) -> None:
    """What the generation config sets is followed unless the recipe sets another value."""
    path = tiny.target(tmp_path / "t")
    settings = GenerationConfig.from_pretrained(path)
    settings.repetition_penalty, settings.num_beams, settings.eos_token_id = 1.5, 2, [2, 99999]
    settings.save_pretrained(path)
    ids, answers = prompt(8)[None] % 40, []
    for generation in ({"num_beams": None}, {"num_beams": 1, "repetition_penalty": 1.0}):
        target = Target.load(TargetConfig(str(path), generation=generation))
        assert "[99999] is none of its 320 tokens" in capsys.readouterr().err
        answers.append(target.model.generate(ids, max_new_tokens=12, do_sample=False))
        assert torch.equal(
            SpeculativeDecoder(target).generate(ids, max_new_tokens=12, do_sample=False).sequences,
            answers[-1],
        )
    assert not torch.equal(*answers)
    said = r"num_beams=2, which aerie does not apply; .*--generation.num_beams null"
    tiny.refused(said, SpeculativeDecoder(Target.load(TargetConfig(str(path)))).generate, ids)


def test_final_transform(monkeypatch: Any) -> None:
    """A final transform that is not known is refused."""
    target = family("granite")
    monkeypatch.setattr("aerie.model.target.final_transform", lambda config: (1.0, None))
    tiny.refused("would not be lossless", Target, target.model, target.recipe)


def test_no_whole_model(tmp_path: Path) -> None:
    """What is no whole model is told what to do."""
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    for name, content, said in (
        ("adapter_config.json", {}, "a LoRA adapter; merge it .* python -c"),
        ("config.json", own, "target.trust_remote_code true"),
        ("words.json", {}, "merge a LoRA adapter into its model first; GGUF is not read"),
    ):
        write_json(tmp_path / Path(name).stem / name, content)
        tiny.refused(said, load_config, TargetConfig(str(tmp_path / Path(name).stem)))


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next", "rwkv"])
def test_only_trains(tmp_path: Path, kind: str) -> None:
    """Layers with a state are told by their configuration."""
    write_json(tmp_path / "config.json", {"model_type": kind})
    (tmp_path / "pytorch_model.bin").touch()
    assert "aerie does not decode with it" in str(
        only_trains(load_config(TargetConfig(str(tmp_path))))
    )


def test_token_ids() -> None:
    """A target may have more tokens than a draft but no other ids."""
    draft = {"a": 0, "b": 1, "c": 2}
    require_same_token_ids({**draft, "<tool>": 3}, draft, 3, "draft", "target")
    tiny.refused(
        "token 'b' has id 2 in its tokenizer, and another in that of target",
        require_same_token_ids,
        {"a": 0, "b": 2, "c": 1},
        draft,
        3,
        "draft",
        "target",
    )


def test_sentencepiece(tmp_path: Path) -> None:
    """Vicuna's tokenizer of a SentencePiece file alone is read."""
    texts = [turn["value"] for row in tiny.conversations(64) for turn in row["conversations"]]
    words = {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(tmp_path / "tokenizer"), **words
    )
    write_json(
        tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    )
    made = load_tokenizer(
        TargetConfig(str(tmp_path), chat_template="configs/templates/vicuna.jinja")
    )
    own = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in texts[:9]:
        given = made(text, add_special_tokens=False, return_offsets_mapping=True)
        assert given["input_ids"] == own.encode(text) and given["offset_mapping"][-1][1] == len(
            text
        )
