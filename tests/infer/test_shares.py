"""Two CPU processes measure what one measures; they are forks with a launcher's environment."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.infer import main as infer
from aerie.infer.measure.bench import CYCLES
from aerie.infer.measure.bench_files import RECORDS
from aerie.model.storage import read_json
from tests import tiny
from tests.infer.test_main import write_recipe
from tests.train.sittings import ended
from tests.train.test_processes import forked

SECTIONS: dict[str, Any] = {
    "bench": {"cycles": True, "sweeps": [{"name": "depth", "vary": "tree.levels", "values": [1]}]},
    "calibrate": {"method": "eagle-chain", "tree": {"levels": 3}, "oracle_levels": 5},
    "tune": {"levels": 3, "k": 2},
}
TIMED = ("t_draft", "t_verify", "cycle_ms", "ms", "peak_memory_gib")


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
    values["tune"]["measure"] = {**prompts, "path": str(root / "q.txt")}
    return tiny.recipe(root / "recipe.yaml", values)


def together(recipe: Path, run: str, *words: object) -> tuple[list[int], str]:
    """The exit codes of two processes that measure into a run, and what they printed."""
    log = recipe.with_name(f"{run}.log")
    words = (*words, "--config", recipe, "--run", recipe.with_name(run))
    children = forked("torchrun", log, *words, command=infer)
    return [*map(ended, children)], log.read_text()


def alone(recipe: Path, run: str, *words: object) -> None:
    words = (*words, "--config", recipe, "--run", recipe.with_name(run))
    assert tiny.call(infer, *words) == 0


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
    words = ("bench", "--head", recipe.parent / "run/heads/eagle1")
    alone(recipe, "one", *words)
    codes, log = together(recipe, "two", *words)
    assert codes == [0, 0], log
    one, two, cut = (recipe.with_name(name) / "bench" for name in ("one", "two", "cut"))
    assert_same_bench(one, two)
    references = [read_json(run / "reference.json") for run in (one, two)]
    assert references[0]["identical_to_generate"] == references[1]["identical_to_generate"] == 9
    assert read_json(two / "provenance.json")["hardware"]["processes"] == 2
    assert log.count("bench: 72 answers") == 1

    log = recipe.with_name("cut.log")
    children = forked(
        "torchrun", log, *words, "--config", recipe, "--run", cut.parent, command=infer
    )
    while not ((cut / RECORDS).exists() and (cut / "process-1" / RECORDS).exists()):
        assert os.waitpid(children[0], os.WNOHANG) == (0, 0), log.read_text()
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
    assert [*map(ended, children)] == [-signal.SIGKILL] * 2
    assert not (cut / "provenance.json").exists()
    assert tiny.call(infer, *words) == 0
    assert_same_bench(one, cut)
