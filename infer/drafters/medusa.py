"""Drafting with a Medusa head: one forward over the last known feature gives the laws of all levels."""

from typing import Any, Protocol

import torch
from torch import Tensor

from model.errors import UserError


class ParallelConfig(Protocol):
    @property
    def num_heads(self) -> int: ...


class ParallelHead(Protocol):
    """A head whose laws do not depend on drafted tokens."""

    @property
    def config(self) -> ParallelConfig: ...

    def __call__(self, features: Tensor) -> Tensor:
        """Logits [num_heads, ..., V] of features [..., D]; row k is for the token at t + 2 + k."""
        ...


class MedusaDrafter:
    """The feature of t and the root, token t + 1, are the target's; level k is token t + 1 + k, row k - 1 of the head.

    Every node of a level has the same law, whatever stands above it.
    """

    max_positions = 2**31  # no attention, no positions
    after_blocks: tuple[int, ...] = ()

    def __init__(self, head: ParallelHead) -> None:
        self.head = head
        self._feature = torch.empty(0)  # [1, D]
        self._log_q = torch.empty(0)  # [num_heads, 1, V]
        self._level = 0

    def forwards(self) -> tuple[tuple[Any, str], ...]:
        """Where it calls the head."""
        return ((self.head, "forward"),)

    def target_ids(self, columns: Tensor) -> Tensor:
        return columns

    def reset(self, prompt: Tensor, capacity: int) -> None:
        return None

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        self._feature = features[-1:]

    def start(self) -> Tensor:
        """log q [1, V] of the root's children; runs the head once for the whole tree."""
        self._log_q = self.head(self._feature).float().log_softmax(-1)
        self._level = 0
        return self._log_q[0]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """log q [n, V] of the next level, n times the same row."""
        self._level += 1
        check_level(self._level, self.head.config.num_heads)
        return self._log_q[self._level].expand(tokens.shape[0], -1)


def check_level(level: int, num_heads: int) -> None:
    """UserError for a level (0: the root's children) that has no head."""
    if level >= num_heads:
        raise UserError(
            f"tree: asks for level {level + 1}, and a draft head of {num_heads} heads drafts {num_heads} levels; give "
            f"tree.choices without paths longer than {num_heads} (or tree.levels {num_heads}), or train a head with "
            f"head.num_heads {level + 1}"
        )
