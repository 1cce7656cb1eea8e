"""Laws of the loop: how a step is cut moves nothing, the best weights are kept, the budget ends a run; what it logs."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import Requeued, UserError
from aerie.configs.schema.train import Eagle1Train
from aerie.data.batches import collate
from aerie.model.checkpoint import load_head
from aerie.train import resume
from aerie.train.loop import MetricsFile, build_optimizer, learning_rate
from aerie.train.objectives import Eagle1Objective
from tests import tiny
from tests.train.sittings import VOCAB, config, job, lines, sitting, weights


def test_cutting_a_step_into_accumulation_parts_moves_neither_losses_nor_weights(tmp_path: Path) -> None:
    log = {"epochs": 1, "log_every": 2}  # means over steps, which weigh slots and not steps
    _, whole = sitting(job(tmp_path / "whole", config(batch_size=8, **log)))
    _, cut = sitting(job(tmp_path / "cut", config(batch_size=2, accumulation=4, **log)))
    assert whole.progress.step == cut.progress.step == 3
    for first, second in zip(lines(tmp_path / "whole"), lines(tmp_path / "cut"), strict=True):
        for name in {"loss", "grad_norm", "feature", "classification", "alpha"} & first.keys():
            assert second[name] == pytest.approx(first[name], rel=2e-6), name
    assert all((weights(cut)[name] - value).abs().max() < 1e-5 for name, value in weights(whole).items())


def test_the_gradient_is_that_of_the_mean_over_supervised_slots_and_is_logged_before_clipping(tmp_path: Path) -> None:
    made = job(tmp_path, config(max_steps=1, batch_size=20, clip_norm=1e-6))
    objective = Eagle1Objective(tiny.head(VOCAB.embedding, scale=5.0).train(), VOCAB, made.objective.settings)
    total, count = torch.zeros(()), 0
    for number, row in enumerate(made.rows.train):
        batch = objective.prepare(collate([row], [number]), epoch=0)
        total = total + objective(batch).total(objective.weights)
        count += int(objective.counts(batch)["feature"])
    (total / count).backward()
    norm = torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None]).norm()
    sitting(made)
    first = lines(tmp_path)[0]
    assert first["loss"] == pytest.approx((total / count).item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-5) and 0.05 < first["peak_memory_gib"] < 64


def test_the_head_on_disk_is_the_one_with_the_best_held_out_score(tmp_path: Path) -> None:
    scores, seen = iter([2.0, 3.0, 1.0]), []

    def measure(head: Any) -> dict[str, float]:
        seen.append(head.fc.weight.clone())
        return {"tau": next(scores)}

    _, loop = sitting(job(tmp_path, config(max_steps=3, eval_every=1)), measure=measure)
    assert loop.progress.best_step == 2 and len(seen) == 3 and not seen[0].equal(seen[1])
    assert load_head(tmp_path / "head").fc.weight.equal(seen[1])
    half = replace(VOCAB, embedding=VOCAB.embedding.bfloat16(), lm_head=VOCAB.lm_head.bfloat16())
    _, loop = sitting(job(tmp_path / "unmeasured", config(max_steps=2, eval_every=1), vocab=half, held_out=[]))
    assert load_head(tmp_path / "unmeasured/head").fc.weight.equal(weights(loop)["fc.weight"].bfloat16())


def test_a_training_that_diverges_keeps_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("aerie.train.losses.smooth_l1", lambda predicted, true: predicted.sum(-1) * float("nan"))
    with pytest.raises(UserError, match=r"the training diverged \(nothing was kept\); lower train.learning_rate"):
        sitting(job(tmp_path, config()))
    assert not (tmp_path / "head/model.safetensors").exists()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_rate_rises_to_its_peak_and_falls_to_its_end_at_the_last_step(schedule: Any) -> None:
    final_rate = 0.33
    settings = Eagle1Train(learning_rate=1.0, warmup_steps=10, schedule=schedule, final_rate=final_rate)
    rates = [learning_rate(step, 110, settings) for step in range(111)]
    end, half = (1.0, 1.0) if schedule == "constant" else (final_rate, final_rate + (1 - final_rate) / 2)
    assert rates[0] > 0 and max(rates) == rates[10] == 1.0
    assert (rates[60], rates[110]) == (pytest.approx(half), pytest.approx(end))
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_matrices_decay_and_norms_do_not_and_the_embedding_is_not_there() -> None:
    head = tiny.head(VOCAB.embedding)
    decayed, spared = build_optimizer(head, Eagle1Train(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in spared["params"]} == {1}
    found = {id(p) for group in (decayed, spared) for p in group["params"]}
    assert found == {id(p) for p in head.parameters()} - {id(head.embed_tokens.weight)}


def test_a_run_that_goes_on_forgets_its_own_later_lines_and_keeps_what_another_training_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "eagle1", "step": 20}\n{"kind": "eagle1", "st\n')  # cut off by a kill
    other = MetricsFile(path, "draft_lm", 0)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(lambda: [other.write({"kind": "draft_lm", "step": step}) for step in range(100)])
        while not training.done():
            MetricsFile(path, "eagle1", 20).write({"kind": "eagle1", "step": 30})
        training.result()
    MetricsFile(path, "eagle1", 20)
    steps = {
        kind: [line["step"] for line in lines(tmp_path) if line["kind"] == kind] for kind in ("eagle1", "draft_lm")
    }
    assert steps == {"eagle1": [20], "draft_lm": [*range(100)]}


@pytest.mark.parametrize("number", resume.STATES)
def test_a_signal_ends_at_once_between_steps_alone(number: signal.Signals, monkeypatch: Any) -> None:
    before = signal.getsignal(number)
    with resume.StopRequest(), pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Requeued):
        signal.raise_signal(number)
    with resume.StopRequest() as stop:
        stop.is_stepping = True
        signal.raise_signal(number)
        stop.is_stepping = False
        signal.raise_signal(number)  # launchers and schedulers repeat it
        assert stop.state == resume.STATES[number]
        monkeypatch.setattr(resume, "PATIENCE_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == before
