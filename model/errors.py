"""What the user did that cannot work: one line, exit code 2, no traceback; and what works and is likely wrong."""

import sys
from collections.abc import Callable


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
    """The process's exit code: main's own, 2 after a UserError (one line on stderr), 130 after Ctrl-C."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what is whole is kept; the same command goes on from there", file=sys.stderr, flush=True)
        return 130
