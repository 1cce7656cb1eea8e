"""The one progress bar of the project: a tqdm bar on rank 0, short plain lines where there is no terminal."""

import sys
from typing import Any, TextIO

from tqdm import tqdm

LINE_SECONDS = 10.0  # between two lines of a log file
FORMAT = "{desc}: {percentage:3.0f}% of {total_fmt}{unit}, {rate_fmt}, {remaining} left{postfix}"
OPEN_FORMAT = "{desc}: {n_fmt}{unit}, {rate_fmt}{postfix}"  # the total is not known


class _Lines:
    """A text stream for tqdm that writes whole lines where tqdm would redraw one."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        line = text.replace("\r", "").strip()
        if line:
            self.stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


def bar(
    total: int | None, unit: str, description: str, rank: int = 0, stream: TextIO | None = None, done: int = 0
) -> "tqdm[Any]":
    """A tqdm bar on stream (standard error), silent off rank 0; close it, or use it as a context.

    unit is a word such as "tok" or "row"; the rate is shown in it per second. done of the total were there before and
    are no part of the rate. In a log file a line comes every ten
    seconds and at the end, without carriage returns.
    """
    stream = stream or sys.stderr
    shared: dict[str, Any] = {"total": total, "initial": done, "unit": f" {unit}", "unit_scale": True}
    shared["desc"] = description
    if stream.isatty():
        return tqdm(disable=rank != 0, dynamic_ncols=True, file=stream, **shared)
    layout = FORMAT if total else OPEN_FORMAT
    lines: Any = _Lines(stream)
    return tqdm(disable=rank != 0, bar_format=layout, mininterval=LINE_SECONDS, delay=1e-9, file=lines, **shared)
