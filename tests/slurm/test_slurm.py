"""The batch scripts under a real SLURM of two nodes: what a cluster does to a job changes no byte of what it makes."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import exit_code
from aerie.data.main import main as features
from tests import tiny
from tests.slurm.cluster import Cluster, missing, started

pytestmark = pytest.mark.slow
STEPS = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    why = missing()
    if why is not None:
        pytest.skip(f"SLURM is not tested here: {why}")
    with started() as running:
        yield running


@dataclass(frozen=True)
class Morning:
    """One day's jobs, all in the queue at once: their numbers, and what was seen on the way."""

    cluster: Cluster
    recipe: Path
    jobs: dict[str, str]
    after_the_signal: dict[str, Any]  # the run's status.json once the ranks had stopped

    @property
    def run(self) -> Path:
        return self.recipe.parent / "run"

    @property
    def alone(self) -> Path:
        """The run whose features one process made, and whose two training processes were cancelled on one node."""
        return self.recipe.parent / "alone"


@pytest.fixture(scope="module")
def morning(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Morning:
    recipe = write_recipe(tmp_path_factory.mktemp("slurm"))
    root, jobs = recipe.parent, {}
    jobs["features"] = cluster.submit("features", recipe, options="--array=1-2")
    jobs["train"] = cluster.submit("train", recipe, options=f"--nodes=2 --dependency=afterok:{jobs['features']}")
    jobs["bench"] = cluster.submit("bench", recipe, options=f"--dependency=afterok:{jobs['train']}")
    jobs["distill"] = cluster.submit("distill", recipe, "--run", root / "distilled")
    jobs["mistake"] = cluster.submit("train", recipe, "--train.bath_size", 3)
    jobs["part"] = cluster.submit("features", recipe, options="--array=2-3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data/main.py", "features", "--config", str(recipe), "--run", str(root / "alone")])
        assert exit_code(features) == 0

    distilled = root / "distilled/status.json"
    cluster.until(lambda: state(distilled) == "running", jobs["distill"])
    signal_before_the_limit(cluster, jobs["distill"])
    cluster.until(lambda: last_step(root / "run/metrics.jsonl") >= 5, jobs["train"])
    signal_before_the_limit(cluster, jobs["train"])
    cluster.until(lambda: state(root / "run/status.json") != "running", jobs["train"])
    seen = json.loads((root / "run/status.json").read_text())
    again = ("train", recipe, "--run", root / "alone")
    jobs["cancelled"] = cluster.submit(*again, AERIE_PROCESSES="2")
    cluster.until(lambda: last_step(root / "alone/metrics.jsonl") >= 5, jobs["cancelled"])
    cluster.run("scancel", jobs["cancelled"])
    cluster.wait([jobs["cancelled"]])
    jobs["continued"] = cluster.submit(*again, AERIE_PROCESSES="2")
    cluster.wait(jobs.values())
    return Morning(cluster, recipe, jobs, seen)


def write_recipe(root: Path) -> Path:
    tiny.target(root / "target", num_blocks=2)
    rows = str(tiny.write_conversations(root / "train.jsonl", 60, seed=2))
    (root / "questions.jsonl").write_text(2 * '{"turns": ["How many owls are two lamps?"]}\n')
    tree = {"levels": 3, "k": 2, "nodes": 6}
    train = {"max_steps": STEPS, "epochs": STEPS, "batch_size": 2, "learning_rate": 2e-3, "warmup_steps": 1}
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [rows], "max_length": 128, "held_out": 0.1},
        "features": {"shard_tokens": 512, "batch_tokens": 512},
        "train": {**train, "eval_every": 0, "log_every": 5, "save_every": 10 * STEPS},
        "tree": tree,
        "distill": {
            "sources": [{"path": rows, "num_rows": 8}],
            "sampling": {"temperature": 0.0, "max_tokens": 8},
            "gate": dict.fromkeys(("cut", "empty", "loop", "language", "repeated"), "keep"),
            "max_turns": 1,
        },
        "bench": {
            "prompts": {"path": str(root / "questions.jsonl"), "num_prompts": 2, "max_new_tokens": 8, "turns": 1},
            "rows": [{"method": "vanilla"}, {"method": "eagle2", "tree": tree}],
        },
    }
    return tiny.recipe(root / "recipe.yaml", values)


