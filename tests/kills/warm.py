"""A process that has imported what the commands import, and forks one child for each start of a command.

A child runs the command's own main function in its own process group. Nothing but the seconds of importing torch is
spared: every configuration is read, every target loaded and every file opened by the child itself.
"""

import json
import os
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

import data.extraction
import data.main
import infer.bench
import infer.main
import infer.reference
import train.jobs
import train.loop
import train.main
import train.source
from model.errors import exit_code
from train.launch import quiet_deepspeed

MAIN = {"data/main.py": data.main.main, "train/main.py": train.main.main, "infer/main.py": infer.main.main}


def serve(line: Connection) -> None:
    """Forks a child for each {words, log}, sends its process id, and its exit code when it has ended."""
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
            _become(request["words"], request["log"])
        line.send(child)
        line.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _become(words: list[str], log: str) -> NoReturn:
    os.setsid()
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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
