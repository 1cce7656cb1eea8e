"""Laws of resuming: the continued run is the unbroken one, bit for bit; broken saves are skipped,
others refused."""

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aerie.configs.schema.heads import Eagle1Train, MuonSection
from aerie.model import storage
from aerie.train import processes, resume
from aerie.train.loop import Loop
from tests.tiny import flip, refused
from tests.train.sittings import (
    config,
    ended,
    fork,
    job,
    killed_at,
    lines,
    sitting,
    timeless,
    weights,
)

# A log line covers several steps, most saves fall between two log lines, and the best evaluation
# changes.
BUSY: dict[str, Any] = {
    "log_every": 4,
    "save_every": 3,
    "eval_every": 5,
    "optimizer": MuonSection(),
}
SHORT: dict[str, Any] = {"epochs": 2, "save_every": 3, "eval_every": 2, "keep_last": 1}
FRESH = resume.Progress({}, 1)
Run = tuple[Path, tuple[str, Loop]]


def same(one: Run, other: Run) -> None:
    """Asserts that two finished runs differ only in times."""
    (place, (_, first)), (elsewhere, (_, second)) = one, other
    assert all(weights(second)[name].equal(value) for name, value in weights(first).items())
    for mine, yours in zip(first.optimizers, second.optimizers, strict=True):
        there = yours.state_dict()["state"]
        for number, state in mine.state_dict()["state"].items():
            assert all(there[number][key].equal(value) for key, value in state.items())
    moved: dict[str, Any] = {"made_of": {}, "seconds": 0.0, "run_id": ""}
    assert replace(first.progress, **moved) == replace(second.progress, **moved)
    assert first.held_out == second.held_out
    assert timeless(place) == timeless(elsewhere)
    heads = [
        {path.name: path.read_bytes() for path in (run / "head").iterdir()}
        for run in (place, elsewhere)
    ]
    assert heads[0] == heads[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs without any stop, each made once."""

    @cache
    def run(measure: Any = None, **settings: Any) -> Run:
        directory = tmp_path_factory.mktemp("undisturbed")
        return directory, sitting(job(directory, config(**settings)), measure=measure)

    return run


def cut(directory: Path, settings: Eagle1Train, batch: int = 8) -> None:
    with pytest.raises(RuntimeError, match="power cut"):
        sitting(job(directory, settings, (batch, 0)))


@pytest.mark.parametrize(("number", "state"), resume.SIGNAL_STATES.items())
def test_stopped_by_signal(
    tmp_path: Path, undisturbed: Any, number: signal.Signals, state: str
) -> None:
    """A run stopped by a signal goes on bit for bit."""
    settings: dict[str, Any] = {"accumulation": 2, "batch_size": 2, "eval_every": 4, "log_every": 4}
    ended, stopped = sitting(job(tmp_path, config(**settings), (11, number)))
    assert (ended, stopped.progress.step) == (state, 6)
    assert [folder.name for folder in resume.folders(tmp_path / "state")] == ["step-00000006"]
    same(undisturbed(**settings), (tmp_path, sitting(job(tmp_path, config(**settings)))))


def test_killed_again_and_again(tmp_path: Path, undisturbed: Any, capsys: Any) -> None:
    """A run killed again and again is the undisturbed one."""
    for batch in (2, 5, 4, 1, 7):
        dies = job(tmp_path, config(**BUSY), (batch, signal.SIGKILL))
        assert ended(fork(lambda dies=dies: sitting(dies))) == -signal.SIGKILL
    assert [folder.name for folder in resume.folders(tmp_path / "state")] == [
        "step-00000012",
        "step-00000009",
    ]
    flip(tmp_path / "state/step-00000012/optimizer.bin", 900)
    shutil.rmtree(tmp_path / "head")  # the save has the best weights as well
    same(undisturbed(**BUSY), (tmp_path, sitting(job(tmp_path, config(**BUSY)))))
    rates = [
        (line["matrix_rate"], line["learning_rate"]) for line in lines(tmp_path) if "loss" in line
    ]
    assert [muon for muon, _ in rates] == pytest.approx([2 * adamw for _, adamw in rates])
    printed = capsys.readouterr()
    assert "step-00000012/optimizer.bin: is damaged" in printed.err
    assert "going on from step 9 of 15" in printed.out


POINTS: dict[
    str, tuple[Any, str, int, str]
] = {  # module, function, which call among those for a path with this ending
    "before its record": (resume.Manifest, "write", 1, "step-00000006.tmp"),
    "before the directory knows it": (storage, "sync", 2, "/state"),
    "while older ones go": (shutil, "rmtree", 3, "step-00000003.old"),
    "while the best weights become the output": (
        storage,
        "write_atomically",
        2,
        "head/config.json",
    ),
}


def growing(head: Any) -> dict[str, float]:
    """A measure that grows with the steps, so that each evaluation is the best so far."""
    return {"tau": 1.0 / float(head.fc.weight.detach().norm())}


@pytest.mark.parametrize("point", POINTS)
def test_killed_in_a_save(tmp_path: Path, undisturbed: Any, point: str) -> None:
    """A kill at any point of a save costs only time."""

    def train() -> tuple[str, Loop]:
        return sitting(job(tmp_path, config(**SHORT)), measure=growing)

    module, name, call, path = POINTS[point]
    assert killed_at(module, name, call, train, path)
    same(undisturbed(growing, **SHORT), (tmp_path, train()))
    assert [path for path in tmp_path.rglob("*") if path.name.endswith((".tmp", ".old"))] == []


@pytest.mark.slow
def test_tracker(tmp_path: Path) -> None:
    """A tracker goes on and has no step twice."""
    settings = config(save_every=4, trackers=("tensorboard",))
    cut(tmp_path, settings)
    time.sleep(1)  # tensorboard sorts its files by seconds
    sitting(job(tmp_path, settings))
    (place,) = {path.parent for path in tmp_path.rglob("aerie/events.out.tfevents.*")}
    (settings_there,) = tmp_path.rglob("hparams.yml")
    assert "train.learning_rate: 0.01" in settings_there.read_text()
    assert [
        (event.step, event.value)
        for event in EventAccumulator(str(place)).Reload().Scalars("train/loss")
    ] == [(line["step"], pytest.approx(line["loss"])) for line in lines(tmp_path) if "loss" in line]


def test_other_recipe_or_engine(tmp_path: Path, undisturbed: Any) -> None:
    """Another recipe or engine is refused and other saves are not."""
    fresh = resume.Progress(
        {"rows": "r", "train": {"log_every": 1, "seed": 0}}, 2, "ZeRO-2 bf16", "NVIDIA A"
    )
    resume.save(tmp_path, replace(fresh, step=7), lambda folder: None, lambda: None, 2)
    for said, other in {
        r"\(rows: r before, s now; train.seed: 0 before": replace(
            fresh, made_of={"rows": "s", "train": {"seed": 1}}
        ),
        "saved under ZeRO-2 bf16, but this run uses plain bf16; launch it as before, or": replace(
            fresh, engine="plain bf16"
        ),
    }.items():
        refused(said, resume.find, tmp_path, other, overwrite=False)
        assert resume.find(tmp_path, other, overwrite=True) == (other, None, [])
    progress, _, warnings = resume.find(
        tmp_path, replace(fresh, machine="NVIDIA B"), overwrite=False
    )
    assert progress.step == 7 and "saved on NVIDIA A, this is NVIDIA B" in warnings[0]
    cut(tmp_path / "run", config(save_every=4))
    continued = sitting(
        job(tmp_path / "run", config(save_every=2, keep_last=3, loss_chunk_slots=512))
    )
    same(undisturbed(save_every=4), (tmp_path / "run", continued))
    assert len(resume.folders(tmp_path / "run/state")) == 3 and all(
        hasattr(config(), name) for name in resume.FREE
    )


def test_pickle(tmp_path: Path) -> None:
    """A save that holds more than tensors is never loaded."""
    torch.save({"weights": torch.zeros(2), "more": tmp_path}, tmp_path / "state.pt")
    accelerator: Any = Mock(
        load_state=lambda folder: torch.load(Path(folder, "state.pt"), weights_only=False)
    )
    refused(
        "holds more than tensors and plain values, which aerie never loads; remove it",
        processes.load_state,
        accelerator,
        tmp_path,
    )


def test_broken_saves(tmp_path: Path) -> None:
    """Broken saves alone are refused and later ones than a new one go."""

    def save(step: int) -> Path:
        fill = lambda folder: torch.save(torch.arange(step), folder / "weights.bin")  # noqa: E731
        resume.save(tmp_path, replace(FRESH, step=step), fill, lambda: None, 2)
        return tmp_path / f"step-{step:08d}/weights.bin"

    flip(save(3), 200)
    flip(save(6), 200)
    refused(
        r"6/weights.bin: is damaged; no other save is whole: start again with --ov",
        resume.find,
        tmp_path,
        FRESH,
        overwrite=False,
    )
    assert resume.find(tmp_path, FRESH, overwrite=True)[:2] == (FRESH, None)
    save(5)  # as by a run that went on from step 3 with another save_every
    assert [folder.name for folder in resume.folders(tmp_path)] == [
        "step-00000005",
        "step-00000003",
    ]


def test_full_disk(small_disk: Path) -> None:
    """A full disk is one line."""
    settings, run = config(save_every=2, eval_every=0), small_disk / "run"
    cut(run, settings, 4)
    size = sum(path.stat().st_size for path in (run / "state/step-00000002").rglob("*"))
    free = shutil.disk_usage(small_disk).free
    for room in (size // 10, size - 5000):  # the weights, or only the last files, do not fit
        (small_disk / "filler").write_bytes(b"0" * (free - room))
        refused("step-00000004: cannot be written .*free some space", sitting, job(run, settings))
        assert [path.name for path in (run / "state").glob("*step*")] == ["step-00000002"]
        (small_disk / "filler").unlink()
    assert sitting(job(run, settings))[0] == "finished"
