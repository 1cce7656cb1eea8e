"""Laws of the loop: how a step is cut moves nothing, the best weights are kept, the budget ends a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.data.batches import collate
from aerie.model.checkpoint import load_head
from aerie.train.objectives.eagle import Eagle1Objective
from tests import tiny
from tests.train.sittings import ENDS, config, job, sitting, weights


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 4), (1, 8)])
def test_cutting_a_step_into_accumulation_parts_moves_neither_losses_nor_weights(
    tmp_path: Path, batch_size: int, accumulation: int
) -> None:
    whole, one = sitting(job(tmp_path / "whole", config(epochs=1, batch_size=8, accumulation=1)))
    cut, other = sitting(job(tmp_path / "cut", config(epochs=1, batch_size=batch_size, accumulation=accumulation)))
    assert whole.progress.step == cut.progress.step == 3
    pairs = zip(_records(tmp_path / "whole/metrics.jsonl"), _records(tmp_path / "cut/metrics.jsonl"), strict=True)
    for first, second in pairs:
        for name in ("loss", "grad_norm", "feature", "classification", "alpha"):
            if name in first:
                assert second[name] == pytest.approx(first[name], rel=2e-6), name
    for name, value in weights(one).items():
        assert (weights(other)[name] - value).abs().max() < 1e-5


def test_the_gradient_is_that_of_the_mean_over_supervised_slots(tmp_path: Path) -> None:
    settings = config(max_steps=1, batch_size=20, clip_norm=1e9)
    made = job(tmp_path, settings)
    head = tiny.head(ENDS.embedding, scale=5.0).train()
    objective = Eagle1Objective(ENDS, settings)
    total, count = torch.zeros(()), 0
    for number, row in enumerate(made.train):
        batch = objective.prepare(collate([row], [number]), epoch=0)
        total, count = total + objective(head, batch).total(), count + objective.divisors(batch)["feature"]
    (total / count).backward()
    norm = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None]).norm()
    sitting(made)
    first = _records(tmp_path / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx((total / count).item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_clipping_holds_the_update_and_reports_the_norm_before_it(tmp_path: Path) -> None:
    sitting(job(tmp_path, config(max_steps=1, clip_norm=1e-6)))
    assert _records(tmp_path / "metrics.jsonl")[0]["grad_norm"] > 1e-3


def test_the_head_on_disk_is_the_one_with_the_best_held_out_score(tmp_path: Path) -> None:
    scores = iter([2.0, 3.0, 1.0])
    seen = []

    def measure(head: Any) -> dict[str, float]:
        seen.append(head.fc.weight.clone())
        return {"tau": next(scores)}

    outcome, _ = sitting(job(tmp_path, config(max_steps=3, eval_every=1), measure=measure))
    assert outcome.progress.best_step == 2 and len(seen) == 3
    assert load_head(tmp_path / "head").fc.weight.equal(seen[1])
    assert not seen[0].equal(seen[1])


def test_without_held_out_rows_the_last_weights_are_saved(tmp_path: Path) -> None:
    _, loop = sitting(job(tmp_path, config(max_steps=2), held_out=[]))
    assert load_head(tmp_path / "head").fc.weight.equal(weights(loop)["fc.weight"])


def test_a_spent_budget_ends_the_run_at_the_next_step_and_keeps_a_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, _ = sitting(job(tmp_path, config(max_seconds=0.0)))
    assert (outcome.state, outcome.code, outcome.progress.step) == ("budget", 0, 1)
    assert "max_seconds 0 is spent after step 1 of 15" in capsys.readouterr().out
    assert (tmp_path / "state/latest").is_file() and load_head(tmp_path / "head")


def test_the_profilers_window_leaves_a_chrome_trace(tmp_path: Path) -> None:
    sitting(job(tmp_path, config(max_steps=4, profile_steps=(1, 2))))
    trace = json.loads((tmp_path / "state/trace-step1-rank0.json").read_text())
    assert trace["traceEvents"]


def test_metrics_are_written_with_their_step_and_all_units(tmp_path: Path) -> None:
    sitting(job(tmp_path, config(max_steps=3, log_every=2)))
    train = [record for record in _records(tmp_path / "metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in train] == [2, 3]
    units = {"data_wait_share", "tokens_per_s", "step_ms", "peak_memory_gib", "grad_norm", "learning_rate", "alpha"}
    assert units <= train[0].keys()


def test_the_bf16_target_gives_a_bf16_head(tmp_path: Path) -> None:
    half = replace(ENDS, embedding=ENDS.embedding.bfloat16(), lm_head=ENDS.lm_head.bfloat16())
    settings = config(max_steps=2)
    made = job(tmp_path, settings, objective=Eagle1Objective(half, settings), save_dtype=torch.bfloat16)
    sitting(made)
    assert load_head(tmp_path / "head").fc.weight.dtype == torch.bfloat16
