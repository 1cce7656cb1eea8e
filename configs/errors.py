"""Mistakes of the user: one line on stderr and exit code 2, no traceback."""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NoReturn

from safetensors import SafetensorError

REQUEUE = 75  # the exit code that asks for another start (sysexits.h: EX_TEMPFAIL)
SECRETS = re.compile(
    "|".join(
        (
            r"(?<=://)(?:[^\s/@]*:[^\s@]+|[^\s/]+)(?=@)",  # user and password, in a URL
            r"(?<=[?&#])([\w.-]+=)[^\s&]*[\w%+/=-]",  # the values of a URL
            r"\bhf_\w{30,}",  # a token of the Hub
            r"\bsk-[\w-]{16,}",  # a key of OpenAI
            r"(?<=bearer )[^\s'\",]+",
            r"(?<=authorization: basic )\S+",
            r"((?:api[-_]?key|password|secret|token)[\"']?[:=]\s?[\"']?)[^\s\"',&]+",  # by name
        )
    ),
    re.IGNORECASE,
)


class UserError(Exception):
    """Its text names the place, the value and the fix."""


class NotWritable(UserError):
    """A file that cannot be written, such as on a full disk."""


class Requeued(KeyboardInterrupt):
    """At SIGUSR1, which a scheduler sends before its time limit."""


class Arguments(argparse.ArgumentParser):
    """A wrong command line is a UserError of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def stop_on_signals() -> None:
    """SIGTERM stops this process as Ctrl-C does, and SIGUSR1 raises Requeued."""

    def requeue(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # batch scripts repeat it
        raise Requeued

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, requeue)


def masked(text: str) -> str:
    """The text with *** for passwords and keys, such as in a server's address or reply."""
    for name in ("OPENAI_API_KEY", "HF_TOKEN"):
        secret = os.environ.get(name, "")
        if len(secret) >= 8:
            text = text.replace(secret, "***")
    return SECRETS.sub(r"\1\2***", text)  # the groups are the names, which stay


def rank() -> int:
    """This process's number among those that a launcher started; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes a launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def warn(message: str) -> None:
    """Only the first process prints it."""
    if rank() == 0:
        print(f"warning: {masked(message)}", file=sys.stderr, flush=True)


def warn_of_lone_process() -> None:
    # `accelerate launch` sets both, and WORLD_SIZE only where it starts several processes.
    is_launched = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys()
    if is_launched and "WORLD_SIZE" not in os.environ:
        warn(
            "accelerate launch: asked for several processes, started one; on a CPU launch them "
            "with --config_file configs/accelerate/zero2.yaml, or with torchrun "
            "(-- before the script)"
        )


@cache
def warn_once(message: str) -> None:
    """Says it once in a process."""
    warn(message)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Wraps a main, and ends the process with the code for what was raised.

    2: an error of the user or of files; 130: Ctrl-C; 75: SIGUSR1; 141: stdout was closed.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again at its end, where an error would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UserError, OSError, SafetensorError, UnicodeDecodeError) as error:
        _report(_line_of(error))
        sys.exit(2)
    except Requeued:
        print(
            "stopped before the time limit: run the same command again to continue", file=sys.stderr
        )
        sys.exit(REQUEUE)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is saved", file=sys.stderr)
        sys.exit(130)


def _line_of(error: Exception) -> str:
    """All problems of a UserError; the first line of another error."""
    if isinstance(error, UserError):
        text = str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = next(iter(str(error).splitlines()), type(error).__name__)
    return masked(text)


def _report(text: str) -> None:
    # torch's launcher quotes this file at the end of its own report.
    if reply := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": f"error: {text}", "timestamp": int(time.time())}
        Path(reply).write_text(json.dumps(content))
    # The first process prints the same error; then the launcher ends this one.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    print(f"error: {text}", file=sys.stderr, flush=True)
