"""Starts a real SLURM with two nodes on this machine: munged, slurmctld, a slurmd a node."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aerie.model.storage import ROOT

DAEMONS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun")
# The nodes claim more CPUs than the machine has, so no job waits in the queue. A requeued job waits
# cred_expire seconds; a value below 5 counts as the default of 120.
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONFIGURATION = """\
ClusterName=aerie
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
KillWait=20
NodeName=nest1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=nest2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """The reason why SLURM cannot be started here, or ''."""
    absent = [name for name in DAEMONS if shutil.which(name, path=PATH) is None]
    absent += ["rights of root"] if os.geteuid() else []
    return f"no {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)" if absent else ""


@dataclass(frozen=True)
class Cluster:
    root: Path
    environment: dict[str, str]

    def submit(self, script: str, *words: object, options: str = "") -> str:
        log = f"--output={self.root}/logs/%x-%j.log"
        command = ["sbatch", "--parsable", "--cpus-per-task=1", log, *options.split()]
        return self.run(*command, f"slurm/{script}.sbatch", *map(str, words)).strip()

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            timeout=60,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, Any]:
        """The status that a job's script wrote; {} if it has not written one."""
        paths = list((self.root / "logs").glob(f"*-{number}.json"))
        return json.loads(paths[0].read_text()) if paths else {}

    def log(self, number: str) -> str:
        return "".join(path.read_text() for path in (self.root / "logs").glob(f"*-{number}.log"))

    def wait(self, numbers: Iterable[str], seconds: float = 600.0) -> None:
        """Waits until the jobs have left the queue."""
        queue = partial(self.run, "squeue", "--noheader", "--format=%F")
        _until(
            lambda: not set(numbers) & set(queue().split()),
            lambda: "".join(map(self.log, numbers)),
            seconds,
        )

    def until(self, is_so: Callable[[], bool], number: str) -> None:
        """Waits until is_so(); fails if the job ends first."""
        ended = ("failed", "done")
        _until(
            lambda: is_so() or self.job(number).get("state") in ended,
            lambda: self.log(number),
            600.0,
        )
        assert is_so(), self.log(number)


@contextmanager
def started() -> Iterator[Cluster]:
    """A cluster with two idle nodes. At the end it and its jobs are stopped."""
    root = Path(tempfile.mkdtemp(prefix="aerie-slurm-"))
    root.chmod(0o755)  # munged runs as another user
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "AERIE"))
        },
        "SLURM_CONF": str(root / "slurm.conf"),
        "AERIE_LOGS": str(root / "logs"),
        "AERIE_VENV": sys.prefix,
        "PATH": PATH,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        for name in ("state", "logs", "munge"):
            (root / name).mkdir()
        host = socket.gethostname().split(".")[0]
        with ExitStack() as opened:
            sockets = [
                opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)
            ]
            ports = [listener.getsockname()[1] for listener in sockets]
        (root / "slurm.conf").write_text(CONFIGURATION.format(host=host, root=root, ports=ports))
        shutil.chown(root / "munge", "munge", "munge")
        as_munge = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        keys = {name: f"{root}/munge/{name}" for name in ("key", "socket", "pid", "log", "seed")}
        subprocess.run(
            [*as_munge, "mungekey", "--create", f"--keyfile={keys['key']}"],
            env=environment,
            check=True,
        )
        files = [f"--{name}-file={keys[name]}" for name in ("key", "pid", "log", "seed")]
        commands = [
            [*as_munge, "munged", "--foreground", f"--socket={keys['socket']}", *files],
            ["slurmctld", "-D"],
            *(["slurmd", "-D", "-N", name] for name in ("nest1", "nest2")),
        ]
        for number, command in enumerate(commands):
            log = stack.enter_context((root / f"daemon-{number}.log").open("w"))
            options: Any = {
                "env": environment,
                "stdout": log,
                "stderr": log,
                "start_new_session": True,
            }
            stack.callback(
                stack.enter_context(subprocess.Popen(command, **options)).terminate
            )  # the stack calls terminate, then waits for the process
            if number == 0:
                _until(Path(keys["socket"]).exists, lambda: "munged's socket")
        cluster = Cluster(root, environment)
        stack.callback(
            lambda: cluster.wait(cluster.run("squeue", "--noheader", "--format=%F").split(), 60.0)
        )
        stack.callback(cluster.run, "scancel", "--user=root")
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        nodes = partial(
            subprocess.run, idle, env=environment, capture_output=True, text=True, check=False
        )
        _until(lambda: nodes().stdout.strip() == "2", lambda: "two idle nodes")
        yield cluster


def _until(is_so: Callable[[], bool], what: Callable[[], str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"waited {seconds:g} s: {what()}"
        time.sleep(0.3)  # each call of is_so may start a process
