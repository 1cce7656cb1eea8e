"""A real vLLM gives the states of our own forward, started by the command that is printed."""

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from aerie.configs.schema.data import StateServersConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.features import extract
from aerie.data.served_states import ServedStates
from aerie.data.servers import states_command
from aerie.data.tokens import TokenisedData
from aerie.model.storage import ROOT
from aerie.model.target import Target
from tests import tiny
from tests.data import caches

pytestmark = [pytest.mark.served, pytest.mark.slow]
VENV = ROOT / ".venv-served"
TAPS = (2, 3, 4)
DATA = TokenisedData(train=caches.rows(40), held_out=caches.rows(3, seed=1))
ROWS = [*DATA.train, *DATA.held_out]
START_S = 300.0
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LD_PRELOAD": str(VENV / "lib/libiomp5.so"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (VENV / "bin/vllm").exists():
        pytest.skip("no vLLM: make served sets it up in .venv-served")
    root = tmp_path_factory.mktemp("real")
    # vLLM's attention on a CPU needs heads of 32.
    tiny.target(root / "target", num_blocks=7, hidden_size=128, initializer_range=0.1)
    return root


@pytest.fixture(scope="module")
def local(root: Path) -> Target:
    return Target.load(TargetConfig(str(root / "target"), dtype="float32"))


@pytest.fixture(scope="module")
def config(root: Path, local: Target) -> Iterator[StateServersConfig]:
    """A server that the printed command has started."""
    states = root / "states"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    longest = max(len(row.input_ids) for row in ROWS)
    command = states_command(local.recipe, TAPS, str(states), longest, is_cpu=True)
    # The first words are the environment's and `vllm`.
    command = command.replace(" vllm ", f" {shlex.quote(str(VENV / 'bin/vllm'))} ", 1)
    command += f" --port {port} --enforce-eager"
    environment = {**os.environ, **SETTINGS, "VLLM_CACHE_ROOT": str(root / "cache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # imports would take 19 s more
    words = ["bash", "-c", f"exec env {command}"]
    with running(words, environment, port, root / "server.log"):
        yield StateServersConfig((f"http://127.0.0.1:{port}/v1",), str(states), retries=0)


@contextmanager
def running(
    words: list[str], environment: dict[str, str], port: int, log_path: Path
) -> Iterator[None]:
    """Starts a server, waits until it answers, and ends it with all its processes."""
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            words, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        wait_for(server, port, log_path)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def wait_for(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        with suppress(OSError):
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


def test_the_states_of_our_own_forward(
    config: StateServersConfig, local: Target, tmp_path: Path
) -> None:
    """Each row has the same slots and states; no file is left."""
    ours = caches.cache(tmp_path / "local", local, DATA, after_blocks=TAPS)
    plan = caches.plan(tmp_path / "served", local, DATA, after_blocks=TAPS, batch_tokens=1)
    with ServedStates(config, local.recipe, TAPS, ROWS, plan.directory) as source:
        extract(source, plan, caches.PartialState(), {"data": {"max_length": 40}})
    served = caches.FeatureCache.open(plan.directory)
    assert served.fingerprint == ours.fingerprint
    for theirs, mine in zip(served, ours, strict=True):
        assert theirs.input_ids.equal(mine.input_ids) and theirs.turn_ids.equal(mine.turn_ids)
        torch.testing.assert_close(theirs.last_hidden, mine.last_hidden, atol=1e-4, rtol=0)
        torch.testing.assert_close(theirs.taps, mine.taps, atol=1e-4, rtol=0)
    assert [*Path(config.states).iterdir()] == []


def test_what_vllm_would_answer_in_silence(
    config: StateServersConfig, local: Target, tmp_path: Path
) -> None:
    """Another tap, another number of taps and another model are refused in a line."""
    other = tiny.target(tmp_path / "other", num_blocks=7, hidden_size=128, seed=1)
    wrong = {
        "or other state ids": (local.recipe, (2, 3, 5)),
        "gives 4 states per token": (local.recipe, (2, 3)),
        "another model": (TargetConfig(str(other), dtype="float32"), TAPS),
        "computes in float32": (replace(local.recipe, dtype="bfloat16"), TAPS),
    }
    for message, (target, taps) in wrong.items():
        tiny.refused(message, ServedStates(config, target, taps, ROWS, tmp_path).__enter__)
