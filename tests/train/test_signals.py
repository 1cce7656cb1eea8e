"""A signal is remembered until the step's end; handlers come back."""

import signal

import pytest

from aerie.train import launch as signals
from aerie.train.launch import StopRequest, answered


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_remembered_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        signal.raise_signal(number)
        signal.raise_signal(number)  # a launcher repeats the terminal's Ctrl-C
        assert stop.received == number
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_after_some_seconds_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "PATIENCE_SECONDS", -1.0)
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "requeue"), (signal.SIGUSR1, "requeue")]
)
def test_a_schedulers_signal_asks_for_a_requeue_and_ctrl_c_for_none(number: signal.Signals, state: str) -> None:
    with StopRequest() as stop:
        assert stop.state is None
        signal.raise_signal(number)
        assert stop.state == state


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_before_the_first_step_ends_at_once_as_a_requeue(number: signal.Signals) -> None:
    def starting() -> tuple[str, int]:
        signal.raise_signal(number)
        raise AssertionError("went on")

    def stepping() -> tuple[str, int]:
        with StopRequest():
            signal.raise_signal(number)
        return "saved", 0

    before = signal.getsignal(number)
    assert answered(starting) == ("requeue", 75)
    assert answered(stepping) == ("saved", 0)
    assert signal.getsignal(number) == before
