"""Commands that are killed at any moment go on, and leave what an undisturbed run leaves: rows, weights, answers.

Moments are drawn by a fixed seed, over the time of the undisturbed stage and over its changes to files; kills between
two changes that follow each other at once are seldom met by time alone. `make soak` kills 50 times and more.
"""

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.kills.starts import WarmPython, run_cold

PROMPTS, STEPS = 7, 72
CLOCKS = {"ms", "cycle_ms", "peak_memory_gib", "t_draft", "t_verify", "data_wait_share", "tokens_per_s", "step_ms"}
RECORDS = ("provenance.json", "recipe.yaml", "reference.json")  # they name the run, or hold times
SOAK = {"features": 17, "train": 17, "bench": 16}


@dataclass
class Stage:
    """One command of the pipeline: how a run for it begins, and the outputs that are compared."""

    name: str
    script: str
    outputs: tuple[str, ...]
    begin: Callable[[Path, Path], None]  # (undisturbed run, new run)
    whole: str  # the file that marks its end
    seconds: float = 0.0  # of an undisturbed start
    changes: int = 0  # to files below the run, of an undisturbed start


@dataclass
class World:
    """The undisturbed run, and what starts the commands."""

    root: Path
    python: WarmPython
    stages: dict[str, Stage] = field(default_factory=dict)

    def words(self, stage: Stage, run: Path) -> list[str]:
        command = [] if stage.name == "train" else [stage.name]
        return [f"{stage.script}/main.py", *command, "--config", str(self.root / "recipe.yaml"), "--run", str(run)]

    def start(self, stage: Stage, run: Path, **limits: Any) -> int:
        return self.python.run(self.words(stage, run), log_of(run), run, **limits)

    def fresh(self, stage: Stage, run: Path) -> Path:
        run.mkdir()
        stage.begin(self.root / "undisturbed", run)
        return run

    def compare(self, stage: Stage, run: Path, code: int) -> None:
        """The run ended with exit code 0 and left what the undisturbed run left; it is removed then."""
        assert code == 0, log_of(run).read_text(errors="replace")[-2000:]
        assert differences(stage, self.root / "undisturbed", run) == []
        shutil.rmtree(run)
        log_of(run).unlink()


def log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def differences(stage: Stage, undisturbed: Path, run: Path) -> list[str]:
    """Files that are missing, left over, or hold other bytes; times in JSON lines are not compared."""
    wrong = [str(path) for path in (run / "state").glob("*/step-*")] if stage.name == "train" else []
    for output in stage.outputs:
        contents = [content_of(place / output, place) for place in (undisturbed, run)]
        wrong += [f"{name}: missing or left over" for name in sorted(contents[0].keys() ^ contents[1].keys())]
        wrong += [name for name in contents[0].keys() & contents[1].keys() if contents[0][name] != contents[1][name]]
    return wrong


def content_of(output: Path, run: Path) -> dict[str, Any]:
    paths = [output] if output.is_file() else sorted(path for path in output.rglob("*") if path.is_file())
    return {str(path.relative_to(run)): comparable(path) for path in paths if path.name not in RECORDS}


