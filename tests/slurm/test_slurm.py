"""Runs the batch scripts under a real SLURM of two nodes; signals and requeues change no byte."""

import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aerie.data import main as data_main
from aerie.model.storage import ROOT, read_json
from tests import tiny
from tests.data.caches import contents
from tests.slurm.cluster import Cluster, missing, started
from tests.train.test_main import write_recipe
from tests.train.test_processes import together

pytestmark = pytest.mark.slow
STEPS = 200
# Like --signal=B:USR1@300, it signals only the batch script.
SIGNAL = ("scancel", "--batch", "--signal=USR1")


@dataclass(frozen=True)
class Morning:
    """Jobs that were in the queue together, and what they left."""

    cluster: Cluster
    root: Path  # of the cluster's run, and of the run `alone` by two undisturbed processes
    jobs: dict[str, str]  # name -> number
    after_the_signal: dict[str, Any]  # the training's status.json once its processes had stopped

    def ended(self, name: str) -> tuple[Any, ...]:
        status = self.cluster.job(self.jobs[name])
        return status["state"], status["code"], status["attempt"], self.cluster.log(self.jobs[name])


@pytest.fixture(scope="module")
def morning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Morning]:
    if why := missing():
        pytest.skip(f"SLURM is not tested here: {why}")
    with started() as cluster:
        root = tmp_path_factory.mktemp("slurm")
        recipe = recipe_for(root)
        features = cluster.submit("features", recipe, options="--array=1-2")
        after = f"--nodes=2 --dependency=afterok:{features}"
        train = cluster.submit("train", recipe, options=after)
        two = f"--dependency=afterok:{train} --export=ALL,AERIE_PROCESSES=2"
        jobs = {
            "features": features,
            "train": train,
            "bench": cluster.submit("bench", recipe, options=two),
            "distill": cluster.submit("distill", recipe, "--run", root / "distilled"),
            "mistake": cluster.submit("train", recipe, "--train.bath_size", 3),
            "part": cluster.submit("features", recipe, options="--array=2-3"),
            "served": cluster.submit(
                "served", served_recipe(root), options=servers_in(root / "venv")
            ),
            "crowded": cluster.submit("served", root / "served.yaml", options="--nodes=1"),
        }
        assert tiny.call(data_main, "features", "--config", recipe, "--run", root / "alone") == 0

        cluster.until(lambda: state(root / "distilled/status.json") == "running", jobs["distill"])
        cluster.run(*SIGNAL, jobs["distill"])
        metrics = root / "run/metrics.jsonl"
        cluster.until(lambda: metrics.is_file() and metrics.stat().st_size > 0, jobs["train"])
        cluster.run(*SIGNAL, jobs["train"])
        cluster.until(lambda: state(root / "run/status.json") != "running", jobs["train"])
        after_the_signal = json.loads((root / "run/status.json").read_text())
        together("zero2", root / "alone", "--config", recipe)
        cluster.wait(jobs.values())
        yield Morning(cluster, root, jobs, after_the_signal)


def recipe_for(root: Path) -> Path:
    tiny.target(root / "target", num_blocks=2)
    rows = str(tiny.write_conversations(root / "train.jsonl", 60, seed=2))
    questions = [{"turns": [f"How many owls are {number} lamps?"]} for number in (2, 3)]
    tiny.write_rows(root / "questions.jsonl", questions)
    tree = {"levels": 3, "k": 2, "nodes": 6}
    train = {
        "max_steps": STEPS,
        "epochs": STEPS,
        "batch_size": 2,
        "learning_rate": 2e-3,
        "eval_every": 0,
        "log_every": 5,
        "save_every": 10 * STEPS,
    }
    sections: dict[str, Any] = {
        "features": {"shard_tokens": 512, "batch_tokens": 512},
        "tree": tree,
        "distill": {
            "sources": [{"path": rows, "num_rows": 8}],
            "max_turns": 1,
            "gate": dict.fromkeys(("cut", "empty", "loop", "language", "repeated"), "keep"),
            "sampling": {"temperature": 0.0, "max_tokens": 8},
        },
        "bench": {
            "prompts": {
                "path": str(root / "questions.jsonl"),
                "num_prompts": 2,
                "max_new_tokens": 8,
            },
            "rows": [{"method": "vanilla"}, {"method": "eagle2", "tree": tree}],
        },
    }
    return write_recipe(root / "recipe.yaml", root, train, **sections)


