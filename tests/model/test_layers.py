"""The decoder layer against transformers' Llama and Qwen3: same RoPE, same attention, same norms."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from aerie.configs.errors import UserError
from aerie.model.layers import DecoderLayer, DraftLayer, KeyValueBuffer, LayerSizes, Rotary

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=str)
def test_the_layer_is_llamas_and_with_query_and_key_norms_qwen3s(family: str, scaling: dict[str, Any] | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    kinds: Any = {"llama": (LlamaConfig, LlamaDecoderLayer), "qwen3": (Qwen3Config, Qwen3DecoderLayer)}[family]
    config = kinds[0](**SIZES, max_position_embeddings=128, rope_parameters=rope)
    config._attn_implementation = "sdpa"
    theirs = kinds[1](config, 0).eval()
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.3)
    ours = DecoderLayer(LayerSizes(**SIZES, qk_norm=family == "qwen3"))
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(1, 11, 32), torch.arange(3, 14)[None]
    cos_and_sin = LlamaRotaryEmbedding(LlamaConfig(**SIZES, max_position_embeddings=128, rope_parameters=rope))(
        x, positions
    )
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
    expected = theirs(x, attention_mask=mask, position_embeddings=cos_and_sin)
    table = Rotary(5e5, scaling, 16, 128)
    torch.testing.assert_close(ours(x, None, table.at(positions, 14, x)), expected, rtol=1e-5, atol=1e-5)
    draft, buffer = DraftLayer(ours), KeyValueBuffer.allocate(1, ours.self_attn.sizes, 16, x)
    added = torch.zeros(11, 11).masked_fill(~mask[0, 0], float("-inf"))[None, None]
    found = draft(x, x, table.between(3, 14, x), added, buffer)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(x, None, table.at(positions, 14, x)), expected, rtol=1e-5, atol=1e-5)  # views now


def test_a_position_beyond_the_heads_length_and_a_rope_that_changes_with_the_length_are_refused() -> None:
    rotary = Rotary(1e4, None, 8, 32)
    rotary.at(torch.arange(32), 32, torch.zeros(1))
    with pytest.raises(UserError, match="max_position_embeddings 32"):
        rotary.at(torch.arange(33), 33, torch.zeros(1))
    with pytest.raises(UserError, match="dynamic"):
        Rotary(1e4, {"rope_type": "dynamic", "factor": 2.0}, 8, 32)
