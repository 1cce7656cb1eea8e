"""The slow forms of training: drafting from each slot on, step by step, as the head would be asked in decoding."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aerie.data.cache import CachedRow
from aerie.model.heads.eagle import Eagle3Head, EagleDraft
from aerie.model.layers import KeyValueBuffer
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


def log_law(head: Any, vocab: VocabWeights, row: CachedRow, slot: int, index: int) -> Tensor:
    """log q [V] of one Medusa or Hydra head at one slot, asked of the head as drafting asks it."""
    if head.kind == "medusa":
        head.laws.vocab = vocab
        return head(row.last_hidden[slot])[index].log_softmax(-1)
    state = head.prefix(row.last_hidden[None, : slot + 1], (0, slot + 1))[:, -1]
    embeddings = vocab.embedding[row.input_ids[slot + 1 : slot + 2 + index]].flatten()[None]
    return head.step(index, state, embeddings)[0].log_softmax(-1)


def choices(head: Any, vocab: VocabWeights, row: CachedRow, slot: int, steps: int) -> Tensor:
    """The tokens [steps] that a head, or a small LM, drafts greedily from a slot on, along the row's own tokens."""
    if not hasattr(head, "kind"):
        return head(row.input_ids[None, : slot + 1 + steps]).logits[0, slot + 1 :].argmax(-1)
    if head.kind in ("medusa", "hydra"):
        return torch.stack([log_law(head, vocab, row, slot, k).argmax() for k in range(steps)])
    outputs = drafted(head, row, slot, steps)
    if isinstance(head, Eagle3Head):
        return head.vocabulary.target_ids(head.logits(outputs).argmax(-1))
    return vocab.logits(outputs).argmax(-1)
