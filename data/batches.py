"""Rows -> right-padded batches, in an order that is a pure function of (seed, epoch) and of the rows per step.

A global step consumes the same set of rows however it is cut into processes, accumulation and batch size.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
WINDOW_STEPS = 16  # rows of so many steps are sorted by length together: padding falls, the order stays random


class TokenisedRow(Protocol):
    """What every row has; rows of a feature cache have `last_hidden` [T, D] and `taps` [T, L*D] or None besides."""

    @property
    def input_ids(self) -> Any: ...

    @property
    def turns(self) -> Any: ...


@dataclass(frozen=True)
class Batch:
    """Right-padded conversations. Padding has token 0, turn 0 and feature 0."""

    input_ids: Tensor  # [B, T]
    turns: Tensor  # [B, T], 0 for what is not learnt, j >= 1 for the j-th assistant turn
    lengths: Tensor  # [B]
    rows: tuple[int, ...]  # row numbers in the data set
    features: Tensor | None = None  # [B, T, D]
    taps: Tensor | None = None  # [B, T, L*D]
    noise: Tensor | None = None  # [B, T, D], what training adds to the features that go in

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def supervised(self, step: int = 0) -> Tensor:
        """[B, T] bool: where slot p, after `step` unroll steps, has something to learn.

        It holds the feature of t_p and the token t_{p+1} and predicts t_{p+2+step}; both tokens must be of one
        assistant turn.
        """
        mask = torch.zeros_like(self.turns, dtype=torch.bool)
        slots = self.turns.shape[1] - 2 - step
        if slots > 0:
            given, asked = self.turns[:, 1 : 1 + slots], self.turns[:, 2 + step :]
            mask[:, :slots] = (given == asked) & (given != 0)
        return mask

    def to(self, device: torch.device | str) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def collate(rows: Sequence[TokenisedRow], numbers: Sequence[int]) -> Batch:
    """The rows as one batch. No rows (a process without work in the last step) give one row of padding."""
    if not rows:
        empty = torch.zeros(1, 2, dtype=torch.long)  # [1, 2]
        return Batch(empty, empty.clone(), torch.zeros(1, dtype=torch.long), (-1,))
    ids = [torch.as_tensor(row.input_ids, dtype=torch.long) for row in rows]
    turns = [torch.as_tensor(row.turns, dtype=torch.long) for row in rows]
    return Batch(
        input_ids=_pad(ids),
        turns=_pad(turns),
        lengths=torch.tensor([len(x) for x in ids]),
        rows=tuple(numbers),
        features=_pad_optional([getattr(row, "last_hidden", None) for row in rows]),
        taps=_pad_optional([getattr(row, "taps", None) for row in rows]),
    )


def empty_like(batch: Batch, width: int, dtype: torch.dtype) -> Batch:
    """A batch of padding with features of this width."""
    return replace(batch, features=torch.zeros(*batch.input_ids.shape, width, dtype=dtype))


def keyed_generator(*key: int) -> torch.Generator:
    """A CPU generator whose seed is a function of the key alone."""
    seed = hashlib.sha256(",".join(str(part) for part in key).encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)


class Order:
    """Which rows each optimiser step consumes.

    The rows of an epoch are spread evenly over its steps (sizes differ by one at most, none above
    batch_size x accumulation x world_size), so no step is a short remainder.
    """

    def __init__(
        self, lengths: Sequence[int], seed: int, batch_size: int, accumulation: int = 1, world_size: int = 1
    ) -> None:
        self.lengths = lengths
        self.seed = seed
        self.accumulation = accumulation
        self.world_size = world_size
        self.rows_per_step = batch_size * accumulation * world_size
        self.steps_per_epoch = -(-len(lengths) // self.rows_per_step)
        self._epoch: tuple[int, list[list[int]]] | None = None

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """All rows of an optimiser step (counted from 0 over all epochs), longest first."""
        epoch = self.epoch_of(step)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._steps_of(epoch))
        return self._epoch[1][step % self.steps_per_epoch]

    def parts(self, step: int, rank: int) -> list[list[int]]:
        """One process's rows of a step: `accumulation` lists, each with the lengths of its neighbours, maybe empty."""
        rows = self.rows(step)
        width = self.rows_per_step // self.accumulation
        return [rows[at * width : (at + 1) * width][rank :: self.world_size] for at in range(self.accumulation)]

    def _steps_of(self, epoch: int) -> list[list[int]]:
        generator = keyed_generator(self.seed, epoch)
        count, steps = len(self.lengths), self.steps_per_epoch
        shuffled = torch.randperm(count, generator=generator).tolist()
        cuts = [count * step // steps for step in range(steps + 1)]
        made: list[list[int]] = []
        for first in range(0, steps, WINDOW_STEPS):
            last = min(first + WINDOW_STEPS, steps)
            window = sorted(shuffled[cuts[first] : cuts[last]], key=lambda row: (-self.lengths[row], row))
            made += [window[cuts[step] - cuts[first] : cuts[step + 1] - cuts[first]] for step in range(first, last)]
        return [made[step] for step in torch.randperm(steps, generator=generator).tolist()]


def prefetched(make: Callable[[int], T], numbers: Iterable[int]) -> Iterator[T]:
    """make(number) for each number, the next one made in a thread while the caller works on this one."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        pending = None
        for number in numbers:
            following = pool.submit(make, number)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


def _pad(tensors: list[Tensor]) -> Tensor:
    longest = max(2, *(len(x) for x in tensors))
    out = tensors[0].new_zeros(len(tensors), longest, *tensors[0].shape[1:])  # [B, T, ...]
    for row, values in zip(out, tensors, strict=True):
        row[: len(values)] = values
    return out


def _pad_optional(tensors: list[Tensor | None]) -> Tensor | None:
    present = [x for x in tensors if x is not None]
    if len(present) not in (0, len(tensors)):
        raise ValueError("some rows have features and some have none")
    return _pad(present) if present else None
