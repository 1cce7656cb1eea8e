"""Lets the processes that a launcher started, one a GPU, measure as if they were one process.

Each process works on its share of the prompts and gets the results of all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from aerie.configs.errors import UserError, rank, world_size
from aerie.data.progress import start_progress

Item = TypeVar("Item")
Result = TypeVar("Result")
LONGEST_WAIT = timedelta(hours=12)  # for the process with the slowest share


@contextmanager
def connected() -> Iterator[None]:
    """A context in which the processes can exchange results."""
    if world_size() == 1:
        yield
        return
    # gloo on GPUs, too: a process that waits in gloo takes no GPU or core time from the others.
    distributed.init_process_group("gloo", timeout=LONGEST_WAIT)
    yield
    distributed.destroy_process_group()


def gather(value: Result) -> list[Result]:
    """The values of all processes, by rank. Every process must call it."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    try:
        distributed.all_gather_object(values, value)
    except RuntimeError as error:  # a process that ended has closed its connections
        raise UserError(
            "another process failed; its last line says why. If it printed none, it was killed, "
            "often for lack of memory. Run the same command again to continue"
        ) from error
    return values


def by_first(work: Callable[[], Result]) -> Result:
    """Calls `work` in the first process, and returns its result in every process."""
    return gather(work() if rank() == 0 else None)[0]  # type: ignore[return-value]


def my_share(items: Sequence[Item]) -> Sequence[Item]:
    """The items that this process works on."""
    return items[rank() :: world_size()]


def share_out(
    work: Callable[[Item], Result], items: Sequence[Item], unit: str, description: str
) -> list[Result]:
    """Calls `work` on this process's share of the items; returns the results for all items.

    The results are in the order of the items.
    """
    share = my_share(items)
    results = []
    with start_progress(len(share), unit, description) as progress:
        for item in share:
            results.append(work(item))
            progress.update()
    parts = gather(results)
    return [parts[number % len(parts)][number // len(parts)] for number in range(len(items))]
