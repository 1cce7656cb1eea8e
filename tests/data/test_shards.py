"""Laws of one shard file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.data.cache import ShardBuffer, ShardReader, Storage, encode, rows_digest, state_of
from aerie.data.chat import Row

HIDDEN, TAPS = 6, 2
PLAIN = Storage(torch.float32)
ROWS = [
    Row([5, 6, 7], [0, 1, 1], "a: row 1"),
    Row([8, 9], [0, 1], "a: row 2"),
    Row([3, 2, 1, 4], [0, 0, 2, 2], "b: row 9"),
]


def states(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(len(row.input_ids), HIDDEN, generator=generator),
            torch.randn(len(row.input_ids), TAPS * HIDDEN, generator=generator),
        )
        for row in ROWS
    ]


def write(path: Path, num_taps: int = TAPS, storage: Storage = PLAIN) -> None:
    buffer = ShardBuffer(ROWS, HIDDEN, num_taps, storage)
    for place, (last_hidden, taps) in reversed(list(enumerate(states()))):
        buffer.put(place, encode(last_hidden, 1, storage), encode(taps, num_taps, storage) if num_taps else None)
    buffer.save(path, "origin")


def test_rows_come_back_bit_for_bit_whatever_the_order_they_arrived_in(tmp_path: Path) -> None:
    write(tmp_path / "shard")
    reader = ShardReader(tmp_path / "shard")
    for place, (row, (last_hidden, taps)) in enumerate(zip(ROWS, states(), strict=True)):
        found = reader.row(place)
        assert found.input_ids.tolist() == list(row.input_ids) and found.input_ids.dtype == torch.int64
        assert found.turns.tolist() == list(row.turns) and found.turns.dtype == torch.int32
        assert found.taps is not None
        assert torch.equal(found.last_hidden, last_hidden) and torch.equal(found.taps, taps)


def test_writing_into_a_row_changes_neither_the_file_nor_the_next_read(tmp_path: Path) -> None:
    write(tmp_path / "shard", num_taps=0)
    reader = ShardReader(tmp_path / "shard")
    row = reader.row(1)
    row.last_hidden.zero_()
    row.turns.zero_()
    assert reader.row(1).last_hidden.abs().sum() > 0 and reader.row(1).turns.tolist() == [0, 1]
    assert reader.row(1).taps is None


def test_bfloat16_is_stored_as_the_rounded_states(tmp_path: Path) -> None:
    write(tmp_path / "shard", storage=Storage(torch.bfloat16))
    found = ShardReader(tmp_path / "shard").row(2)
    assert torch.equal(found.last_hidden, states()[2][0].bfloat16())


def test_the_same_rows_and_states_give_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5])
def test_states_that_are_not_finite_as_stored_are_refused_with_the_row(bad: float) -> None:
    storage = Storage(torch.float16)
    buffer = ShardBuffer(ROWS, HIDDEN, 0, storage)
    last_hidden = states()[2][0]
    last_hidden[3, 5] = bad
    with pytest.raises(UserError, match="b: row 9: the target's states are not finite in float16"):
        buffer.put(2, encode(last_hidden, 1, storage), None)


def test_a_shard_is_told_absent_damaged_foreign_or_whole(tmp_path: Path) -> None:
    path, rows = tmp_path / "shard", rows_digest(ROWS)
    assert state_of(path, rows, "origin") == "absent"
    write(path)
    assert state_of(path, rows, "origin") == "whole"
    assert state_of(path, rows, "another origin") == "foreign"
    assert state_of(path, rows_digest(ROWS[:2]), "origin") == "foreign"
    whole = path.read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert state_of(path, rows, "origin") == "damaged"


def test_the_rows_digest_sees_ids_turns_and_borders() -> None:
    digests = {
        rows_digest(rows)
        for rows in (
            [Row([1, 2], [0, 1], "")],
            [Row([1, 3], [0, 1], "")],
            [Row([1, 2], [0, 2], "")],
            [Row([1], [0], ""), Row([2], [1], "")],
        )
    }
    assert len(digests) == 4
