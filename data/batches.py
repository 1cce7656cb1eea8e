"""Rows -> right-padded batches; seed, epoch and rows per step fix their order."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aerie.configs.errors import UserError
from aerie.data.cache import CachedRow, decode
from aerie.data.chat import TokenRow
from aerie.model.miniature import SHORT, lengths_to_check
from aerie.model.target import Target, TargetOutput, family

T = TypeVar("T")
BatchRow = TokenRow | CachedRow
WINDOW_STEPS = 16  # rows of this many steps are sorted by length together: less padding


@dataclass(frozen=True)
class Batch:
    """Conversations, right-padded, or packed into one row; `to` decodes the stored states."""

    input_ids: Tensor  # [B, T]
    turn_ids: Tensor  # [B, T], on the host: number of the assistant turn; 0: not learnt
    lengths: Tensor  # tokens of each conversation, on the host: [B], or more if packed
    rows: tuple[int, ...]  # row numbers in the data set
    features: Any = None  # [B, T, D]; never None in an objective
    taps: Any = None  # [B, T, L*D]
    documents: tuple[int, ...] | None = None  # packed (B is 1): the conversations' lengths
    seeds: tuple[int, ...] | None = None  # one per row, for noise, dropout and blocks
    scales: Tensor | None = None  # [B, T, 1 + L]
    dtype: torch.dtype | None = None  # to decode the states to; None: they are not encoded

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def positions(self) -> Tensor:
        """[B, T], on the host: each token's place in its own conversation."""
        places = torch.arange(self.input_ids.shape[1])  # [T]
        if self.documents is not None:
            sizes = torch.tensor(self.documents)
            places = places - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return places.expand_as(self.input_ids)

    def supervised(self, step: int = 0) -> Tensor:
        """[B, T] bool: the slots p that learn after `step` unroll steps.

        Slot p holds the feature of t_p and token t_{p+1}, and predicts t_{p+2+step}. It learns if both tokens are of
        one turn, and t_p is of the same conversation."""
        mask = torch.zeros_like(self.turn_ids, dtype=torch.bool)
        slots = self.turn_ids.shape[1] - 2 - step
        if slots > 0:
            given, asked = self.turn_ids[:, 1 : 1 + slots], self.turn_ids[:, 2 + step :]
            mask[:, :slots] = (given == asked) & (given != 0)
            for first in accumulate(
                self.documents or ()
            ):  # this slot's t_{p+1} begins the next one
                mask[:, first - 1] = False
        return mask

    def pinned(self) -> "Batch":
        """The batch in pinned memory, which a GPU copies from while it computes."""
        pinned: dict[str, Any] = {
            k: v.pin_memory() for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **pinned)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device, with decoded states; turn_ids and lengths stay on the host, where they are read."""
        values = {
            name: value for name, value in vars(self).items() if name not in ("turn_ids", "lengths")
        }
        moved: dict[str, Any] = {
            k: v.to(device, non_blocking=True) for k, v in values.items() if isinstance(v, Tensor)
        }
        if self.dtype is not None and self.features is not None:
            scales = moved.pop("scales", None)  # [B, T, 1 + L]
            for name, columns in (("features", slice(0, 1)), ("taps", slice(1, None))):
                if name in moved:
                    moved[name] = decode(
                        moved[name], None if scales is None else scales[..., columns], self.dtype
                    )
            moved |= {"scales": None, "dtype": None}
        return replace(self, **moved)


def collate(rows: Sequence[BatchRow], numbers: Sequence[int], packed: bool = False) -> Batch:
    """The rows as one batch; without rows (a process without work), one row of padding."""
    if not rows:
        empty = torch.zeros(1, 2, dtype=torch.long)  # [1, 2]
        return Batch(empty, empty.clone(), torch.zeros(1, dtype=torch.long), (-1,))
    columns = {
        name: [torch.as_tensor(getattr(row, name)).long() for row in rows]
        for name in ("input_ids", "turn_ids")
    }
    lengths = [len(ids) for ids in columns["input_ids"]]
    for field, name in (("features", "last_hidden"), ("taps", "taps"), ("scales", "scales")):
        if getattr(rows[0], name, None) is not None:
            columns[field] = [getattr(row, name) for row in rows]
    if packed:  # no two conversations may share a turn number
        used = [0, *accumulate(int(turn_ids.max()) for turn_ids in columns["turn_ids"])]
        columns["turn_ids"] = [
            torch.where(turn_ids > 0, turn_ids + used[at], 0)
            for at, turn_ids in enumerate(columns["turn_ids"])
        ]
    join = (
        (lambda parts: torch.cat(parts)[None])
        if packed
        else partial(pad_sequence, batch_first=True)
    )  # [B, T, ...]
    joined: dict[str, Any] = {name: join(parts) for name, parts in columns.items()}
    documents, dtype = tuple(lengths) if packed else None, getattr(rows[0], "dtype", None)
    return Batch(
        **joined,
        lengths=torch.tensor(lengths),
        rows=tuple(numbers),
        documents=documents,
        dtype=dtype,
    )


def keyed_generator(*key: int) -> torch.Generator:
    seed = hashlib.sha256(",".join(str(part) for part in key).encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)


def permuted(values: Sequence[T], generator: torch.Generator) -> list[T]:
    return [values[index] for index in torch.randperm(len(values), generator=generator).tolist()]


class ShardPools(NamedTuple):
    """Rows come from `at_once` shards at a time; each shard is read once an epoch."""

    shards: Sequence[range]  # of row numbers, all of them
    at_once: int


@dataclass
class Order:
    """Which rows each optimiser step takes, and which of these each process."""

    lengths: Sequence[int]  # of the rows, in tokens
    seed: int
    batch_size: int
    accumulation: int = 1
    world_size: int = 1
    pools: ShardPools | None = None

    def __post_init__(self) -> None:
        self.rows_per_step = self.batch_size * self.accumulation * self.world_size
        self.steps_per_epoch = -(-len(self.lengths) // self.rows_per_step)
        self._steps_of = lru_cache(1)(self._shuffled)  # the steps of an epoch

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def parts(self, step: int, rank: int) -> list[list[int]]:
        """One process's rows of a step: `accumulation` lists, maybe empty, each of rows of similar length."""
        rows = self.rows(step)
        width = self.rows_per_step // self.accumulation
        return [
            rows[at * width : (at + 1) * width][rank :: self.world_size]
            for at in range(self.accumulation)
        ]

    def rows(self, step: int) -> list[int]:
        """All rows of a step (counted from 0 over all epochs), longest first."""
        return self._steps_of(self.epoch_of(step))[step % self.steps_per_epoch]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """The rows of each step of an epoch."""
        generator, shuffled, steps = (
            keyed_generator(self.seed, epoch),
            list[int](),
            self.steps_per_epoch,
        )
        if self.pools is None:
            shuffled = permuted(range(len(self.lengths)), generator)
        else:
            order, at_once = permuted(self.pools.shards, generator), self.pools.at_once
            for first in range(0, len(order), at_once):
                shuffled += permuted(
                    [row for shard in order[first : first + at_once] for row in shard], generator
                )
        cuts = [len(shuffled) * step // steps for step in range(steps + 1)]
        rows_of_steps: list[list[int]] = []
        for first in range(0, steps, WINDOW_STEPS):
            last = min(first + WINDOW_STEPS, steps)
            window = sorted(
                shuffled[cuts[first] : cuts[last]], key=lambda row: (-self.lengths[row], row)
            )
            parts = [
                window[cuts[at] - cuts[first] : cuts[at + 1] - cuts[first]]
                for at in range(first, last)
            ]
            # With pools the steps of a window stay together.
            rows_of_steps += parts if self.pools is None else permuted(parts, generator)
        return permuted(rows_of_steps, generator) if self.pools is None else rows_of_steps


def prefetched(make: Callable[[int], T], numbers: Iterable[int]) -> Iterator[T]:
    """Yields make(number) for each number; two threads work ahead."""
    torch.set_num_threads(
        torch.get_num_threads()
    )  # rebuilds torch's pool after a fork; two threads cannot at once
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="batches") as pool:
        rest, pending = iter(numbers), deque[Future[T]]()
        while True:
            pending.extend(pool.submit(make, number) for number in islice(rest, 3 - len(pending)))
            if not pending:
                return
            yield pending.popleft().result()


