"""Drafting with an EAGLE head: its own keys and values, true features where they are known, predictions below."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.errors import UserError
from aerie.model.heads import Head
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head
from aerie.model.layers import KeyValueBuffer
from aerie.model.target import Target


class EagleDrafter:
    """Slot p holds (feature of t_p, token t_{p+1}) at position p; its output stands for the feature of t_{p+1}.

    An EAGLE-1 head takes the target's last_hidden and drafts with the target's LM head. An EAGLE-3 head takes the fused
    taps and has laws of its own over a draft vocabulary: their columns are draft ids, which `target_ids` maps.
    `commit` appends slots with the target's true features; they stay. `step` appends slots with the head's own
    predictions; they are forgotten at the next commit, so no guess ever outlives its cycle.
    """

    def __init__(self, head: Head, target: Target) -> None:
        if not isinstance(head, Eagle1Head | Eagle3Head):
            raise UserError(f"head: a {head.kind} head does not draft as EAGLE heads do; give an EAGLE head")
        self.head = head
        self._vocabulary = head.vocabulary if isinstance(head, Eagle3Head) else None
        self.target = target
        self._draft = head.fused()
        self._logits = head.logits if isinstance(head, Eagle3Head) else target.logits
        self._fuse = head.fuse if isinstance(head, Eagle3Head) else None
        self._buffers: list[KeyValueBuffer] = []
        self._length = 0  # committed slots
        self._last: Tensor | None = None  # [1, 1, D] of the last committed slot
        self._hidden: Tensor | None = None  # [1, rows of the last call, D]
        self._seen: Tensor | None = None  # additive [rows of the last call, drafted slots so far]
        self._levels = 0
        self._nothing = torch.empty(1, 0)  # the mask of the rows of a tree that has drafted none
        self._own: dict[int, Tensor] = {}  # additive masks of n slots that see themselves alone, [n, n]

    @property
    def max_positions(self) -> int:
        return self.head.config.max_position_embeddings

    @property
    def after_blocks(self) -> tuple[int, ...]:
        """The taps that `commit` is given; none: it is given last_hidden."""
        return self.head.config.after_blocks if isinstance(self.head, Eagle3Head) else ()

    def forwards(self) -> tuple[tuple[Any, str], ...]:
        """Where it calls the head, its fusion and its LM head."""
        names = ("_draft", "_logits") if self._fuse is None else ("_draft", "_logits", "_fuse")
        return tuple((self, name) for name in names)

    def target_ids(self, columns: Tensor) -> Tensor:
        """The target's token ids of columns of log q."""
        return columns if self._vocabulary is None else self._vocabulary.target_ids(columns)

    def reset(self, prompt: Tensor, capacity: int) -> None:
        """Forgets everything and makes room for `capacity` slots (prompt, answer and one tree's drafted slots)."""
        like = self.head.fc.weight
        sizes = self.head.config.sizes()
        self._buffers = [
            KeyValueBuffer.allocate(1, sizes, capacity, like) for _ in range(self.head.config.num_hidden_layers)
        ]
        self._nothing = like.new_empty(1, 0)
        self._length = 0

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        """Appends slots: last_hidden [n, D] or taps [n, L*D] of n tokens, and the n tokens [n] that follow each."""
        if self._fuse is not None:
            features = self._fuse(features)
        count, first = tokens.shape[0], self._length
        total = first + count
        self._rewind(first)
        mask = features.new_full((count, total), float("-inf")).triu_(first + 1)  # slot i sees slots <= first + i
        hidden = self._draft(tokens[None], features[None], (first, total), mask[None, None], self._buffers)
        self._length = total
        self._hidden = self._last = hidden[:, -1:]

    def start(self) -> Tensor:
        """log q [1, V or Vd] after the last committed token."""
        self._rewind(self._length)
        self._hidden = self._last
        self._seen = self._nothing
        self._levels = 0
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, V or Vd] after n drafted tokens [n], each below the row of the last call that parents [n] names."""
        assert self._hidden is not None and self._seen is not None
        count, position = tokens.shape[0], self._length + self._levels
        self._seen = torch.cat([self._seen.index_select(0, parents), self._itself(count)], dim=1)
        mask = F.pad(self._seen, (self._length, 0))  # everybody sees what is known
        features = self._hidden.index_select(1, parents)
        at = (position, position + 1)
        self._hidden = self._draft(tokens[None], features, at, mask[None, None], self._buffers)
        for buffer in self._buffers:
            buffer.length += count
        self._levels += 1
        return self._log_q()

    def _rewind(self, length: int) -> None:
        for buffer in self._buffers:
            buffer.length = length

    def _itself(self, count: int) -> Tensor:
        if count not in self._own or self._own[count].device != self._nothing.device:
            eye = torch.eye(count, dtype=torch.bool, device=self._nothing.device)
            self._own[count] = self._nothing.new_full((count, count), float("-inf")).masked_fill_(eye, 0.0)
        return self._own[count]

    def _log_q(self) -> Tensor:
        assert self._hidden is not None
        return self._logits(self._hidden[0]).float().log_softmax(-1)
