"""The learning rate of every step, and what decays."""

from typing import Any

import pytest

from aerie.configs.schema.train import TrainConfig
from aerie.train.loop import build_optimizer, learning_rate
from tests import tiny


def _rates(schedule: str, steps: int = 100, warmup: int = 10) -> list[float]:
    config = TrainConfig(learning_rate=1.0, warmup_steps=warmup, schedule=schedule)  # type: ignore[arg-type]
    return [learning_rate(step, steps, config) for step in range(steps + 1)]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_rises_to_its_peak_and_falls_to_zero_at_the_last_step(schedule: str) -> None:
    rates = _rates(schedule)
    assert rates[0] > 0 and max(rates) == rates[10] == 1.0 and rates[100] == pytest.approx(0.0)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5)


def test_cosine_is_above_linear_first_and_below_it_later() -> None:
    linear, cosine = _rates("linear"), _rates("cosine")
    assert cosine[30] > linear[30] and cosine[80] < linear[80]


def test_constant_stays_and_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert set(_rates("constant")[10:]) == {1.0}
    short = _rates("linear", steps=5, warmup=2000)
    assert short[:5] == sorted(short[:5]) and max(short) <= 1.0


def test_matrices_decay_and_norms_do_not_and_the_embedding_is_not_there() -> None:
    head = tiny.head(tiny.ends().embedding)
    decayed, spared = build_optimizer(head, TrainConfig(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3 and spared["weight_decay"] == 0.0
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in spared["params"]} == {1}
    found = {id(p) for group in (decayed, spared) for p in group["params"]}
    assert found == {id(p) for p in head.parameters() if p.requires_grad}
    assert id(head.embed_tokens.weight) not in found


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_ends_at_final_rate_and_is_half_way_at_half_time(schedule: Any) -> None:
    config = TrainConfig(learning_rate=1.0, warmup_steps=10, schedule=schedule, final_rate=0.33)
    assert learning_rate(10, 110, config) == pytest.approx(1.0)
    assert learning_rate(60, 110, config) == pytest.approx(0.33 + 0.67 / 2)
    assert learning_rate(110, 110, config) == pytest.approx(0.33)