def group_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Groups of positions, longest first; rows x longest is at most batch_tokens (except for single rows)."""
    groups: list[list[int]] = []
    for position in sorted(
        range(len(lengths)), key=lambda position: (-lengths[position], position)
    ):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= batch_tokens:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def forward(
    target: Target, input_ids: Tensor, lengths: Tensor, after_blocks: tuple[int, ...]
) -> tuple[TargetOutput, Tensor]:
    """The target's states of right-padded ids [B, T], and the mask [B, T] of real tokens, on the host."""
    mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    is_long = lengths > (target.rope_switch or 2**31)
    if is_long.any() and not is_long.all():  # LongRoPE: a long row changes the factors of all rows
        whole: dict[str, Any] = {"taps": None}
        for rows in (is_long, ~is_long):
            part, _ = forward(
                target, input_ids[rows, : int(lengths[rows].max())], lengths[rows], after_blocks
            )
            for name, states in vars(part).items():
                if states is not None:
                    if whole.get(name) is None:
                        whole[name] = states.new_zeros(*input_ids.shape, states.shape[-1])
                    whole[name][rows, : states.shape[1]] = states
        return TargetOutput(**whole), mask
    return target.features(input_ids.to(target.device), after_blocks), mask


@torch.inference_mode()
def check_padding(target: Target) -> None:
    """UserError if a row's states change when a longer row is in its batch."""
    for length, seconds in lengths_to_check(target).items():
        if length > SHORT and seconds > 1:
            continue
        ids = (
            torch.arange(2 * length)
            .view(2, length)
            .mul(7)
            .remainder(target.vocab.embedding.shape[0])
        )
        lengths = torch.tensor([length, max(1, length // 3)])
        together = forward(target, ids, lengths, ())[0].last_hidden
        for row, beside, count in zip(ids, together, lengths.tolist(), strict=True):
            alone = target.features(row[None, :count].to(target.device)).last_hidden[0]
            error = target.difference(target.logits(beside[:count]), target.logits(alone))
            if error is not None:
                what = (
                    f"a row's logits change by {error:.2g} beside a longer row of {length} tokens"
                )
                raise UserError(
                    f"{target.recipe.path}: {family(target.model)}: {what}; no head can be trained for it"
                )


def with_states(
    target: Target, after_blocks: tuple[int, ...], dtype: torch.dtype, batch: Batch
) -> Batch:
    if batch.features is not None:  # zeros, in a process without rows
        return batch
    ids, sizes = batch.input_ids, batch.documents
    if sizes is not None:  # the target reads packed conversations one per row
        ids = pad_sequence(ids[0].split(sizes), batch_first=True)  # [N, T]
    output, mask = forward(target, ids, batch.lengths, after_blocks)  # [N, T]
    # Zero in padding, as in a cache. Copies: autograd cannot keep inference tensors.
    states = {"features": output.last_hidden, "taps": output.taps}
    copies = {k: v.to(ids.device, dtype, copy=True) for k, v in states.items() if v is not None}
    if sizes is None:
        known = mask[..., None].to(ids.device, non_blocking=True)
        used: dict[str, Any] = {k: v * known for k, v in copies.items()}
    else:  # found on the host: a mask on the device would need a wait
        places = mask.flatten().nonzero()[:, 0].to(ids.device, non_blocking=True)
        used = {k: v.flatten(0, 1)[places][None] for k, v in copies.items()}
    return replace(batch, **used)
