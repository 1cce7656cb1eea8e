"""Laws of the extraction: the target's own states, whoever made them, whatever interrupted it."""

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from aerie.configs.errors import NotWritable, UserError
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.data.batches import collate, group_by_length, with_states
from aerie.data.chat import TokenRow
from aerie.data.feature_cache import CachePlan
from aerie.data.features import WRITING, plan_cache, within_context
from aerie.data.progress import JobShare
from aerie.data.tokens import TokenisedData
from aerie.model.storage import Lock, write_text
from aerie.model.target import Target
from tests.data import caches

DATA = TokenisedData(train=caches.rows(24), held_out=caches.rows(3, seed=1))
ROWS = [*DATA.train, *DATA.held_out]


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the cache as one undisturbed process writes it."""
    plan = caches.plan(tmp_path_factory.mktemp("whole"), target, DATA)
    assert len(plan.shards) >= 5
    caches.write(target, plan)
    return caches.contents(plan.directory)


@pytest.fixture
def plan(target: Target, tmp_path: Path) -> CachePlan:
    return caches.plan(tmp_path / "features", target, DATA)


def test_foreign_tokens_and_long_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token that the target lacks is refused by its place; text beyond the context is cut."""
    data = TokenisedData([TokenRow([1, 320, 2], [0, 1, 1], "a: row 7")], [])
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=4, max_position_embeddings=64
    )
    asked = DataConfig(("rows.jsonl",), max_length=100)
    assert (
        within_context(asked, config).max_length == 64
        and "are cut at 64" in capsys.readouterr().err
    )
    assert within_context(replace(asked, max_length=32), config).max_length == 32
    with pytest.raises(UserError, match="a: row 7: token id 320 is"):
        plan_cache(
            tmp_path, data, FeaturesConfig(dtype="float32"), "owner/target", config, {"target": {}}
        )


