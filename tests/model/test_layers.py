"""The decoder layer against transformers' Llama: same RoPE, same attention, same norm."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from aerie.configs.errors import UserError
from aerie.model.layers import DecoderLayer, LayerSizes, Rotary

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_the_layer_is_llamas(scaling: dict[str, object] | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": 5e5},
    )
    config._attn_implementation = "sdpa"
    theirs = LlamaDecoderLayer(config, 0).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0.0, 0.3)
    ours = DecoderLayer(LayerSizes(32, 48, 4, 2, 16, 1e-5))
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, 11, 32), torch.arange(11)[None] + 3
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
    expected = theirs(x, attention_mask=mask, position_embeddings=(cos, sin))
    rope = Rotary(5e5, scaling, 16, 128).at(positions, 14, x)
    out = ours(x, None, rope)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_position_beyond_the_heads_length_is_refused() -> None:
    rotary = Rotary(1e4, None, 8, 32)
    rotary.at(torch.arange(32), 32, torch.zeros(1))
    with pytest.raises(UserError, match="max_position_embeddings 32"):
        rotary.at(torch.arange(33), 33, torch.zeros(1))


def test_a_rope_that_changes_with_the_length_is_refused() -> None:
    with pytest.raises(UserError, match="dynamic"):
        Rotary(1e4, {"rope_type": "dynamic", "factor": 2.0}, 8, 32)
