"""The EAGLE-3 head: the published tensors, its layer against plain formulas and transformers' Qwen3, its switches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import Eagle3Section
from aerie.model.checkpoint import check_sizes, load_head, new_head, save_head
from aerie.model.heads.eagle import DraftVocabulary, Eagle3Head, EagleDraft
from aerie.model.layers import KeyValueBuffer, UnrollMemory
from tests import tiny

# SafeAILab's EAGLE3-LLaMA3.1-Instruct-8B with D 32, I 64, 4 heads, 2 of keys and values, V 320, Vd 107, three taps.
PUBLISHED = {
    "d2t": (107,),
    "t2d": (320,),
    "fc.weight": (32, 96),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.mlp.gate_proj.weight": (64, 32),
    "midlayer.mlp.up_proj.weight": (64, 32),
    "midlayer.mlp.down_proj.weight": (32, 64),
    "midlayer.post_attention_layernorm.weight": (32,),
    "norm.weight": (32,),
    "lm_head.weight": (107, 32),
}
TAPS = (2, 4, 5)


def head(**changes: Any) -> Eagle3Head:
    return tiny.eagle3_head(tiny.vocab().embedding, **{"after_blocks": TAPS, "scale": 6.0, **changes}).eval()


def restored(directory: Path) -> Eagle3Head:
    loaded = load_head(directory, vocab=tiny.vocab())
    assert isinstance(loaded, Eagle3Head)
    return loaded


def random_norms(module: torch.nn.Module) -> None:
    """Norm weights that differ from one, so that a norm in the wrong place shows."""
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)


def test_a_head_has_exactly_the_published_keys_and_shapes(tmp_path: Path) -> None:
    save_head(head(), tmp_path / "head")
    state = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in state.items()} == PUBLISHED
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool


def test_a_head_of_another_width_trains_and_saves_its_own_embedding(tmp_path: Path) -> None:
    embedding = tiny.vocab(hidden_size=48).embedding
    one = tiny.eagle3_head(embedding, hidden_size=32, head_dim=8)
    assert one.embed_tokens.weight.shape == (320, 32) and one.embed_tokens.weight.requires_grad
    assert one.fc.weight.shape == (32, 2 * 48)
    save_head(one, tmp_path / "head")
    assert "embed_tokens.weight" in load_file(tmp_path / "head" / "model.safetensors")
    two = load_head(tmp_path / "head")
    assert torch.equal(one.state_dict()["embed_tokens.weight"], two.state_dict()["embed_tokens.weight"])
    with pytest.raises(UserError, match="its hidden size is 48, that of t is 32"):
        check_sizes(two.config, tiny.vocab(), "head", "t")


def test_an_embedding_that_is_not_the_targets_stays_in_the_file(tmp_path: Path) -> None:
    one = head()
    save_head(one, tmp_path / "head")
    weights = tmp_path / "head" / "model.safetensors"
    state = load_file(weights)
    for own, kept in ((tiny.vocab().embedding.clone(), False), (tiny.vocab(seed=1).embedding, True)):
        save_file({**state, "embed_tokens.weight": own}, weights)
        loaded = restored(tmp_path / "head")
        assert torch.equal(loaded.embed_tokens.weight, own) and loaded.saves_embedding == kept
        save_head(loaded, tmp_path / "again")
        assert ("embed_tokens.weight" in load_file(tmp_path / "again" / "model.safetensors")) == kept


def expected_output(made: Eagle3Head, tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """(output before the final norm [T, D], logits [T, Vd]) from the definition of the layer."""
    eps, layer = made.config.rms_norm_eps, made.midlayer

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    h = taps @ made.fc.weight.T
    e = made.embed_tokens.weight[tokens]
    x = torch.cat([normed(e, layer.input_layernorm.weight), normed(h, layer.hidden_norm.weight)], dim=-1)
    h = h + layer.self_attn(x[None], made.rotary.between(0, len(tokens), x))[0]  # as Llama's: test_layers
    x = normed(h, layer.post_attention_layernorm.weight)
    gate, up, down = (getattr(layer.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
    h = h + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return h, normed(h, made.norm.weight) @ made.lm_head.weight.T


def slots(count: int = 7, taps: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 320, (1, count), generator=generator)
    return tokens, torch.randn(1, count, taps * 32, generator=generator), torch.arange(count)[None]


@torch.no_grad()
def test_the_layer_is_its_definition_and_the_residual_is_not_normed() -> None:
    made = head()
    random_norms(made)
    tokens, taps, positions = slots()
    hidden, logits = expected_output(made, tokens[0], taps[0])
    out = made(tokens, made.fuse(taps), positions)
    torch.testing.assert_close(out[0], hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.logits(out)[0], logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 3}, {"norm_output": True, "qk_norm": True}])
def test_whole_sequence_buffered_and_unrolled_forwards_agree(changes: dict[str, Any]) -> None:
    made = head(**changes)
    random_norms(made)
    tokens, taps, positions = slots()
    features = made.fuse(taps)
    whole = made(tokens, features, positions)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    memories = [UnrollMemory() for _ in range(made.config.num_hidden_layers)]
    unrolled = made.unroll(tokens, features, positions, memories)
    torch.testing.assert_close(unrolled, whole, rtol=1e-4, atol=1e-4)
    draft = EagleDraft(made)
    buffers = [KeyValueBuffer.allocate(1, made.config, 16, features) for _ in range(made.config.num_hidden_layers)]
    for first, last in ((0, 4), (4, 7)):
        part = slice(first, last)
        seen = torch.zeros(last - first, last).masked_fill(~mask[part, :last], float("-inf"))[None, None]
        out = draft(tokens[:, part], features[:, part], (first, last), seen, buffers)
        for buffer in buffers:
            buffer.length = last
        torch.testing.assert_close(out, whole[:, part], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_norm_output_feeds_back_the_normed_state_and_norms_it_once() -> None:
    plain, normed = head(), head(norm_output=True)
    random_norms(plain)
    normed.load_state_dict(plain.state_dict())
    tokens, taps, positions = slots()
    before, after = (made(tokens, made.fuse(taps), positions) for made in (plain, normed))
    torch.testing.assert_close(after, plain.norm(before))
    torch.testing.assert_close(normed.logits(after), plain.logits(before))
    assert not torch.allclose(after, before, atol=1e-2)


@torch.no_grad()
def test_fc_norm_norms_each_fused_feature_alone() -> None:
    made = head(fc_norm=True)
    random_norms(made)
    _, taps, _ = slots()
    scaled = taps.clone()
    scaled[..., 32:64] *= 50.0  # a norm over all of them at once would shrink the other two
    torch.testing.assert_close(made.fuse(scaled), made.fuse(taps), rtol=1e-4, atol=1e-4)
    weights = [made.state_dict()[f"fc_norm.{i}.weight"] for i in range(3)]
    pieces = [F.rms_norm(taps[..., 32 * i : 32 * i + 32], (32,), weights[i], 1e-6) for i in range(3)]
    torch.testing.assert_close(made.fuse(taps), torch.cat(pieces, dim=-1) @ made.fc.weight.T)
    assert {f"fc_norm.{i}.weight" for i in range(3)} == made.state_dict().keys() - head().state_dict().keys()


def test_an_lm_head_started_from_the_target_has_its_rows_of_the_draft_vocabulary() -> None:
    target, vocab = tiny.llama(num_blocks=8), tiny.vocab()
    vocabulary = DraftVocabulary.of_ids(torch.arange(5, 320, 2), 320)
    taken = Eagle3Section(lm_head_init="target")
    head = new_head(taken, target.config, vocab, seed=1, after_blocks=(2, 4, 5), vocabulary=vocabulary)
    assert isinstance(head, Eagle3Head) and torch.equal(head.lm_head.weight, vocab.lm_head[5::2])
    other = new_head(Eagle3Section(), target.config, vocab, seed=1, after_blocks=(2, 4, 5), vocabulary=vocabulary)
    assert isinstance(other, Eagle3Head) and torch.equal(other.fc.weight, head.fc.weight)  # nothing else moved
    with pytest.raises(UserError, match="lm_head_init"):
        narrow = replace(taken, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
        new_head(narrow, target.config, vocab, seed=1, after_blocks=(2, 4, 5), vocabulary=vocabulary)


def test_equal_vocabularies_need_no_tables_in_the_file(tmp_path: Path) -> None:
    save_head(head(ids=torch.arange(320)), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in state.items() if k not in ("d2t", "t2d")}, tmp_path / "model.safetensors")
    assert restored(tmp_path).vocabulary.ids.equal(torch.arange(320))
    save_file({k: v for k, v in state.items() if k != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="one of d2t and t2d"):
        restored(tmp_path)
