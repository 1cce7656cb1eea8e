"""What the user did that cannot work: one line, exit code 2, no traceback; and what works and is likely wrong."""

import os
import select
import sys
from collections.abc import Callable
from typing import TextIO


class UserError(Exception):
    """A mistake at the border (recipe, file, checkpoint, template); its text names the place and the fix."""


class NotWritable(UserError):
    """A file that could not be written; is_full: for want of space."""

    def __init__(self, message: str, is_full: bool) -> None:
        super().__init__(message)
        self.is_full = is_full


def warn(message: str) -> None:
    """Prints one line on stderr for what works and is likely wrong; it names the place and the fix."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def exit_code(main: Callable[[], int]) -> int:
    """The process's exit code: main's own, 2 after a UserError (one line on stderr), 130 after Ctrl-C.

    141 where nobody reads what is printed any more (`| head`), as a shell tells it.
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
