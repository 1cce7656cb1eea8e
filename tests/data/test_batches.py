"""Laws of batches: what is supervised, which rows a step takes, and what padding does: nothing."""

import itertools
import threading
from dataclasses import replace

import pytest
import torch

from aerie.data.batches import Batch, Order, ShardPools, collate, group_by_length, prefetched
from aerie.data.feature_cache import shard_spans
from tests import tiny


@pytest.mark.parametrize(
    ("turn_ids", "step", "slots"),
    [
        (
            [0, 0, 0, 1, 1, 1, 1, 0, 0],
            0,
            [2, 3, 4],
        ),  # a span [s, e] = [3, 6] supervises s - 1 to e - 2
        ([0, 1, 1, 1, 1, 0, 2, 2, 2], 0, [0, 1, 2, 5, 6]),
        (
            [0, 1, 1, 1, 1, 0, 2, 2, 2],
            1,
            [0, 1, 5],
        ),  # each unroll step loses the last slot of every turn
        ([0, 1, 1, 1, 1, 0, 2, 2, 2], 2, [0]),
        ([0, 1, 1, 2, 2, 0], 0, [0, 2]),  # adjacent turns stay separate
    ],
)
def test_supervised_slots(turn_ids: list[int], step: int, slots: list[int]) -> None:
    """Slots are supervised within one turn."""
    ids = torch.arange(len(turn_ids))[None]
    batch = Batch(ids, torch.tensor([turn_ids]), torch.tensor([len(turn_ids)]), (0,))
    assert batch.supervised(step)[0].nonzero().flatten().tolist() == slots


def test_padding() -> None:
    """Padding supervises nothing and keeps every row."""
    rows = tiny.rows(3)
    batch = collate(rows, [4, 5, 6])
    assert batch.num_tokens == sum(len(row.input_ids) for row in rows) and batch.rows == (4, 5, 6)
    for at, row in enumerate(rows):
        alone, length = collate([row], [0]).supervised()[0], len(row.input_ids)
        assert (
            batch.supervised()[at, :length].equal(alone)
            and not batch.supervised()[at, length:].any()
        )
        assert batch.features is not None and batch.features[at, :length].equal(row.last_hidden)
        assert not batch.features[at, length:].any()
    empty = collate([], [])  # for a process without rows
    assert empty.num_tokens == 0 and not empty.supervised().any()


def test_packing() -> None:
    """Packed conversations supervise what each supervises alone."""
    # the third begins with a learnt token, as pretokenised rows may, and follows another one
    rows = [
        *tiny.rows(2),
        replace(tiny.rows(1)[0], turn_ids=torch.ones_like(tiny.rows(1)[0].turn_ids)),
        tiny.rows(4)[3],
    ]
    packed = collate(rows, range(4), packed=True)
    assert packed.input_ids.shape == (1, packed.num_tokens) and packed.documents == tuple(
        map(int, packed.lengths)
    )
    assert packed.features is not None and packed.features[0].equal(
        torch.cat([row.last_hidden for row in rows])
    )
    places = [torch.arange(len(row.input_ids)) for row in rows]
    assert packed.positions[0].equal(torch.cat(places))
    for step in (0, 1, 3):
        alone = torch.cat([collate([row], [0]).supervised(step)[0] for row in rows])
        assert packed.supervised(step)[0].equal(alone)


def test_prefetched() -> None:
    """Batches are made ahead by threads and come in their order."""
    made, both = list[int](), threading.Barrier(2)

    def make(number: int) -> int:
        made.append(number)
        if number < 2:
            both.wait(timeout=60)  # two run at once
        return number

    seen = [(number, len(made)) for number in prefetched(make, range(9), 2)]
    assert [number for number, _ in seen] == [*range(9)] and all(
        count <= number + 3 for number, count in seen
    )


LENGTHS = [3 + (7 * row) % 40 for row in range(101)]


def test_grouping() -> None:
    """Shards and batches take every row once within their tokens."""
    lengths = [300, *LENGTHS, 300]
    everything = list(range(len(lengths)))
    shards, groups = (
        [everything[rows] for rows in shard_spans(lengths, 256)],
        group_by_length(lengths, 256),
    )
    assert list(itertools.chain(*shards)) == sorted(itertools.chain(*groups)) == everything
    assert all(len(rows) == 1 or sum(lengths[row] for row in rows) <= 256 for rows in shards)
    assert all(
        len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= 256 for rows in groups
    )
    assert max(len(shards), len(groups)) < 1.25 * sum(lengths) / 256


def test_order() -> None:
    """A step takes the same rows however it is cut, and an epoch takes each row once."""
    whole = Order(LENGTHS, seed=3, batch_size=1, accumulation=8)
    steps = [whole.rows(step) for step in range(whole.steps_per_epoch)]
    assert sorted(itertools.chain(*steps)) == list(range(len(LENGTHS))) and {
        len(step) for step in steps
    } == {7, 8}
    for batch_size, accumulation, world_size in (
        (2, 4, 1),
        (8, 1, 1),
        (4, 1, 2),
        (1, 4, 2),
        (2, 2, 2),
    ):
        cut = Order(LENGTHS, 3, batch_size, accumulation, world_size)
        for step in range(2 * whole.steps_per_epoch):
            parts = [part for rank in range(world_size) for part in cut.parts(step, rank)]
            assert all(len(part) <= batch_size for part in parts)
            assert sorted(itertools.chain(*parts)) == sorted(whole.rows(step))
    later = whole.steps_per_epoch + 2
    assert whole.rows(2) != whole.rows(later) != Order(LENGTHS, 1, 8).rows(later)
    assert sorted(Order(LENGTHS, 3, 8).rows(later)) == sorted(
        whole.rows(later)
    )  # any step, without those before


def test_pools() -> None:
    """Rows of pools come from few shards at a time; an epoch takes each row once."""
    lengths = [5 + (7 * row) % 40 for row in range(1000)]
    shards = [range(first, first + 50) for first in range(0, 1000, 50)]
    order = Order(lengths, 3, 10, pools=ShardPools(shards, 2))
    for epoch in (0, 1):
        steps = [order.rows(step) for step in range(epoch * 100, epoch * 100 + 100)]
        assert sorted(itertools.chain(*steps)) == list(range(1000))
        seen = [{row // 50 for row in rows} for rows in steps]
        for first in range(
            0, 100, 16
        ):  # 16 steps are sorted by length together, and touch at most three of ten pools
            assert 2 <= len(set.union(*seen[first : first + 16])) <= 6
    assert order.rows(57) == Order(lengths, 3, 5, world_size=2, pools=ShardPools(shards, 2)).rows(
        57
    )
