"""Drafting with a Hydra head: one small forward a level, over the last known state and the tokens drafted since."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from infer.drafters.medusa import ParallelConfig, check_level
from model.layers import KeyValueBuffer, LayerSizes
from model.target import Target


class SequentialConfig(ParallelConfig, Protocol):
    @property
    def prefix_layer(self) -> bool: ...

    @property
    def max_position_embeddings(self) -> int: ...

    def sizes(self) -> LayerSizes: ...


class SequentialHead(Protocol):
    """A head whose laws depend on the drafted tokens."""

    @property
    def config(self) -> SequentialConfig: ...

    def prefix(
        self, features: Tensor, span: tuple[int, int], mask: Tensor | None, buffers: Sequence[KeyValueBuffer]
    ) -> Tensor:
        """States [B, T, D] of features [B, T, D] at positions span = (first, stop); the features without a layer."""
        ...

    def step(self, index: int, state: Tensor, embeddings: Tensor) -> Tensor:
        """Logits [n, V] of the token at t + 2 + index from states [n, D] and embeddings [n, (index + 1) * D]."""
        ...


class HydraDrafter:
    """The state of t and the root, token t + 1, are known; a node's law sees the root's embedding and its path's.

    With a prefix layer (Hydra++) the state is that layer's output: its keys and values are of true features alone.
    """

    after_blocks: tuple[int, ...] = ()

    def __init__(self, head: SequentialHead, target: Target) -> None:
        self.head = head
        self._embedding = target.ends.embedding.to(target.device)  # the target may span several devices
        self._buffers: list[KeyValueBuffer] = []
        self._length = 0  # positions whose features are known
        self._state = torch.empty(0)  # [1, D]
        self._root = torch.empty(0)  # its embedding [1, D]
        self._embeddings = torch.empty(0)  # [rows of the last call, (level + 1) * D]
        self._level = 0

    @property
    def max_positions(self) -> int:
        return self.head.config.max_position_embeddings if self.head.config.prefix_layer else 2**31

    def forwards(self) -> tuple[tuple[Any, str], ...]:
        """Where it calls the prefix layer, if it has one, and the heads."""
        names = ("step", "prefix") if self.head.config.prefix_layer else ("step",)
        return tuple((self.head, name) for name in names)

    def target_ids(self, columns: Tensor) -> Tensor:
        return columns

    def reset(self, prompt: Tensor, capacity: int) -> None:
        """Forgets everything and makes room for `capacity` positions."""
        self._length = 0
        self._buffers = []
        if self.head.config.prefix_layer:
            self._buffers = [KeyValueBuffer.allocate(1, self.head.config.sizes(), capacity, self._embedding)]

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        """Takes in last_hidden [n, D] of n tokens; the root is the last of the n tokens [n] that follow each."""
        first, total = self._length, self._length + tokens.shape[0]
        self._length = total
        if self._buffers:
            self._buffers[0].length = first
            mask = features.new_full((total - first, total), float("-inf")).triu_(first + 1)
            features = self.head.prefix(features[None], (first, total), mask[None, None], self._buffers)[0]
            self._buffers[0].length = total
        self._state = features[-1:]
        self._root = self._embed(tokens[-1:])

    def start(self) -> Tensor:
        """log q [1, V] of the root's children."""
        self._level, self._embeddings = 0, self._root
        return self._log_q()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, V] of the children of n nodes with tokens [n]; parents [n] index the rows of the last call."""
        self._level += 1
        check_level(self._level, self.head.config.num_heads)
        self._embeddings = torch.cat([self._embeddings.index_select(0, parents), self._embed(tokens)], dim=1)
        return self._log_q()

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding)

    def _log_q(self) -> Tensor:
        state = self._state.expand(self._embeddings.shape[0], -1)
        return self.head.step(self._level, state, self._embeddings).float().log_softmax(-1)
