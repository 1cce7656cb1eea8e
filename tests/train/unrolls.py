"""Two slow forms of the training-time test: drafting step by step, and one dense mask over all steps' keys."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aerie.data.cache import CachedRow
from aerie.model.heads.eagle import Eagle3Head, EagleDraft
from aerie.model.layers import KeyValueBuffer, rotate
from aerie.model.target import VocabWeights
from tests import tiny


def rows(count: int, seed: int = 0, num_taps: int = 2, hidden_size: int = 32) -> list[CachedRow]:
    """Rows with random taps besides."""
    generator = torch.Generator().manual_seed(seed + 100)
    made = []
    for row in tiny.rows(count, hidden_size=hidden_size, seed=seed):
        made.append(replace(row, taps=torch.randn(len(row.input_ids), num_taps * hidden_size, generator=generator)))
    return made


def drafted(head: Any, row: CachedRow, slot: int, steps: int) -> Tensor:
    """[steps, D] outputs of drafting from `slot`: true features for the prefix, then own outputs and given tokens."""
    assert row.taps is not None
    config, draft = head.config, EagleDraft(head)
    buffers = [KeyValueBuffer.allocate(1, config, 64, row.taps) for _ in range(config.num_hidden_layers)]
    features = head.fuse(row.taps) if isinstance(head, Eagle3Head) else row.last_hidden
    outputs, x, first, count = [], features[None, : slot + 1], 0, slot + 1
    for _ in range(steps):
        end = first + count
        mask = torch.full((count, end), float("-inf")).triu_(first + 1)[None, None]
        x = draft(row.input_ids[None, first + 1 : end + 1], x, (first, end), mask, buffers)[:, -1:]
        for buffer in buffers:
            buffer.length = end
        outputs.append(x[0, 0])
        first, count = end, 1
    return torch.stack(outputs)


def starts(row: CachedRow) -> list[tuple[int, int]]:
    """(slot, number of supervised steps) of every slot where a chain starts, by the turns alone."""
    turns, found = row.turns.tolist(), []
    for slot in range(len(turns) - 2):
        if turns[slot + 1]:
            alive = 0
            while slot + 2 + alive < len(turns) and turns[slot + 2 + alive] == turns[slot + 1]:
                alive += 1
            if alive:
                found.append((slot, alive))
    return found


def cross_entropy(head: Eagle3Head, vocab: VocabWeights, output: Tensor, state: Tensor) -> tuple[float, bool]:
    """H(p, q) of one slot over the draft vocabulary, and whether the target's choice is in it."""
    logits = state @ vocab.lm_head.T
    law = logits[head.vocabulary.ids].softmax(-1)
    return -(law * head.logits(output).log_softmax(-1)).sum().item(), bool(head.vocabulary.t2d[logits.argmax()])


def by_one_mask(head: Eagle3Head, row: CachedRow, steps: int) -> list[Tensor]:
    """steps x [T-1, D] outputs: at each step one softmax over all keys so far, masked [causal | I | I ...].

    Written from the weights alone, without the head's own forward: one layer, one key/value head per query head.
    """
    assert row.taps is not None
    layer, config = head.midlayer, head.config
    attention, slots, dim = layer.self_attn, len(row.input_ids) - 1, config.head_dim
    ids = torch.cat([row.input_ids, row.input_ids.new_zeros(steps)])
    hidden, outputs = row.taps[:-1] @ head.fc.weight.T, []
    keys, values, masks = [], [], []
    for step in range(steps):
        embedded = head.embed_tokens.weight[ids[1 + step : 1 + step + slots]]
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
        shape = (slots, config.num_attention_heads, dim)
        q, k, v = (
            (x @ projection.weight.T).view(shape).transpose(0, 1)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        rope = head.rotary.at(torch.arange(slots) + step, config.max_position_embeddings, x)
        keys.append(rotate(k, *rope))
        values.append(v)
        identity = torch.eye(slots, dtype=torch.bool)
        masks.append(identity if step else torch.ones_like(identity).tril())
        scores = rotate(q, *rope) @ torch.cat(keys, dim=1).mT / math.sqrt(dim)
        law = scores.masked_fill(~torch.cat(masks, dim=1), -torch.inf).softmax(-1)
        attended = (law @ torch.cat(values, dim=1)).transpose(0, 1).flatten(1) @ attention.o_proj.weight.T
        hidden = hidden + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        outputs.append(hidden)
    return outputs
