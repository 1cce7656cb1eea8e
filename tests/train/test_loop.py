"""Laws of the loop: cutting a step changes nothing, the best weights stay, the budget ends a run;
what it logs."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from transformers import AutoConfig

from aerie.configs.errors import Requeued
from aerie.configs.schema.heads import AdamWSection, Eagle1Train, MuonSection, RateScaling
from aerie.data.batches import collate
from aerie.model.checkpoint import load_head
from aerie.model.miniature import small_model
from aerie.model.storage import ROOT
from aerie.train import deepspeed_internals, processes, resume
from aerie.train.loop import MetricsFile
from aerie.train.objectives import Eagle1Objective
from aerie.train.optimizers import build_optimizers, learning_rate, muon_matrices
from tests import tiny
from tests.train.sittings import VOCAB, config, job, lines, sitting, weights


@pytest.mark.parametrize(("batch_size", "accumulation"), [(20, 1), (5, 4), (8, 1)])
def test_means_over_slots(tmp_path: Path, batch_size: int, accumulation: int) -> None:
    """20 rows: as one batch, as four parts of a step, and as three steps without learning, in one
    log line."""
    steps, still = (
        -(-20 // (batch_size * accumulation)),
        {"epochs": 1, "learning_rate": 1e-12, "clip_norm": 1e-6},
    )
    made = job(
        tmp_path, config(batch_size=batch_size, accumulation=accumulation, log_every=steps, **still)
    )
    objective = Eagle1Objective(
        tiny.head(VOCAB.embedding, scale=5.0).train(), VOCAB, made.objective.settings
    )
    batch = objective.prepare(collate([*made.rows.train], range(20)), epoch=0)
    loss = objective(batch).total(objective.weights) / objective.counts(batch)["feature"]
    loss.backward()
    norm = torch.cat(
        [p.grad.flatten() for p in objective.parameters() if p.grad is not None]
    ).norm()
    sitting(made)
    first = lines(tmp_path)[0]
    assert (
        first["loss"] == pytest.approx(loss.item(), rel=1e-5)
        and 0.05 < first["peak_memory_gib"] < 64
    )
    assert steps > 1 or first["grad_norm"] == pytest.approx(
        norm.item(), rel=1e-5
    )  # before clipping


def test_best_head_stays(tmp_path: Path) -> None:
    """The head on disk is the one with the best held out score."""
    seen: list[Any] = []

    def measure(head: Any) -> dict[str, float]:
        seen.append(head.fc.weight.clone())
        return {"tau": [2.0, 3.0, 1.0][len(seen) - 1]}

    _, loop = sitting(job(tmp_path, config(max_steps=3, eval_every=1)), measure=measure)
    assert loop.progress.best_step == 2 and not seen[0].equal(seen[1])
    assert load_head(tmp_path / "head").fc.weight.equal(seen[1])
    half = replace(VOCAB, embedding=VOCAB.embedding.bfloat16(), lm_head=VOCAB.lm_head.bfloat16())
    _, loop = sitting(
        job(tmp_path / "unmeasured", config(max_steps=2, eval_every=1), vocab=half, held_out=0)
    )
    assert load_head(tmp_path / "unmeasured/head").fc.weight.equal(
        weights(loop)["fc.weight"].bfloat16()
    )


def test_divergence(tmp_path: Path, monkeypatch: Any) -> None:
    """A training that diverges keeps nothing."""
    monkeypatch.setattr(
        "aerie.train.losses.smooth_l1", lambda predicted, true: predicted.sum(-1) * float("nan")
    )
    tiny.refused(
        r"the training diverged \(nothing was kept\); lower train.learning_rate",
        sitting,
        job(tmp_path, config()),
    )
    assert not (tmp_path / "head/model.safetensors").exists()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_learning_rate(schedule: Any) -> None:
    """The rate rises to its peak and falls to its end at the last step."""
    settings = Eagle1Train(learning_rate=1.0, warmup_steps=10, schedule=schedule, final_rate=0.4)
    rates = [learning_rate(step, 110, settings) for step in range(111)]
    half, end = (1.0, 1.0) if schedule == "constant" else (0.7, 0.4)
    assert (
        rates[0] > 0
        and max(rates) == rates[10] == 1.0
        and [rates[60], rates[110]] == pytest.approx([half, end])
    )
    scaled = replace(
        settings,
        optimizer=MuonSection(matrix_rate=3.0),
        scale_rates=RateScaling(steps=440, power=0.5),
    )
    assert [learning_rate(step, 110, scaled, True) for step in range(111)] == pytest.approx(
        [6 * rate for rate in rates]
    )
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_weight_decay() -> None:
    """Matrices decay and norms do not and the embedding is not there."""
    head = tiny.head(VOCAB.embedding)
    decayed, spared = build_optimizers(head, Eagle1Train(weight_decay=0.3))[0].param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in spared["params"]} == {1}
    found = {id(p) for group in (decayed, spared) for p in group["params"]}
    assert found == {id(p) for p in head.parameters()} - {id(head.embed_tokens.weight)}


def five_rounds(gradient: torch.Tensor) -> torch.Tensor:
    """Five rounds of Newton-Schulz (Muon), in float64."""
    is_tall = gradient.shape[0] > gradient.shape[1]
    x = (gradient.T if is_tall else gradient).double() / gradient.double().norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x


@pytest.mark.parametrize("join", [None, deepspeed_internals.zero_muon])
def test_muon(
    join: Any,
) -> None:
    """Muon moves every direction of a matrix by its rate and adamw the rest as alone."""
    moved: list[dict[str, torch.Tensor]] = []
    for section in (MuonSection(matrix_rate=0.1, weight_decay=0.0), AdamWSection()):
        model, generator = tiny.llama(num_blocks=1), torch.Generator().manual_seed(0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        with torch.compiler.set_stance("force_eager"):
            for optimizer in build_optimizers(model, config(optimizer=section), join):
                optimizer.step()
        moved.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
    matrices = {name for name in moved[0] if "proj" in name}
    assert len(matrices) == 7 and all(
        moved[0][name].equal(moved[1][name]) for name in moved[0].keys() - matrices
    )
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in matrices:
        turn = moved[0][name] / (
            -0.1 * max(1.0, moved[0][name].shape[0] / moved[0][name].shape[1]) ** 0.5
        )
        sizes = torch.linalg.svdvals(turn)
        assert 0.5 < sizes.min() <= sizes.max() < 1.5
        torch.testing.assert_close(
            turn, five_rounds(gradients[name]).float(), rtol=0, atol=1e-3
        )  # bf16 is 1e-2 away
    gpt2 = small_model(AutoConfig.for_model("gpt2")).transformer  # tables by other names
    assert not {id(gpt2.wte.weight), id(gpt2.wpe.weight)} & {id(p) for p in muon_matrices(gpt2)}


MUON = {"optimizer": MuonSection()}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("changes", "precision", "zero", "said"),
    [
        (MUON, "fp16", None, r"train.optimizer: muon trains in float32 or bf16"),
        (MUON, "no", {"stage": 0}, r"train.optimizer: muon trains in float32 or bf16"),
        (MUON, "bf16", OFFLOADED, r"train.optimizer: muon trains in float32 or bf16"),
    ],
)
def test_refused_engines(
    changes: Any, precision: str, zero: Any, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Muon needs one scale of gradients and whole matrices."""
    plugin = zero and SimpleNamespace(
        deepspeed_config={"zero_optimization": zero}, zero_stage=zero["stage"]
    )
    accelerator = SimpleNamespace(
        mixed_precision=precision,
        state=SimpleNamespace(deepspeed_plugin=plugin),
        num_processes=1,
        distributed_type="any",
    )
    monkeypatch.setattr(processes, "Accelerator", lambda **_: accelerator)
    tiny.refused(said, processes.build_accelerator, config(**changes), tmp_path)


