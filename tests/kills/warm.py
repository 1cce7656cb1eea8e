"""A process that has imported what the commands import, and forks one child for each start of a command.

A child runs the command's own main function in its own process group. Nothing but the seconds of importing torch is
spared: every configuration is read, every target loaded and every file opened by the child itself.
"""

import json
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import aerie.data.main
import aerie.infer.main
import aerie.train.main
from aerie.configs.errors import exit_code
from aerie.train.launch import quiet_deepspeed

MAIN = {
    "data/main.py": aerie.data.main.main,
    "train/main.py": aerie.train.main.main,
    "infer/main.py": aerie.infer.main.main,
}

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree")


def serve(line: Connection) -> None:
    """Forks a child for each {words, log, below, fatal}, sends its process id, and its exit code when it has ended."""
    quiet_deepspeed()  # imports DeepSpeed
    line.send("ready")
    while True:
        try:
            request = json.loads(line.recv())
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            line.close()
            _become(request["words"], request["log"], Changes(request["below"], request["fatal"]))
        line.send(child)
        line.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


class Changes:
    """Counts the changes that this process makes to names below a directory, and dies just before the fatal-th.

    A change is a file opened for writing, a rename, a removal or a new directory, as Python's audit hooks tell them.
    """

    def __init__(self, below: str, fatal: int | None) -> None:
        self.below, self.fatal, self.count = below, fatal, 0
        self._turn = threading.Lock()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not any(str(path).startswith(self.below) for path in arguments[:2]):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        with self._turn:
            self.count += 1
            if self.count == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def _become(words: list[str], log: str, changes: Changes) -> NoReturn:
    os.setsid()
    sys.addaudithook(changes)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = words
    code = 1
    try:
        code = exit_code(MAIN[words[0]])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        print(f"changes: {changes.count}", flush=True)
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
