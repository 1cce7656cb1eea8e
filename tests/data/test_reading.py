"""Laws of the measured reading: what it calls a first read comes from files that nobody maps."""

import os
from pathlib import Path

import pytest
import torch

from aerie.data.batches import Order
from aerie.data.cache import FeatureCache
from aerie.data.features import last_step, measure
from aerie.data.tokens import TokenisedData
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


def test_where_the_system_cannot_forget_files_the_reading_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    data = TokenisedData(train=caches.rows(8), held_out=caches.rows(1, seed=1))
    cache = caches.cache(tmp_path / "features", caches.load_target(tmp_path / "target"), data).split("train")
    order = Order(cache.lengths, 0, 4, 1, 1, None)
    assert "from memory" not in measure(cache, order, 2, None).text()
    monkeypatch.delattr(os, "posix_fadvise")
    assert "the first read may come from memory" in measure(cache, order, 2, None).text()


@pytest.mark.parametrize("torn", [b'{"kind": "eagle1", "step_ms": 4', b'{"kind": "\xc3'])
def test_a_torn_line_of_the_metrics_is_passed_over(tmp_path: Path, torn: bytes) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"kind": "eagle1", "step_ms": 100, "data_wait_share": 0.25}\n' + torn)
    assert last_step(metrics, "eagle1") == (75.0, 0.25)
