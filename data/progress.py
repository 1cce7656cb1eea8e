"""A job's share of the work, and the one progress bar of the project."""

import sys
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

from aerie.configs.errors import UserError

LINE_SECONDS = 10.0  # between two lines of a log file
FORMAT = "{desc}: {percentage:3.0f}% of {total_fmt}{unit}, {rate_fmt}, {remaining} left{postfix}"
OPEN_FORMAT = "{desc}: {n_fmt}{unit}, {rate_fmt}{postfix}"  # where the total is not known


@dataclass(frozen=True)
class Share:
    """The index-th of count parts, counted from 1: every count-th item."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> "Share":
        """From 'i/n'; UserError for anything else."""
        first, separator, second = text.partition("/")
        if not separator or not first.isdecimal() or not second.isdecimal() or not 1 <= int(first) <= int(second):
            raise UserError(f"--shard: {text} is no share; write i/n with i from 1 to n (--shard 1/4)")
        return cls(int(first), int(second))

    def __contains__(self, position: int) -> bool:
        return position % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def part(self, count: int, rank: int = 0, world: int = 1) -> range:
        """The positions, out of `count`, of process `rank` of the `world` processes of this job."""
        return range(self.index - 1, count, self.count)[rank::world]


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

    unit is a word such as "tok" or "row". `done` of the total were there before and do not count in the rate. A log
    file gets a line every ten seconds and one at the end.
    """
    stream = stream or sys.stderr
    options: dict[str, Any] = {"total": total, "initial": done, "unit": f" {unit}", "unit_scale": True}
    if stream.isatty():
        options |= {"file": stream, "dynamic_ncols": True}
    else:
        layout = FORMAT if total else OPEN_FORMAT
        options |= {"file": _Lines(stream), "bar_format": layout, "mininterval": LINE_SECONDS, "delay": 1e-9}
    return tqdm(desc=description, disable=rank != 0, **options)
