"""Drafting with a trained head: EAGLE's, Medusa's or Hydra's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.infer.decode.shape import Drafter
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head, EagleDraft
from aerie.model.layers import KeyValueBuffer
from aerie.model.target import Target


class EagleDrafter(Drafter):
    # Slot p holds (feature of t_p, token t_{p+1}) at position p; its output stands for the feature of t_{p+1}
    # slots with the head's own predictions are forgotten at the next commit: no guess outlives its cycle
    def __init__(self, head: Eagle1Head | Eagle3Head, target: Target) -> None:
        self.head, self._draft = head, EagleDraft(head)
        self._logits: Callable[[Tensor], Tensor] = target.logits
        self.max_positions = head.config.max_position_embeddings
        if isinstance(head, Eagle3Head):
            self.after_blocks = head.config.after_blocks
            self._logits, self._fuse = head.logits, head.fuse
        names = ("_draft", "_logits", "_fuse") if self.after_blocks else ("_draft", "_logits")
        self.forwards = tuple((self, name) for name in names)
        self._buffers: list[KeyValueBuffer] = []
        self._length = self._levels = 0  # committed slots; drafted levels
        self._last = self._hidden = torch.empty(0)  # [1, 1, D] of the last committed slot; [1, rows of last call, D]
        self._seen = self._nothing = torch.empty(1, 0)  # additive [rows of the last call, drafted slots]
        self._own: dict[int, Tensor] = {}  # additive [n, n]: slots that see themselves alone

    def target_ids(self, columns: Tensor) -> Tensor:
        return self.head.vocabulary.target_ids(columns) if isinstance(self.head, Eagle3Head) else columns

    def reset(self, prompt: Tensor, capacity: int) -> None:
        like, config = self.head.fc.weight, self.head.config
        self._buffers = [KeyValueBuffer.allocate(1, config, capacity, like) for _ in range(config.num_hidden_layers)]
        self._nothing, self._length = like.new_empty(1, 0), 0

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        if self.after_blocks:
            features = self._fuse(features)
        first, total = self._length, self._length + tokens.shape[0]
        mask = causal(features, first, total)
        for buffer in self._buffers:  # forgets the drafted slots
            buffer.length = first
        hidden = self._draft(tokens[None], features[None], (first, total), mask, self._buffers)
        self._length = total
        self._hidden = self._last = hidden[:, -1:]

    def start(self) -> Tensor:
        for buffer in self._buffers:
            buffer.length = self._length
        self._hidden, self._seen, self._levels = self._last, self._nothing, 0
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        count, position = tokens.shape[0], self._length + self._levels
        if count not in self._own or self._own[count].device != self._nothing.device:
            eye = torch.eye(count, dtype=torch.bool, device=self._nothing.device)
            self._own[count] = self._nothing.new_full((count, count), float("-inf")).masked_fill_(eye, 0.0)
        # a drafted slot sees the drafted slots that its parent saw, and itself
        self._seen = torch.cat([self._seen.index_select(0, parents), self._own[count]], dim=1)
        mask = F.pad(self._seen, (self._length, 0))
        features = self._hidden.index_select(1, parents)
        at = (position, position + 1)  # all slots of a level have one position
        self._hidden = self._draft(tokens[None], features, at, mask[None, None], self._buffers)
        for buffer in self._buffers:
            buffer.length += count
        self._levels += 1
        return self._log_q()

    def _log_q(self) -> Tensor:
        return self._logits(self._hidden[0]).float().log_softmax(-1)


def causal(features: Tensor, first: int, total: int) -> Tensor:
    """The additive mask [1, 1, total - first, total] of new rows."""
    return features.new_full((total - first, total), float("-inf")).triu_(first + 1)[None, None]


class MedusaDrafter(Drafter):
    # one forward gives the laws of all levels: row k - 1 of the head is the law of every node of level k
    forwards_per_tree = 1

    def __init__(self, head: Any, target: Target | None = None) -> None:
        self.head, self.max_levels, self.forwards = head, head.config.num_heads, ((head, "forward"),)
        self._feature = self._log_q = torch.empty(0)  # [1, D]; [num_heads, 1, V]
        self._level = 0

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        self._feature = features[-1:]

    def start(self) -> Tensor:
        self._log_q, self._level = self.head(self._feature).float().log_softmax(-1), 0
        return self._log_q[0]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        return self._log_q[self._level].expand(tokens.shape[0], -1)


class HydraDrafter(Drafter):
    # A node's law sees the state before the root (with Hydra++ a prefix layer's) and the embeddings down to it
    def __init__(self, head: Any, target: Target) -> None:
        self.head, self.max_levels, self.forwards = head, head.config.num_heads, ((head, "step"),)
        if head.config.prefix_layer:
            self.max_positions = head.config.max_position_embeddings
            self.forwards += ((head, "prefix"),)
        self._embedding = target.vocab.embedding.to(target.device)  # the target may span several devices
        self._buffers: list[KeyValueBuffer] = []
        self._length = self._level = 0  # positions whose features are known
        self._state = self._root = torch.empty(0)  # [1, D]; the root's embedding [1, D]
        self._embeddings = torch.empty(0)  # [rows of the last call, (level + 1) * D]

    def reset(self, prompt: Tensor, capacity: int) -> None:
        self._length, self._buffers = 0, []
        if self.head.config.prefix_layer:
            self._buffers = [KeyValueBuffer.allocate(1, self.head.config, capacity, self._embedding)]

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        first, self._length = self._length, self._length + tokens.shape[0]
        for buffer in self._buffers:
            span = (first, self._length)
            features = self.head.prefix(features[None], span, causal(features, *span), self._buffers)[0]
            buffer.length = self._length
        self._state = features[-1:]
        self._root = F.embedding(tokens[-1:], self._embedding)

    def start(self) -> Tensor:
        self._level, self._embeddings = 0, self._root
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._level += 1
        above = self._embeddings.index_select(0, parents)
        self._embeddings = torch.cat([above, F.embedding(tokens, self._embedding)], dim=1)
        return self._log_q()

    def _log_q(self) -> Tensor:
        state = self._state.expand(self._embeddings.shape[0], -1)
        return self.head.step(self._level, state, self._embeddings).float().log_softmax(-1)
