"""The decoder layer against transformers' Llama and Qwen3, and the unroll's attention against one
masked softmax."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from aerie.model.kv_cache import KeptRows, KeyValueCache
from aerie.model.layers import DecoderLayer, HeadLayer, Rotary, attend
from aerie.model.unrolled_attention import UnrollMemory
from tests.tiny import refused

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: its kernels wait"),
]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def sized(scaling: dict[str, Any] | None = None, **changes: Any) -> Any:
    return SimpleNamespace(**{**SIZES, "rope_theta": 5e5, "rope_scaling": scaling, **changes})


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=str)
def test_layer(family: str, scaling: dict[str, Any] | None) -> None:
    """The layer is Llama's and with query and key norms Qwen3's."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    kinds: Any = {
        "llama": (LlamaConfig, LlamaDecoderLayer),
        "qwen3": (Qwen3Config, Qwen3DecoderLayer),
    }[family]
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
    table, cache = (
        Rotary(sized(scaling)),
        KeyValueCache.empty(1, sized(), KeptRows(16, x.device, x.dtype), x),
    )
    cache.begin(11)
    torch.testing.assert_close(
        ours(x, None, table.at(positions, 14, x)), expected, rtol=1e-5, atol=1e-5
    )
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    found = HeadLayer(ours)(x[0], x[0], table.at(positions, 14, x), added, (cache, 0))
    torch.testing.assert_close(found[None], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        ours(x, None, table.at(positions, 14, x)), expected, rtol=1e-5, atol=1e-5
    )  # views now


def test_kept_mask() -> None:
    """The mask of a text hides what it does not keep."""
    kept = KeptRows(16, torch.device("cpu"), torch.bfloat16)
    for count in (7, 3, -4, 1):
        kept.advance(count)
        assert (kept.mask == 0).equal(kept.positions < kept.length) and kept.free[0] == kept.length
    kept.restart()
    assert (kept.mask == torch.finfo(torch.bfloat16).min).all()


def test_rope_limits() -> None:
    """A position beyond the head's length and a rope that changes with the length are refused."""
    rotary = Rotary(sized(max_position_embeddings=32))
    refused("max_position_embeddings 32", rotary.at, torch.arange(33), 33, torch.zeros(1))
    refused("dynamic", Rotary, sized({"rope_type": "dynamic", "factor": 2.0}))


STEPS = 3  # of the unroll
DOCUMENTS = (5, 1, 20, 7)


def _made(
    heads: int, kv: int = 2, dim: int = 8
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """Step 2's queries, keys and values of all steps (33, 20 and 12 slots), and the places of
    slots that go on."""
    generator = torch.Generator().manual_seed(heads)
    pairs = [(1, kv, length, dim) for length in (33, 20, 12)]
    made = [
        2.0 * torch.randn(size, generator=generator)
        for size in ((1, heads, 12, dim), *pairs, *pairs)
    ]
    q, *rest = [x.requires_grad_() for x in made]
    return q, rest[:STEPS], rest[STEPS:], torch.randperm(33, generator=generator)[:20]


def _by_one_mask(
    q: Tensor, keys: list[Tensor], values: list[Tensor], places: Tensor, documents: Any
) -> Tensor:
    """All scores under one boolean mask [block-causal | identity | identity]."""
    owner, (n, length) = (
        torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)),
        (q.shape[2], 33),
    )
    causal = torch.ones(length, length, dtype=torch.bool).tril() & (owner[:, None] == owner)
    mask = torch.cat(
        [causal[places[:n]], *(torch.eye(n, key.shape[2]).bool() for key in keys[1:])], dim=1
    )
    k, v = (
        torch.cat(list(part), dim=2).repeat_interleave(q.shape[1] // 2, dim=1)
        for part in (keys, values)
    )
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def _value_and_gradients(out: Tensor, *of: Tensor) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), of)]


def _last_step(
    q: Tensor, keys: list[Tensor], values: list[Tensor], places: Tensor, documents: Any
) -> Tensor:
    memory = UnrollMemory(documents, places, True, keys[:-1], values[:-1])
    out = attend(q, keys[-1], values[-1], None, memory)
    return out.unflatten(2, (q.shape[1], -1)).transpose(1, 2)