def signal_before_the_limit(cluster: Cluster, job: str) -> None:
    """What --signal=B:USR1@300 has SLURM do: the batch script alone is told."""
    cluster.run("scancel", "--batch", "--signal=USR1", job)


def state(path: Path) -> str | None:
    return json.loads(path.read_text())["state"] if path.is_file() else None


def last_step(path: Path) -> int:
    lines = path.read_text().splitlines() if path.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def files(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != "provenance.json")
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def test_an_arrays_shares_are_the_cache_that_one_process_makes(morning: Morning) -> None:
    together, alone = files(morning.run / "features"), files(morning.alone / "features")
    assert together == alone and sum(name.startswith("shard") for name in alone) >= 4
    for share in (1, 2):
        assert state(morning.run / f"status-features-{share}-of-2.json") in ("done", "share-done")
    logs = sorted((morning.cluster.root / "logs").glob("features-*.json"))
    ended = {status["job"]: status["state"] for status in map(json.loads, (path.read_text() for path in logs))}
    array = morning.jobs["features"]
    assert ended[f"{array}_1"] == ended[f"{array}_2"] == "done"


def test_a_training_signalled_on_two_nodes_and_one_cancelled_on_one_go_on_and_end_with_the_same_weights(
    morning: Morning,
) -> None:
    assert morning.after_the_signal == {"stage": "train", "state": "requeue", "code": 75}
    cluster, jobs, weights = morning.cluster, morning.jobs, []
    cancelled, signalled = cluster.job(jobs["cancelled"]), cluster.job(jobs["train"])
    assert (cancelled["attempt"], cancelled["state"], cancelled["code"]) == (1, "interrupted", 143)
    assert (signalled["attempt"], signalled["nodes"]) == (2, "nest[1-2]")
    for name, run in (("train", morning.run), ("continued", morning.alone)):
        log = cluster.log(jobs[name])
        assert (cluster.job(jobs[name])["state"], state(run / "status.json")) == ("done", "done"), log
        assert 5 <= int(log.split("going on from step ")[1].split(" ")[0]) < STEPS
        provenance = json.loads((run / "heads/eagle1/provenance.json").read_text())
        assert (provenance["processes"], provenance["steps"]) == (2, STEPS)
        weights.append((run / "heads/eagle1/model.safetensors").read_bytes())
    assert weights[0] == weights[1]  # that of a run which nobody stopped: tests/train/test_processes.py


def test_a_process_that_is_signalled_while_it_loads_is_requeued_too(morning: Morning) -> None:
    status = morning.cluster.job(morning.jobs["distill"])
    assert (status["attempt"], status["state"]) == (2, "done"), morning.cluster.log(morning.jobs["distill"])
    rows = (morning.recipe.parent / "distilled/distilled/conversations.jsonl").read_text().splitlines()
    assert len(rows) == 8


def test_the_bench_waits_for_the_requeued_training_and_measures_its_head(morning: Morning) -> None:
    assert morning.cluster.job(morning.jobs["bench"])["state"] == "done", morning.cluster.log(morning.jobs["bench"])
    summary = json.loads((morning.run / "report/summary.json").read_text())
    assert [row["status"] for row in summary["rows"]] == ["ok", "ok"]


@pytest.mark.parametrize(("name", "said"), [("mistake", "'train.batch_size'?"), ("part", "(AERIE_SHARDS=n)")])
def test_a_mistake_or_a_part_of_an_array_ends_a_job_in_one_line_before_any_step(
    morning: Morning, name: str, said: str
) -> None:
    status, log = morning.cluster.job(morning.jobs[name]), morning.cluster.log(morning.jobs[name])
    assert (status["state"], status["code"], status["attempt"]) == ("failed", 2, 1)
    assert len(log.splitlines()) == 1 and said in log