def served_recipe(root: Path) -> Path:
    """The recipe that `aerie init --server` writes, for a short training."""
    recipe = root / "served.yaml"
    options = f"""--target {root}/target --data {root}/train.jsonl --server http://elsewhere/v1
    --kind eagle1 --run {root}/served --threads 1 --train.max_steps 6 --out {recipe}
    --distill.sampling.max_tokens 8 --distill.gate"""
    gate = json.dumps(dict.fromkeys(("cut", "empty", "loop", "language", "repeated"), "keep"))
    assert tiny.call(data_main, "init", *options.split(), gate) == 0
    return recipe


def servers_in(venv: Path) -> str:
    """sbatch's options for servers with a stand-in for `vllm`."""
    script = venv / "bin/vllm"
    script.parent.mkdir(parents=True)
    module = f"PYTHONPATH={ROOT}/src:{ROOT} exec {sys.executable} -m tests.data.vllm_stand_in"
    script.write_text(f'#!/bin/bash\ncd {venv.parent} && {module} "$@"\n')
    script.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    return f"--nodes=2 --export=ALL,AERIE_SERVER_VENV={venv},AERIE_SERVER_PORT={port}"


def state(path: Path) -> str | None:
    return json.loads(path.read_text())["state"] if path.is_file() else None


def test_an_arrays_shares_are_the_cache_that_one_process_makes(morning: Morning) -> None:
    shared, alone = (contents(morning.root / run / "features") for run in ("run", "alone"))
    assert shared == alone and sum(name.startswith("shard") for name in alone) >= 4
    for share in (1, 2):
        assert state(morning.root / f"run/status-features-{share}-of-2.json") in (
            "done",
            "share-done",
        )


def test_a_training_signalled_on_two_nodes_ends_as_an_undisturbed_one(morning: Morning) -> None:
    assert morning.after_the_signal == {"stage": "train", "state": "requeue", "code": 75}
    ended, code, attempt, log = morning.ended("train")
    assert (ended, code, attempt) == ("done", 0, 2), log
    assert morning.cluster.job(morning.jobs["train"])["nodes"] == "nest[1-2]"
    assert 5 <= int(log.split("going on from step ")[1].split(" ")[0]) < STEPS
    weights = "heads/eagle1/model.safetensors"
    alone = (morning.root / "alone" / weights).read_bytes()
    assert (morning.root / "run" / weights).read_bytes() == alone


def test_a_process_signalled_while_it_loads_is_requeued_and_the_bench_waits_for_the_training(
    morning: Morning,
) -> None:
    assert morning.ended("distill")[:3] == ("done", 0, 2), morning.ended("distill")
    assert len(tiny.read_rows(morning.root / "distilled/distilled/conversations.jsonl")) == 8
    assert morning.ended("bench")[0] == "done", morning.ended("bench")
    summary = read_json(morning.root / "run/report/summary.json")
    assert [(row["status"], row["prompts"]) for row in summary["rows"]] == [("ok", 2)] * 2
    assert summary["hardware"]["processes"] == "2"


def test_servers_and_training_share_an_allocation(morning: Morning) -> None:
    """One node serves first answers, then states, and the other node trains the head on them."""
    ended, code, attempt, log = morning.ended("served")
    assert (ended, code, attempt) == ("done", 0, 1), log
    run = morning.root / "served"
    assert (run / "heads/eagle1/model.safetensors").is_file()
    assert read_json(run / "features/provenance.json")["server"]["vllm"] == ["0.32.0"]
    assert not any((run / "states").iterdir())


MISTAKES = [
    ("mistake", "'train.batch_size'?"),
    ("part", "(AERIE_SHARDS=n)"),
    ("crowded", "at least one node serves, and one trains"),
]


@pytest.mark.parametrize(("name", "message"), MISTAKES)
def test_a_mistake_or_a_part_of_an_array_ends_a_job_in_one_line(
    morning: Morning, name: str, message: str
) -> None:
    *ended, log = morning.ended(name)
    assert ended == ["failed", 2, 1] and len(log.splitlines()) == 1 and message in log
