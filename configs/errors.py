"""A user's mistake ends the process with one line on stderr and exit code 2, without a
traceback."""

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
            r"(?<=://)(?:[^\s/@]*:[^\s@]+|[^\s/]+)(?=@)",  # user and password in a URL
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
    """A user's mistake. Its text names the place, the value and the fix."""


class NotWritable(UserError):
    """A file that cannot be written, for instance because the disk is full."""


class Requeued(KeyboardInterrupt):
    """Raised at SIGUSR1, which a scheduler sends before its time limit."""


class Arguments(argparse.ArgumentParser):
    """A parser that reports a wrong command line as a UserError of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def stop_on_signals() -> None:
    """Makes SIGTERM stop this process as Ctrl-C does, and SIGUSR1 raise Requeued."""

    def requeue(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # batch scripts repeat the signal
        raise Requeued

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, requeue)


def masked(text: str) -> str:
    """The text with *** in place of passwords and keys, which a server's address or reply may
    hold."""
    for name in ("OPENAI_API_KEY", "HF_TOKEN"):
        secret = os.environ.get(name, "")
        if len(secret) >= 8:
            text = text.replace(secret, "***")
    return SECRETS.sub(r"\1\2***", text)  # the groups hold the names, which stay readable


def rank() -> int:
    """This process's number among those that a launcher started; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes a launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def warn(message: str) -> None:
    """Prints a warning to stderr, in the first process only."""
    if rank() == 0:
        print(f"warning: {masked(message)}", file=sys.stderr, flush=True)


def warn_of_lone_process() -> None:
    """Warns if `accelerate launch` was to start several processes and started one."""
    # The launcher always sets both names, but WORLD_SIZE only if it starts several processes.
    is_launched = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys()
    if is_launched and "WORLD_SIZE" not in os.environ:
        warn(
            "accelerate launch: started one process of the several you asked for; on a CPU, launch "
            "with --config_file configs/accelerate/zero2.yaml, or with torchrun "
            "(and -- before the script)"
        )


@cache
def warn_once(message: str) -> None:
    """Prints a warning once per process."""
    warn(message)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Wraps a main, and ends the process with the exit code for what it raised.

    2: a mistake of the user, or an unusable file; 130: Ctrl-C; 75: SIGUSR1; 141: stdout was closed.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again when it exits; an error there would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UserError, OSError, SafetensorError, UnicodeDecodeError) as error:
        _report(_line_of(error))
        sys.exit(2)
    except Requeued:
        print(
            "stopped before the time limit; run the same command again to continue", file=sys.stderr
        )
        sys.exit(REQUEUE)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is saved", file=sys.stderr)
        sys.exit(130)


def _line_of(error: Exception) -> str:
    """The whole text of a UserError, which may list several problems; the first line of another
    error."""
    if isinstance(error, UserError):
        text = str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = next(iter(str(error).splitlines()), type(error).__name__)
    return masked(text)


def _report(text: str) -> None:
    """Prints the error, and leaves it in the file that torch's launcher quotes at its end."""
    if reply := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": f"error: {text}", "timestamp": int(time.time())}
        Path(reply).write_text(json.dumps(content))
    # Other processes wait: the first one prints the same error, and the launcher then ends them.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    print(f"error: {text}", file=sys.stderr, flush=True)
