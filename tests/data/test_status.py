"""What scripts read: a command's exit code, and the status that its end leaves."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aerie.configs.errors import UserError, exit_code, stop_on_signals
from aerie.model.storage import with_status

CLEANED: list[int] = []  # the signals after which a clean-up came to its end


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of before come back."""
    CLEANED.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    stop_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def refuse() -> tuple[str, int]:
    raise UserError("a mistake")


def stopped_by(number: signal.Signals) -> Callable[[], tuple[str, int]]:
    def run() -> tuple[str, int]:
        try:
            signal.raise_signal(number)
        finally:
            if number == signal.SIGUSR1:
                signal.raise_signal(number)  # a batch script repeats it
            CLEANED.append(number)
        return "done", 0

    return run


@pytest.mark.parametrize(
    ("run", "state", "code"),
    [
        (lambda: ("done", 0), "done", 0),
        (refuse, "failed", 2),
        (stopped_by(signal.SIGTERM), "interrupted", 130),
        (stopped_by(signal.SIGUSR1), "requeue", 75),
    ],
    ids=["done", "refused", "SIGTERM", "SIGUSR1"],
)
def test_a_commands_end_is_its_exit_code_and_its_status(
    run: Callable[[], tuple[str, int]], state: str, code: int, tmp_path: Path
) -> None:
    path = tmp_path / "status.json"
    assert exit_code(lambda: with_status(path, "features", run)) == code
    assert json.loads(path.read_text()) == {"stage": "features", "state": state, "code": code}
    stopped = {"interrupted": [signal.SIGTERM], "requeue": [signal.SIGUSR1]}
    assert stopped.get(state, []) == CLEANED