def test_metrics_file(
    tmp_path: Path,
) -> None:
    """A run that goes on forgets its own later lines and keeps what another training writes."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "eagle1", "step": 20}\n{"kind": "eagle1", "st\n')  # cut off by a kill
    other = MetricsFile(path, "draft_lm", 0)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(
            lambda: [other.write({"kind": "draft_lm", "step": step}) for step in range(100)]
        )
        while not training.done():
            MetricsFile(path, "eagle1", 20).write({"kind": "eagle1", "step": 30})
    MetricsFile(path, "eagle1", 20)
    assert [line["step"] for line in lines(tmp_path)] == [20, *range(100)]


@pytest.mark.parametrize("number", resume.SIGNAL_STATES)
def test_signals(number: signal.Signals, monkeypatch: Any) -> None:
    """A signal ends at once between steps alone."""
    before = signal.getsignal(number)
    with (
        resume.StopRequest(),
        pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Requeued),
    ):
        signal.raise_signal(number)
    with resume.StopRequest() as stop:
        stop.is_stepping = True
        for _ in range(2):  # launchers and schedulers send it again
            signal.raise_signal(number)
        assert stop.state == resume.SIGNAL_STATES[number]
        monkeypatch.setattr(resume, "PATIENCE_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == before


def test_deepspeed_version(monkeypatch: Any) -> None:
    """Private parts of deepspeed are those of every 0.19, which the constraints pin."""
    assert "deepspeed==0.19." in (ROOT / "constraints.txt").read_text()
    for version in (deepspeed.__version__, "0.19.99"):
        monkeypatch.setattr("deepspeed.__version__", version)
        deepspeed_internals.require_known_version()
    monkeypatch.setattr("deepspeed.__version__", "0.20.0")
    tiny.refused(
        r"0.20.0: .*pip install 'deepspeed==0.19.\*', or launch",
        deepspeed_internals.clip_before_muon,
        None,
        1.0,
    )
