"""Laws of the cache's table of contents."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from aerie.configs.errors import UserError
from aerie.data.cache import FILE, CacheIndex, ShardEntry, is_complete, pack, read_index, write_index

INDEX = CacheIndex(
    schema=1,
    fingerprint={"after_blocks": [1]},
    dtype="float32",
    hidden_size=8,
    after_blocks=(1,),
    splits={"train": (0, 2), "held_out": (2, 3)},
    lengths=(4, 5, 6),
    shards=(ShardEntry("shard-00000.safetensors", 0, 3, 15, 7, "ab"),),
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / INDEX.shards[0].file).write_bytes(b"1234567")
    write_index(tmp_path, INDEX)
    return tmp_path


def test_packing_keeps_the_order_loses_nothing_and_overfills_only_for_a_single_row() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(1, 90) for _ in range(500)]
    shards = list(pack(lengths, 64))
    assert [row for shard in shards for row in shard] == list(range(500))
    assert all(len(shard) == 1 or sum(lengths[row] for row in shard) <= 64 for shard in shards)
    assert all(sum(lengths[row] for row in [*shard, shard.stop]) > 64 for shard in shards[:-1])


def test_no_rows_need_no_shard() -> None:
    assert list(pack([], 64)) == []


def test_an_index_reads_back_as_it_was_written(directory: Path) -> None:
    found = read_index(directory)
    assert replace(found, seal=None) == INDEX and found.seal is not None
    assert is_complete(directory)
    assert (INDEX.num_tokens, INDEX.num_bytes) == (15, 7)


def test_a_missing_or_short_shard_makes_the_cache_incomplete(directory: Path) -> None:
    shard = directory / INDEX.shards[0].file
    shard.write_bytes(b"123")
    with pytest.raises(UserError, match=r"shard-00000.safetensors is 3 bytes long instead of 7.*data/main.py features"):
        read_index(directory)
    shard.unlink()
    with pytest.raises(UserError, match="missing"):
        read_index(directory)
    assert not is_complete(directory)


def test_absent_and_unfinished_caches_are_named_with_the_command_that_builds_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such feature cache; build it with: python data/main.py features"):
        read_index(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"not whole \(no index.json\)"):
        read_index(tmp_path)


def test_a_changed_index_is_refused_unless_it_never_had_a_seal(directory: Path) -> None:
    values = json.loads((directory / FILE).read_text())
    values["splits"] = {"train": [0, 3], "held_out": [3, 3]}
    (directory / FILE).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"index.json: its seal does not match .*features --config RECIPE --verify"):
        read_index(directory)
    del values["seal"]
    (directory / FILE).write_text(json.dumps(values))
    assert read_index(directory).splits["train"] == (0, 3)


def test_an_index_of_another_version_is_refused_with_its_key(directory: Path) -> None:
    values = json.loads((directory / FILE).read_text())
    (directory / FILE).write_text(json.dumps({**values, "schema": 2}))
    with pytest.raises(UserError, match=r"index.json: schema: .*rebuild with"):
        read_index(directory)
