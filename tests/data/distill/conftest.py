"""Shared by the tests of distillation: no waits between tries."""

import pytest

from aerie.data.distill import answer


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    base = pytest.importorskip("openai._base_client", reason="needs the extra 'distill' (pip install -e .[distill])")
    monkeypatch.setattr(base, "INITIAL_RETRY_DELAY", 0.02)
    monkeypatch.setattr(base, "MAX_RETRY_DELAY", 0.1)
    monkeypatch.setattr(answer, "PAUSE_S", 0.02)
