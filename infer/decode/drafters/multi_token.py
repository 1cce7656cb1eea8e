"""Drafting with heads that have a module for each future token: Medusa's laws are independent, Hydra's sequential."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from aerie.infer.decode.shape import Drafter
from aerie.model.layers import KeyValueBuffer
from aerie.model.target import Target


class MedusaDrafter(Drafter):
    """The feature of t and the root, token t + 1, are the target's; level k is token t + 1 + k, row k - 1 of the head.

    Every node of a level has the same law, whatever stands above it: one forward gives the laws of all levels.
    """

    def __init__(self, head: Any, target: Target | None = None) -> None:
        """head: a module that maps features [1, D] to logits [num_heads, 1, V]."""
        self.head = head
        self._feature = torch.empty(0)  # [1, D]
        self._log_q = torch.empty(0)  # [num_heads, 1, V]
        self._level = 0

    def forwards(self) -> tuple[tuple[Any, str], ...]:
        return ((self.head, "forward"),)

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        # row 0 of the head is for the token after the root
        self._feature = features[-1:]

    def start(self) -> Tensor:
        """log q [1, V] of the root's children; runs the head once for the whole tree."""
        self._log_q, self._level = self.head(self._feature).float().log_softmax(-1), 0
        return self._log_q[0]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, V] of the next level, n times the same row."""
        self._level += 1
        return self._log_q[self._level].expand(tokens.shape[0], -1)


class HydraDrafter(Drafter):
    """The state of t and the root, token t + 1, are known; a node's law sees the root's embedding and its path's.

    With a prefix layer (Hydra++) the state is that layer's output: its keys and values are of true features alone.
    """

    def __init__(self, head: Any, target: Target) -> None:
        """head: a module with `prefix` and `step` as HydraHead has them."""
        self.head = head
        if head.config.prefix_layer:  # without attention there are no positions
            self.max_positions = head.config.max_position_embeddings
        self._embedding = target.vocab.embedding.to(target.device)  # the target may span several devices
        self._buffers: list[KeyValueBuffer] = []
        self._length = self._level = 0  # positions whose features are known
        self._state = self._root = torch.empty(0)  # [1, D]; the root's embedding [1, D]
        self._embeddings = torch.empty(0)  # [rows of the last call, (level + 1) * D]

    def forwards(self) -> tuple[tuple[Any, str], ...]:
        names = ("step", "prefix") if self.head.config.prefix_layer else ("step",)
        return tuple((self.head, name) for name in names)

    def reset(self, prompt: Tensor, capacity: int) -> None:
        """Forgets everything and makes room for `capacity` positions."""
        self._length, self._buffers = 0, []
        if self.head.config.prefix_layer:
            self._buffers = [KeyValueBuffer.allocate(1, self.head.config, capacity, self._embedding)]

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        """Takes in last_hidden [n, D] of n tokens; the root is the last of the n tokens [n] that follow each."""
        first, total = self._length, self._length + tokens.shape[0]
        self._length = total
        if self._buffers:
            self._buffers[0].length = first
            mask = features.new_full((total - first, total), float("-inf")).triu_(first + 1)
            features = self.head.prefix(features[None], (first, total), mask[None, None], self._buffers)[0]
            self._buffers[0].length = total
        # only the last feature is needed: what came before is in the prefix layer's keys and values
        self._state = features[-1:]
        self._root = F.embedding(tokens[-1:], self._embedding)

    def start(self) -> Tensor:
        """log q [1, V] of the root's children."""
        self._level, self._embeddings = 0, self._root
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, V] of the children of n nodes with tokens [n]; parents [n] index the rows of the last call."""
        self._level += 1
        # a node's input is the root's embedding and those of its path, side by side
        above = self._embeddings.index_select(0, parents)
        self._embeddings = torch.cat([above, F.embedding(tokens, self._embedding)], dim=1)
        return self._log_q()

    def _log_q(self) -> Tensor:
        state = self._state.expand(self._embeddings.shape[0], -1)
        return self.head.step(self._level, state, self._embeddings).float().log_softmax(-1)
