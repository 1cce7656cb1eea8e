"""Rows -> right-padded batches, in an order that is a pure function of (seed, epoch) and of the rows per step.

A global step consumes the same set of rows however it is cut into processes, accumulation and batch size.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from aerie.data.cache import decode
from aerie.model.target import Target

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
    """Conversations: right-padded, one a row, or packed one after the other in a single row without padding.

    Padding has token 0, turn 0 and feature 0. Features and taps that a cache stores otherwise than they are used
    (dtype is then set, and scales where they are fp8 or int8) stay so until `to` has moved them.
    """

    input_ids: Tensor  # [B, T]
    turns: Tensor  # [B, T], 0 for what is not learnt; every assistant turn of a row has a number of its own
    lengths: Tensor  # of the conversations, [B] where they are not packed
    rows: tuple[int, ...]  # row numbers in the data set
    features: Tensor | None = None  # [B, T, D]
    taps: Tensor | None = None  # [B, T, L*D]
    noise: Tensor | None = None  # [B, T, D], what training adds to the features that go in
    documents: tuple[int, ...] | None = None  # packed (B is 1): the conversations' lengths
    seeds: tuple[int, ...] | None = None  # one a row, of what training draws on the device (dropout, tokens)
    redrawn: Tensor | None = None  # [B, T] bool: tokens that a draft LM draws itself in training
    scales: Tensor | None = None  # [B, T, 1 + L]
    dtype: torch.dtype | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def positions(self) -> Tensor:
        """[B, T]: each token's place in its own conversation."""
        places = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)  # [T]
        if self.documents is not None:
            sizes = torch.tensor(self.documents, device=places.device)
            places = places - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return places.expand_as(self.input_ids)

    def supervised(self, step: int = 0) -> Tensor:
        """[B, T] bool: where slot p, after `step` unroll steps, has something to learn.

        It holds the feature of t_p and the token t_{p+1} and predicts t_{p+2+step}; both tokens must be of one
        assistant turn, and t_p of the same conversation.
        """
        mask = torch.zeros_like(self.turns, dtype=torch.bool)
        slots = self.turns.shape[1] - 2 - step
        if slots > 0:
            given, asked = self.turns[:, 1 : 1 + slots], self.turns[:, 2 + step :]
            mask[:, :slots] = (given == asked) & (given != 0)
            if self.documents is not None:  # a conversation's first token follows nothing of its own
                mask[:, :slots] &= self.positions[:, 1 : 1 + slots] != 0
        return mask

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device, with its states decoded there."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        if self.dtype is not None and self.features is not None:
            scales = moved.pop("scales", None)  # [B, T, 1 + L]
            of_hidden, of_taps = (None, None) if scales is None else (scales[..., :1], scales[..., 1:])
            moved["features"] = decode(moved["features"], of_hidden, self.dtype)
            if self.taps is not None:
                moved["taps"] = decode(moved["taps"], of_taps, self.dtype)
            moved |= {"scales": None, "dtype": None}
        return replace(self, **moved)


def collate(rows: Sequence[TokenisedRow], numbers: Sequence[int], packed: bool = False) -> Batch:
    """The rows as one batch. No rows (a process without work in the last step) give one row of padding."""
    if not rows:
        empty = torch.zeros(1, 2, dtype=torch.long)  # [1, 2]
        return Batch(empty, empty.clone(), torch.zeros(1, dtype=torch.long), (-1,))
    ids = [torch.as_tensor(row.input_ids, dtype=torch.long) for row in rows]
    turns = [torch.as_tensor(row.turns, dtype=torch.long) for row in rows]
    if packed:  # turn numbers that no two conversations share
        used = [0, *accumulate(int(row.max()) for row in turns)]
        turns = [torch.where(row > 0, row + before, 0) for row, before in zip(turns, used, strict=False)]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        if packed:
            return torch.cat(list(tensors))[None]  # [1, sum of T, ...]
        longest = max(2, *(len(row) for row in tensors))
        out = tensors[0].new_zeros(len(tensors), longest, *tensors[0].shape[1:])  # [B, T, ...]
        for padded, row in zip(out, tensors, strict=True):
            padded[: len(row)] = row
        return out

    def join_states(name: str) -> Tensor | None:
        tensors: list[Any] = [getattr(row, name, None) for row in rows]
        return None if tensors[0] is None else join(tensors)

    return Batch(
        input_ids=join(ids),
        turns=join(turns),
        lengths=torch.tensor([len(row) for row in ids]),
        rows=tuple(numbers),
        features=join_states("last_hidden"),
        taps=join_states("taps"),
        documents=tuple(len(row) for row in ids) if packed else None,
        scales=join_states("scales"),
        dtype=getattr(rows[0], "dtype", None),
    )