def comparable(path: Path) -> Any:
    if path.suffix != ".jsonl":
        return path.read_bytes()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def write_recipe(root: Path) -> None:
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 1400)
    rows = [{"question_id": n, "category": "count", "turns": [f"Please count {n + 2} boats."]} for n in range(PROMPTS)]
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tree = {"levels": 3, "k": 3, "nodes": 8}
    values: dict[str, Any] = {
        "run": str(root / "undisturbed"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.1},
        "features": {"batch_tokens": 1024, "shard_tokens": 1024},
        "tree": tree,
        "train": {
            **{"max_steps": STEPS, "batch_size": 4, "accumulation": 2, "learning_rate": 1e-3, "warmup_steps": 8},
            **{"log_every": 1, "save_every": 6, "eval_every": 18, "eval_conversations": 24},
            **{"measure_prompts": 4, "measure_new_tokens": 16},
        },
        "bench": {
            "prompts": {"path": str(root / "questions.jsonl"), "num_prompts": PROMPTS, "max_new_tokens": 20},
            "warmup_prompts": 1,
            "cycles": True,
            "sampling": [{"temperature": 0.0}, {"temperature": 1.0}],
            "rows": [
                {"method": "vanilla"},
                {"method": "eagle2", "tree": tree},
                {"method": "eagle-chain", "tree": {"levels": 3}},
            ],
        },
    }
    tiny.recipe(root / "recipe.yaml", values)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Each stage has run undisturbed, once, in one run directory."""
    root = tmp_path_factory.mktemp("kills")
    write_recipe(root)
    stages = (
        Stage("features", "data", ("features",), lambda _, run: None, "features/provenance.json"),
        Stage(
            "train",
            "train",
            ("heads/eagle1", "metrics.jsonl"),
            lambda undisturbed, run: (run / "features").symlink_to(undisturbed / "features"),
            "heads/eagle1/provenance.json",
        ),
        Stage(
            "bench",
            "infer",
            ("bench",),
            lambda undisturbed, run: shutil.copytree(undisturbed / "heads", run / "heads") and None,
            "bench/provenance.json",
        ),
    )
    with WarmPython() as python:
        world = World(root, python, {stage.name: stage for stage in stages})
        for stage in stages:
            began = time.monotonic()
            code = world.start(stage, root / "undisturbed")
            assert code == 0, log_of(root / "undisturbed").read_text(errors="replace")[-2000:]
            stage.seconds = time.monotonic() - began
            counted = re.findall(r"^changes: (\d+)$", log_of(root / "undisturbed").read_text(), re.MULTILINE)
            stage.changes = int(counted[-1])
        yield world


@pytest.mark.slow
@pytest.mark.parametrize("name", SOAK)
def test_a_stage_that_is_killed_goes_on_to_the_same_bytes(name: str, world: World, tmp_path: Path) -> None:
    stage, chance = world.stages[name], random.Random(name)
    run = world.fresh(stage, tmp_path / "run")
    assert world.start(stage, run, fatal=chance.randrange(2, stage.changes // 2)) == -9
    assert world.start(stage, run, fatal=chance.randrange(2, stage.changes // 3)) == -9
    world.start(stage, run, seconds=chance.random() * stage.seconds)
    world.compare(stage, run, world.start(stage, run))


@pytest.mark.slow
def test_the_comparison_finds_a_flipped_bit_a_lost_line_and_a_file_left_over(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(world.root / "undisturbed", run)
    for stage in world.stages.values():
        assert differences(stage, world.root / "undisturbed", run) == []
        output = run / stage.outputs[0]
        weights = next(output.glob("*.safetensors"), None)
        if weights is not None:
            content = bytearray(weights.read_bytes())
            content[len(content) // 2] ^= 1
            weights.write_bytes(content)
        else:
            lines = (output / "records.jsonl").read_text().splitlines(keepends=True)
            (output / "records.jsonl").write_text("".join([*lines[:3], *lines[4:]]))
        (output / ".left.tmp").touch()
        assert len(differences(stage, world.root / "undisturbed", run)) == 2


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK)
def test_kills_at_random_moments_leave_no_trace(
    name: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, chance, kills, runs, cold = world.stages[name], random.Random(f"soak {name}"), 0, 0, 0
    while kills < SOAK[name]:
        run, runs, code = world.fresh(stage, tmp_path / str(runs)), runs + 1, -9
        while code < 0:
            has_begun = (run / "status.json").exists()
            if kills >= SOAK[name]:
                code = world.start(stage, run)
            elif cold < 3:  # the command from nothing: the seconds of its imports count, too
                code = run_cold(world.words(stage, run), log_of(run), 8 + chance.random() * stage.seconds)
                cold += code < 0
            else:
                code = world.start(stage, run, seconds=chance.random() * stage.seconds)
            is_counted = code < 0 and not (run / stage.whole).exists() and (has_begun or (run / "status.json").exists())
            kills += is_counted
        world.compare(stage, run, code)
    with capsys.disabled():
        print(f"\n{name}: {kills} kills, {cold} of them cold; {runs} of {runs} runs equal", flush=True)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK)
def test_a_stage_that_dies_before_any_change_to_a_file_goes_on_to_the_same_bytes(
    name: str, world: World, tmp_path: Path
) -> None:
    stage = world.stages[name]
    run, fatal = world.fresh(stage, tmp_path / "start"), 1
    while (code := world.start(stage, run, fatal=fatal)) < 0:  # its n-th start dies before its n-th change
        fatal += 1
    world.compare(stage, run, code)
    assert fatal > 12
    for change in range(max(1, stage.changes - 24), stage.changes + 1):  # near the end, one by one
        run = world.fresh(stage, tmp_path / "end")
        world.start(stage, run, fatal=change)
        world.compare(stage, run, world.start(stage, run))
