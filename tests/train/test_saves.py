"""Laws of saves: whole or told to be broken, by every byte; they rotate, and the newest whole one is gone on from."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import NotWritable, UserError
from aerie.model import storage as saves
from aerie.model.checkpoint import head_facts, load_head
from aerie.train import resume
from aerie.train import resume as best
from aerie.train.resume import Progress
from tests.disks import small_disk  # noqa: F401
from tests.train.kills import Interrupted, ended_by
from tests.train.sittings import config, job, sitting, weights

FRESH = Progress({}, 1)


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def save(directory: Path, step: int, keep_last: int = 2, best: tuple[tuple[float, int], ...] = ()) -> Path:
    """A save of two small files."""

    def fill(folder: Path) -> None:
        (folder / "ranks").mkdir()
        torch.save(torch.arange(step), folder / "weights.bin")
        (folder / "ranks/0").write_text(f"rank 0 at step {step}")

    resume.save(directory, FRESH.moved(step=step, best=best), fill, keep_last=keep_last)
    return directory / saves.name_of(step)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda folder: (folder / "weights.bin").write_bytes((folder / "weights.bin").read_bytes()[:-9]),
        r"step-00000006/weights.bin: [\d,]+ bytes long instead of",
    ),
    "empty": (lambda folder: (folder / "ranks/0").write_text(""), r"ranks/0: 0 bytes long instead of"),
    "flipped": (lambda folder: flip(folder / "weights.bin", 200), r"weights.bin: is not what was written"),
    "flipped in the record": (lambda folder: flip(folder / saves.RECORD, 40), saves.RECORD),
    "a file missing": (lambda folder: (folder / "ranks/0").unlink(), r"ranks/0: missing"),
    "the record missing": (lambda folder: (folder / saves.RECORD).unlink(), rf"{saves.RECORD}: No such file"),
    "all missing": (shutil.rmtree, r"step-00000006: the newest save is missing"),
    "of another version": (
        lambda folder: (folder / saves.RECORD).write_text('{"recipe": "a", "step": 6}'),
        "was written by another version",
    ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_broken_newest_save_is_named_and_the_one_before_is_gone_on_from(
    damage: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    save(tmp_path, 3)
    damage(save(tmp_path, 6))
    found = resume.find(tmp_path, FRESH, overwrite=False)
    assert found.folder == tmp_path / "step-00000003" and found.progress.step == 3
    (warning,) = found.warnings
    assert re.search(said, warning), warning
    assert warning.endswith("going on from step-00000003, the newest whole save")
    save(tmp_path, 5)  # of the continued run, with another save_every
    assert [folder.name for folder in saves.folders(tmp_path)] == ["step-00000005", "step-00000003"]


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_broken_only_save_is_refused_and_never_silently_begun_anew(
    damage: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    damage(save(tmp_path, 6, keep_last=1))
    with pytest.raises(UserError, match=said) as refused:
        resume.find(tmp_path, FRESH, overwrite=False)
    assert str(refused.value).endswith("no other save is whole: start anew with --overwrite")
    anew = resume.find(tmp_path, FRESH, overwrite=True)
    assert anew.folder is None and anew.progress == FRESH and "starting anew" in anew.warnings[0]


def test_a_change_of_any_byte_of_a_save_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 6)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        for place in range(0, path.stat().st_size, 7):
            flip(path, place)
            with pytest.raises(UserError):
                saves.read(folder)
            flip(path, place)
    assert saves.read(folder)["step"] == 6


def test_a_run_whose_newest_save_is_broken_ends_bit_for_bit_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(save_every=3, eval_every=4)
    _, unbroken = sitting(job(tmp_path / "whole", settings))
    dies = job(tmp_path / "cut", settings, objective=Interrupted(settings, 8, signal.SIGKILL))
    assert ended_by(lambda: sitting(dies)) == -signal.SIGKILL
    flip(tmp_path / "cut/state/step-00000006/optimizer.bin", 900)
    _, continued = sitting(job(tmp_path / "cut", settings))
    printed = capsys.readouterr()
    assert (
        "step-00000006/optimizer.bin: is not what was written" in printed.err and "going on from step 3" in printed.out
    )
    assert all(weights(continued)[name].equal(value) for name, value in weights(unbroken).items())
    assert saves.read(tmp_path / "cut/state/step-00000012")["step"] == 12


@pytest.mark.parametrize("keep_last", [1, 2, 4])
def test_so_many_saves_stay_as_the_recipe_says(tmp_path: Path, keep_last: int) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep_last)
        assert (tmp_path / resume.LATEST).read_text().strip() == saves.name_of(step)
    steps = [saves.step_of(folder) for folder in saves.folders(tmp_path)]
    assert steps == [8, 6, 4, 2][:keep_last]
    resume.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_saving_leaves_the_save_before(tmp_path: Path) -> None:
    save(tmp_path, 3)

    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("power cut")

    with pytest.raises(OSError, match="power cut"):
        resume.save(tmp_path, FRESH.moved(step=6), fails)
    assert resume.find(tmp_path, FRESH, overwrite=False).progress.step == 3
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step-00000003"]


def test_the_best_weights_so_far_stay_and_are_named_by_their_scores(tmp_path: Path) -> None:
    scores = [1.0, 3.0, 2.0, 5.0, 4.0, 0.5]
    left = iter(scores)
    made = job(tmp_path, config(max_steps=6, eval_every=1, keep_best=3), measure=lambda head: {"tau": next(left)})
    outcome, _ = sitting(made)
    assert outcome.progress.best == ((5.0, 4), (4.0, 5), (3.0, 2))
    kept = {score: tmp_path / "state/best" / saves.name_of(step) for score, step in outcome.progress.best}
    assert {score: head_facts(place)["tau"] for score, place in kept.items()} == {score: score for score in kept}
    assert head_facts(tmp_path / "head")["tau"] == 5.0
    assert load_head(kept[5.0]).fc.weight.equal(load_head(tmp_path / "head").fc.weight)
    best.clear_best(tmp_path / "state", [4, 5])
    assert sorted(path.name for path in (tmp_path / "state/best").iterdir()) == ["step-00000004", "step-00000005"]


def test_weights_that_any_save_names_stay_until_it_goes(tmp_path: Path) -> None:
    for step, named in ((2, 2), (4, 4), (6, 6)):
        best.keep(tmp_path, step, lambda folder: (folder / "weights").write_text("w") and None)
        progress = FRESH.moved(step=step, best=((1.0, named),))
        resume.save(tmp_path, progress, lambda folder: None, keep_last=2)
        best.forget_others(tmp_path, progress)
    assert [saves.step_of(folder) for folder in saves.folders(tmp_path / "best")] == [6, 4]


def test_broken_best_weights_come_back_from_the_output_or_are_given_up_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, output, progress = tmp_path / "state", tmp_path / "head", FRESH.moved(step=4, best=((2.0, 3),))
    best.keep(state, 3, lambda folder: (folder / "model.safetensors").write_text("the best") and None)
    best.publish(state, 3, output)
    kept = state / "best/step-00000003/model.safetensors"
    flip(kept)
    assert best.restore(state, progress, output) == progress and kept.read_text() == "the best"
    flip(kept)
    flip(output / "model.safetensors")
    assert best.restore(state, progress, output).best == ()
    assert "step-00000003: broken or missing; weights that are measured later are kept" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_the_save_before_stays(small_disk: Path) -> None:  # noqa: F811
    settings = config(save_every=2, eval_every=0)
    made = job(small_disk / "run", settings, held_out=[])
    filler = small_disk / "filler"
    with pytest.raises(RuntimeError, match="power cut"):
        sitting(job(small_disk / "run", settings, held_out=[], objective=Interrupted(settings, 4, None)))
    size = sum(path.stat().st_size for path in (small_disk / "run/state/step-00000002").iterdir())
    free = shutil.disk_usage(small_disk).free
    for room in (size // 10, size // 2, size - 5000):  # the weights, the optimiser or the last files do not fit
        filler.write_bytes(b"0" * (free - room))
        with pytest.raises(NotWritable, match=r"step-00000004: cannot be written .*free some space") as full:
            sitting(made)
        assert full.value.is_full and "step-00000002 is kept, and the same command goes on from there" in str(
            full.value
        )
        assert [path.name for path in (small_disk / "run/state").glob("*step*")] == ["step-00000002"]
        filler.unlink()
    finished, _ = sitting(made)
    assert finished.state == "finished" and saves.read(small_disk / "run/state/step-00000014")["step"] == 14


def test_a_read_only_disk_is_one_line(small_disk: Path) -> None:  # noqa: F811
    save(small_disk, 3)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(NotWritable, match=r"step-00000006: cannot be written .Read-only file system.; choose another"):
        save(small_disk, 6)
    assert resume.find(small_disk, FRESH, overwrite=False).progress.step == 3


def test_a_record_holds_every_other_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 6)
    listed = json.loads((folder / saves.RECORD).read_text())["files"]
    assert set(listed) == {"weights.bin", "ranks/0"}
