"""The decoder layer against transformers' Llama and Qwen3, and the unroll's attention against one masked softmax."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from aerie.configs.errors import UserError
from aerie.model import layers
from aerie.model.layers import DecoderLayer, Documents, DraftLayer, KeyValueBuffer, Rotary, UnrollMemory

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def sized(scaling: dict[str, Any] | None = None, **changes: Any) -> Any:
    return SimpleNamespace(**{**SIZES, "rope_theta": 5e5, "rope_scaling": scaling, **changes})


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=str)
def test_the_layer_is_llamas_and_with_query_and_key_norms_qwen3s(family: str, scaling: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    kinds: Any = {"llama": (LlamaConfig, LlamaDecoderLayer), "qwen3": (Qwen3Config, Qwen3DecoderLayer)}[family]
    config = kinds[0](**SIZES, rope_parameters=rope)
    config._attn_implementation = "sdpa"
    theirs = kinds[1](config, 0).eval()
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.3)
    ours = DecoderLayer(sized(qk_norm=family == "qwen3"))
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(1, 11, 32), torch.arange(3, 14)[None]
    cos_and_sin = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=rope))(x, positions)
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
    expected = theirs(x, attention_mask=mask, position_embeddings=cos_and_sin)
    table, buffer = Rotary(sized(scaling)), KeyValueBuffer.allocate(1, sized(), 16, x)
    torch.testing.assert_close(ours(x, None, table.at(positions, 14, x)), expected, rtol=1e-5, atol=1e-5)
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    found = DraftLayer(ours)(x, x, table.between(3, 14, x), added, buffer)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(x, None, table.at(positions, 14, x)), expected, rtol=1e-5, atol=1e-5)  # views now


def test_a_position_beyond_the_heads_length_and_a_rope_that_changes_with_the_length_are_refused() -> None:
    rotary = Rotary(sized(max_position_embeddings=32))
    with pytest.raises(UserError, match="max_position_embeddings 32"):
        rotary.at(torch.arange(33), 33, torch.zeros(1))
    with pytest.raises(UserError, match="dynamic"):
        Rotary(sized({"rope_type": "dynamic", "factor": 2.0}))


STEPS = 3  # of the unroll


def _made(length: int, heads: int = 4, kv: int = 2, dim: int = 8) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(length)
    sizes = [(2, heads, length, dim), *[(2, kv, length, dim)] * (2 * STEPS)]
    q, *rest = [(2.0 * torch.randn(size, generator=generator)).requires_grad_() for size in sizes]
    return q, rest[:STEPS], rest[STEPS:]


def _by_one_mask(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
    """All T x 3T scores under one boolean mask [block-causal | identity | identity]."""
    length, groups = q.shape[2], q.shape[1] // keys[0].shape[1]
    owner = torch.cat([torch.full((last - first,), first) for first, last in layers.spans(documents, length)])
    causal = torch.ones(length, length, dtype=torch.bool).tril() & (owner[:, None] == owner)
    mask = torch.cat([causal, *[torch.eye(length, dtype=torch.bool)] * (len(keys) - 1)], dim=1)
    k, v = (torch.cat(list(part), dim=2).repeat_interleave(groups, dim=1) for part in (keys, values))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def _value_and_gradients(made: tuple[Tensor, list[Tensor], list[Tensor]], out: Tensor) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    q, keys, values = made
    return [out, *torch.autograd.grad((out * weights).sum(), [q, *keys, *values])]


def _last_step(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
    memory = UnrollMemory(documents, keys[:-1], values[:-1])
    return layers.attend(q, keys[-1], values[-1], None, memory).unflatten(2, (q.shape[1], -1)).transpose(1, 2)


@pytest.mark.parametrize("documents", [None, (5, 1, 20, 8)])  # the last one is cut by a slot
@pytest.mark.parametrize("heads", [2, 4])
def test_merged_and_dense_attention_are_one_masked_softmax_in_value_and_gradient(
    documents: Documents, heads: int
) -> None:
    made = _made(33, heads)
    expected = _value_and_gradients(made, _by_one_mask(*made, documents))
    merged = _value_and_gradients(made, _last_step(*made, documents))
    dense = _value_and_gradients(made, layers.dense_attention(*made, documents=documents, chunk=7))
    for found in (merged, dense):
        for x, y in zip(found, expected, strict=True):
            assert (x - y).abs().max() <= 1e-5 * y.abs().max()
    keys, values = ([x.bfloat16() for x in part] for part in made[1:])
    rounded = _last_step(made[0].bfloat16(), keys, values, documents)
    assert rounded.dtype == torch.bfloat16 and (rounded.float() - expected[0]).abs().max() < 0.1
