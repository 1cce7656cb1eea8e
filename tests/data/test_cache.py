"""Laws of the feature cache as a sequence."""

import pickle
from collections.abc import Sequence

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.cache import FeatureCache
from aerie.data.chat import Row
from aerie.data.tokens import TokenisedData
from aerie.model.target import fingerprint, load_ends
from tests.data import caches

DATA = TokenisedData(train=caches.rows(11), held_out=caches.rows(4, seed=1))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("cache")
    return caches.cache(root / "features", caches.load_target(root / "target"), DATA, after_blocks=(1, 3))


def ids(found: FeatureCache) -> list[list[int]]:
    return [row.input_ids.tolist() for row in found]


def given(rows: Sequence[Row]) -> list[list[int]]:
    return [list(row.input_ids) for row in rows]


def test_the_splits_hold_the_rows_in_order_and_together_are_the_cache(cache: FeatureCache) -> None:
    assert len(cache.contents.shards) > 2
    train, held_out = cache.split("train"), cache.split("held_out")
    assert ids(train) == given(DATA.train) and ids(held_out) == given(DATA.held_out)
    assert ids(cache) == ids(train) + ids(held_out)
    assert (
        train.lengths + held_out.lengths == cache.lengths == [len(row) for row in given([*DATA.train, *DATA.held_out])]
    )


def test_a_row_keeps_its_number_in_every_view(cache: FeatureCache) -> None:
    assert [row.number for row in cache.split("held_out")] == [11, 12, 13, 14]
    assert [row.number for row in cache[3:9:2]] == [3, 5, 7]
    assert cache[-1].number == 14
    with pytest.raises(IndexError):
        cache.split("train")[11]


def test_a_view_can_be_sent_to_another_process(cache: FeatureCache) -> None:
    assert cache[12].turns.tolist() == list(DATA.held_out[1].turns)  # a file is mapped by now
    copy = pickle.loads(pickle.dumps(cache))  # noqa: S301
    assert torch.equal(copy[12].last_hidden, cache[12].last_hidden)


def test_the_fingerprint_is_the_one_that_training_computes_without_the_trunk(cache: FeatureCache) -> None:
    path = cache.directory.parent / "target"
    text_config, ends = load_ends(TargetConfig(path=str(path)))
    expected = {"target": fingerprint(text_config, ends), "after_blocks": (1, 3), "dtype": "float32"}
    assert len(FeatureCache.open(cache.directory, expected)) == 15


def test_a_mismatch_is_refused_with_both_values_and_the_command_that_rebuilds(cache: FeatureCache) -> None:
    with pytest.raises(UserError) as refusal:
        FeatureCache.open(cache.directory, {"after_blocks": (1, 2)})
    assert str(refusal.value) == (
        f"{cache.directory}: built with after_blocks (1, 3), this recipe asks (1, 2); "
        f"rebuild with: python data/main.py features --config RECIPE --overwrite"
    )
    with pytest.raises(UserError, match=r"data.max_length 40, this recipe asks 2048"):
        FeatureCache.open(cache.directory, {"data": {"max_length": 2048}})
    with pytest.raises(UserError, match=r"built with target [0-9a-f]{16}, this recipe asks other"):
        FeatureCache.open(cache.directory, {"target": "other"})


def test_the_shards_of_a_view_partition_its_rows_by_file(cache: FeatureCache) -> None:
    for view in (cache, cache.split("train"), cache.split("held_out")):
        assert [row for rows in view.shards for row in rows] == list(range(len(view)))
        for rows in view.shards:
            assert len({view.file_of(row) for row in rows}) == 1
    assert len({cache.file_of(rows[0]) for rows in cache.shards}) == len(cache.contents.shards)
