"""Starts of the real commands that can be killed at any moment, forked from a process that has imported torch."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from aerie.configs.errors import exit_code

ROOT = Path(__file__).resolve().parents[2]
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree")
HEAVY = ("aerie.train.loop", "aerie.data.features", "aerie.infer.measure.bench", "deepspeed")


class WarmPython:
    def __enter__(self) -> "WarmPython":
        self.line, other = Pipe()
        command = [sys.executable, "-m", "tests.kills.starts", str(other.fileno())]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[other.fileno()])
        other.close()
        self.line.recv()
        return self

    def __exit__(self, *error: object) -> None:
        self.line.close()
        self.process.kill()
        self.process.wait()

    def run(self, words: list[str], log: Path, below: Path, seconds: float = 600.0, fatal: int | None = None) -> int:
        """Exit code of one start, -9 where it was killed: after `seconds`, or just before its fatal-th change below."""
        self.line.send(json.dumps({"words": words, "log": str(log), "below": str(below), "fatal": fatal}))
        child = self.line.recv()
        if not self.line.poll(seconds):
            deadline = time.monotonic() + 10
            while not self.line.poll(0.002) and time.monotonic() < deadline:  # it may have no group of its own yet
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
        code: int = self.line.recv()
        return code


def serve(line: Connection) -> None:
    """Forks a child for each request; sends its process id, then its exit code."""
    mains = {f"{name}/main.py": import_module(f"aerie.{name}.main").main for name in ("data", "train", "infer")}
    for heavy in HEAVY:
        import_module(heavy)
    line.send("ready")
    with suppress(EOFError):
        while True:
            request = json.loads(line.recv())
            child = os.fork()
            if child == 0:
                line.close()
                become(mains[request["words"][0]], **request)
            line.send(child)
            line.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def become(main: Any, words: list[str], log: str, below: str, fatal: int | None) -> NoReturn:
    """Runs main, counts the changes to names below a directory, and dies just before the fatal-th."""
    count, lock = 0, threading.Lock()

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

    os.setsid()
    sys.addaudithook(on_event)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv, code = words, 1
    try:
        code = exit_code(main)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        print(f"changes: {count}", flush=True)
        os._exit(code)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
