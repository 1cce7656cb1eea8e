"""Batches of rows, padded or packed, and their order, fixed by seed, epoch and rows per step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aerie.configs.errors import UserError
from aerie.data.chat import TokenRow
from aerie.data.feature_cache import CachedRow, decode
from aerie.data.inputs import hashed_number
from aerie.data.progress import run_ahead
from aerie.data.served_states import ServedRows
from aerie.model.miniature import SHORT, lengths_to_check
from aerie.model.target import Target, TargetOutput, family

Shuffled = TypeVar("Shuffled")
Prefetched = TypeVar("Prefetched")
BatchRow = TokenRow | CachedRow
WINDOW_STEPS = 16  # rows of this many steps are sorted by length together, to save padding


# --- batches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Conversations, right-padded, or packed into one row; `to` decodes the stored states."""

    input_ids: Tensor  # [B, T]
    # [B, T], on the host, the loss mask: the number of the answer, or 0 where nothing is learnt
    turn_ids: Tensor
    lengths: Tensor  # [B] or, packed, [documents], on the host: tokens of each conversation
    rows: tuple[int, ...]  # row numbers in the data set
    features: Any = None  # [B, T, D], last_hidden; never None in an objective
    taps: Any = None  # [B, T, L*D]
    documents: tuple[int, ...] | None = None  # if packed (B is 1): the conversations' lengths
    seeds: tuple[int, ...] | None = None  # one per row, for noise, dropout and drawn tokens
    scales: Tensor | None = None  # [B, T, 1 + L]
    dtype: torch.dtype | None = None  # to decode the states to; None: they are not encoded

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def positions(self) -> Tensor:
        """[B, T], on the host: each token's place in its own conversation."""
        positions = torch.arange(self.input_ids.shape[1])  # [T]
        if self.documents is not None:
            lengths = torch.tensor(self.documents)
            starts = lengths.cumsum(0) - lengths
            positions = positions - starts.repeat_interleave(lengths)
        return positions.expand_as(self.input_ids)

    def supervised(self, step: int = 0) -> Tensor:
        """[B, T] bool: the slots p that learn after `step` unroll steps.

        Slot p holds the feature of t_p and token t_{p+1}, and predicts t_{p+2+step}. It learns if
        both tokens are of one turn, and t_p is of the same conversation.
        """
        mask = torch.zeros_like(self.turn_ids, dtype=torch.bool)
        slots = self.turn_ids.shape[1] - 2 - step
        if slots > 0:
            read = self.turn_ids[:, 1 : 1 + slots]  # of t_{p+1}
            predicted = self.turn_ids[:, 2 + step :]  # of t_{p+2+step}
            mask[:, :slots] = (read == predicted) & (read != 0)
            for end in accumulate(self.documents or ()):
                mask[:, end - 1] = False  # this slot's t_{p+1} begins the next conversation
        return mask

    def pinned(self) -> "Batch":
        """The batch in pinned memory, which a GPU copies from while it computes."""
        return replace(self, **{name: x.pin_memory() for name, x in self._tensors().items()})

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device, with decoded states."""
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=True)
            for name, x in self._tensors().items()
            if name not in ("turn_ids", "lengths")  # these are read on the host
        }
        if self.dtype is not None and self.features is not None:
            scales = moved.get("scales")  # [B, T, 1 + L]
            of_features, of_taps = (None, None) if scales is None else scales.tensor_split([1], -1)
            moved["features"] = decode(moved["features"], of_features, self.dtype)
            if self.taps is not None:
                moved["taps"] = decode(moved["taps"], of_taps, self.dtype)
            moved |= {"scales": None, "dtype": None}
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def collate(rows: Sequence[BatchRow], numbers: Sequence[int], packed: bool = False) -> Batch:
    """The rows as one batch, padded or packed; numbers: the rows' numbers in the data set.

    A process without rows gets one row of padding.
    """
    if not rows:
        empty = torch.zeros(1, 2, dtype=torch.long)  # [1, 2]
        return Batch(empty, empty.clone(), torch.zeros(1, dtype=torch.long), (-1,))
    columns = {
        "input_ids": [torch.as_tensor(row.input_ids).long() for row in rows],
        "turn_ids": [torch.as_tensor(row.turn_ids).long() for row in rows],
    }
    lengths = [len(ids) for ids in columns["input_ids"]]
    for name, attribute in (("features", "last_hidden"), ("taps", "taps"), ("scales", "scales")):
        if getattr(rows[0], attribute, None) is not None:
            columns[name] = [getattr(row, attribute) for row in rows]
    if packed:
        columns["turn_ids"] = _renumbered(columns["turn_ids"])
        joined: dict[str, Any] = {
            name: torch.cat(parts)[None] for name, parts in columns.items()
        }  # [1, T, ...]
    else:
        joined = {
            name: pad_sequence(parts, batch_first=True) for name, parts in columns.items()
        }  # [B, T, ...]
    return Batch(
        **joined,
        lengths=torch.tensor(lengths),
        rows=tuple(numbers),
        documents=tuple(lengths) if packed else None,
        dtype=getattr(rows[0], "dtype", None),
    )


def _renumbered(turn_ids: list[Tensor]) -> list[Tensor]:
    """Turn ids of conversations that share a row, so that no two answers have the same one."""
    used = 0
    renumbered = []
    for ids in turn_ids:
        renumbered.append(torch.where(ids > 0, ids + used, 0))
        used += int(ids.max())
    return renumbered


# --- the order of rows --------------------------------------------------------------------------


def keyed_generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(hashed_number(",".join(map(str, key)), bits=63))


def permuted(values: Sequence[Shuffled], generator: torch.Generator) -> list[Shuffled]:
    return [values[index] for index in torch.randperm(len(values), generator=generator).tolist()]


class ShardPools(NamedTuple):
    """Rows come from `at_once` shards at a time; each shard is read once an epoch."""

    shards: Sequence[range]  # of row numbers, all of them
    at_once: int


@dataclass
class Order:
    """Which rows each optimiser step takes, and which of them each process takes."""

    lengths: Sequence[int]  # of the rows, in tokens
    seed: int
    batch_size: int
    accumulation: int = 1
    world_size: int = 1
    pools: ShardPools | None = None

    def __post_init__(self) -> None:
        self.rows_per_step = self.batch_size * self.accumulation * self.world_size
        self.steps_per_epoch = -(-len(self.lengths) // self.rows_per_step)
        self._steps_of = lru_cache(1)(self._rows_of_steps)  # keeps the last epoch's steps

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def parts(self, step: int, rank: int) -> list[list[int]]:
        """One process's rows of a step: `accumulation` lists, each of similar lengths."""
        rows = self.rows(step)
        width = self.batch_size * self.world_size
        starts = range(0, self.rows_per_step, width)
        return [rows[start : start + width][rank :: self.world_size] for start in starts]

    def rows(self, step: int) -> list[int]:
        """All rows of a step (counted from 0 over all epochs), longest first."""
        return self._steps_of(self.epoch_of(step))[step % self.steps_per_epoch]

    def _rows_of_steps(self, epoch: int) -> list[list[int]]:
        """The rows of each step of an epoch."""
        generator = keyed_generator(self.seed, epoch)
        shuffled = self._shuffled(generator)
        steps = self.steps_per_epoch
        cuts = [len(shuffled) * step // steps for step in range(steps + 1)]
        rows_of_steps: list[list[int]] = []
        for first in range(0, steps, WINDOW_STEPS):
            last = min(first + WINDOW_STEPS, steps)
            window = shuffled[cuts[first] : cuts[last]]
            window.sort(key=lambda row: (-self.lengths[row], row))
            parts = [
                window[cuts[step] - cuts[first] : cuts[step + 1] - cuts[first]]
                for step in range(first, last)
            ]
            # With pools the steps of a window stay together.
            rows_of_steps += parts if self.pools is None else permuted(parts, generator)
        return permuted(rows_of_steps, generator) if self.pools is None else rows_of_steps

    def _shuffled(self, generator: torch.Generator) -> list[int]:
        if self.pools is None:
            return permuted(range(len(self.lengths)), generator)
        shards = permuted(self.pools.shards, generator)
        at_once = self.pools.at_once
        shuffled = list[int]()
        for first in range(0, len(shards), at_once):
            pool = [*chain.from_iterable(shards[first : first + at_once])]
            shuffled += permuted(pool, generator)
        return shuffled


def prefetched(
    make: Callable[[int], Prefetched], numbers: Iterable[int], threads: int
) -> Iterator[Prefetched]:
    """Yields make(number) for each number, in order; `threads` threads work ahead."""
    # Rebuild torch's pool after a fork here, since two threads cannot do it at once.
    torch.set_num_threads(torch.get_num_threads())
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="batches") as pool:
        yield from run_ahead(pool, make, numbers, threads + 1)


