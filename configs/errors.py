"""Mistakes of the user: one line on stderr and exit code 2, no traceback."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

REQUEUE = 75  # the exit code that asks for another start (sysexits.h: EX_TEMPFAIL)


class UserError(Exception):
    """Its text names the place, the value and the fix."""


class NotWritable(UserError):
    """A file that cannot be written, such as on a full disk."""


class Requeued(KeyboardInterrupt):
    """SIGUSR1, a scheduler's warning before its time limit."""


def stop_on_signals() -> None:
    """SIGTERM stops this process as Ctrl-C does, and SIGUSR1 raises Requeued."""

    def requeue(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a batch script repeats it
        raise Requeued

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, requeue)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Around a main: exits with 2 for a UserError, 130 for Ctrl-C, 75 for SIGUSR1, 141 when nobody reads stdout."""
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        # torch's launcher quotes this file at the end of its own report.
        if reply := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(reply).write_text(json.dumps({"message": f"error: {error}", "timestamp": int(time.time())}))
        # The first process says the same, and the launcher ends the others.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Requeued:
        print("stopped before the time limit: the same command goes on", file=sys.stderr)
        sys.exit(REQUEUE)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from there", file=sys.stderr)
        sys.exit(130)
