"""A signal is remembered until the step's end; handlers come back."""

import signal

import pytest

from train import signals
from train.signals import StopRequest


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