def fetch_rows(rows: Sequence[BatchRow], positions: Sequence[int]) -> Sequence[BatchRow]:
    """Several rows; if servers give their states, all rows are asked for at once."""
    if isinstance(rows, ServedRows):
        return rows.at(positions)
    return [rows[position] for position in positions]


def threads_for(rows: Sequence[BatchRow], rows_per_step: int) -> int:
    """How many threads read steps ahead: enough to keep servers busy."""
    if isinstance(rows, ServedRows):
        return 1 + -(-rows.source.workers // rows_per_step)
    return 2


def group_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Groups of positions, longest first.

    A group's rows times its longest row is at most batch_tokens, unless the group is one row.
    """
    groups: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= batch_tokens:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


# --- the target's states of a batch -------------------------------------------------------------


def forward(
    target: Target, input_ids: Tensor, lengths: Tensor, after_blocks: tuple[int, ...]
) -> tuple[TargetOutput, Tensor]:
    """The states of right-padded ids [B, T], and the mask [B, T] of real tokens, on the host."""
    mask = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [B, T]
    is_long = lengths > (target.rope_switch or 2**31)  # [B]
    if not is_long.any() or is_long.all():
        return target.features(input_ids.to(target.device), after_blocks), mask
    # LongRoPE: a long row would change the factors of all rows, so short rows run by themselves.
    joined: dict[str, Any] = {}
    for rows in (is_long, ~is_long):
        ids = input_ids[rows, : int(lengths[rows].max())]
        part, _ = forward(target, ids, lengths[rows], after_blocks)
        for name, states in vars(part).items():
            if states is None:
                joined[name] = None
                continue
            if name not in joined:
                joined[name] = states.new_zeros(*input_ids.shape, states.shape[-1])
            joined[name][rows, : states.shape[1]] = states
    return TargetOutput(**joined), mask


@torch.inference_mode()
def check_padding(target: Target) -> None:
    """UserError if a row's states change when a longer row is in its batch."""
    vocab_size = target.vocab.embedding.shape[0]
    for length, seconds in lengths_to_check(target).items():
        if length > SHORT and seconds > 1:
            continue  # this forward would take too long
        ids = torch.arange(2 * length).view(2, length).mul(7).remainder(vocab_size)  # [2, T]
        lengths = torch.tensor([length, max(1, length // 3)])
        together = forward(target, ids, lengths, ())[0].last_hidden  # [2, T, D]
        for row, states, count in zip(ids, together, lengths.tolist(), strict=True):
            alone = target.features(row[None, :count].to(target.device)).last_hidden[0]  # [T, D]
            error = target.difference(target.logits(states[:count]), target.logits(alone))
            if error is not None:
                raise UserError(
                    f"{target.recipe.path}: {family(target.model)}: a row's logits change by "
                    f"{error:.2g} if its batch has a longer row of {length} tokens, so "
                    "no head can be trained for this target"
                )


def with_states(
    target: Target, after_blocks: tuple[int, ...], dtype: torch.dtype, batch: Batch
) -> Batch:
    """The batch with the target's states, zero in padding as in a cache."""
    if batch.features is not None:  # zeros, in a process without rows
        return batch
    ids = batch.input_ids
    documents = batch.documents
    if documents is not None:  # the target reads packed conversations one per row
        ids = pad_sequence(ids[0].split(documents), batch_first=True)  # [N, T]
    output, mask = forward(target, ids, batch.lengths, after_blocks)
    # A mask [B, T, 1], or the numbers [tokens] of real tokens. The host finds them, because a
    # device would have to wait for their count.
    real = mask[..., None] if documents is None else mask.flatten().nonzero()[:, 0]
    real = real.to(ids.device, non_blocking=True)
    used: dict[str, Any] = {}
    for name, states in (("features", output.last_hidden), ("taps", output.taps)):
        if states is not None:
            # A copy: autograd cannot keep inference tensors.
            states = states.to(ids.device, dtype, copy=True)  # [N, T, ...]
            used[name] = states * real if documents is None else states.flatten(0, 1)[real][None]
    return replace(batch, **used)
