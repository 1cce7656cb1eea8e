"""Means are sums divided once; the metrics file forgets what a resumed run repeats."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aerie.train.log import Meter, MetricsFile, StepRecord, clock, held_out_line, peak_memory_gib, thousands

CPU = torch.device("cpu")


def _pair(value: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(value), torch.tensor(count)


def test_a_mean_over_steps_weighs_slots_and_not_steps() -> None:
    meter = Meter()
    meter.add({"feature": _pair(10.0, 10), "alpha": _pair(1.0, 2)})
    meter.add({"feature": _pair(90.0, 30), "alpha": _pair(0.0, 0)})
    assert meter.flush(CPU) == {"feature": 2.5, "alpha": 0.5}
    assert meter.flush(CPU) == {}


def test_nothing_counted_is_zero_and_no_division() -> None:
    meter = Meter()
    meter.add({"alpha": _pair(0.0, 0)})
    assert meter.flush(CPU) == {"alpha": 0.0}


def test_the_line_is_dense_and_has_units() -> None:
    record = StepRecord("eagle1", 1200, 10000, 3, {"alpha": 0.7}, 1.842, 0.43, 4.7e-5, 0.01, 41234.0, 312.4, 61.3, 43.0)
    assert record.line() == (
        "step 1,200/10,000 | loss 1.8420 | alpha 0.7000 | grad 0.43 | lr 4.70e-05 | wait 1% | 41.2k tok/s | 312 ms "
        "| 61.30 GiB | eta 0:43"
    )


def test_held_out_accuracies_stand_together_after_the_predicted_tau() -> None:
    values = {"predicted_tau": 3.1, "loss": 1.0, "accuracy_at_1": 0.71, "accuracy_at_2": 0.62}
    line = held_out_line(500, 1000, 64, values)
    assert line == "step 500/1,000 | held out (64 rows) | tau~ 3.1000 | acc @1 0.710 @2 0.620 | loss 1.0000"


@pytest.mark.parametrize(("seconds", "text"), [(43.9, "0:43"), (725, "12:05"), (12011, "3:20:11"), (-1, "0:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_thousands() -> None:
    assert [thousands(value) for value in (912.4, 41234, 3.4e6)] == ["912", "41.2k", "3.4M"]


def test_a_run_that_goes_on_forgets_its_own_later_lines_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, "eagle1", 0)
    for step in (10, 20, 30):
        first.write({"kind": "eagle1", "step": step})
    first.write({"kind": "draft_lm", "step": 99})
    with path.open("a") as handle:
        handle.write('{"kind": "eagle1", "st')
    MetricsFile(path, "eagle1", 20).write({"kind": "eagle1", "step": 30, "again": True})
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in kept] == [
        ("eagle1", 10),
        ("eagle1", 20),
        ("draft_lm", 99),
        ("eagle1", 30),
    ]
    assert kept[-1]["again"]


def test_a_run_that_goes_on_keeps_what_another_heads_training_writes_meanwhile(tmp_path: Path) -> None:
    path, lines = tmp_path / "metrics.jsonl", 200
    other = MetricsFile(path, "draft_lm", 0)

    def train() -> None:
        for step in range(1, lines + 1):
            other.write({"kind": "draft_lm", "step": step})

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while not training.done():
            MetricsFile(path, "eagle1", 10).write({"kind": "eagle1", "step": 20})
        training.result()
    MetricsFile(path, "eagle1", 10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(1, lines + 1)]


def test_peak_memory_is_this_processs_in_gib() -> None:
    assert 0.05 < peak_memory_gib(CPU) < 64
