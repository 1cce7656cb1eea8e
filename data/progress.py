"""Progress bars, sizes for people, and the share of a stage that one job makes."""

import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from aerie.configs.errors import UserError, rank

ShareItem = TypeVar("ShareItem")
WorkItem = TypeVar("WorkItem")
WorkResult = TypeVar("WorkResult")
LOG_LINE = (
    "{desc}: {percentage:3.0f}% of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left{postfix}"
)
LOG_LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {rate_noinv_fmt}"


def format_bytes(num_bytes: float) -> str:
    """The size in KiB, MiB or GiB, with one decimal."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB"


def free_bytes(path: Path) -> int:
    """The free bytes of the disk that path is on, or will be."""
    path = path.absolute()
    return shutil.disk_usage(next(at for at in (path, *path.parents) if at.exists())).free


@dataclass(frozen=True)
class JobShare:
    """Every count-th item, from the index-th on (counted from 1)."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> "JobShare":
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UserError(f"--shard: {text} is not a share; write i/n with i from 1 to n")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def part(self, items: Sequence[ShareItem]) -> Sequence[ShareItem]:
        return items[self.index - 1 :: self.count]


WHOLE_JOB = JobShare()


def run_ahead(
    pool: Executor, work: Callable[[WorkItem], WorkResult], items: Iterable[WorkItem], most: int
) -> Iterator[WorkResult]:
    """The results of `work`, in the items' order; at most `most` are under way or wait."""
    rest = iter(items)
    pending = deque[Future[WorkResult]]()
    while True:
        pending.extend(pool.submit(work, item) for item in islice(rest, most - len(pending)))
        if not pending:
            return
        yield pending.popleft().result()


class _LogLines(StringIO):
    """Writes each state of a bar on a line of its own, since a log cannot overwrite a line."""

    def write(self, text: str) -> int:
        line = text.replace("\r", "").strip()
        return sys.stderr.write(line and f"{line}\n")


def start_progress(total: int | None, unit: str, description: str, done: int = 0) -> "tqdm[Any]":
    """The first process's progress bar on standard error; in a log, a line every ten seconds.

    A bar without a total is cleared at its end. The rate leaves out the `done` items.
    """
    options: dict[str, Any] = {"file": sys.stderr, "dynamic_ncols": True}
    if not sys.stderr.isatty():
        options = {
            "file": _LogLines(),
            "bar_format": LOG_LINE_WITHOUT_TOTAL if total is None else LOG_LINE,
            "mininterval": 10.0,  # seconds between two lines
            "delay": 1e-9,  # no line before the first item
        }
    return tqdm(
        desc=description,
        total=total,
        initial=done,
        disable=rank() != 0,
        unit=f" {unit}",
        unit_scale=total is None or total >= 1000,
        leave=total is not None,
        **options,
    )
