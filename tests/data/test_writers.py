"""Laws of several writers, and of disks that cannot be written: what is whole never depends on who made it, or when."""

import errno
import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from aerie.configs.errors import NotWritable, UserError
from aerie.data.cache import FeatureCache
from aerie.data.features import HEADER_BYTES, WRITING, CachePlan, check, extract, require_space
from aerie.data.tokens import Share, TokenisedData
from aerie.model.storage import Lock, write_text
from aerie.model.target import Target
from tests.data import caches

DATA = TokenisedData(train=caches.rows(40), held_out=caches.rows(3, seed=1))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    return caches.load_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the cache as one undisturbed process writes it."""
    plan = caches.plan(tmp_path_factory.mktemp("whole"), target, DATA, after_blocks=(1,))
    assert len(plan.shards) >= 7
    extract(target, plan, PartialState(), {})
    return contents(plan)


def contents(plan: CachePlan) -> dict[str, bytes]:
    return {
        str(path.relative_to(plan.directory)): path.read_bytes() for path in plan.directory.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("shares", [("2/2", "1/2"), ("3/3", "1/3", "2/3"), ("2/5", "1/1"), ("1/2", "4/4", "2/4")])
def test_the_cache_does_not_depend_on_how_it_was_shared_out_or_continued(
    shares: tuple[str, ...], target: Target, whole: dict[str, bytes], tmp_path: Path
) -> None:
    plan, times = caches.plan(tmp_path / "features", target, DATA, after_blocks=(1,)), dict[str, int]()
    for share in shares:
        assert "index.json" not in (contents(plan) if plan.directory.exists() else {})
        made = extract(target, plan, PartialState(), {}, Share.of(share))
        for path in plan.directory.glob("shard*"):
            assert times.setdefault(path.name, path.stat().st_mtime_ns) == path.stat().st_mtime_ns  # never made twice
    assert made is not None and contents(plan) == whole


@pytest.mark.parametrize("features", [{}, {"after_blocks": (0, 1, 3), "storage": "int8"}])
def test_a_shard_takes_the_bytes_that_were_planned(target: Target, tmp_path: Path, features: dict[str, Any]) -> None:
    plan = caches.plan(tmp_path / "features", target, DATA, **features)
    extract(target, plan, PartialState(), {})
    over = [plan.bytes_of(shard) - plan.path_of(shard).stat().st_size for shard in range(len(plan.shards))]
    assert min(over) >= 0 and max(over) < HEADER_BYTES


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/", "/4", "a/b", "1/0", "-1/4"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--shard: .* is no share; write i/n"):
        Share.of(text)


def test_shares_take_every_shard_once_whatever_their_processes() -> None:
    worlds = (1, 2, 3)  # of the three jobs
    taken = [
        shard
        for job in (1, 2, 3)
        for rank in range(worlds[job - 1])
        for shard in Share(job, 3).part(20, rank, worlds[job - 1])
    ]
    assert sorted(taken) == list(range(20))


def test_two_writers_of_one_cache_share_the_work(target: Target, whole: dict[str, bytes], tmp_path: Path) -> None:
    plan, forwards, errors = caches.plan(tmp_path / "features", target, DATA, after_blocks=(1,)), [0, 0], []

    def write(number: int) -> None:
        counted = CountingTarget(target, forwards, number)
        try:
            extract(counted, plan, PartialState(), {})  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    assert errors == [] and contents(plan) == whole
    alone = [0]
    extract(
        CountingTarget(target, alone, 0),
        caches.plan(tmp_path / "alone", target, DATA, after_blocks=(1,)),
        PartialState(),
        {},
    )  # type: ignore[arg-type]
    assert sum(forwards) == alone[0] and min(forwards) > 0


class CountingTarget:
    """The target, and how many forwards each writer asked of it."""

    def __init__(self, target: Target, counts: list[int], number: int) -> None:
        self.target, self.counts, self.number = target, counts, number

    def __getattr__(self, name: str) -> object:
        return getattr(self.target, name)

    def features(self, *arguments: object) -> object:
        self.counts[self.number] += 1
        return self.target.features(*arguments)  # type: ignore[arg-type]


def test_a_writer_of_another_recipe_is_refused_while_one_is_at_work(
    target: Target, whole: dict[str, bytes], tmp_path: Path
) -> None:
    plan = caches.plan(tmp_path / "features", target, DATA, after_blocks=(1,))
    other = caches.plan(tmp_path / "features", target, DATA, after_blocks=(2,))
    extract(target, plan, PartialState(), {}, Share(1, 2))
    with Lock(plan.directory / WRITING / "cache") as at_work:
        at_work.acquire(shared=True)
        before = contents(plan)
        with pytest.raises(UserError, match="another process is writing another cache there"):
            extract(target, other, PartialState(), {})
        assert contents(plan) == before
        extract(target, plan, PartialState(), {}, Share(2, 2))  # one of the same recipe is welcome
        assert {name: text for name, text in contents(plan).items() if not name.startswith(WRITING)} == whole
        assert (plan.directory / WRITING / "cache").exists()  # somebody is still at work


def test_a_writer_begins_where_another_has_just_ended_or_never_said_what_it_writes(
    target: Target, whole: dict[str, bytes], tmp_path: Path
) -> None:
    plan = caches.plan(tmp_path / "features", target, DATA, after_blocks=(1,))
    ending = Lock(plan.directory / WRITING / "cache")
    ending.acquire(shared=True)
    waited = threading.Event()

    def end() -> None:
        waited.wait(0.3)
        ending.release()

    thread = threading.Thread(target=end)
    thread.start()
    extract(target, plan, PartialState(), {})
    thread.join()
    assert contents(plan) == whole


@pytest.mark.parametrize("ends", [True, False])
def test_a_writer_that_is_overtaken_while_its_lock_becomes_shared_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    plan = caches.plan(tmp_path / "features", target, DATA, after_blocks=(1,))
    other = caches.plan(tmp_path / "features", target, DATA, after_blocks=(2,))
    acquire, left = Lock.acquire, [1]

    def overtaken(lock: Lock, shared: bool = False, wait: bool = True) -> object:
        if shared and lock.path.name == "cache" and left:
            left.clear()
            fcntl.flock(lock.file, fcntl.LOCK_UN)  # as the kernel does before it takes the shared one
            extract(target, other, PartialState(), {}, Share() if ends else Share(1, 2))
            if not ends:
                acquire(at_work, shared=True)
        return acquire(lock, shared, wait)

    with Lock(tmp_path / "features" / WRITING / "cache") as at_work, monkeypatch.context() as patched:
        patched.setattr(Lock, "acquire", overtaken)
        said = "made from other rows or by another target" if ends else "another process is writing another cache there"
        with pytest.raises(UserError, match=said):
            extract(target, plan, PartialState(), {})
    part = Share() if ends else Share(1, 2)
    assert {other.state_of(shard) for shard in part.part(len(other.shards))} == {"whole"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB in memory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_stops_with_the_bytes_that_are_needed_and_loses_nothing(
    small_disk: Path, target: Target, whole: dict[str, bytes]
) -> None:
    plan = caches.plan(small_disk / "features", target, DATA, after_blocks=(1,))
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * (256 * 1024 - plan.bytes_of(0) - plan.bytes_of(1) - plan.bytes_of(2) // 2 - 20_000))
    with pytest.raises(UserError, match="the disk is full") as stopped:
        extract(target, plan, PartialState(), {})
    left = plan.missing()
    assert 0 < len(left) < len(plan.shards)
    assert (
        f"what is left of this process's part takes {sum(map(plan.bytes_of, left)):,} bytes in {len(left)} shards"
        in str(stopped.value)
    )
    assert len(check(plan.directory).problems) == 1  # no index
    assert not [path for path in plan.directory.rglob("*") if "tmp" in path.name]
    filler.unlink()
    extract(target, plan, PartialState(), {})
    assert contents(plan) == whole


def test_what_is_replaced_counts_as_free(small_disk: Path, target: Target, whole: dict[str, bytes]) -> None:
    plan = caches.plan(small_disk / "features", target, DATA, after_blocks=(1,))
    extract(target, caches.plan(small_disk / "features", target, DATA, after_blocks=(2,)), PartialState(), {})
    require_space(plan, Share())
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * (shutil.disk_usage(small_disk).free - plan.bytes_of(0)))
    require_space(plan, Share())
    extract(target, plan, PartialState(), {}, may_replace=lambda: True)
    assert contents(plan) == whole
    plan.path_of(0).unlink()
    filler.write_bytes(b"0" * (filler.stat().st_size + shutil.disk_usage(small_disk).free))
    with pytest.raises(UserError, match=r"the cache needs .* more"):  # what stays does not
        require_space(plan, Share())


def test_a_read_only_directory_is_refused_in_one_line(small_disk: Path, target: Target) -> None:
    plan = caches.plan(small_disk / "features", target, DATA)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for write in (
        lambda: extract(target, plan, PartialState(), {}),
        lambda: write_text(small_disk / "status.json", ""),
    ):
        with pytest.raises(NotWritable, match=r"cannot be written .Read-only file system.; choose another --run"):
            write()


def test_a_lock_is_one_writers_until_it_is_released_or_shared(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock") as first, Lock(tmp_path / "lock") as second:
        assert first.acquire() and not second.acquire(wait=False) and not second.acquire(shared=True, wait=False)
        first.release()
        assert second.acquire(shared=True, wait=False)
        with Lock(tmp_path / "lock") as third:
            assert third.acquire(shared=True, wait=False) and not third.acquire(wait=False)


def test_a_lock_on_a_file_that_its_last_holder_removed_is_taken_on_the_file_that_others_see(tmp_path: Path) -> None:
    path = tmp_path / "folder/lock"
    with Lock(path) as first, Lock(path) as second:
        assert first.acquire()
        first.forget()
        path.parent.rmdir()
        first.release()
        assert second.acquire()
        with Lock(path) as third:
            assert not third.acquire(wait=False)


def test_without_locks_no_temporary_file_is_removed_and_one_warning_says_so(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    plan = caches.plan(tmp_path / "features", target, DATA)
    others = plan.directory / ".shard-00002.safetensors.1-00000000.tmp"
    write_text(others, "under way on another node")
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", unsupported)
        extract(target, plan, PartialState(), {})
    assert others.is_file() and check(plan.directory).problems == ()
    assert capsys.readouterr().err.count("warning: ") == 1
    extract(target, plan, PartialState(), {})
    assert not others.exists() and capsys.readouterr().err.count("warning: ") == 0


def test_what_a_cache_reads_is_what_was_written_while_it_is_written_anew(target: Target, tmp_path: Path) -> None:
    plan = caches.plan(tmp_path / "features", target, DATA)
    extract(target, plan, PartialState(), {})
    cache = FeatureCache.open(plan.directory)
    before = cache[0].last_hidden
    plan.path_of(0).unlink()
    extract(target, plan, PartialState(), {})
    assert cache[0].last_hidden.equal(before) and FeatureCache.open(plan.directory)[0].last_hidden.equal(before)
