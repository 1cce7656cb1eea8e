"""Commands killed at any moment, or any change to files, go on and leave the same bytes as an
undisturbed run."""

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.schema.heads import TargetConfig
from aerie.model.target import Target
from tests import tiny
from tests.data.state_server import StateStandIn
from tests.train.test_main import write_recipe

PROMPTS, STEPS = 7, 72
CLOCKS = {
    "ms",
    "cycle_ms",
    "peak_memory_gib",
    "t_draft",
    "t_verify",
    "data_wait_share",
    "tokens_per_s",
    "step_ms",
}
RECORDS = (
    "provenance.json",
    "recipe.yaml",
    "reference.json",
)  # not compared: they name the run, or contain times
# Kills of each stage; of the served ones the states come from a server, online for the training.
SOAK = {"features": 17, "train": 17, "bench": 16, "served features": 10, "served train": 10}
SCRIPTS = {"features": "data", "train": "train", "bench": "infer"}
OUTPUTS = {
    "features": ("features",),
    "train": ("heads/eagle1", "metrics.jsonl"),
    "bench": ("bench",),
}
BEFORE = {"train": ("features",), "bench": ("heads",)}  # what a run needs before a stage
CHANGES = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "shutil.rmtree",
)
WARM = get_context("forkserver")  # each start is a fork of a process that has imported torch
WARM.set_forkserver_preload(
    ["aerie.train.loop", "aerie.data.features", "aerie.infer.measure.bench", "deepspeed"]
)