def empty_like(batch: Batch, width: int, dtype: torch.dtype, num_taps: int = 0) -> Batch:
    """A batch of padding with features (and taps) of this width."""
    features = torch.zeros(*batch.input_ids.shape, width, dtype=dtype)
    return replace(batch, features=features, taps=features.repeat(1, 1, num_taps) if num_taps else None)


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
        self,
        lengths: Sequence[int],
        seed: int,
        batch_size: int,
        accumulation: int = 1,
        world_size: int = 1,
        pools: "ShardPools | None" = None,
    ) -> None:
        """pools: where the rows lie, so that an epoch reads some shards after the others; None: all at once."""
        self.lengths, self.seed, self.pools = lengths, seed, pools
        self.accumulation, self.world_size = accumulation, world_size
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
        shuffled = permuted(range(count), generator) if self.pools is None else self.pools.shuffled(generator)
        cuts = [count * step // steps for step in range(steps + 1)]
        rows_of_steps: list[list[int]] = []
        for first in range(0, steps, WINDOW_STEPS):
            last = min(first + WINDOW_STEPS, steps)
            window = sorted(shuffled[cuts[first] : cuts[last]], key=lambda row: (-self.lengths[row], row))
            parts = [window[cuts[step] - cuts[first] : cuts[step + 1] - cuts[first]] for step in range(first, last)]
            # Long steps must not all come first; with pools the steps of a window stay together.
            rows_of_steps += parts if self.pools is None else permuted(parts, generator)
        return permuted(rows_of_steps, generator) if self.pools is None else rows_of_steps


@dataclass(frozen=True)
class ShardPools:
    """Rows drawn from `at_once` shards at a time: what is read lies together, and each shard is read once an epoch."""

    shards: Sequence[range]  # of row numbers, all of them
    at_once: int

    def shuffled(self, generator: torch.Generator) -> list[int]:
        """All rows: shards in a random order, and the rows of each `at_once` of them in a random order."""
        order, rows = permuted(self.shards, generator), list[int]()
        for first in range(0, len(order), self.at_once):
            rows += permuted([row for shard in order[first : first + self.at_once] for row in shard], generator)
        return rows


def permuted(values: Sequence[T], generator: torch.Generator) -> list[T]:
    """The values in a random order."""
    return [values[index] for index in torch.randperm(len(values), generator=generator).tolist()]


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


def grouped(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Positions grouped by similar length, longest first, so that rows x longest stays within batch_tokens."""
    groups: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda position: (-lengths[position], position)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= batch_tokens:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


class OnlineFeatures:
    """Fills the features and taps that a cache would have held; what uses the batch cannot tell."""

    def __init__(self, target: Target, after_blocks: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        """dtype is that of the states (None: the target's)."""
        self.target, self.after_blocks, self.dtype = target, after_blocks, dtype or target.dtype

    def __call__(self, batch: Batch) -> Batch:
        """The batch with states, on its own device; one that has them already (of a process without rows) as it is."""
        if batch.features is not None:
            return batch
        # Packed conversations go through the target one a row, and are packed again afterwards.
        longest = batch.input_ids.shape[1] if batch.documents is None else max(batch.documents)
        mask = torch.arange(longest, device=batch.input_ids.device) < batch.lengths[:, None]  # [N, T]
        ids = batch.input_ids
        if batch.documents is not None:
            ids = torch.zeros_like(mask, dtype=torch.long)  # [N, T]
            ids[mask] = batch.input_ids[0]
        device = self.target.device
        attention_mask = None if bool(mask.all()) else mask.long().to(device)
        output = self.target.features(ids.to(device), attention_mask, self.after_blocks)

        def used(states: Tensor) -> Tensor:
            """[B, T, D] as a cache yields them, zero in padding. A copy: autograd cannot keep inference tensors."""
            states = states.to(batch.input_ids.device, self.dtype, copy=True)
            return states * mask[..., None] if batch.documents is None else states[mask][None]

        taps = None if output.taps is None else used(output.taps)
        return replace(batch, features=used(output.last_hidden), taps=taps)