def test_states_of_a_forward(target: Target, tmp_path: Path) -> None:
    """The cache holds the states of a direct forward whatever the padding."""
    views = [
        caches.cache(tmp_path / str(size), target, DATA, after_blocks=(0, 3), batch_tokens=size)
        for size in (1, 100, 4096)
    ]
    for number, row in enumerate(ROWS):
        with torch.inference_mode():
            output = target.model(
                input_ids=torch.tensor([row.input_ids]), output_hidden_states=True
            )
        taps = torch.cat([output.hidden_states[k][0] for k in (0, 3)], dim=-1)
        for view in views:
            torch.testing.assert_close(
                view[number].last_hidden, output.hidden_states[-1][0], atol=1e-5, rtol=0
            )
            torch.testing.assert_close(view[number].taps, taps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_online_states(target: Target, tmp_path: Path, packed: bool) -> None:
    """States made in the step are the cached ones to rounding."""
    cache = caches.cache(tmp_path, target, TokenisedData(DATA.train[:6], []), after_blocks=(1, 2))
    cached = collate([cache[number] for number in range(6)], range(6), packed)
    online = with_states(target, (1, 2), target.dtype, collate(DATA.train[:6], range(6), packed))
    assert online.documents == cached.documents and online.input_ids.equal(cached.input_ids)
    for found, expected in ((online.features, cached.features), (online.taps, cached.taps)):
        assert found is not None and expected is not None and found.dtype == expected.dtype
        assert (
            found.shape == expected.shape
            and (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        )
        torch.nn.Parameter(torch.ones(())).mul(
            found
        ).sum().backward()  # autograd refuses inference tensors


def test_infinite_states(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that cannot be stored are refused with their row; no shard is written."""
    forwards, poison = Target.features, TokenRow([319] * 9, [0] + [1] * 8, "a: row 7")

    def broken(self: Target, ids: Tensor, *rest: Any) -> Any:
        output, is_bad = (
            forwards(self, ids, *rest),
            (ids == 319) | (ids == 0),
        )  # padding, which does not count
        return replace(
            output, last_hidden=output.last_hidden.masked_fill(is_bad[..., None], 80_000.0)
        )

    monkeypatch.setattr(Target, "features", broken)
    rows = [row for row in DATA.train if not {0, 319} & {*row.input_ids}]
    # float16 ends at 65,504, though a scale can be larger
    keys: dict[str, Any] = {"shard_tokens": 9999, "dtype": "float16", "storage": "fp8"}
    plan = caches.plan(tmp_path, target, TokenisedData([*rows, poison], rows), **keys)
    with pytest.raises(
        UserError, match=rf"a: row 7: the target's states are not finite in {plan.storage}"
    ):
        caches.write(target, plan)
    assert list(plan.directory.glob("shard*")) == []


@pytest.mark.parametrize("shares", [("3/3", "1/3", "2/3"), ("1/2", "4/4", "2/4", "1/4")])
def test_shares_and_continuing(
    shares: tuple[str, ...], target: Target, whole: dict[str, bytes], plan: CachePlan
) -> None:
    """The cache does not depend on how it was shared out or continued."""
    times, index = dict[str, int](), None
    write_text(plan.directory / ".shard-00002.safetensors.0123abcd.tmp", "left by a killed process")
    write_text(plan.directory / ".tmpleft", "as safetensors leaves it")
    for share in shares:
        assert index is None or share == shares[-1]
        index = caches.write(target, plan, share=JobShare.of(share))
        for path in plan.directory.glob("shard*"):
            assert (
                times.setdefault(path.name, path.stat().st_mtime_ns) == path.stat().st_mtime_ns
            )  # never made twice
    assert index is not None and caches.contents(plan.directory) == whole


def test_two_writers(
    target: Target, whole: dict[str, bytes], plan: CachePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers of one cache make each shard once."""
    begun, both, features = list[int](), threading.Barrier(2), Target.features

    def counting(self: Target, *arguments: Any) -> Any:
        begun.append(1)
        if len(begun) <= 2:
            both.wait(timeout=60)  # each works on a shard
        return features(self, *arguments)

    monkeypatch.setattr(Target, "features", counting)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: caches.write(target, plan), range(2)))
    groups = [
        group_by_length([len(row.input_ids) for row in shard.rows], 128) for shard in plan.shards
    ]
    assert caches.contents(plan.directory) == whole and len(begun) == sum(map(len, groups))


def test_another_recipes_writer(target: Target, plan: CachePlan) -> None:
    """Another recipes writer waits its turn and replaces only what it may."""
    caches.write(target, plan, share=JobShare(1, 2))
    fewer = caches.plan(plan.directory, target, TokenisedData(DATA.train[:3], []))
    (at_work,) = (plan.directory / WRITING).glob("cache-*")
    with Lock(at_work) as lock:
        lock.acquire(shared=True)
        before = caches.contents(plan.directory)
        with pytest.raises(
            UserError, match="another process is writing another cache here; wait until it ends"
        ):
            caches.write(target, fewer, overwrite=True)
        assert caches.contents(plan.directory).items() >= before.items()
        caches.write(target, plan, share=JobShare(2, 2))  # the same recipe may write too
    with pytest.raises(
        UserError, match=r"made from other rows or by another target; .*--overwrite"
    ):
        caches.write(target, fewer)
    caches.write(target, fewer, overwrite=True)
    # neither a surplus shard nor a lock is left
    assert sorted(caches.contents(plan.directory)) == [
        "index.json",
        "shard-00000.json",
        "shard-00000.safetensors",
    ]


def test_full_disk(small_disk: Path, target: Target, whole: dict[str, bytes]) -> None:
    """A full or read only disk loses nothing."""
    tight, filler = caches.plan(small_disk / "features", target, DATA), small_disk / "filler"
    estimates = [tight.bytes_of(shard) for shard in tight.shards]
    filler.write_bytes(b"0" * (shutil.disk_usage(small_disk).free - sum(estimates[:2]) - 30_000))
    with pytest.raises(NotWritable, match=r"No space left on device.*free some space"):
        caches.write(target, tight)
    assert 0 < len(tight.missing()) < len(tight.shards)
    assert not [path for path in small_disk.rglob("*") if "tmp" in path.name]
    filler.unlink()
    caches.write(target, tight)
    assert caches.contents(tight.directory) == whole
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        NotWritable, match=r"cannot be written .Read-only file system.; choose another --run"
    ):
        caches.write(target, tight)
