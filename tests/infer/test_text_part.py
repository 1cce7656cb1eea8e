"""The text part of a model that also reads images: its states and answers are the whole model's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import Eagle1Section, TargetConfig
from aerie.infer.decode.check import checked_lm
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.model.checkpoint import new_head, rope_notes, save_head
from aerie.model.miniature import miniature
from aerie.model.target import Target, load_vocab
from tests import tiny

MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "max_position_embeddings": 256, "layer_types": ["full_attention"] * 4, "pad_token_id": 4,
    "bos_token_id": None, "eos_token_id": 3,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_heads": 2, "depth": 1, "out_hidden_size": 32, "image_size": 28, "patch_size": 14,
    "head_dim": 8, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
    "qwen2_5_vl": {"rope_parameters": MROPE},
    "mistral3": {},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},
    "llava": {},
}


def whole_model(family: str, directory: Path) -> Any:
    config = AutoConfig.for_model(family)
    text = config.text_config.to_dict() | TEXT | FAMILIES[family]
    vision = config.vision_config.to_dict()
    small = {name: size for name, size in VISION.items() if name in vision}
    small_config = AutoConfig.for_model(family, text_config=text, vision_config=vision | small)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(small_config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[3], pad_token_id=4)
    model.eval().save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_is_the_whole_model_on_text(family: str, tmp_path: Path) -> None:
    whole = whole_model(family, tmp_path / "target")
    target = Target.load(TargetConfig(str(tmp_path / "target"), dtype="float32"))
    kept = sum(parameter.numel() for parameter in target.model.parameters())
    text = sum(parameter.numel() for parameter in target.decoder.parameters())
    assert kept <= text + target.vocab.lm_head.numel() < whole.num_parameters()

    ids = torch.randint(5, 261, (1, 24), generator=torch.Generator().manual_seed(1))
    states = target.features(ids, (1, 2))
    expected = whole(ids, output_hidden_states=True)
    torch.testing.assert_close(states.taps, torch.cat(expected.hidden_states[1:3], dim=-1))
    torch.testing.assert_close(target.logits(states.last_hidden), expected.logits)

    _, vocab = load_vocab(target.recipe)
    torch.testing.assert_close(vocab.lm_head, target.vocab.lm_head)
    head = new_head(Eagle1Section(), target.config, target.vocab, 0)
    save_head(head, tmp_path / "head")
    assert bool(rope_notes(target.config)) == (family not in ("mistral3", "llava"))
    theirs = whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16)
    for options in ({"method": "pld"}, {"head": str(tmp_path / "head")}):
        decoder = SpeculativeDecoder.from_pretrained(target, **options)
        ours = decoder.generate(ids, max_new_tokens=16)
        assert ours.sequences.tolist() == theirs.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_miniature_of_the_family_decodes(family: str) -> None:
    """So that features --plan, and targets in narrow dtypes, are tried."""
    rope = {"text_config": FAMILIES[family]} if "_vl" in family else {}
    config = AutoConfig.for_model(family, **rope)
    small = miniature(config, TargetConfig(family, dtype="float32"))
    assert small is not None
    checked_lm(small)


def test_a_model_without_a_text_part_is_named(tmp_path: Path) -> None:
    AutoConfig.for_model("clip").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match="reads images or sound, and transformers builds no model"):
        Target.load(TargetConfig(str(tmp_path)))
