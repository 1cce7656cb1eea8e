"""States made in the step are those that a cache would have given, in the same places of the same batch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aerie.data.batches import collate
from aerie.data.features import OnlineFeatures
from aerie.data.tokens import TokenisedData
from tests.data import caches

TAPS = (1, 2)


@pytest.mark.parametrize("packed", [False, True])
def test_an_online_batch_is_the_cached_one_to_rounding(tmp_path: Path, packed: bool) -> None:
    target = caches.load_target(tmp_path / "target")
    data = TokenisedData(caches.rows(6), [])
    cache = caches.cache(tmp_path / "cache", target, data, after_blocks=TAPS)
    cached = collate([cache[number] for number in range(6)], range(6), packed)
    online = OnlineFeatures(target, TAPS)(collate(data.train, range(6), packed))
    assert online.documents == cached.documents and online.input_ids.equal(cached.input_ids)
    for name in ("features", "taps"):
        found, expected = getattr(online, name), getattr(cached, name)
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert online.taps is not None
    torch.nn.Parameter(torch.ones(())).mul(online.taps).sum().backward()  # no inference tensor, which autograd refuses


def test_without_taps_there_are_none_and_states_that_are_there_stay(tmp_path: Path) -> None:
    target = caches.load_target(tmp_path / "target")
    supply, batch = OnlineFeatures(target, (), torch.bfloat16), collate(caches.rows(2), [0, 1])
    filled = supply(batch)
    assert filled.taps is None and filled.features is not None and filled.features.dtype == torch.bfloat16
    mine = replace(batch, features=torch.ones(1))
    assert supply(mine) is mine
