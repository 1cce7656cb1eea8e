"""Several processes that a launcher started, one a GPU, measure as if they were one.

Each works on its share of the prompts, and gets the results of all.
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
    """A block in which the processes exchange results."""
    if world_size() == 1:
        yield
        return
    # On GPUs, too: a process that waits in gloo takes no time of a GPU or a core from the others.
    distributed.init_process_group("gloo", timeout=LONGEST_WAIT)
    yield
    distributed.destroy_process_group()


def gather(value: Result) -> list[Result]:
    """Every process's value, by rank; all processes must call it."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    try:
        distributed.all_gather_object(values, value)
    except RuntimeError as error:  # its end has closed the connections
        raise UserError(
            "another process failed, and the line that it printed says why, or it was killed, "
            "often for lack of memory; the same command goes on"
        ) from error
    return values


def by_first(work: Callable[[], Result]) -> Result:
    """What the first process's call returns, in every process; only the first calls it."""
    return gather(work() if rank() == 0 else None)[0]  # type: ignore[return-value]


def my_share(items: Sequence[Item]) -> Sequence[Item]:
    """The items that this process works on."""
    return items[rank() :: world_size()]


def share_out(
    work: Callable[[Item], Result], items: Sequence[Item], unit: str, description: str
) -> list[Result]:
    """The results of all items, in their order; each process works on its share."""
    share = my_share(items)
    results = []
    with start_progress(len(share), unit, description) as progress:
        for item in share:
            results.append(work(item))
            progress.update()
    parts = gather(results)
    return [parts[number % len(parts)][number // len(parts)] for number in range(len(items))]
