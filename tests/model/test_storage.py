"""Outputs on disk are whole or absent, ours or another run's; a command ends with an exit code and
a status."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import NotWritable, UserError, exit_codes, rank, stop_on_signals, warn
from aerie.infer.measure.recorder import append_lines
from aerie.model.storage import (
    FILE,
    Damaged,
    Foreign,
    Lock,
    Manifest,
    Stage,
    Whole,
    differences,
    digest,
    directory_atomically,
    remove_temporaries,
    status_file,
    working_alone,
    write_text,
)
from tests.tiny import refused


@pytest.mark.parametrize(
    ("event", "state", "code"),
    [
        (UserError("a mistake"), "failed", 2),
        (signal.SIGTERM, "interrupted", 130),
        (signal.SIGUSR1, "requeue", 75),
    ],
)
def test_exit_status(event: Any, state: str, code: int, tmp_path: Path) -> None:
    """A command's end is its exit code and its status."""

    @exit_codes()
    @status_file(tmp_path / "status.json", "features")
    def run() -> None:
        try:
            if isinstance(event, signal.Signals):
                signal.raise_signal(event)
            raise event
        finally:
            if event == signal.SIGUSR1:
                signal.raise_signal(
                    signal.SIGUSR1
                )  # batch scripts send it again; the clean-up goes on
            (tmp_path / "cleaned").touch()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        stop_on_signals()
        with pytest.raises(SystemExit) as end:
            run()
        assert end.value.code == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert json.loads((tmp_path / "status.json").read_text()) == {
        "stage": "features",
        "state": state,
        "code": code,
    }
    assert (tmp_path / "cleaned").exists()


def test_warn_once(monkeypatch: Any, capsys: Any) -> None:
    """The first process alone warns and without a launcher every process is the first."""
    for text, number in (("0", 0), ("3", 3)):
        monkeypatch.setenv("RANK", text)
        warn("careful")
        assert (rank(), "careful" in capsys.readouterr().err) == (number, number == 0)


def written(directory: Path, seed: int = 1) -> Path:
    with directory_atomically(directory) as temporary:
        (temporary / "ranks").mkdir()
        (temporary / "ranks/0").write_text(f"rank 0 with seed {seed}")
        Manifest.of(temporary, {"seed": seed, "data": {"rows": (1, 2)}}, {"stage": "heads"}).write(
            temporary
        )
    return directory


def test_manifest(tmp_path: Path) -> None:
    """A manifest tells whole foreign and every changed byte."""
    folder, mine = written(tmp_path / "made"), {"seed": 1, "data": {"rows": [1, 2]}}
    found, other = Manifest.check(folder, mine), Manifest.check(folder, {**mine, "seed": 2})
    assert (
        isinstance(found, Whole)
        and found.manifest.facts == {"stage": "heads"}
        and len(found.manifest.files) == 1
    )
    assert isinstance(other, Foreign) and other.differences == "seed: 1 before, 2 now"
    files = [{"a.json": digest(number), "seed": number} for number in (1, 2)]
    assert differences(*files).startswith("seed: 1 before, 2 now; a.json: ")
    rows = ({"rows": [{"a": 1}]}, {"rows": [{"a": 1}, {"a": 2}]})
    assert differences(*rows) == "rows.1: None before, {'a': 2} now"
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for place in range(0, len(content), 5):
            path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
            damage = Manifest.check(folder, mine)
            assert isinstance(damage, Damaged) and damage.path == path, place
        path.write_bytes(content[:-3])
        assert isinstance(
            Manifest.check(folder, content=path.name == FILE), Damaged
        )  # sizes are always compared
        path.unlink()
        assert isinstance(Manifest.check(folder, mine), Damaged)
        path.write_bytes(content)
    assert isinstance(Manifest.check(folder, mine), Whole)


def test_a_manifest_with_numbers_as_keys_is_read_as_it_was_written(tmp_path: Path) -> None:
    """2 comes before 10 as a number, and after it as text."""
    Manifest.of(tmp_path, facts={"lengths": {2: 384, 10: 384}}).write(tmp_path)
    assert Manifest.read(tmp_path).facts == {"lengths": {"2": 384, "10": 384}}


