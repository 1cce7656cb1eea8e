"""A decoder layer for drafting: projections that read the same input are one product, and nothing is called in between.

Drafting runs a tiny batch through one layer many times a cycle, so what it costs is the number of calls. The merged
weights are not copies: the layer's own parameters become views of them, so loading new weights into the layer (in
place) changes both.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.layers import MLP, Attention, KeyValueBuffer, RMSNorm


class FusedAttention:
    """Attention over a buffer's rows and the new ones, with one product for queries, keys and values."""

    def __init__(self, attention: Attention) -> None:
        sizes = attention.sizes
        self.heads, self.kv_heads, self.head_dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.weight = merge([projection.weight for projection in projections])  # [(H + 2 KV) * hd, inputs]
        self.bias = merge([p.bias for p in projections]) if attention.q_proj.bias is not None else None
        self.out = attention.o_proj.weight
        self.norms = (attention.q_norm, attention.k_norm) if sizes.qk_norm else None

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, buffer: KeyValueBuffer) -> Tensor:
        """x [1, n, inputs], rope [.., n or 1, hd], additive mask [1, 1, n, S] -> [1, n, D]."""
        both = F.linear(x, self.weight, self.bias).view(1, x.shape[1], -1, self.head_dim).transpose(1, 2)
        q_and_k, v = both.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.norms is not None:
            q, k = q_and_k.split([self.heads, self.kv_heads], dim=1)
            q_and_k = torch.cat([self.norms[0](q), self.norms[1](k)], dim=1)
        cos, sin = rope
        half = self.head_dim // 2
        turned = torch.cat([-q_and_k[..., half:], q_and_k[..., :half]], dim=-1)
        q, k = (q_and_k * cos + turned * sin).split([self.heads, self.kv_heads], dim=1)
        k, v = buffer.append(k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)
        return F.linear(out.transpose(1, 2).flatten(2), self.out)


class FusedMLP:
    """SwiGLU after its norm, with one product for gate and up."""

    def __init__(self, norm: RMSNorm, mlp: MLP) -> None:
        self.norm = norm
        self.weight = merge([mlp.gate_proj.weight, mlp.up_proj.weight])  # [2 I, D]
        self.down = mlp.down_proj.weight

    def __call__(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, self.norm.weight.shape, self.norm.weight, self.norm.eps)
        gate, up = F.linear(normed, self.weight).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), self.down)


@torch.no_grad()
def merge(parameters: list[Tensor]) -> Tensor:
    """The parameters stacked along their first axis; each becomes a view of its part."""
    merged = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, merged.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return merged
