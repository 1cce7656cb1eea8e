"""Commands killed at any moment go on to what an undisturbed run leaves: rows, weights, optimizer and answers alike.

The moments are drawn uniformly over the time that the undisturbed stage takes, by a fixed seed. `make soak` draws 50.
"""

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kills.changes import from_the_start, to_the_end
from tests.kills.stages import Bench, Features, Stage, Training, prepare
from tests.kills.starts import ColdPython, Python, WarmPython
from tests.kills.trial import Tally, Undisturbed, table, trial

KILLS = {"features": 17, "training": 17, "bench": 16}
COLD_KILLS = 3  # of each stage, of commands that are started from nothing
SEED = 0


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    with WarmPython() as python:
        yield python


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Stage]:
    """The stages in their order, on a target that no stage has seen yet."""
    root = tmp_path_factory.mktemp("kills")
    recipe, run = prepare(root), root / "undisturbed"
    return [Features(recipe, run), Training(recipe, run), Bench(recipe, run)]


@pytest.fixture(scope="module")
def known(stages: list[Stage], warm: WarmPython) -> list[Undisturbed]:
    """Each stage run undisturbed, in one run directory."""
    return [Undisturbed.of(stage, stage.undisturbed, [warm]) for stage in stages]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3), ids=list(KILLS))
def test_a_stage_that_is_killed_at_a_random_moment_goes_on_to_the_same_bytes(
    number: int, known: list[Undisturbed], warm: WarmPython, tmp_path: Path
) -> None:
    tally, chance = Tally(known[number].stage.name), random.Random(SEED)
    while tally.counted < 1:
        trial(known[number], warm, tmp_path / str(tally.runs), chance, tally, wanted=1)
    assert tally.differences == [] and tally.equal == tally.runs


@pytest.mark.slow
def test_the_comparison_finds_what_is_lost_doubled_or_another_bit(known: list[Undisturbed], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(known[0].stage.undisturbed, run)
    features, training, bench = (each.stage for each in known)
    assert [stage.differences(run) for stage in (features, training, bench)] == [[], [], []]
    _flip(run / "features/shard-00002.safetensors")
    assert len(features.differences(run)) == 1
    (run / "features/.shard-00003.safetensors.7.tmp").touch()
    assert len(features.differences(run)) == 2
    _flip(run / "heads/eagle1/model.safetensors")
    _flip(sorted((run / "seen").glob("step-*"))[-1] / "optimizer.bin")
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:-1]))
    assert len(training.differences(run)) == 3
    records = run / "bench/records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join([*lines[:3], *lines[4:]]))
    assert any("is lost" in found for found in bench.differences(run))
    records.write_text("".join([*lines, lines[3]]))
    assert any("is there twice" in found for found in bench.differences(run))


@pytest.mark.slow
@pytest.mark.soak
def test_fifty_kills_at_random_moments_leave_no_trace(
    stages: list[Stage], warm: WarmPython, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cold, tallies, started = ColdPython(), [], time.monotonic()
    for stage in stages:
        known = Undisturbed.of(stage, stage.undisturbed, [cold, warm])
        tally, chance = Tally(stage.name), random.Random(f"{SEED} {stage.name}")
        tallies.append(tally)
        while tally.counted < KILLS[stage.name]:
            python: Python = cold if tally.cold < COLD_KILLS else warm
            wanted = COLD_KILLS if python is cold else KILLS[stage.name]
            trial(known, python, tmp_path / f"{stage.name}-{tally.runs}", chance, tally, wanted)
            with capsys.disabled():
                print(f"{stage.name}: {tally.counted} kills, {tally.equal} of {tally.runs} runs equal", flush=True)
    with capsys.disabled():
        print(f"\n{table(tallies)}\n{time.monotonic() - started:,.0f} s", flush=True)
    assert [found for tally in tallies for found in tally.differences] == []
    assert {tally.stage: tally.counted for tally in tallies} == KILLS and sum(KILLS.values()) == 50


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("number", range(3), ids=list(KILLS))
def test_a_stage_that_dies_before_any_change_to_a_file_goes_on_to_the_same_bytes(
    number: int, known: list[Undisturbed], warm: WarmPython, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = known[number].stage
    kills, differences = from_the_start(stage, warm, tmp_path / "start")
    last_kills, last_differences = to_the_end(stage, warm, tmp_path / "end")
    with capsys.disabled():
        print(f"\n{stage.name}: killed before a change to a file, {kills} times in one run, {last_kills} near its end")
    assert differences + last_differences == [] and min(kills, last_kills) > 12


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
