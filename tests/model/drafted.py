"""What a head drafts, by plain forwards over the whole text: without caches, trees or an unroll."""

from typing import Any

import torch
from torch import Tensor

from aerie.model.vocab_weights import VocabWeights


def drafted(head: Any, features: Tensor, tokens: Tensor) -> Tensor:
    """Outputs [n, D] of an EAGLE head that reads true features [T, D], and then its own outputs.

    tokens [T + n - 1]: the one after each feature's own.
    """
    known = features[None]
    for count in range(len(features), len(tokens) + 1):
        out = head(tokens[None, :count], known, torch.arange(count)[None])
        known = torch.cat([known, out[:, -1:]], dim=1)
    return known[0, len(features) :]


def log_laws(
    head: Any, vocab: VocabWeights, tokens: Tensor, last_hidden: Tensor, taps: Any
) -> Tensor:
    """log q [n, V or Vd] after each of the last n tokens of T + n; the target's states of the
    first T are known."""
    known = len(last_hidden)
    steps = range(len(tokens) - known)
    if head.kind == "medusa":
        head.laws.vocab = vocab
        logits = torch.stack([*head(last_hidden[-1])][: len(steps)])
    elif head.kind == "hydra":
        state = head.prefix(last_hidden[None], torch.arange(known))[:, -1]
        embeddings = vocab.embedding[tokens[known:]]
        logits = torch.cat([head.step(k, state, embeddings[: k + 1].reshape(1, -1)) for k in steps])
    elif head.kind == "block":
        anchor = torch.tensor([[known]])
        states = head(tokens[anchor], taps[None], anchor, vocab.embedding)[0, 0, : len(steps)]
        ends = [tokens[[max(known + k - i, 0) for i in (2, 1, 0)]] for k in steps]
        before = torch.stack(ends)[:, -head.config.markov_order :]
        logits = head.correct(vocab.logits(states), before, states)
    else:
        features, ends = (head.fuse(taps), head) if head.kind == "eagle3" else (last_hidden, vocab)
        logits = ends.logits(drafted(head, features, tokens[1:]))
    return logits.log_softmax(-1)
