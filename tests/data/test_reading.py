"""Laws of the measured reading: what it calls a first read comes from files that nobody maps."""

import os
from pathlib import Path

import pytest
import torch

from data.batches import Order
from data.cache import FeatureCache
from data.reading import measure
from data.tokens import TokenisedData
from tests.data import caches


def test_no_shard_is_mapped_when_its_pages_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    data = TokenisedData(train=caches.rows(14), held_out=caches.rows(3, seed=1))
    cache = caches.cache(tmp_path / "features", caches.load_target(tmp_path / "target"), data).split("train")
    list(cache)  # maps every shard

    def mapped() -> bool:
        return str(tmp_path / "features" / "shard-") in Path("/proc/self/maps").read_text()

    assert mapped()
    dropped, advise = [], os.posix_fadvise

    def watched(*arguments: int) -> None:
        dropped.append(mapped())
        advise(*arguments)

    monkeypatch.setattr(os, "posix_fadvise", watched)
    reading = measure(cache, Order(cache.lengths, 0, 4, 1, 1, None), 2, 0.001)
    files = {cache.file_of(row) for step in range(2) for row in Order(cache.lengths, 0, 4, 1, 1, None).rows(step)}
    assert dropped == [False] * 2 * len(files)
    assert reading.num_steps == 2 and len(list(FeatureCache.open(tmp_path / "features"))) == 17
