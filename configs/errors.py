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
from pathlib import Path
from types import FrameType
from typing import NoReturn

from safetensors import SafetensorError

REQUEUE = 75  # the exit code that asks for another start (sysexits.h: EX_TEMPFAIL)


class UserError(Exception):
    """Its text names the place, the value and the fix."""


class NotWritable(UserError):
    """A file that cannot be written, such as on a full disk."""


class Requeued(KeyboardInterrupt):
    """At SIGUSR1, which a scheduler sends before its time limit."""


def stop_on_signals() -> None:
    """SIGTERM stops this process as Ctrl-C does, and SIGUSR1 raises Requeued."""

    def requeue(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # batch scripts repeat it
        raise Requeued

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, requeue)


LONE_SURROGATE = re.compile(
    "[\ud800-\udfff]"
)  # from bytes that are not UTF-8, or half of an escaped pair
SECRETS = re.compile(  # in a URL: user and password before @, values after ?; keys, by their form or name
    r"(?<=://)(?:[^\s/@]*:[^\s@]+|[^\s/]+)(?=@)|(?<=[?&#])([\w.-]+=)[^\s&]*[\w%+/=-]|\bhf_\w{30,}|\bsk-[\w-]{16,}"
    r"|(?<=bearer )[^\s'\",]+|(?<=authorization: basic )\S+"
    r"|((?:api[-_]?key|password|secret|token)[\"']?[:=]\s?[\"']?)[^\s\"',&]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """The text with *** for passwords and keys, such as in a server's address or reply."""
    for value in (os.environ.get("OPENAI_API_KEY", ""), os.environ.get("HF_TOKEN", "")):
        text = text.replace(value, "***") if len(value) >= 8 else text
    return SECRETS.sub(lambda found: f"{found[1] or found[2] or ''}***", text)


def rank() -> int:
    """This process's number among those that a launcher started; 0 without a launcher."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else 0


def warn(message: str) -> None:
    """Only the first process prints it."""
    if rank() == 0:
        print(f"warning: {masked(message)}", file=sys.stderr, flush=True)


class Arguments(argparse.ArgumentParser):
    """A wrong command line is a UserError of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


@contextmanager
def exit_codes() -> Iterator[None]:
    """Wraps a main: exits with 2 for errors of users or files, 130 for Ctrl-C, 75 for SIGUSR1, 141 if stdout closes."""
    try:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            if not re.fullmatch("[0-9]{1,9}", os.environ.get(name, "0")):
                raise UserError(
                    f"{name}: {os.environ[name][:20]!r} is no number; a launcher sets it, so unset it"
                )
        if rank() >= (world := int(os.environ.get("WORLD_SIZE", "1"))):
            raise UserError(
                f"RANK: {rank()} is not below WORLD_SIZE {world}; a launcher sets both, so unset them"
            )
        for word in sys.argv:
            if LONE_SURROGATE.search(word):
                raise UserError(f"{word!a}: is no UTF-8 text")
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UserError, OSError, SafetensorError, UnicodeDecodeError) as error:
        said = (
            str(error)
            if isinstance(error, UserError)
            else (str(error).splitlines() or [type(error).__name__])[0]
        )
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        said = masked(said)
        # torch's launcher quotes this file at the end of its own report.
        if reply := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(reply).write_text(
                json.dumps({"message": f"error: {said}", "timestamp": int(time.time())})
            )
        # The first process prints the same error; then the launcher ends this one.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        print(f"error: {said}", file=sys.stderr, flush=True)
        sys.exit(2)
    except Requeued:
        print(
            "stopped before the time limit: run the same command again to continue", file=sys.stderr
        )
        sys.exit(REQUEUE)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        sys.exit(130)
