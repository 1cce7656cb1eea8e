"""Locks between processes that write one directory: held until closed, freed by the kernel when a process is killed.

They spare two writers the same work and refuse what two must not do at once; no file is whole because of them.
"""

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of file systems


class Lock:
    """A lock on a file, which is made where it does not exist; a context that frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = _opened(path)

    def acquire(self, shared: bool = False, wait: bool = True) -> bool | Literal["unknown"]:
        """Whether this process has it now; "unknown", which is true as a condition, where there are no locks."""
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            try:
                fcntl.flock(self.file, kind)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
                return "unknown"
            if _is_named(self.file, self.path):
                return True
            self.file.close()
            self.file = _opened(self.path)

    def forget(self) -> None:
        """Removes the file: whoever takes a new one finds the work done."""
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        self.file.close()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _is_named(file: IO[bytes], path: Path) -> bool:
    """Whether path still is this open file: before it was locked another may have removed or replaced it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _opened(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")
