"""Two CPU processes measure what one measures; they are forks with a launcher's environment."""

import json
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from aerie import run
from aerie.infer import main as infer
from aerie.infer.measure.bench import CYCLES
from aerie.infer.measure.bench_files import RECORDS
from aerie.model.storage import read_json
from tests import tiny
from tests.configs.test_recipes import load
from tests.data.caches import contents
from tests.infer.test_main import write_recipe
from tests.train.sittings import ended
from tests.train.test_processes import forked

SECTIONS: dict[str, Any] = {
    "bench": {"cycles": True, "sweeps": [{"name": "depth", "vary": "tree.levels", "values": [1]}]},
    "calibrate": {"method": "eagle-chain", "tree": {"levels": 1}, "oracle_levels": 5},
    "tune": {"levels": 3, "k": 2},
}
TIMED = ("t_draft", "t_verify", "cycle_ms", "ms", "peak_memory_gib", "processes")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five prompts of one and two turns; what draws does so at temperature 1."""
    root = tmp_path_factory.mktemp("shares")
    write_recipe(root)
    values = yaml.safe_load((root / "recipe.yaml").read_text())
    turns = [[f"Please count {number} boats.", "Now sort them."] for number in range(5)]
    turns[1].pop()
    questions = tiny.write_rows(root / "questions.jsonl", [{"turns": texts} for texts in turns])
    prompts = {"path": str(questions), "max_new_tokens": 8}
    for name, section in SECTIONS.items():
        values[name] = {**values.get(name, {}), **section, "prompts": prompts}
    values["bench"]["sweeps"][0]["rows"] = [values["bench"]["rows"][1]]
    values["calibrate"]["temperature"] = 1.0
    (root / "others.txt").write_text("Please sort 7 owls.\nPlease sort 8 owls.\n")
    values["tune"]["measure"] = {**prompts, "path": str(root / "others.txt")}
    return tiny.recipe(root / "recipe.yaml", values)


def options(recipe: Path, run: Path, *words: object) -> tuple[object, ...]:
    command, *others = words
    named = ("--head", recipe.parent / "run/heads/eagle1", "--config", recipe, "--run", run)
    return (command, *named, *others)


def alone(recipe: Path, run: str, *words: object) -> Path:
    """Measures in this process; returns the run's directory."""
    directory = recipe.with_name(run)
    assert tiny.call(infer, *options(recipe, directory, *words)) == 0
    return directory


def together(recipe: Path, run: str, *words: object) -> tuple[Path, str]:
    """The run's directory, and what two processes printed."""
    directory = recipe.with_name(run)
    log = recipe.with_name(f"{run}.log")
    children = forked("torchrun", log, *options(recipe, directory, *words), command=infer)
    assert [*map(ended, children)] == [0, 0], log.read_text()
    return directory, log.read_text()


def untimed(path: Path) -> list[dict[str, Any]]:
    """The lines of a bench's file without times and memory."""
    lines = tiny.read_rows(path)
    return [{key: line[key] for key in line.keys() - TIMED} for line in lines]


def assert_same_bench(first: Path, second: Path) -> None:
    assert untimed(first / RECORDS) == untimed(second / RECORDS)
    by_answer = [sorted(map(json.dumps, untimed(run / CYCLES))) for run in (first, second)]
    assert by_answer[0] == by_answer[1] != []
    assert (first / "suite.json").read_bytes() == (second / "suite.json").read_bytes()
    assert not [*second.glob("process-*")]