def test_stage(tmp_path: Path) -> None:
    """A stage reuses its own output and refuses another's."""
    stage, other = (
        Stage("features", tmp_path, {"rows": "these"}),
        Stage("features", tmp_path, {"rows": "those"}),
    )
    record = stage.finish(rows=7)
    assert (
        stage.is_whole()
        and not other.is_whole()
        and record["rows"] == 7
        and record["versions"]["python"]
    )
    other.require_own_directory(overwrite=True)
    refused(
        r"holds another features .rows: these before, those now.; choose another",
        other.require_own_directory,
        overwrite=False,
    )
    (tmp_path / "rows").write_text("[]")
    stage.finish()
    (tmp_path / "calibrator.json").touch()
    assert stage.is_whole()
    for name, said in (("rows", "rows: is damaged"), (FILE, r"its checksum differs\)")):
        (tmp_path / name).write_text("{}")
        refused(
            f"{said}; write it again with --overwrite",
            stage.require_own_directory,
            overwrite=stage.is_whole(),
        )


def test_atomic(tmp_path: Path, monkeypatch: Any) -> None:
    """A directory or file is as it was until the new one is whole."""
    monkeypatch.setenv("RANK", "1")  # where there is no barrier, a process is alone
    folder = written(tmp_path / "made")
    with pytest.raises(ZeroDivisionError), directory_atomically(folder) as temporary:
        (temporary / "half").write_text("half")
        raise ZeroDivisionError
    assert isinstance(Manifest.check(folder), Whole) and [
        path.name for path in tmp_path.iterdir()
    ] == ["made"]
    written(folder, seed=2)
    assert (folder / "ranks/0").read_text() == "rank 0 with seed 2"
    (folder / ".0.0123abcd.tmp").write_text("left by a killed process")
    (folder / ".hidden.tmp").write_text("a user's own")
    (folder / ".ranks.old").mkdir()
    remove_temporaries(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".hidden.tmp", FILE, "ranks"]


def test_irregular(tmp_path: Path) -> None:
    """What is no regular file is not replaced."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path, said in (
        (tmp_path / "pipe", "pipe: is no regular file; name a file, or a new path"),
        (tmp_path / "link", "link: is no regular file"),
        (tmp_path, "is no regular file"),
        (tmp_path / ("a" * 300), "cannot be written .File name too long"),
        (tmp_path / "pipe/below", "cannot be written .File exists"),
    ):
        refused(said, write_text, path, "{}")
    assert (tmp_path / "pipe").is_fifo()
    said = r"cannot be written .Not a directory.*choose another --run"
    refused(said, working_alone, tmp_path / "pipe/run", "measuring")


def test_full_disk(small_disk: Path) -> None:
    """A full disk is one line and the status says failed."""
    said = r"records.jsonl: cannot be written .No space left"
    with pytest.raises(NotWritable, match=said):  # noqa: SIM117
        with status_file(small_disk / "status.json", "bench"):
            (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
            append_lines(small_disk / "records.jsonl", ["{}"])
    assert json.loads((small_disk / "status.json").read_text())["state"] == "failed"


def test_lock(tmp_path: Path) -> None:
    """A lock is one writer's until it is released or shared."""
    path = tmp_path / "folder/lock"
    with Lock(path) as first, Lock(path) as second, Lock(path) as third:
        assert (
            first.acquire()
            and not second.acquire(wait=False)
            and not second.acquire(shared=True, wait=False)
        )
        first.path.unlink()  # a waiting process locks the file that others see
        first.file.close()
        assert second.acquire(shared=True)
        assert third.acquire(shared=True, wait=False) and not third.acquire(wait=False)


def test_launcher(tmp_path: Path, monkeypatch: Any) -> None:
    """A launcher is told the mistake and the first process alone says it."""
    slept: list[float] = []
    monkeypatch.setattr("aerie.configs.errors.time.sleep", slept.append)
    monkeypatch.setattr("aerie.configs.errors.signal.signal", lambda *_: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "reply.json"))
    for local in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(SystemExit), exit_codes():
            raise UserError("a mistake")
    assert (
        json.loads((tmp_path / "reply.json").read_text())["message"] == "error: a mistake"
        and len(slept) == 1
    )