def become(words: list[str], below: str, fatal: int | None) -> None:
    """Runs a command, counts its changes to names below a directory, and dies just before change
    number `fatal`."""
    count = 0
    lock = threading.Lock()

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in CHANGES or not any(str(path).startswith(below) for path in arguments[:2]):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        with lock:
            count += 1
            if count == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    output = os.open(f"{below}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    module = import_module(f"aerie.{words[0].replace('/', '.').removesuffix('.py')}")
    sys.addaudithook(on_event)
    code = tiny.call(module, *words[1:])
    print(f"changes: {count}", flush=True)
    os._exit(code)


@dataclass
class World:
    """Starts one stage again and again, and compares with the undisturbed run."""

    root: Path
    name: str
    words: tuple[str, ...] = ()  # of the command, beside the usual ones
    seconds: float = 0.0  # of an undisturbed start
    changes: int = 0  # to files below the run, of an undisturbed start

    @property
    def stage(self) -> str:
        return self.name.split()[-1]

    @property
    def undisturbed(self) -> Path:
        return self.root / ("undisturbed served" if self.words else "undisturbed")

    def start(self, run: Path, seconds: float = 600.0, fatal: int | None = None) -> int | None:
        """Exit code of one start; -9 if it was killed, after `seconds` or just before change number
        `fatal`."""
        words = [
            f"{SCRIPTS[self.stage]}/main.py",
            *([] if self.stage == "train" else [self.stage]),
            "--config",
            str(self.root / "recipe.yaml"),
            "--run",
            str(run),
            *self.words,
        ]
        child = WARM.Process(target=become, args=(words, str(run), fatal))
        child.start()
        child.join(seconds)
        child.kill()
        child.join()
        return child.exitcode

    def fresh(self, run: Path) -> Path:
        run.mkdir()
        for name in BEFORE.get(self.name, ()):
            shutil.copytree(self.undisturbed / name, run / name)
        return run

    def differences(self, run: Path, code: int | None = 0) -> list[str]:
        """The files that differ from the undisturbed run's; if the last start failed, the end of
        its log."""
        if code != 0:
            return [log_of(run).read_text(errors="replace")[-2000:]]
        # Of the stages, training alone leaves saves.
        wrong = [str(path) for path in (run / "state").glob("*/step-*")]
        undisturbed = self.undisturbed
        for output in OUTPUTS[self.stage]:
            old = content_of(undisturbed / output, undisturbed)
            new = content_of(run / output, run)
            wrong += [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return wrong


def log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def content_of(output: Path, run: Path) -> dict[str, Any]:
    """The file's content for the comparison, without times."""
    made: dict[str, Any] = {}
    for path in [output] if output.is_file() else sorted(output.rglob("*")):
        if path.suffix == ".jsonl":
            lines = tiny.read_rows(path)
            made[str(path.relative_to(run))] = [
                {k: v for k, v in line.items() if k not in CLOCKS} for line in lines
            ]
        elif path.is_file() and path.name not in RECORDS:
            made[str(path.relative_to(run))] = path.read_bytes()
    return made


def prepare(root: Path) -> None:
    """Writes a target, rows and a recipe."""
    tiny.target(root / "target")
    tiny.write_conversations(root / "train.jsonl", 1400)
    rows = [
        {"question_id": n, "category": "count", "turns": [f"Please count {n + 2} boats."]}
        for n in range(PROMPTS)
    ]
    tree = {"levels": 3, "k": 3, "nodes": 8}
    write_recipe(
        root / "recipe.yaml",
        root,
        {
            **{"max_steps": STEPS, "batch_size": 4, "accumulation": 2, "learning_rate": 1e-3},
            **{"warmup_steps": 8, "log_every": 1, "save_every": 6, "eval_every": 18},
            **{"eval_conversations": 24, "measure_prompts": 4, "measure_new_tokens": 16},
        },
        run=str(root / "undisturbed"),
        tree=tree,
        bench={
            "prompts": {
                "path": str(tiny.write_rows(root / "questions.jsonl", rows)),
                "num_prompts": PROMPTS,
                "max_new_tokens": 20,
            },
            "warmup_prompts": 1,
            "cycles": True,
            "sampling": [{"temperature": 0.0}, {"temperature": 1.0}],
            "rows": [
                {"method": "vanilla"},
                {"method": "eagle2", "tree": tree},
                {"method": "eagle-chain"},
            ],
        },
        features={"batch_tokens": 1024, "shard_tokens": 1024},
    )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    root = tmp_path_factory.mktemp("kills")
    prepare(root)
    target = Target.load(TargetConfig(str(root / "target")))
    states = root / "states"
    with StateStandIn(target.model, (target.num_blocks,), states) as server:
        served = [f"--features.server.urls=[{server.url}]", f"--features.server.states={states}"]
        made = {name: World(root, name) for name in SOAK}
        made["served features"].words = tuple(served)
        made["served train"].words = (*served, "--features.mode=online")
        for world in made.values():
            began = time.monotonic()
            code = world.start(world.undisturbed)
            log = log_of(world.undisturbed).read_text(errors="replace")
            assert code == 0, log[-2000:]
            world.seconds = time.monotonic() - began
            world.changes = int(log.split()[-1])  # `become` prints it last
        yield made
        # Each start removes what a killed one left. Only the empty lock of a process that was
        # killed after its last file may stay.
        assert [*states.glob("[!.]*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SOAK)
def test_killed_stage(name: str, worlds: dict[str, World], tmp_path: Path) -> None:
    """A stage that is killed goes on to the same bytes."""
    world = worlds[name]
    chance = random.Random(name)
    run = world.fresh(tmp_path / "run")
    assert world.start(run, fatal=chance.randrange(2, world.changes // 2)) == -9
    assert world.differences(run)  # the comparison finds what is missing
    assert world.start(run, fatal=chance.randrange(2, world.changes // 3)) == -9
    world.start(run, seconds=chance.random() * world.seconds)
    assert world.differences(run, world.start(run)) == []


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK)
def test_random_moments(name: str, worlds: dict[str, World], tmp_path: Path) -> None:
    """Kills at random moments leave no trace."""
    world, chance, kills, runs = worlds[name], random.Random(f"soak {name}"), 0, 0
    whole = f"{OUTPUTS[world.stage][0]}/provenance.json"  # marks the end of the stage
    while kills < SOAK[name]:
        run, runs = world.fresh(tmp_path / str(runs)), runs + 1
        code: int | None = -9
        while code == -9:
            limit = {} if kills >= SOAK[name] else {"seconds": chance.random() * world.seconds}
            code = world.start(run, **limit)
            kills += code == -9 and not (run / whole).exists() and (run / "status.json").exists()
        assert world.differences(run, code) == []
        shutil.rmtree(run)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK)
def test_every_change(name: str, worlds: dict[str, World], tmp_path: Path) -> None:
    """A stage that dies before any change to a file goes on to the same bytes."""
    world = worlds[name]
    run, fatal = world.fresh(tmp_path / "start"), 1
    while (code := world.start(run, fatal=fatal)) == -9:  # start n dies before its change n
        fatal += 1
    assert world.differences(run, code) == [] and fatal > 12
    for change in range(max(1, world.changes - 24), world.changes + 1):  # near the end, one by one
        run = world.fresh(tmp_path / f"end-{change}")
        world.start(run, fatal=change)
        assert world.differences(run, world.start(run)) == []
        shutil.rmtree(run)