def test_two_benches_are_one(recipe: Path) -> None:
    """Turns, draws, sweeps, cycles and the reference: all but times; a kill changes nothing."""
    one = alone(recipe, "one", "bench") / "bench"
    two, log = together(recipe, "two", "bench")
    assert_same_bench(one, two / "bench")
    references = [read_json(path / "reference.json") for path in (one, two / "bench")]
    assert references[0]["identical_to_generate"] == references[1]["identical_to_generate"] == 9
    assert read_json(two / "bench/provenance.json")["hardware"]["processes"] == "2"
    assert log.count("bench: 72 answers") == 1

    cut = recipe.with_name("cut") / "bench"
    log = recipe.with_name("cut.log")
    children = forked("torchrun", log, *options(recipe, cut.parent, "bench"), command=infer)
    while not ((cut / RECORDS).exists() and (cut / "process-1" / RECORDS).exists()):
        assert os.waitpid(children[0], os.WNOHANG) == (0, 0), log.read_text()
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
    assert [*map(ended, children)] == [-signal.SIGKILL] * 2
    assert not (cut / "provenance.json").exists()
    assert_same_bench(one, alone(recipe, "cut", "bench") / "bench")
    hardware = read_json(cut / "provenance.json")["hardware"]
    by_prompt: dict[Any, set[int]] = {}
    for line in tiny.read_rows(cut / RECORDS):
        by_prompt.setdefault(line["prompt_id"], set()).add(line["processes"])
    assert all(len(counts) == 1 for counts in by_prompt.values())
    counts = sorted(set().union(*by_prompt.values()))
    assert hardware["processes"] == " and ".join(map(str, counts))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle-chain", "medusa"])
def test_two_calibrations_are_one(recipe: Path, method: str) -> None:
    """Drawn trees with their oracle, and for a static one the tree rebuilt from ranks."""
    words: list[object] = ["calibrate", "--calibrate.method", method]
    if method == "medusa":
        tree = f"{{choices: {recipe.parent}/shallow.yaml}}"
        words += ["--calibrate.tree", tree, "--head", recipe.parent / "run/heads/medusa"]
    first = alone(recipe, f"one-{method}", *words)
    second, _ = together(recipe, f"two-{method}", *words)
    assert contents(first / "calibration") == contents(second / "calibration")
    cycles = pd.read_parquet(first / "calibration/cycles.parquet")
    assert cycles.prompt.nunique() == 5
    assert method == "medusa" or (cycles.oracle > cycles.accepted).any()


@pytest.mark.slow
def test_two_tunings_are_one(recipe: Path) -> None:
    """What is recorded is the same; what is timed is not."""
    one = alone(recipe, "one", "tune") / "tune"
    two = together(recipe, "two", "tune")[0] / "tune"
    published = []
    for path in (one, two):
        facts = read_json(path / "tune.json")["heads"][0]["published"]
        published.append((facts["name"], facts["tau"]))
        assert len(read_json(path / "measured.json")["rows"]) == 3
    assert published[0] == published[1]


@pytest.mark.slow
def test_a_process_that_fails_ends_all_with_its_line(recipe: Path) -> None:
    run = recipe.with_name("broken")
    tiny.write_rows(run / "bench/process-1", [])  # where the second process makes a directory
    log = recipe.with_name("broken.log")
    children = forked("torchrun", log, *options(recipe, run, "bench"), command=infer)
    assert [*map(ended, children)] == [2, 2]
    assert "error: another process failed" in log.read_text()
    assert f"error: {run}/bench/process-1: File exists" in log.read_text()
    assert read_json(run / "status.json") == {"stage": "bench", "state": "failed", "code": 2}


def test_servers_and_a_spread_target_take_one_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = "[{method: vanilla}, {method: served, url: 'http://localhost:1'}]"
    changes = {"bench": f"bench.rows={rows}", "tune": "target.device_map=auto"}
    for stage, change in changes.items():
        plain = load(recipe)
        changed = load(recipe, f"--{change}")
        numbers = [run._number_of_processes(stage, 8, made) for made in (plain, changed)]
        assert numbers == [8, 1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = """
    aerie bench {words} --plan --{bench}
        exit 2
        bench.rows: a measured server must answer nobody else
    aerie tune {words} --plan --{tune}
        exit 2
        target.device_map: auto spreads the target over all GPUs; start one process
    """
    quoted = {stage: shlex.quote(change) for stage, change in changes.items()}
    words = f"--config {recipe} --head {recipe.parent}/run/heads/eagle1"
    tiny.session(text, capsys, words=words, **quoted)
