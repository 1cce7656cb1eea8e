"""What the user did that cannot work: one line, exit code 2, no traceback; and what works and is likely wrong."""

import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TextIO

REQUEUE = 75  # the exit code of a command that wants to be started again (sysexits.h: EX_TEMPFAIL)


class UserError(Exception):
    """A mistake at the border (recipe, file, checkpoint, template); its text names the place and the fix."""


class NotWritable(UserError):
    """A file that could not be written; is_full: for want of space."""

    def __init__(self, message: str, is_full: bool) -> None:
        super().__init__(message)
        self.is_full = is_full


class Requeued(KeyboardInterrupt):
    """SIGUSR1: a scheduler's warning before its time limit. A command stops as after Ctrl-C, and asks to go on."""


def stop_on_signals() -> None:
    """SIGTERM then stops this process as Ctrl-C does, and SIGUSR1 by Requeued."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, _requeue)


def _requeue(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a batch script repeats it: the clean-up is not to be disturbed
    raise Requeued


def warn(message: str) -> None:
    """Prints one line on stderr for what works and is likely wrong; it names the place and the fix."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def exit_code(main: Callable[[], int]) -> int:
    """The process's exit code: main's own, 2 after a UserError (one line on stderr), 130 after Ctrl-C.

    75 after SIGUSR1; 141 where nobody reads what is printed any more (`| head`), as a shell tells it.
    """
    try:
        code = main()
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        return 141
    except Requeued:
        print(
            "stopped before the time limit: what is whole is kept; the same command goes on",
            file=sys.stderr,
            flush=True,
        )
        return REQUEUE
    except KeyboardInterrupt:
        print("interrupted: what is whole is kept; the same command goes on from there", file=sys.stderr, flush=True)
        return 130


def _is_unread(stream: TextIO) -> bool:
    """Whether the reader of a stream's pipe is gone; what is left to print then goes nowhere."""
    watched = select.poll()
    watched.register(stream.fileno(), select.POLLOUT)
    if not any(state & (select.POLLERR | select.POLLHUP) for _, state in watched.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return True