def _explicit(q: Tensor, k: Tensor) -> Tensor:
    """Causal scores [..., n, n]."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(
        torch.ones(q.shape[-2], k.shape[-2]).triu(1).bool(), -1e30
    )


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = _explicit(q, k)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor
) -> list[Tensor]:
    p = (_explicit(q, k) - logs[..., None]).exp()
    score = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return [score @ k, score.mT @ q, p.mT @ g]


def _apart(borders: Tensor, *parts: Tensor) -> Any:
    """Splits [N, H or KV, hd] into documents [H, n, hd]."""
    heads = max(x.shape[1] for x in parts)
    for first, stop in pairwise(borders.tolist()):
        cut = [x[first:stop].transpose(0, 1) for x in parts]
        yield [x.repeat_interleave(heads // len(x), dim=0) for x in cut]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, _: Tensor, longest: int, *rest: Any
) -> Any:
    assert longest == borders.diff().max() and rest == (longest, 0.0, True, False)
    out, logs = zip(*(_forward(*cut) for cut in _apart(borders, q, k, v)), strict=True)
    return torch.cat(out, 1).transpose(0, 1).contiguous(), torch.cat(logs, 1), *[torch.empty(0)] * 3


def _flash_backward(*given: Any) -> Any:
    g, q, k, v, out, logs, borders = given[:7]
    assert g.is_contiguous() and logs.is_contiguous() and logs.shape == (q.shape[1], len(q))
    cuts = _apart(borders, g, q, k, v, out, logs.T[..., None].expand_as(q))
    parts = (_backward(*cut[:5], cut[5][..., 0]) for cut in cuts)
    found = [torch.cat(column, 1).transpose(0, 1) for column in zip(*parts, strict=True)]
    return found[0], *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in found[1:])


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: None, *rest: Any) -> Any:
    out, logs = _forward(q, k, v)
    return (
        out,
        F.pad(logs, (0, -logs.shape[-1] % 32), value=math.inf),
        torch.empty(()),
        torch.empty(()),
    )


def _efficient_backward(*given: Any) -> Any:
    g, q, k, v, _, out, _, _, count, _, logs = given[:11]
    assert (
        out.is_contiguous()
        and logs.is_contiguous()
        and logs.shape[-1] % 32 == 0
        and given[-2:] == (1, False)
    )
    cuts = (x.transpose(1, 2) for x in (g, q, k, v, out))
    return *(x.transpose(1, 2) for x in _backward(*cuts, logs[..., :count])), torch.empty(0)


CUDA = {
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_efficient_attention_backward": _efficient_backward,
}


@pytest.mark.parametrize("kernel", ["cpu", "flash", "efficient"])
@pytest.mark.parametrize("documents", [(33,), DOCUMENTS], ids=str)
@pytest.mark.parametrize(("heads", "steps"), [(2, STEPS), (4, STEPS), (4, 1)])
def test_unroll_softmax(
    kernel: Any, documents: Any, heads: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unroll's attention is one masked softmax, in value and gradient."""
    library = torch.library.Library("aten", "IMPL")  # stand-ins for CUDA's kernels
    for name, function in CUDA.items():
        library.impl(name, function, "CPU")
    monkeypatch.setattr("aerie.model.unrolled_attention.kernel_of", lambda x: kernel)
    q, keys, values, places = _made(heads)
    keys, values = keys[:steps], values[:steps]
    expected = _value_and_gradients(
        _by_one_mask(q, keys, values, places, documents), q, *keys, *values
    )
    found = _value_and_gradients(_last_step(q, keys, values, places, documents), q, *keys, *values)
    library._destroy()
    for x, y in zip(found, expected, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


@pytest.mark.parametrize(
    ("device", "dtype", "error"),
    [
        ("cpu", torch.bfloat16, 0.1),
        pytest.param("cuda", torch.bfloat16, 0.1, marks=GPU),
        pytest.param("cuda", torch.float32, 1e-2, marks=GPU),
    ],
)
def test_unroll_devices(device: str, dtype: torch.dtype, error: float) -> None:
    """The unroll's attention on every device."""
    q, keys, values, places = _made(4)
    expected = _value_and_gradients(
        _by_one_mask(q, keys, values, places, DOCUMENTS), q, *keys, *values
    )
    moved = [x.detach().to(device, dtype).requires_grad_() for x in (q, *keys, *values)]
    out = _last_step(
        moved[0], moved[1 : 1 + STEPS], moved[1 + STEPS :], places.to(device), DOCUMENTS
    )
    for x, y in zip(_value_and_gradients(out, *moved), expected, strict=True):
        assert x.dtype == dtype and (x.cpu().float() - y).abs().max() < error * y.abs().max()
