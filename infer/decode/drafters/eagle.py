"""Drafting with an EAGLE head: its own keys and values, true features where they are known, predictions below."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.configs.errors import UserError
from aerie.infer.decode.shape import Drafter
from aerie.model.heads import Head
from aerie.model.heads.eagle import Eagle1Head, Eagle3Head, EagleDraft
from aerie.model.layers import KeyValueBuffer
from aerie.model.target import Target


class EagleDrafter(Drafter):
    """Slot p holds (feature of t_p, token t_{p+1}) at position p; its output stands for the feature of t_{p+1}.

    An EAGLE-1 head takes the target's last_hidden and drafts with the target's LM head. An EAGLE-3 head takes the fused
    taps and has laws of its own over a draft vocabulary: their columns are draft ids, which `target_ids` maps.
    `commit` appends slots with the target's true features; they stay. `step` appends slots with the head's own
    predictions; they are forgotten at the next commit, so no guess ever outlives its cycle.
    """

    def __init__(self, head: Head, target: Target) -> None:
        if not isinstance(head, Eagle1Head | Eagle3Head):
            raise UserError(f"head: a {head.kind} head does not draft as EAGLE heads do; give an EAGLE head")
        own_laws = isinstance(head, Eagle3Head)
        self.head, self.target = head, target
        self.max_positions = head.config.max_position_embeddings
        self.after_blocks: tuple[int, ...] = head.config.after_blocks if isinstance(head, Eagle3Head) else ()
        self._vocabulary = head.vocabulary if isinstance(head, Eagle3Head) else None
        self._draft = EagleDraft(head)
        self._logits = head.logits if isinstance(head, Eagle3Head) else target.logits
        self._fuse = head.fuse if isinstance(head, Eagle3Head) else None
        self._calls = ("_draft", "_logits", "_fuse") if own_laws else ("_draft", "_logits")
        self._buffers: list[KeyValueBuffer] = []
        self._length = self._levels = 0  # committed slots; drafted levels
        self._last = self._hidden = torch.empty(
            0
        )  # [1, 1, D] of the last committed slot; [1, rows of the last call, D]
        self._seen = self._nothing = torch.empty(1, 0)  # additive [rows of the last call, drafted slots so far]
        self._own: dict[int, Tensor] = {}  # additive masks of n slots that see themselves alone, [n, n]

    def forwards(self) -> tuple[tuple[Any, str], ...]:
        """Where it calls the head, its LM head and its fusion."""
        return tuple((self, name) for name in self._calls)

    def target_ids(self, columns: Tensor) -> Tensor:
        """The target's token ids of columns of log q."""
        return columns if self._vocabulary is None else self._vocabulary.target_ids(columns)

    def reset(self, prompt: Tensor, capacity: int) -> None:
        """Forgets everything and makes room for `capacity` slots (prompt, answer and one tree's drafted slots)."""
        like, config = self.head.fc.weight, self.head.config
        self._buffers = [KeyValueBuffer.allocate(1, config, capacity, like) for _ in range(config.num_hidden_layers)]
        self._nothing = like.new_empty(1, 0)
        self._length = 0

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        """Appends slots: last_hidden [n, D] or taps [n, L*D] of n tokens, and the n tokens [n] that follow each."""
        if self._fuse is not None:
            features = self._fuse(features)
        first, total = self._length, self._length + tokens.shape[0]
        self._rewind()
        # slot i of the new ones sees slots <= first + i
        mask = features.new_full((total - first, total), float("-inf")).triu_(first + 1)
        hidden = self._draft(tokens[None], features[None], (first, total), mask[None, None], self._buffers)
        self._length = total
        self._hidden = self._last = hidden[:, -1:]

    def start(self) -> Tensor:
        """log q [1, V or Vd] after the last committed token."""
        self._rewind()
        self._hidden, self._seen, self._levels = self._last, self._nothing, 0
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, V or Vd] after n drafted tokens [n], each below the row of the last call that parents [n] names."""
        count, position = tokens.shape[0], self._length + self._levels
        if count not in self._own or self._own[count].device != self._nothing.device:
            eye = torch.eye(count, dtype=torch.bool, device=self._nothing.device)
            self._own[count] = self._nothing.new_full((count, count), float("-inf")).masked_fill_(eye, 0.0)
        # a drafted slot sees the drafted slots that its parent saw, and itself
        self._seen = torch.cat([self._seen.index_select(0, parents), self._own[count]], dim=1)
        mask = F.pad(self._seen, (self._length, 0))  # and everything that is known
        features = self._hidden.index_select(1, parents)
        at = (position, position + 1)  # all slots of a level have one position
        self._hidden = self._draft(tokens[None], features, at, mask[None, None], self._buffers)
        for buffer in self._buffers:
            buffer.length += count
        self._levels += 1
        return self._log_q()

    def _rewind(self) -> None:
        """Forgets the drafted slots."""
        for buffer in self._buffers:
            buffer.length = self._length

    def _log_q(self) -> Tensor:
        return self._logits(self._hidden[0]).float().log_softmax(-1)
